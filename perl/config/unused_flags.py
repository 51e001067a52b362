"""Flags that are known but change nothing in this run: each gets one warning, none is silently ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jsonargparse import Namespace

from perl.algorithms import ALGORITHMS
from perl.config.derived import correction_of, rows_stand


@dataclass(frozen=True)
class Rule:
    """Fields that start with one of `prefixes` have no effect unless `active(values)`."""

    prefixes: tuple[str, ...]
    active: Callable[[Namespace], bool]
    because: str
    keep: tuple[str, ...] = ()
    """Fields with such a prefix that always have an effect."""


def only_with(fields: str, name: str, *values: str | bool, keep: tuple[str, ...] = ()) -> Rule:
    """Fields, their prefixes between spaces, that have an effect where the field `name` has one of `values` alone."""
    alone = "is false" if values[0] is True else f"is not {values[0]}"
    because = alone if len(values) == 1 else f"is neither {' nor '.join(map(str, values))}"
    return Rule(tuple(fields.split()), lambda v: v[name] in values, f"{name} {because}", keep)


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of TRL with PPO's clip of the ratio at 1 - epsilon and 1 + epsilon_high."""
IS_BOUNDS = tuple(f"training.vllm_importance_sampling_{name}" for name in ("clip_min", "clip_max", "cap"))


PYTHON = {"python", "code_interpreter"}
"""Names of environment.tools that run code."""


def uses(v: Namespace, field: str) -> bool:
    return field in ALGORITHMS[v.algorithm.name].uses


def advantages_of_trl(v: Namespace) -> bool:
    """TRL makes the advantages of the rewards."""
    return ALGORITHMS[v.algorithm.name].advantages is None


def scaled(v: Namespace) -> bool:
    """Advantages are GRPO's own, or scaled as GRPO's are."""
    of_grpo = advantages_of_trl(v) and v.training.multi_objective_aggregation == "sum_then_normalize"
    return of_grpo or uses(v, "training.scale_rewards")


def tells_wandb(v: Namespace) -> bool:
    asked = v.training.report_to
    return not {"wandb", "all"}.isdisjoint([asked] if isinstance(asked, str) else asked or ())


def never(v: Namespace) -> bool:
    return False


def unread(fields: str, because: str, keep: tuple[str, ...] = ()) -> Rule:
    """Fields of `training`, their prefixes between spaces, that nothing reads."""
    return Rule(tuple(f"training.{field}" for field in fields.split()), never, because, keep)


OF_ANY_TRAINING: tuple[Rule, ...] = (
    Rule(("peft.adapter_mode",), lambda v: v.peft.adapter is not None, "peft.adapter names no adapter"),
    only_with("peft.lora_plus_lr_ratio", "peft.type", "lora_plus"),
    Rule(
        ("peft.r", "peft.lora_alpha", "peft.lora_dropout", "peft.target_modules", "peft.exclude_modules"),
        lambda v: v.peft.type != "none",
        "peft.type none trains all weights",
    ),
    Rule(
        ("training.num_train_epochs",), lambda v: v.training.max_steps <= 0, "training.max_steps is given, and decides"
    ),
    Rule(("training.weight_decay",), lambda v: v.peft.type != "lora_plus", "peft.type lora_plus decays no weights"),
    unread("trust_remote_code", "models and tokenizers are loaded by transformers' own code"),
    only_with("training.save_steps", "training.save_strategy", "steps"),
    Rule(
        ("training.save_total_limit",),
        lambda v: v.training.save_strategy != "no",
        "training.save_strategy is no: a run that is stopped alone writes a checkpoint",
    ),
    Rule(
        ("training.warmup_steps",),
        lambda v: v.training.lr_scheduler_type != "constant",
        "training.lr_scheduler_type constant has no warm-up; constant_with_warmup has",
    ),
    Rule(("logging.wandb_project",), tells_wandb, "training.report_to does not name wandb"),
)
"""Of perl.train and perl.sft."""

RULES: tuple[Rule, ...] = (
    *OF_ANY_TRAINING,
    Rule(("algorithm.gamma",), lambda v: uses(v, "algorithm.gamma"), "algorithm.name discounts no reward"),
    Rule(
        ("algorithm.lam",),
        lambda v: uses(v, "algorithm.lam"),
        "algorithm.name has no generalized advantage estimation",
    ),
    Rule(("training.scale_rewards",), scaled, "algorithm.name or multi_objective_aggregation has a scale of its own"),
    Rule(
        ("training.multi_objective_aggregation",),
        advantages_of_trl,
        "the advantages of algorithm.name are made of the weighted sum of the rewards",
    ),
    Rule(("algorithm.kl_in_reward_",), lambda v: v.algorithm.kl_in_reward > 0.0, "algorithm.kl_in_reward is 0"),
    Rule(
        ("algorithm.kl_in_reward_horizon",),
        lambda v: v.algorithm.kl_in_reward == 0.0 or v.algorithm.kl_in_reward_target is not None,
        "algorithm.kl_in_reward_target is null: the coefficient is fixed",
    ),
    Rule(
        ("algorithm.kl_estimator", "training.use_bias_correction_kl"),
        lambda v: v.training.beta != 0.0,
        "training.beta is 0: no KL is in the loss",
    ),
    Rule(
        ("training.use_bias_correction_kl",),
        lambda v: v.algorithm.kl_estimator != "mse" or v.training.beta == 0.0,
        "algorithm.kl_estimator mse is not weighed by the ratio: its own gradient is that of the KL divergence",
    ),
    Rule(("critic.",), lambda v: ALGORITHMS[v.algorithm.name].critic, "only algorithm.name ppo has a critic"),
    only_with("algorithm.dynamic_sampling_metric algorithm.max_resample_factor", "algorithm.dynamic_sampling", True),
    Rule(
        ("environment.",),
        lambda v: bool(v.environment.tools or v.environment.factory),
        "environment.tools and environment.factory name none",
        ("environment.tools", "environment.factory"),
    ),
    Rule(
        ("environment.sandbox",),
        lambda v: not PYTHON.isdisjoint(v.environment.tools),
        "environment.tools has no python",
    ),
    only_with("noise_injection.", "noise_injection.enabled", True, keep=("noise_injection.enabled",)),
    Rule(
        ("noise_injection.sigma_end",),
        lambda v: not v.noise_injection.enabled or v.noise_injection.schedule != "target_kl",
        "noise_injection.schedule target_kl sets sigma by target_kl_start and target_kl_end",
    ),
    Rule(
        ("noise_injection.target_kl_",),
        lambda v: not v.noise_injection.enabled or v.noise_injection.schedule == "target_kl",
        "noise_injection.schedule is not target_kl",
    ),
    Rule(
        IS_BOUNDS,
        lambda v: correction_of(v.rollout) != "none",
        "rollout.importance_correction is none",
    ),
    only_with("training.vllm_", "rollout.engine", "vllm", keep=IS_BOUNDS),
    Rule(
        ("training.vllm_enable_sleep_mode",),
        lambda v: not v.rollout.workers or not v.training.use_vllm,
        "rollout.workers: an engine that shares no device with the trainer has no need to sleep",
    ),
    only_with("training.cache_implementation", "rollout.engine", "generate"),
    only_with("rollout.max_batch_tokens rollout.capture_graphs", "rollout.engine", "fast"),
    only_with("rollout.merge_adapter", "rollout.engine", "fast", "generate"),
    Rule(("rollout.executor", "rollout.deadline_s"), lambda v: v.rollout.workers > 0, "rollout.workers is 0"),
    only_with("rollout.ray_address", "rollout.executor", "ray"),
    Rule(
        ("rollout.behaviour",),
        lambda v: correction_of(v.rollout) != "none" or v.training.off_policy_mask_threshold is not None,
        "rollout.importance_correction is none",
    ),
    Rule(("rollout.merge_adapter",), lambda v: v.peft.type != "none", "peft.type none has no adapter"),
    Rule(
        ("reward.overlong_cache_length",),
        lambda v: "overlong" in v.reward.functions,
        "reward.functions does not hold overlong",
    ),
    Rule(
        ("dataset.filter_overlong_prompts",),
        lambda v: v.dataset.max_prompt_length is not None,
        "dataset.max_prompt_length is null",
    ),
    Rule(
        ("dataset.truncation",),
        lambda v: v.dataset.max_prompt_length is not None and not v.dataset.filter_overlong_prompts,
        "no prompt is too long: filter_overlong_prompts drops them, or max_prompt_length is null",
    ),
    Rule(
        ("training.epsilon_high",),
        lambda v: v.training.loss_type in (*CLIPPED, "cispo"),
        f"it clips the losses {', '.join(CLIPPED)} and cispo",
    ),
    Rule(
        ("training.importance_sampling_level",),
        lambda v: v.training.loss_type != "vespo" or (v.training.beta != 0.0 and v.training.use_bias_correction_kl),
        "loss_type vespo weighs by the ratio of a whole completion",
    ),
    Rule(("training.cispo_",), lambda v: v.training.loss_type == "cispo", "loss_type is not cispo"),
    Rule(("training.sapo_temperature",), lambda v: v.training.loss_type == "sapo", "loss_type is not sapo"),
    Rule(("training.vespo_",), lambda v: v.training.loss_type == "vespo", "loss_type is not vespo"),
    Rule(
        ("training.delta", "training.epsilon"),
        lambda v: v.training.loss_type in CLIPPED,
        f"it clips the losses {', '.join(CLIPPED)}",
        keep=("training.epsilon_high",),
    ),
    only_with("training.entropy_coef_ training.entropy_target", "training.use_adaptive_entropy", True),
    Rule(
        ("training.max_tokens_per_microbatch",),
        lambda v: not rows_stand(v.training),
        "the loss (loss_type bnpo, top_entropy_quantile, an entropy bonus) depends on which rows share a micro-batch",
    ),
    Rule(
        ("validation.",),
        lambda v: bool(v.validation.datasets),
        "validation.datasets is empty",
        keep=("validation.datasets",),
    ),
    unread(
        "batch_eval_metrics bf16_full_eval do_ eval_ fp16_full_eval greater_is_better include_for_metrics"
        " metric_for_best_model num_generations_eval per_device_eval_batch_size prediction_loss_only",
        "it is of TRL's own evaluation; validation.datasets and perl/eval.py score",
        keep=("training.eval_strategy",),
    ),
    unread(
        "data_seed dataloader_ length_column_name remove_unused_columns train_sampling_strategy",
        "perl reads the prompts itself, in the order of common.seed and training.shuffle_dataset",
    ),
    unread("average_tokens_across_devices label_", "it is of losses of labels, and a completion has none"),
    unread("liger_kernel_config", "Liger's kernels are not used"),
    unread("local_rank", "accelerate numbers the processes"),
    unread("log_multimodal", "images are not logged"),
    unread("max_tool_calling_iterations", "environment.max_turns bounds the turns of a completion"),
    unread("pad_to_multiple_of", "micro-batches are packed, or padded to their longest row"),
    unread("ref_model_", "the reference is the model that the run begins with, and never changes"),
    only_with(
        "training.log_completions_hub_repo training.log_unique_prompts training.num_completions_to_print",
        "training.log_completions",
        True,
    ),
    Rule(
        ("reward.deadline_s",),
        lambda v: "accuracy" in v.reward.functions or bool(v.validation.datasets),
        "reward.functions does not hold accuracy, and nothing is validated",
    ),
)


def flags_without_effect(values: Namespace, given: Namespace, rules: Sequence[Rule] = RULES) -> list[str]:
    """One line for each given flag that has no effect under `values`.

    Args:
        values: the resolved configuration, groups at the top.
        given: only what the user wrote on the command line.
        rules: of the program.
    """
    return [
        f"--config.{name} has no effect: {rule.because}"
        for name in sorted(given.keys(branches=False))
        for rule in rules
        if name.startswith(rule.prefixes) and name not in rule.keep and not rule.active(values)
    ]
