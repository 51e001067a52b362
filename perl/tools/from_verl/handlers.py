"""Handlers of keys whose value alone does not say what they become: they read verl's whole configuration."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from perl.base.errors import UserError
from perl.tasks import rows_of
from perl.tools.from_verl import batch as arithmetic
from perl.tools.from_verl.batch import BatchError
from perl.tools.from_verl.outcomes import (
    ADAPTER,
    Handler,
    NoEffect,
    Outcome,
    Refused,
    Translated,
    Verl,
    number,
    one_or_more,
    path,
    positive,
    shown,
    texts,
    to,
    where,
    whole,
    yes_or_no,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
SPEED = "speed and memory only: the result is the same"


# Batch


def batch_field(field: str, meaning: str) -> Handler:
    """A number of the batch: what the whole batch comes to, or why it cannot be cut at this key."""

    def handle(value: Any, verl: Verl) -> Outcome:
        batch = verl.batch
        if isinstance(batch, BatchError):
            return Refused(batch.why) if batch.key == meaning else NoEffect(f"the batch cannot be cut: {batch.why}")
        return Translated({field: getattr(batch, field.removeprefix("training."))})

    return handle


def group_size(value: Any, verl: Verl) -> Outcome:
    if verl["algorithm.adv_estimator"] not in ("gae", "reinforce_plus_plus") and value == 1:
        return Refused("1 completion has no others to be compared with; a group has 2 or more: rollout.n=8")
    return to("training.num_generations", positive)(value, verl)


def whole_micro_batch(value: Any, verl: Verl) -> Outcome:
    if verl[arithmetic.MICRO] is not None:
        return NoEffect("ppo_micro_batch_size_per_gpu goes before it")
    if value is None:
        return NoEffect("null leaves it to ppo_micro_batch_size_per_gpu")
    return batch_field("training.per_device_train_batch_size", arithmetic.MICRO)(value, verl)


def devices(value: Any, verl: Verl) -> Outcome:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return Refused(f"{shown(value)} is not a whole number from 1")
    return Translated({"NUM_PROCESSES": verl.devices})


def dynamic_batches(value: Any, verl: Verl) -> Outcome:
    if not value:
        return NoEffect("micro-batches have as many rows as ppo_micro_batch_size_per_gpu says")
    return Translated({"training.max_tokens_per_microbatch": verl[f"{ACTOR}.ppo_max_token_len_per_gpu"]})


def updates(value: Any, verl: Verl) -> int:
    """Steps of verl in optimizer steps."""
    return positive(value) * verl.updates_per_rollout


# Algorithm and loss


def estimator(value: Any, verl: Verl) -> Outcome:
    if value in ("grpo", "grpo_vectorized"):
        return Translated({"training.scale_rewards": "group" if verl["algorithm.norm_adv_by_std_in_grpo"] else "none"})
    if value == "gpg" and _scored_with_signs(verl):
        note = "gpg's factor is 1 where verl scores rows -1 or 1, as none of them is 0: grpo without the deviation"
        return Translated({"training.scale_rewards": "none"}, note)
    if value in ESTIMATORS:
        return Translated({"algorithm.name": ESTIMATORS[value]})
    if value == "remax":
        return Refused("remax samples a greedy completion for each prompt too, which is not there; the nearest is rloo")
    known = ", ".join(("grpo", *ESTIMATORS))
    return Refused(f"{shown(value)}: this advantage estimator is not there; {known} are")


ESTIMATORS = {
    "gae": "ppo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
}
"""verl's algorithm.adv_estimator -> algorithm.name, where that is not grpo."""


def by_group(verl: Verl) -> bool:
    """Whether norm_adv_by_std_in_grpo has an effect."""
    return verl["algorithm.adv_estimator"] in ("grpo", "grpo_vectorized", "grpo_passk")


def scale_matters(verl: Verl) -> bool:
    """Whether twice the score is another run: a KL divergence is taken from it, or no deviation divides it."""
    whitened = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    divided = (
        verl["algorithm.norm_adv_by_std_in_grpo"] if by_group(verl) else verl["algorithm.adv_estimator"] in whitened
    )
    return verl["algorithm.use_kl_in_reward"] or not divided


def discounted(verl: Verl) -> bool:
    """Whether gamma has an effect."""
    return verl["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus")


def kl_in_reward(value: Any, verl: Verl) -> Outcome:
    coefficient = number(verl["algorithm.kl_ctrl.kl_coef"]) if value else 0.0
    return Translated({"algorithm.kl_in_reward": coefficient}) if value else NoEffect("False leaves it off, as here")


def in_reward(handler: Handler) -> Handler:
    return where(
        lambda verl: verl["algorithm.use_kl_in_reward"], handler, "in verl too, while use_kl_in_reward is False"
    )


def kl_control(value: Any, verl: Verl) -> Outcome:
    if value == "fixed":
        return NoEffect("the coefficient is fixed, as here")
    if value != "adaptive":
        return Refused(f"{shown(value)}: fixed and adaptive are known")
    target, horizon = (verl[f"algorithm.kl_ctrl.{name}"] for name in ("target_kl", "horizon"))
    return Translated(
        {"algorithm.kl_in_reward_target": number(target), "algorithm.kl_in_reward_horizon": positive(horizon)}
    )


def adaptive(verl: Verl) -> bool:
    return verl["algorithm.kl_ctrl.type"] == "adaptive"


KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "mse",
    "k2": "mse",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
}
"""verl's names -> ours."""


def kl_penalty(value: Any, verl: Verl) -> Outcome:
    if value in KL_ESTIMATORS:
        return Translated({"algorithm.kl_in_reward_estimator": KL_ESTIMATORS[value]})
    return Refused(f"{shown(value)}: {', '.join(KL_ESTIMATORS)} are there")


def kl_loss(value: Any, verl: Verl) -> Outcome:
    coefficient = number(verl[f"{ACTOR}.kl_loss_coef"]) if verl[f"{ACTOR}.use_kl_loss"] else 0.0
    return Translated({"training.beta": coefficient})


def kl_type(value: Any, verl: Verl) -> Outcome:
    uncorrected = {"training.use_bias_correction_kl": False}  # TRL's default weighs it by the ratio
    if value in ("low_var_kl", "k3"):
        return Translated(uncorrected)
    if value in KL_ESTIMATORS:
        return Translated({"algorithm.kl_estimator": KL_ESTIMATORS[value], **uncorrected})
    if str(value).removesuffix("+") in KL_ESTIMATORS:
        return Refused(f"{shown(value)}: its gradient is that of mse, only the logged value differs; write mse")
    return Refused(f"{shown(value)}: {', '.join(KL_ESTIMATORS)} are there")


def policy_loss(value: Any, verl: Verl) -> Outcome:
    levels = {"vanilla": "token", "gspo": "sequence"}
    if value == "sapo":
        return Translated({"training.importance_sampling_level": "token", "training.loss_type": "sapo"})
    if value == "cispo":
        return Refused(
            "TRL's cispo has no lower bound, and adds up tokens of the whole batch; write vanilla, and"
            " --config.training.loss_type cispo behind the printed command for TRL's"
        )
    if value not in levels:
        return Refused(f"{shown(value)}: this loss is not there; vanilla, gspo and sapo are")
    return Translated({"training.importance_sampling_level": levels[value]})


def is_sapo(verl: Verl) -> bool:
    return verl[f"{ACTOR}.policy_loss.loss_mode"] == "sapo"


def aggregation(value: Any, verl: Verl) -> Outcome:
    if is_sapo(verl):
        return NoEffect("in verl too: the loss sapo is seq-mean-token-mean")
    if value not in AGGREGATIONS:
        return Refused(f"{shown(value)}: not there; {', '.join(AGGREGATIONS)} are")
    return Translated({"training.loss_type": AGGREGATIONS[value]})


AGGREGATIONS = {
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""verl's loss_agg_mode -> TRL's loss_type. token-mean: of each micro-batch, as in verl up to 0.5."""


def clip_ratio(value: Any, verl: Verl) -> Outcome:
    if verl[f"{ACTOR}.clip_ratio_low"] is None or verl[f"{ACTOR}.clip_ratio_high"] is None:
        return to("training.epsilon", number)(value, verl)
    return NoEffect("in verl too: clip_ratio_low and clip_ratio_high, 0.2 by default, go before it")


def clip_end(field: str) -> Handler:
    def handle(value: Any, verl: Verl) -> Outcome:
        return to(field, number)(verl[f"{ACTOR}.clip_ratio"] if value is None else value, verl)

    return handle


def importance_correction(value: Any, verl: Verl) -> Outcome:
    """Truncated importance sampling: rollout_is of newer versions of verl."""
    if not value:
        return NoEffect(f"{shown(value)} leaves it off, as it is here")
    if value not in ("token", "sequence"):
        return Refused(f"{shown(value)}: only token and sequence are there")
    return corrected(value, verl["algorithm.rollout_correction.rollout_is_threshold"], verl)


def importance_cap(value: Any, verl: Verl) -> Outcome:
    """tis_imp_ratio_cap of versions 0.5 and 0.6: the same, of tokens."""
    if not capped(value):
        return NoEffect("off, as it is here")
    return corrected("token", value, verl)


def capped(value: Any) -> bool:
    """verl 0.5 writes -1 for off."""
    return value is not None and number(value) > 0


def corrected(level: str, limit: Any, verl: Verl) -> Outcome:
    """Ratios of `level`, cut at `limit`; with vLLM TRL's own fields say so."""
    cut = {"training.vllm_importance_sampling_clip_max": number(limit)}
    if verl.choices.engine != "vllm":
        return Translated({"rollout.importance_correction": level, **cut})
    mode = {"training.vllm_importance_sampling_mode": f"{level}_truncate"}
    return Translated({"training.vllm_importance_sampling_correction": True, **mode, **cut})


# Optimizer


def learning_rate(value: Any, verl: Verl) -> Outcome:
    if number(value) < 0:
        raise ValueError(f"{shown(value)} is below 0")
    return Translated({"training.learning_rate": multiplied(value, verl)})


def multiplied(rate: Any, verl: Verl) -> float:
    """By --learning_rate_factor, to twelve digits: 1e-6 tenfold is 1e-5."""
    return float(f"{number(rate) * verl.choices.learning_rate_factor:.12g}")


def with_critic(handler: Handler) -> Handler:
    return where(lambda verl: verl.has_critic, handler, "only PPO (adv_estimator=gae) has it")


def critic_rate(value: Any, verl: Verl) -> Outcome:
    if number(value) <= 0:
        raise ValueError(f"{shown(value)} is not above 0")
    return Translated({"critic.lr": multiplied(value, verl)})


def critic_model(value: Any, verl: Verl) -> Outcome:
    """The base of the critic, which is the policy's where verl loads the same model twice."""
    if not value or path(value) == path(verl[f"{MODEL}.path"]):
        return NoEffect("the critic computes on the policy's base")
    return Refused(f"{shown(value)}: the critic computes on the policy's base")


def critic_rank(value: Any, verl: Verl) -> Outcome:
    if not value:
        return NoEffect("verl would train all weights of the critic; here LoRA (critic.r 16) and its head")
    return Translated({"critic.r": positive(value)})


def schedule(value: Any, verl: Verl) -> Outcome:
    """lr_scheduler_type, its warm-up and its lowest rate, which TRL has in three fields."""
    optim = f"{ACTOR}.optim"
    kind = verl.first(f"{optim}.lr_scheduler_type", f"{optim}.warmup_style", f"{optim}.lr_decay_style") or "constant"
    steps, ratio, lowest = (verl[f"{optim}.{k}"] for k in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio"))
    if kind not in ("constant", "cosine"):
        return Refused(f"{shown(kind)}: constant and cosine are there")
    warmup: dict[str, Any] = {}
    if isinstance(steps, int) and steps > 0:
        warmup = {"training.warmup_steps": updates(steps, verl)}
    elif ratio and number(ratio) > 0:
        warmup = {"training.warmup_steps": number(ratio)}
    if kind == "constant":
        return Translated({"training.lr_scheduler_type": f"constant{'_with_warmup' if warmup else ''}", **warmup})
    if lowest and number(lowest) > 0:
        rate = {"min_lr_rate": number(lowest)}
        return Translated(
            {"training.lr_scheduler_type": "cosine_with_min_lr", "training.lr_scheduler_kwargs": rate, **warmup}
        )
    return Translated({"training.lr_scheduler_type": "cosine", **warmup})


def betas(value: Any, verl: Verl) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        return Refused(f"{shown(value)}: two numbers, such as [0.9,0.999]")
    return Translated({"training.adam_beta1": value[0], "training.adam_beta2": value[1]})


# Data


def prompts_as(value: Any, verl: Verl) -> Outcome:
    modes = ("error", "left", "right", "middle")
    return to("dataset.truncation")(value, verl) if value in modes else Refused(f"{shown(value)}: {', '.join(modes)}")


def rollout_batch(value: Any, verl: Verl) -> Outcome:
    if value in (None, verl["data.train_batch_size"]) or verl["algorithm.filter_groups.enable"]:
        return NoEffect("as many prompts are drawn as data.train_batch_size says")
    return Refused("it differs from data.train_batch_size; drop it, or train on as many prompts as are drawn")


def filtered(handler: Handler) -> Handler:
    return where(
        lambda verl: verl["algorithm.filter_groups.enable"], handler, "algorithm.filter_groups.enable is False"
    )


def filter_metric(value: Any, verl: Verl) -> Outcome:
    """What must differ within a group: acc and score are without the punishment of long completions."""
    if value in ("seq_reward", "seq_final_reward"):
        return Translated({"algorithm.dynamic_sampling_metric": "sum"})
    if value not in ("acc", "score"):
        return Refused(f"{shown(value)}: acc, score, seq_reward, seq_final_reward")
    rewards = reward_functions(None, verl)
    assert isinstance(rewards, Translated)
    return Translated({"algorithm.dynamic_sampling_metric": rewards.fields["reward.functions"][0]})


def filter_limit(value: Any, verl: Verl) -> Outcome:
    """verl counts batches of data.gen_batch_size prompts."""
    if not isinstance(value, int) or value <= 0:
        return NoEffect("no limit in verl; here --config.algorithm.max_resample_factor is one, 10 unless it is said")
    batch = verl["data.train_batch_size"]
    drawn = value * (verl["data.gen_batch_size"] or batch)
    return Translated(
        {"algorithm.max_resample_factor": drawn / batch},
        "at the limit verl ends the run; here groups of equal rewards fill the batch",
    )


def chat_template(value: Any, verl: Verl) -> Outcome:
    arguments = verl["data.apply_chat_template_kwargs"]
    return Translated({"training.chat_template_kwargs": arguments}) if arguments else NoEffect("empty")


def same_as(key: str) -> Handler:
    """Without effect where the value is that of another key, from which it comes in verl."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if value in (None, verl[key]):
            return NoEffect(f"{key} decides")
        return Refused(f"it differs from {key}, {shown(verl[key])}; set that instead")

    return handle


def validates(verl: Verl) -> bool:
    frequency = verl["trainer.test_freq"]
    return bool(verl["trainer.val_before_train"]) or (isinstance(frequency, int) and frequency > 0)


def validated(handler: Handler) -> Handler:
    return where(validates, handler, "nothing is validated: test_freq is not above 0 and val_before_train is False")


def test_frequency(value: Any, verl: Verl) -> Outcome:
    """Above 0 the last step is validated too, else none is."""
    if not isinstance(value, int) or isinstance(value, bool):
        return Refused(f"{shown(value)} is not a whole number")
    if value <= 0:
        return Translated({"validation.every_steps": None, "validation.after_train": False})
    return Translated({"validation.every_steps": updates(value, verl)})


def completion_length(value: Any, verl: Verl) -> Outcome:
    longest = positive(value)
    validation = {"validation.max_new_tokens": longest} if validates(verl) else {}
    return Translated({"training.max_completion_length": longest, **validation})


def validation_temperature(value: Any, verl: Verl) -> Outcome:
    sampled = verl[f"{ROLLOUT}.val_kwargs.do_sample"]
    return to("validation.temperature", number)(verl[f"{ROLLOUT}.val_kwargs.temperature"] if sampled else 0.0, verl)


def greedy(verl: Verl) -> bool:
    values = verl[f"{ROLLOUT}.val_kwargs.do_sample"], verl[f"{ROLLOUT}.val_kwargs.temperature"]
    return not all(values)


def all_tokens(value: Any, verl: Verl) -> Outcome:
    if greedy(verl) or value in (-1, 0, 1, 1.0):
        return NoEffect("greedy, or nothing is cut off")
    return Refused(f"{shown(value)}: validation draws from all tokens; leave it out")


# Model and rollouts


def full_parameters(value: Any, verl: Verl) -> Outcome:
    """lora_rank; 0 trains all weights in verl, and here a LoRA adapter unless the user wants all."""
    if value and not isinstance(value, bool) and isinstance(value, int):
        return Translated({"peft.type": "lora", "peft.r": value})
    if verl.is_lora:
        return NoEffect(f"model.{'lora_adapter_path' if verl[ADAPTER] else 'lora.rank'} goes before it")
    if verl.is_full:
        return Translated({"peft.type": "none"})
    return Translated({"peft.type": "lora", "peft.r": 16, "peft.lora_alpha": 32})


def with_lora(handler: Handler) -> Handler:
    return where(lambda verl: verl.is_lora, handler, "lora_rank is 0: verl would train all weights")


def lora_modules(value: Any, verl: Verl) -> Outcome:
    return to("peft.target_modules", one_or_more)(value, verl)


def megatron_lora_modules(value: Any, verl: Verl) -> Outcome:
    if value == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]:
        return Translated({"peft.target_modules": "all-linear"})
    return Refused(f"{shown(value)}: Megatron's names; leave it out for all linear layers")


def model_settings(value: Any, verl: Verl) -> Outcome:
    return NoEffect("empty") if not value else Refused("a changed architecture is not taken over")


def engine(value: Any, verl: Verl) -> Outcome:
    if value not in ("vllm", "sglang", "hf", None):
        return Refused(f"{shown(value)}: vllm, sglang and hf are known")
    chosen = verl.choices.engine
    note = "" if chosen == value else "the same policy is sampled, by perl's own decode loop; --engine vllm takes vLLM"
    if chosen != "vllm":
        return Translated({"rollout.engine": chosen}, note)
    fields: dict[str, Any] = {"rollout.engine": chosen, "training.vllm_mode": "colocate"}
    if not capped(verl[f"{ACTOR}.tis_imp_ratio_cap"]) and not verl["algorithm.rollout_correction.rollout_is"]:
        fields["training.vllm_importance_sampling_correction"] = False  # TRL's default masks whole completions
    return Translated(fields, note)


def vllm_only(field: str, nearest: str) -> Handler:
    def handle(value: Any, verl: Verl) -> Outcome:
        if verl.choices.engine == "vllm":
            return Translated({field: value})
        return NoEffect(f"vLLM's; {nearest}")

    return handle


def eager(value: Any, verl: Verl) -> Outcome:
    if verl.choices.engine == "vllm":
        return NoEffect("vLLM starts as it decides; speed only")
    return Translated({"rollout.capture_graphs": False if value else "auto"})


def top_k(value: Any, verl: Verl) -> Outcome:
    return Translated({"training.top_k": 0 if value in (-1, None) else whole(value)})


def backend(value: Any, verl: Verl) -> Outcome:
    if value in ("fsdp", "fsdp2"):
        return NoEffect("how weights are spread; here ACCELERATE_CONFIG says so: scripts/accelerate/npu_fsdp2.yaml, …")
    if value == "megatron":
        return Refused(f"Megatron (MindSpeed) is not there; the nearest is {ACTOR}.strategy=fsdp2")
    return Refused(f"{shown(value)} is not there; the nearest is {ACTOR}.strategy=fsdp2")


def offload(value: Any, verl: Verl) -> Outcome:
    if not value:
        return NoEffect("nothing is moved to the host here either")
    if verl.is_full:
        return NoEffect(
            "memory only; ACCELERATE_CONFIG=scripts/accelerate/npu_zero3.yaml or npu_fsdp2.yaml splits weights and"
            " optimizer over the devices"
        )
    return NoEffect(
        "memory only; the base is frozen and the adapter's optimizer small. If the base does not fit a device:"
        " ACCELERATE_CONFIG=scripts/accelerate/npu_zero3.yaml or npu_fsdp2.yaml"
    )


def model_dtype(value: Any, verl: Verl) -> Outcome:
    if value in ("fp32", "float32"):
        what = "weights are" if verl.is_full else "the adapter, over a base in the device's dtype, is"
        return NoEffect(f"{what} trained in float32")
    if value in ("bf16", "bfloat16"):
        return Translated({"model.dtype": "bfloat16"})
    return Refused(f"{shown(value)}: fp32 and bf16 are known")


# Rewards


def reward_functions(value: Any, verl: Verl) -> Outcome:
    """The reward: the user's function, or verl's by data source; with DAPO's punishment of long completions."""
    file, name = (verl.first(f"custom_reward_function.{k}", f"reward.custom_reward_function.{k}") for k in CUSTOM)
    files = _files(verl)
    if file:
        functions, note = [_own_reward(path(file), str(name or "compute_score"))], ""
    elif _named(files, "gsm8k"):
        functions, note = ["strict"], "verl's rule for GSM8K, only `#### n` counts; accuracy takes other forms too"
    elif _named(files, "geo3k", "geometry3k"):
        note = "verl's score for geometry3k: 0.9 for the answer, 0.1 for its form"
        return Translated({"reward.functions": ["accuracy", "think"], "reward.weights": [0.9, 0.1]}, note)
    else:
        functions, note = ["accuracy"], "the rule of the rows' own task, as verl chooses by data_source"
    buffer, weight = _overlong(verl), 1.0
    if functions == ["accuracy"] and (buffer or scale_matters(verl)):
        weight = 2.0 if _scored_with_signs(verl) else 1.0
        scores = "-1 or 1, accuracy 0 or 1" if weight == 2 else "0 or 1, as accuracy is (-1 or 1 for DAPO's and AIME's)"
        note += f"; it weighs {weight:g}: verl's score of these rows is {scores}"
    if not buffer:
        weights = {} if weight == 1 else {"reward.weights": [weight]}
        return Translated({"reward.functions": functions, **weights}, note)
    length, factor = buffer
    fields = {
        "reward.functions": [*functions, "overlong"],
        "reward.weights": [weight, float(factor)],
        "reward.overlong_cache_length": length,
    }
    return Translated(fields, note)


SIGNED = re.compile(r"dapo|(?<![a-z])aime(?![a-z])|^math$")
"""Data sources (else names of files) whose rows verl scores with -1 or 1 (its reward_score/__init__.py, math_dapo)."""


def _files(verl: Verl) -> list[str]:
    files = verl["data.train_files"]
    return [path(name) for name in (files if isinstance(files, list) else [files]) if name]


def _scored_with_signs(verl: Verl) -> bool:
    """Whether verl's own rules score all rows with -1 or 1, which accuracy scores with 0 or 1."""
    own = not any(verl.first(key) for key in ("custom_reward_function.path", "reward.custom_reward_function.path"))
    files = _files(verl)
    return own and bool(files) and all(map(_is_signed, files))


def _is_signed(file: str) -> bool:
    """Whether verl's score of a file's rows is -1 or 1: by its first row's data_source, or, where the file is not here,
    by its path."""
    named = file
    with contextlib.suppress(UserError, StopIteration):
        if Path(file).exists():
            row, *_ = next(rows_of(file, None))
            named = str(row.get("data_source", ""))
    return SIGNED.search(named.lower()) is not None


def _named(files: list[str], *names: str) -> bool:
    """Whether each of verl's train_files has one of `names` in its path."""
    return bool(files) and all(any(name in file.lower() for name in names) for file in files)


CUSTOM = ("path", "name")
OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg")  # fmt: skip


def _own_reward(file: str, name: str) -> str:
    """verl's own file for GSM8K is the rule `strict` here."""
    return "strict" if file.endswith("utils/reward_score/gsm8k.py") else f"{file}:{name}"


def _overlong(verl: Verl) -> tuple[int, float] | None:
    """(length, factor) of DAPO's soft punishment, where it is on: only the reward manager dapo looks at it."""
    for group in OVERLONG if _manager(verl) == "dapo" else ():
        if verl[f"{group}.enable"]:
            return whole(verl[f"{group}.len"]), number(verl[f"{group}.penalty_factor"] or 1.0)
    return None


def custom_reward(value: Any, verl: Verl) -> Outcome:
    if not verl.first("custom_reward_function.path", "reward.custom_reward_function.path"):
        return NoEffect("no custom_reward_function.path: verl's own rules")
    return reward_functions(value, verl)


def reward_kwargs(value: Any, verl: Verl) -> Outcome:
    file = verl.first("custom_reward_function.path", "reward.custom_reward_function.path")
    if not file:
        return NoEffect("no custom_reward_function.path: verl's own rules")
    if _own_reward(str(file), "") == "strict":
        return Refused("verl's own gsm8k.py is the reward strict here, which takes no arguments; leave them out")
    arguments = verl.first("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs")
    return Translated({"reward.kwargs": arguments or verl["reward.custom_reward_function.reward_kwargs"]})


MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")


def _manager(verl: Verl) -> str:
    """The reward manager, naive where none is named."""
    named = [verl[key] for key in MANAGERS if key in verl.command.given] or [verl[key] for key in MANAGERS]
    return str(next(filter(None, named), "naive"))


def overlong(value: Any, verl: Verl) -> Outcome:
    if _overlong(verl):
        return reward_functions(value, verl)
    if (manager := _manager(verl)) != "dapo":
        return NoEffect(f"only the reward manager dapo looks at it, and this one is {manager}")
    return NoEffect("overlong_buffer.enable is False")


def reward_manager(value: Any, verl: Verl) -> Outcome:
    if value in (None, "naive", "prime", "dapo", "batch"):
        return NoEffect("how functions are called; DAPO's punishment of long completions stands in overlong_buffer")
    return Refused(f"{shown(value)}: naive, batch, prime and dapo are known")


# Trainer


def report_to(value: Any, verl: Verl) -> Outcome:
    loggers = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = {"console": None, "file": None, "wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow",
             "swanlab": "swanlab", "clearml": "clearml", "trackio": "trackio"}  # fmt: skip
    for name in loggers:
        if name not in known:
            return Refused(f"{name}: {', '.join(known)} are known")
    trackers = [known[name] for name in loggers if known[name]]
    # One row of metrics for each step of verl, so that the curves can be compared.
    return Translated({"training.report_to": trackers or "none", "training.logging_steps": verl.updates_per_rollout})


def save_frequency(value: Any, verl: Verl) -> Outcome:
    if not isinstance(value, int) or isinstance(value, bool):
        return Refused(f"{shown(value)} is not a whole number")
    if value <= 0:
        return Translated({"training.save_strategy": "no"})
    return Translated({"training.save_strategy": "steps", "training.save_steps": updates(value, verl)})


def epochs(value: Any, verl: Verl) -> Outcome:
    if verl["trainer.total_training_steps"]:
        return NoEffect("in verl too: total_training_steps goes before it")
    return Translated({"training.num_train_epochs": positive(value), "training.max_steps": -1})


def total_steps(value: Any, verl: Verl) -> Outcome:
    if not value:
        return NoEffect("null: trainer.total_epochs decides")
    return Translated({"training.max_steps": updates(value, verl)})


def critic_warmup(value: Any, verl: Verl) -> Outcome:
    if value == 0:
        return NoEffect("the policy is trained from the first step")
    if verl.has_critic:
        return Translated({"critic.warmup_steps": updates(value, verl)})
    return Refused("verl does not train the policy in these steps, without a critic either; write 0")


def resume(value: Any, verl: Verl) -> Outcome:
    if value in ("auto", "disable"):
        return NoEffect("a new run begins; --config.training.resume_from_checkpoint auto goes on from its folder")
    return Refused("a checkpoint of verl holds another model than an adapter; begin again with resume_mode=disable")


# Noise


def noise(field: str) -> Handler:
    """A field of AQN. Where the published meanings differ, --noise_rule decides (docs/aqn.md)."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if field == "enabled" and value is True:
            rule = NOISE_RULES[verl.choices.noise_rule]
            given = [name.rpartition(".")[2] for name in verl.command.given if name.startswith("trainer.noise_")]
            rest = {name: fixed for name, fixed in rule.items() if name.rpartition(".")[2] not in given}
            return Translated({"noise_injection.enabled": True, **rest})
        if not verl["trainer.noise_injection.enabled"]:
            if field == "enabled":
                return Translated({"noise_injection.enabled": False})
            return NoEffect("trainer.noise_injection.enabled is not true")
        return to(f"noise_injection.{field}", NOISE_VALUES[field])(value, verl)

    return handle


NOISE_VALUES = {
    "sigma_start": number,
    "sigma_end": number,
    "num_stages": positive,
    "target_modules": texts,
    "exclude_patterns": lambda value: texts(value) if value else [],
    "enabled": yes_or_no,
}
NOISE_RULES: dict[str, dict[str, Any]] = {
    "guide": {
        "noise_injection.schedule": "linear",
        "noise_injection.warmup_stage": False,
        "noise_injection.target_modules": ["post_attention_layernorm"],
        "noise_injection.exclude_patterns": ["input_layernorm"],
    },
    "code": {
        "noise_injection.schedule": "exponential",
        "noise_injection.warmup_stage": True,
        "noise_injection.target_modules": ["norm"],
        "noise_injection.exclude_patterns": [],
    },
}
"""The two published meanings of verl's noise_injection: the Ascend guide's words, and QeRL's code."""
