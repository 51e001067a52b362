"""What contradicts itself in a configuration of perl.train, before a device, a file or a model is needed."""

from __future__ import annotations

from jsonargparse import Namespace

from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.derived import batches_ahead, correction_of, reward_calls
from perl.config.parser import MAPPING
from perl.config.peft_fields import UNMERGED


def check_values(values: Namespace) -> None:
    """Checks over several fields that need neither a device nor a file."""
    reward, training = values.reward, values.training
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        raise UserError(
            f"--config.reward.weights has {len(reward.weights)} entries, --config.reward.functions has"
            f" {len(reward.functions)}; give one weight for each function"
        )
    if not reward.functions and values.environment.factory is None:
        raise UserError("--config.reward.functions is empty; give at least one, e.g. '[\"accuracy\"]'")
    calls = reward_calls(values)
    if reward.function_deadline_s is not None and reward.function_deadline_s * calls >= training.ddp_timeout:
        raise UserError(
            f"--config.reward.function_deadline_s {reward.function_deadline_s:g}: other processes wait for the rewards,"
            f" of {calls} calls one after the other, for --config.training.ddp_timeout {training.ddp_timeout} s; write"
            " less, or raise ddp_timeout"
        )
    if training.eval_strategy not in (None, "no"):
        raise UserError(
            "--config.training.eval_strategy: leave it at no; --config.validation.datasets scores while the model"
            " trains, perl/eval.py scores checkpoints"
        )
    if training.save_strategy == "best":
        raise UserError(
            "--config.training.save_strategy best: is of TRL's own evaluation; write steps or epoch, and"
            " --config.validation.save_best true"
        )
    for name in ("chat_template_kwargs", "generation_kwargs"):
        if isinstance(text := training[name], str):  # which TRL takes, and nothing can be looked up in
            raise UserError(
                f"--config.training.{name}: expected {MAPPING}, not {text}; write it as '{{\"name\": value}}'"
            )
    if training.load_best_model_at_end:
        raise UserError(
            "--config.training.load_best_model_at_end true: is of TRL's own evaluation; write"
            " --config.validation.save_best true"
        )
    check_loss(values)
    check_noise(values)
    check_workers(values)
    check_quantization(values)
    check_dynamic_sampling(values)
    check_validation(values)
    check_critic(values)
    check_environment(values)


def check_loss(values: Namespace) -> None:
    """What contradicts itself in the loss, and in what it is made of."""
    algorithm, training = values.algorithm, values.training
    low, high = training.cispo_min_ratio, training.epsilon_high
    given = f"null (epsilon {training.epsilon:g})" if high is None else f"{high:g}"
    high = training.epsilon if high is None else high
    if training.loss_type == "cispo" and high < 1.0:
        raise UserError(
            f"--config.training.epsilon_high {given}: with loss_type cispo it is the highest ratio itself, and below 1"
            " nearly all tokens weigh the same; write a number from 1, such as 5, or --config.algorithm.name cispo"
        )
    if training.loss_type == "cispo" and low is not None and low > high:
        raise UserError(
            f"--config.training.cispo_min_ratio {low:g} is above the highest ratio, --config.training.epsilon_high"
            f" {high:g}"
        )
    if algorithm.kl_in_reward > 0.0 and training.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            "--config.algorithm.kl_in_reward: there is no one reward to take it from where"
            " multi_objective_aggregation is normalize_then_sum; --config.training.beta puts KL into the loss"
        )
    if training.beta < 0.0:
        raise UserError(
            f"--config.training.beta {training.beta:g}: a coefficient below 0 drives the policy away from the"
            " reference; write a number from 0"
        )
    if (correction := correction_of(values.rollout)).startswith("sequence") and training.loss_type == "vespo":
        raise UserError(
            f"--config.rollout.importance_correction {correction}: loss_type vespo weights"
            " sequences itself; write token"
        )


def check_noise(values: Namespace) -> None:
    """What schedule of the noise can't be followed."""
    noise = values.noise_injection
    adaptive = noise.schedule == "target_kl"
    if noise.enabled and not adaptive and noise.sigma_end > noise.sigma_start:
        raise UserError(
            f"--config.noise_injection.sigma_end ({noise.sigma_end}) is above sigma_start ({noise.sigma_start});"
            " noise decays: swap them"
        )
    if noise.enabled and adaptive and noise.target_kl_end > noise.target_kl_start:
        raise UserError(
            f"--config.noise_injection.target_kl_end ({noise.target_kl_end}) is above target_kl_start"
            f" ({noise.target_kl_start}); the target decays: swap them"
        )
    if noise.enabled and adaptive and noise.sigma_start == 0:
        raise UserError(
            "--config.noise_injection.sigma_start 0: schedule target_kl multiplies it, and never leaves 0;"
            " give a positive sigma_start"
        )
    if noise.enabled and noise.schedule == "exponential" and noise.sigma_end == 0:
        raise UserError(
            "--config.noise_injection.schedule exponential never reaches sigma_end 0;"
            " give a positive sigma_end or schedule linear"
        )
    if noise.enabled and noise.warmup_stage and noise.num_stages == 1:
        raise UserError(
            "--config.noise_injection.num_stages 1: with warmup_stage the only stage would have no noise; write 2 or"
            " more, or --config.noise_injection.warmup_stage false"
        )
    if noise.enabled and noise.old_logps == "noisy" and values.rollout.behaviour == "exact":
        raise UserError(
            "--config.rollout.behaviour exact: with --config.noise_injection.old_logps noisy the ratio's old policy is"
            " the one that drew, so that nothing is left to correct; write engine, or old_logps clean"
        )


def check_workers(values: Namespace) -> None:
    """What cannot be drawn by workers, or ahead."""
    rollout = values.rollout
    tensor_parallel = values.training.vllm_tensor_parallel_size
    if rollout.workers and rollout.engine == "generate":
        raise UserError(
            f"--config.rollout.workers {rollout.workers}: workers draw with engine fast or vllm; write"
            " --config.rollout.engine fast, or --config.rollout.workers 0"
        )
    if rollout.workers and rollout.engine == "vllm" and tensor_parallel > 1:
        raise UserError(
            f"--config.training.vllm_tensor_parallel_size {tensor_parallel}: a worker has one device; leave it out, or"
            " write --config.rollout.workers 0"
        )
    if rollout.workers and values.training.cast_lm_head_to_fp32:
        raise UserError(
            "--config.training.cast_lm_head_to_fp32 true: workers hold the head as the model's files have it, another"
            " policy than the trainer's; leave it out, or write --config.rollout.workers 0"
        )
    if rollout.piece_size and not rollout.workers and rollout.engine != "fast":
        raise UserError(
            f"--config.rollout.piece_size {rollout.piece_size}: without workers engine fast alone draws in pieces;"
            " leave it out, or write --config.rollout.engine fast"
        )
    if rollout.lag and rollout.max_staleness:
        raise UserError(
            f"--config.rollout.max_staleness {rollout.max_staleness}: --config.rollout.lag {rollout.lag} says which"
            " policy draws; write one of the two"
        )
    if rollout.max_staleness and rollout.piece_size:
        raise UserError(
            f"--config.rollout.piece_size {rollout.piece_size}: with max_staleness there are no pieces; leave it out,"
            f" or write --config.rollout.lag {rollout.max_staleness} in the place of max_staleness"
        )
    if rollout.max_staleness and ALGORITHMS[values.algorithm.name].greedy:
        raise UserError(
            f"--config.rollout.max_staleness {rollout.max_staleness}: algorithm {values.algorithm.name} draws a greedy"
            " completion of each prompt, for which an engine would run empty each time; write --config.rollout.lag"
            f" {rollout.max_staleness} in its place"
        )
    if not (ahead := batches_ahead(rollout)):
        return
    flag = f"--config.rollout.{'lag' if rollout.lag else 'max_staleness'}"
    if not rollout.workers:
        raise UserError(
            f"{flag} {ahead}: the trainer cannot draw while it trains; write --config.rollout.workers 1 or more, or"
            f" {flag} 0"
        )
    if values.peft.type == "none":
        raise UserError(
            f"{flag} {ahead}: all weights are trained, and each policy that is kept is a whole model; write {flag} 0,"
            " or --config.peft.type lora"
        )
    if values.algorithm.dynamic_sampling:
        raise UserError(
            f"{flag} {ahead}: which prompts a batch has under algorithm.dynamic_sampling is known when the batch"
            f" before it is scored, so nothing can be drawn ahead; write {flag} 0, or"
            " --config.algorithm.dynamic_sampling false"
        )
    if values.noise_injection.enabled and values.noise_injection.schedule == "target_kl":
        raise UserError(
            f"{flag} {ahead}: noise_injection.schedule target_kl measures what the noise does to the policy that is"
            f" trained, and an older one draws; write --config.noise_injection.schedule linear, or {flag} 0"
        )


def check_quantization(values: Namespace) -> None:
    """What a quantised base cannot be had with while completions are sampled."""
    rollout = values.rollout
    if values.model.quantization != "none" and rollout.engine == "vllm":
        raise UserError(
            f"--config.model.quantization {values.model.quantization}: vLLM is not given such a base; write"
            " --config.rollout.engine fast, or none"
        )
    if rollout.quantization == "none":
        return
    flag, leave_out = f"--config.rollout.quantization {rollout.quantization}", "--config.rollout.quantization none"
    if values.model.quantization != "none":
        raise UserError(
            f"{flag}: the base is quantised already, by --config.model.quantization {values.model.quantization}; write"
            " none for one of the two"
        )
    if rollout.engine == "generate":
        raise UserError(
            f"{flag}: --config.rollout.engine generate draws with weights that perl does not quantise; write"
            f" --config.rollout.engine fast, or {leave_out}"
        )
    if values.peft.type not in UNMERGED:
        why = "all weights are trained" if values.peft.type == "none" else "is no sum of the base's product and its own"
        raise UserError(
            f"{flag}: --config.peft.type {values.peft.type}: {why}, and the base is what is quantised; write lora, or"
            f" {leave_out}"
        )
    if rollout.merge_adapter is True:
        raise UserError(
            f"{flag}: --config.rollout.merge_adapter true: quantised weights would round most of the adapter away;"
            f" leave it out, or write {leave_out}"
        )


def check_critic(values: Namespace) -> None:
    """What the algorithm's advantages are made of must be there: a group to compare, or a critic."""
    algorithm, generations = ALGORITHMS[values.algorithm.name], values.training.num_generations
    if algorithm.groups and generations == 1:
        raise UserError(
            f"--config.training.num_generations 1: algorithm {values.algorithm.name} compares the completions of a"
            " prompt; write 2 or more, or --config.algorithm.name ppo, which has a critic instead"
        )
    if algorithm.critic and values.peft.type == "none":
        raise UserError(
            f"--config.peft.type none: the critic of algorithm {values.algorithm.name} computes on a frozen base; write"
            " lora, or --config.algorithm.name grpo"
        )
    if algorithm.critic and values.peft.type == "ln_tuning":
        raise UserError(
            f"--config.peft.type ln_tuning: the critic of algorithm {values.algorithm.name} would compute with the"
            " policy's norms; write lora, or --config.algorithm.name grpo"
        )
    if algorithm.critic and 0 < values.training.max_steps <= values.critic.warmup_steps:
        raise UserError(
            f"--config.critic.warmup_steps {values.critic.warmup_steps}: the training ends after step"
            f" {values.training.max_steps}, before the policy would learn; write less, or raise"
            " --config.training.max_steps"
        )
    if algorithm.critic and values.training.torch_compile:
        raise UserError(
            f"--config.training.torch_compile true: algorithm {values.algorithm.name} computes policy and critic in one"
            " packed sequence, which torch_compile can't have; leave it out"
        )


def check_environment(values: Namespace) -> None:
    """What conversations of several turns can't be had with."""
    environment, rollout, data = values.environment, values.rollout, values.dataset
    if not environment.tools and environment.factory is None:
        return
    flag = "--config.environment.tools" if environment.tools else "--config.environment.factory"
    if rollout.engine == "generate":
        raise UserError(
            f"--config.rollout.engine generate: draws torch's own random numbers, so that with {flag} a run would"
            " depend on how long an answer takes; write --config.rollout.engine fast"
        )
    if "stop" in (values.training.generation_kwargs or {}):
        raise UserError(
            f"--config.training.generation_kwargs: with {flag} a completion that a string ends counts as cut off,"
            " and no tool is called; leave stop out: the chat template's end of a turn ends a call"
        )
    if rollout.workers and environment.tool_timeout_s >= rollout.deadline_s:
        raise UserError(
            f"--config.environment.tool_timeout_s {environment.tool_timeout_s:g}: a worker may say nothing for so long,"
            f" and --config.rollout.deadline_s is {rollout.deadline_s:g} s; write less, or raise deadline_s"
        )
    if rollout.engine == "vllm" and values.training.vllm_tensor_parallel_size > 1:
        raise UserError(
            f"--config.training.vllm_tensor_parallel_size {values.training.vllm_tensor_parallel_size}: processes that"
            f" share an engine give it all prompts at once, and with {flag} they come turn by turn; leave it out"
        )
    if data.truncation != "error" and not data.filter_overlong_prompts:
        raise UserError(
            f"--config.dataset.truncation {data.truncation}: a prompt that lists tools can't be cut; use"
            " --config.dataset.filter_overlong_prompts true"
        )


def check_dynamic_sampling(values: Namespace) -> None:
    algorithm = values.algorithm
    if not algorithm.dynamic_sampling:
        return
    if values.training.num_generations == 1:
        raise UserError(
            "--config.algorithm.dynamic_sampling true: one completion of a prompt is always equal to itself, so that no"
            " group would be kept; write false, or --config.training.num_generations 2 or more"
        )
    if algorithm.max_resample_factor < 1:
        raise UserError(
            f"--config.algorithm.max_resample_factor {algorithm.max_resample_factor:g}: a batch has to be drawn once;"
            " write a number from 1"
        )
    known = [*values.reward.functions, *(["environment"] if values.environment.factory else []), "sum"]
    if algorithm.dynamic_sampling_metric not in (None, *known):
        raise UserError(
            f"--config.algorithm.dynamic_sampling_metric {algorithm.dynamic_sampling_metric}: no such reward; write"
            f" one of {', '.join(known)}"
        )


def check_validation(values: Namespace) -> None:
    validation, training = values.validation, values.training
    if not validation.datasets:
        if validation.save_best:
            raise UserError(
                "--config.validation.save_best true: there is no score to choose by; name"
                " --config.validation.datasets too, e.g. '[\"gsm8k\"]'"
            )
        return
    during = validation.every_steps is not None or validation.after_train
    if not during and (validation.save_best or not validation.before_train):
        raise UserError(
            "--config.validation.after_train false: no step is validated; name --config.validation.every_steps, or"
            " leave --config.validation.datasets out"
        )
    check_quantized(values)
    if training.metric_for_best_model is not None:
        raise UserError(
            f"--config.training.metric_for_best_model {training.metric_for_best_model}: is of TRL's own evaluation;"
            " write --config.validation.save_best true"
        )


def check_quantized(values: Namespace) -> None:
    """Which policies can be validated: vLLM in the trainer's process holds the quantised one alone, and where vLLM
    draws in workers the trainer's own model validates, which is not quantised."""
    rollout, quantized = values.rollout, values.validation.quantized
    flag = "--config.validation.quantized"
    if rollout.quantization == "none":
        if quantized:
            raise UserError(
                f"{flag} true: --config.rollout.quantization is none, so no policy is quantised; write int8 there, or"
                f" {flag} false"
            )
    elif rollout.engine == "vllm" and not rollout.workers and not quantized:
        raise UserError(
            f"{flag} false: vLLM holds the policy above the {rollout.quantization} base alone, and validates; write"
            f" {flag} true, or --config.rollout.workers 1, with which the trainer's own model validates"
        )
    elif rollout.engine == "vllm" and rollout.workers and quantized:
        raise UserError(
            f"{flag} true: the workers alone hold the {rollout.quantization} base, and the trainer's own model"
            f" validates; write {flag} false, and score checkpoints by perl/eval.py --quantization"
            f" {rollout.quantization}"
        )
