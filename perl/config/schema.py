"""Every group of the training configuration that is ours; `config.training` is TRL's (see config/training.py).

A field is a flag: `DatasetConfig.split` is `--config.dataset.split` and `dataset: {split: …}` in a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from perl.config.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat


@dataclass
class CommonConfig:
    """What concerns the whole run.

    Args:
        seed: seed of data order, adapter initialisation, sampling and noise (also written `training.seed`).
        debug: log at level DEBUG.
        on_nonfinite: what to do where a reward, the loss or the gradient's norm is NaN or infinite: stop saves the
            batch and ends the run, skip makes no update, and ends it after 10 in a row.
    """

    seed: int = 42
    debug: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"


@dataclass
class ModelConfig:
    """The base model.

    Args:
        model_name_or_path: a folder, or a name on the hub.
        dtype: dtype of the base's weights; null lets the device decide (bfloat16, or float32 on a CPU). With peft.type
            none null is float32, or what DeepSpeed computes in.
        attn_implementation: attention kernel ("eager", "sdpa", "flash_attention_2"); null is transformers' choice.
        quantization: nf4 holds the frozen linear layers in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes.
    """

    model_name_or_path: str = "Qwen/Qwen2.5-7B"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    attn_implementation: str | None = None
    quantization: Literal["none", "nf4"] = "none"


def data_sets(named: str | list[str]) -> list[str]:
    """The data sets that dataset.dataset_name_or_path names."""
    return [named] if isinstance(named, str) else list(named)


@dataclass
class DatasetConfig:
    """The prompts to train on.

    Args:
        dataset_name_or_path: a task (gsm8k, dapo-math, …), a name on the hub, a local file or folder, or a list of
            them, read one after the other.
        split: split of a hub dataset or of a folder; null is the task's training split.
        task: grade every row as this task; null decides by the row's own data_source or the file's schema.
        example_numbers: use only the first so many rows.
        max_prompt_length: longest prompt in tokens; null is no limit (also `training.max_prompt_length`).
        filter_overlong_prompts: drop rows whose prompt is longer than max_prompt_length.
        truncation: what to do with a longer prompt that was not dropped: stop with an error, or cut tokens off its
            left, its right or its middle.
        system_prompt: text of a system turn before each prompt that brings none; null is the task's own.
    """

    dataset_name_or_path: str | list[str] = "open-r1/DAPO-Math-17k-Processed"
    split: str | None = None
    task: str | None = None
    example_numbers: PositiveInt | None = None
    max_prompt_length: PositiveInt | None = 512
    filter_overlong_prompts: bool = True
    truncation: Literal["error", "left", "right", "middle"] = "error"
    system_prompt: str | None = None


@dataclass
class SFTDatasetConfig:
    """The rows to learn from.

    Args:
        dataset_name_or_path: a task (gsm8k, …), a name on the hub, or a local file or folder. A row is messages, or
            prompt and completion, or question and answer; tools, where a row has them, are passed to the chat template.
        split: split of a hub dataset or of a folder; null is the task's training split.
        task: word every question as this task does; null decides by the row's own data_source or the file's schema.
        example_numbers: use only the first so many rows.
        system_prompt: text of a system turn before each row that brings none; null is the task's own.
        eval_dataset: rows for the evaluation loss, as dataset_name_or_path; when is training.eval_strategy.
        eval_split: split of eval_dataset; null is the task's evaluation split.
        eval_example_numbers: use only the first so many rows of eval_dataset.
    """

    dataset_name_or_path: str = "gsm8k"
    split: str | None = None
    task: str | None = None
    example_numbers: PositiveInt | None = None
    system_prompt: str | None = None
    eval_dataset: str | None = None
    eval_split: str | None = None
    eval_example_numbers: PositiveInt | None = None


@dataclass
class AlgorithmConfig:
    """How rewards become a loss.

    Args:
        name: grpo, dapo, dr_grpo, gspo, luspo, cispo, sapo, vespo, gdpo, grpo_passk, rloo, remax, opo,
            gpg, reinforce_plus_plus, reinforce_plus_plus_baseline or ppo (docs/algorithms.md). It sets what its paper
            says of other fields; a recipe or a flag that says otherwise overrides it, with a line.
        dynamic_sampling: replace groups of equal rewards by those of further prompts, until the batch is full.
        dynamic_sampling_metric: what must differ within a group: a name of reward.functions, or sum, their weighted
            sum; null is accuracy where that is one of them, else sum.
        max_resample_factor: groups that a rollout may draw, over those of its batch; at the limit groups of equal
            rewards fill it.
        gamma: discount of a reward for each token before it (reinforce_plus_plus, ppo).
        lam: lambda of generalized advantage estimation (ppo).
        kl_estimator: how the KL divergence that training.beta puts into the loss is estimated (low_var_kl is k3, TRL's;
            mse is k2).
        kl_in_reward: coefficient of the KL divergence from the reference policy that is taken from the rewards.
        kl_in_reward_estimator: how the KL divergence of kl_in_reward is estimated.
        kl_in_reward_target: KL divergence a token, in nats, that the coefficient is adapted to; null leaves it fixed.
        kl_in_reward_horizon: completions over which the coefficient follows; the fewer, the quicker.
    """

    name: str = "grpo"
    dynamic_sampling: bool = False
    dynamic_sampling_metric: str | None = None
    max_resample_factor: PositiveFloat = 10.0
    gamma: UnitFloat = 1.0
    lam: UnitFloat = 1.0
    kl_estimator: Literal["low_var_kl", "k1", "abs", "mse"] = "low_var_kl"
    kl_in_reward: NonNegativeFloat = 0.0
    kl_in_reward_estimator: Literal["low_var_kl", "k1", "abs", "mse"] = "k1"
    kl_in_reward_target: PositiveFloat | None = None
    kl_in_reward_horizon: PositiveInt = 10000


@dataclass
class CriticConfig:
    """The critic of algorithm.name ppo: the policy's frozen base with LoRA of its own and a scalar head.

    Args:
        lr: learning rate, on the policy's schedule.
        r: rank of its LoRA, on the layers that the policy's adapter has.
        warmup_steps: first optimizer steps, in which the critic alone is trained.
        value_clip: how far a value moves from what it was at the rollout, at most; null is no bound.
    """

    lr: PositiveFloat = 1e-4
    r: PositiveInt = 16
    warmup_steps: NonNegativeInt = 0
    value_clip: PositiveFloat | None = 0.5


@dataclass
class PeftConfig:
    """The adapter, or none.

    Args:
        type: lora, rslora, dora, lora_plus, lora_fa, pissa, milora, milora_plus, adalora, vera, miss, ia3, ln_tuning,
            hra or oft (docs/peft.md); none trains all weights. A field that the method does not read stays at its
            default.
        r: rank (adalora: of each layer at first; vera: of the shared matrices; hra: number of reflections).
        lora_alpha: scale; the update is scaled by lora_alpha / r (rslora: / sqrt(r)).
        lora_dropout: dropout on the adapter's input while training.
        target_modules: names of the layers that get an adapter, or "all-linear", which for ia3 is keys, values and
            down_proj, and for ln_tuning every norm.
        exclude_modules: names of layers that get none all the same, or a regular expression of them; null is the vision
            tower of a model that takes images, and [] nothing.
        lora_plus_lr_ratio: learning rate of B over that of A (lora_plus only).
        adalora_target_r: mean rank of a layer in the end; null is two thirds of r (adalora only).
        adalora_tinit: first optimizer steps, in which all ranks stay (adalora only).
        adalora_tfinal: last optimizer steps, in which the ranks no longer change (adalora only).
        oft_block_size: inputs of a layer that are rotated together (oft only).
        adapter: folder of a trained adapter that the training starts from.
        adapter_mode: continue trains that adapter further (type, r, lora_alpha, lora_dropout, target_modules and
            exclude_modules are its own); merge writes it into the base's weights, to base/ in the run's folder, and
            trains a new one on top.
    """

    type: str = "lora"
    r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    lora_dropout: UnitFloat = 0.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None
    lora_plus_lr_ratio: NonNegativeFloat = 16.0
    adalora_target_r: PositiveInt | None = None
    adalora_tinit: NonNegativeInt = 0
    adalora_tfinal: NonNegativeInt = 0
    oft_block_size: PositiveInt = 32
    adapter: str | None = None
    adapter_mode: Literal["continue", "merge"] = "continue"


CorrectionMode = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]


@dataclass
class RolloutConfig:
    """How completions are drawn during training.

    Args:
        engine: fast is perl's decode loop (one prefill a prompt, sequences leave as they end, a seed for each);
            generate is the model's own, as TRL calls it; vllm runs vLLM in the trainer's process, or in each worker's
            (also written training.use_vllm true).
        max_batch_tokens: most tokens of KV cache at once; null is half of the memory that the update leaves free, where
            pieces are drawn of what the weights leave of the device (fast only).
        capture_graphs: run decode steps as captured graphs, so that they are not bound by kernel launches; with
            attention sdpa and weights that are whole on each device; auto does so on CUDA (fast only).
        merge_adapter: merge the adapter into the weights while completions are sampled; auto does so unless
            rounding to the weights' dtype would lose about a tenth of the update or more (fast and generate).
        importance_correction: weight the loss by trainer's over sampler's probability, of each token or of the whole
            completion, cut at training.vllm_importance_sampling_clip_max, or 0 above it (mask). auto is token where
            vllm draws, an older policy (lag, max_staleness) or a quantised one, else none.
        quantization: weights of the base in so many bits while completions are sampled, the adapter unmerged above
            them (docs/quantised.md); with fast on a CPU or an NPU, or with vllm (not generate).
        workers: processes, each with a device of its own, that draw while the trainer trains; 0: the trainer draws
            (fast and vllm).
        executor: where workers run, processes of this machine or actors in a Ray cluster.
        ray_address: of the cluster, as perl/eval.py has it.
        lag: a generation batch is drawn by the policy of so many generation batches before, while those are trained
            on; 0: the trainer waits for its batch.
        max_staleness: a generation batch is drawn by the policies of at most so many generation batches before, each
            prompt by the newest one when it is given to a worker, without pieces: less waiting where lengths differ
            much, and a run that does not repeat bit for bit. 0: lag says it.
        piece_size: completions that are decoded together, by one worker; null is a quarter of the generation batch, in
            whole groups, and without workers no division. A run repeats bit for bit with the same one.
        deadline_s: seconds after which a worker that completes nothing, no turn either, is ended, and what it had
            given to another.
        behaviour: which log-probabilities importance_correction refers to: the engine's, or the trainer's own of the
            policy that drew, computed again.
    """

    engine: Literal["fast", "generate", "vllm"] = "fast"
    max_batch_tokens: PositiveInt | None = None
    capture_graphs: bool | Literal["auto"] = "auto"
    merge_adapter: bool | Literal["auto"] = "auto"
    importance_correction: Literal["auto"] | CorrectionMode = "auto"
    quantization: Literal["none", "int8", "int8_w8a8", "int4", "fp8", "nvfp4"] = "none"
    workers: NonNegativeInt = 0
    executor: Literal["processes", "ray"] = "processes"
    ray_address: str = "auto"
    lag: NonNegativeInt = 0
    max_staleness: NonNegativeInt = 0
    piece_size: PositiveInt | None = None
    deadline_s: PositiveFloat = 1800.0
    behaviour: Literal["engine", "exact"] = "engine"


@dataclass
class NoiseConfig:
    """Adaptive quantization noise (QeRL, arXiv 2510.11696): weight + N(0, sigma^2) while completions are generated.

    Args:
        enabled: whether to add noise.
        sigma_start: standard deviation in the first noisy stage (target_kl: in the first noisy rollout).
        sigma_end: standard deviation in the last stage (not target_kl).
        num_stages: number of stages of equal length over max_steps.
        schedule: how sigma falls from stage to stage (linear is the guide's, exponential QeRL's); target_kl sets it
            after each rollout, so that the KL divergence of noisy and clean policy holds a target, which falls.
        target_kl_start: KL divergence in the first noisy stage, in nats a token (target_kl only).
        target_kl_end: KL divergence in the last stage, in nats a token (target_kl only).
        relative: sigma is a fraction of the root mean square of each layer's clean weights.
        warmup_stage: QeRL's first stage without noise, before num_stages - 1 noisy ones.
        target_modules: parts of module names that get noise.
        exclude_patterns: parts of module names that do not, even if they match.
        seed: seed of the noise; null is common.seed.
        old_logps: policy that the importance ratio refers to: clean weights, or the noisy ones that sampled.
    """

    enabled: bool = False
    sigma_start: NonNegativeFloat = 0.05
    sigma_end: NonNegativeFloat = 0.0005
    num_stages: PositiveInt = 10
    schedule: Literal["linear", "exponential", "cosine", "logarithmic", "target_kl"] = "linear"
    target_kl_start: PositiveFloat = 0.001
    target_kl_end: PositiveFloat = 0.0001
    relative: bool = False
    warmup_stage: bool = False
    target_modules: list[str] = field(default_factory=lambda: ["post_attention_layernorm"])
    exclude_patterns: list[str] = field(default_factory=lambda: ["input_layernorm"])
    seed: int | None = None
    old_logps: Literal["clean", "noisy"] = "clean"


@dataclass
class RewardConfig:
    """The reward.

    Args:
        functions: accuracy, strict, format, think, overlong, or path/to/file.py:function for one of your own, in TRL's
            form or verl's.
        weights: one weight for each function; null is 1 for each (also `training.reward_weights`).
        kwargs: further keyword arguments of your own functions in verl's form (its reward_kwargs).
        overlong_cache_length: last tokens of max_completion_length over which `overlong` falls from 0 to -1.
        deadline_s: seconds that the verification of one completion may take before it counts as wrong.
        function_deadline_s: seconds that one call of a reward function may take before the run ends; null is half of
            training.ddp_timeout, which must be longer, over the number of functions.
    """

    functions: list[str] = field(default_factory=lambda: ["accuracy"])
    weights: list[float] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    overlong_cache_length: NonNegativeInt = 64
    deadline_s: PositiveFloat = 5.0
    function_deadline_s: PositiveFloat | None = None


@dataclass
class EnvironmentConfig:
    """What answers a completion that is no answer yet: tools, or an environment (docs/training.md).

    Args:
        tools: python, or path/to/file.py:function, with type hints and a docstring as TRL's `tools` have them.
        factory: path/to/file.py:Class as TRL's `environment_factory`, or one with reset(row) and step(message).
        max_turns: completions of a conversation, at most; together, with what is observed, they have
            training.max_completion_length tokens.
        max_observation_tokens: longest observation, of all answers to a turn; of a longer one the middle is left out.
        tool_timeout_s: seconds that a turn's calls may take.
        tool_call_parser: how calls are written, by vLLM's names; auto asks the chat template. python_fence takes blocks
            of ```python for calls of python.
        sandbox: the least isolation of the tool python: limits, or namespaces too.
    """

    tools: list[str] = field(default_factory=list)
    factory: str | None = None
    max_turns: PositiveInt = 8
    max_observation_tokens: PositiveInt = 512
    tool_timeout_s: PositiveFloat = 30.0
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "python_fence"] = "auto"
    sandbox: Literal["limits", "namespaces"] = "namespaces"

    @property
    def used(self) -> bool:
        return bool(self.tools or self.factory)


@dataclass
class ValidationConfig:
    """Scores while the model trains: the evaluator's tasks, prompts and grading on the live model, without noise.

    Args:
        datasets: what to score on: tasks, names on the hub, files or folders, as perl/eval.py's --dataset; empty is no
            validation.
        every_steps: validate after each so many optimizer steps; null: after none but the last.
        before_train: validate before the first step too.
        after_train: validate after the last step, whatever every_steps says.
        n: completions of each problem. This and the next four: null is the task's own, as in perl/eval.py.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with this much probability.
        top_k: sample from the so many likeliest tokens; 0 is off.
        max_new_tokens: longest completion.
        max_samples: only the first so many problems of each dataset.
        save_best: keep the adapter with the highest mean accuracy on the first dataset, in best/ of the run's folder.
        quantized: score the policy above the base of rollout.quantization too, in as much time again; vllm without
            workers holds that one alone, and needs true.
    """

    datasets: list[str] = field(default_factory=list)
    every_steps: PositiveInt | None = None
    before_train: bool = True
    after_train: bool = True
    n: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    top_p: UnitFloat | None = None
    top_k: NonNegativeInt | None = None
    max_new_tokens: PositiveInt | None = None
    max_samples: PositiveInt | None = None
    save_best: bool = False
    quantized: bool = False


@dataclass
class LoggingConfig:
    """Where metrics go besides metrics.jsonl.

    Args:
        wandb_project: Weights & Biases project; null is made of what is trained how (grpo-lora), the model's and the
            device's names.
    """

    wandb_project: str | None = None


@dataclass(kw_only=True)
class Groups:
    """The groups of perl.train that are ours."""

    common: CommonConfig = field(default_factory=CommonConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    noise_injection: NoiseConfig = field(default_factory=NoiseConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


@dataclass(kw_only=True)
class SFTGroups:
    """The groups of perl.sft that are ours."""

    common: CommonConfig = field(default_factory=CommonConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: SFTDatasetConfig = field(default_factory=SFTDatasetConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


GROUPS: dict[str, type] = get_type_hints(Groups)
