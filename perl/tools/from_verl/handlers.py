"""Handlers of keys whose value alone does not say what they become: they read verl's whole configuration."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.tasks import rows_of
from perl.tools.from_verl import batch as arithmetic
from perl.tools.from_verl.batch import BatchError
from perl.tools.from_verl.outcomes import ADAPTER, OFF, Handler, NoEffect, Outcome, Refused, Translated, Verl, to, when
from perl.tools.from_verl.tool_configs import allowed, read_tools
from perl.tools.from_verl.values import (
    KL_ESTIMATORS,
    kl_estimator,
    not_negative,
    number,
    path,
    paths,
    positive,
    shown,
    whole,
    yes_or_no,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
TURNS = f"{ROLLOUT}.multi_turn"


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
    name = verl["algorithm.adv_estimator"]
    if ALGORITHMS[ESTIMATORS.get(name, "grpo")].groups and value == 1:
        return Refused("1 completion has no others to be compared with; a group has 2 or more: rollout.n=8")
    return Translated({"training.num_generations": positive(value)})


def whole_micro_batch(value: Any, verl: Verl) -> Outcome:
    if verl[arithmetic.MICRO] is not None:
        return NoEffect("ppo_micro_batch_size_per_gpu overrides it")
    if value is None:
        return NoEffect("null leaves it to ppo_micro_batch_size_per_gpu")
    return batch_field("training.per_device_train_batch_size", arithmetic.MICRO)(value, verl)


def devices(value: Any, verl: Verl) -> Outcome:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return Refused(f"{shown(value)} is not a whole number from 1")
    return Translated({"NUM_PROCESSES": verl.devices})


def updates(value: Any, verl: Verl) -> int:
    """Steps of verl in optimizer steps."""
    return positive(value) * verl.updates_per_rollout


def frequency(field: str, on: Mapping[str, Any], never: Mapping[str, Any]) -> Handler:
    """A number of steps between two events; not above 0 is never."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if not isinstance(value, int) or isinstance(value, bool):
            return Refused(f"{shown(value)} is not a whole number")
        return Translated({**on, field: updates(value, verl)} if value > 0 else {**never})

    return handle


# Algorithm and loss


ESTIMATORS = {"gae": "ppo", "rloo": "rloo", "rloo_vectorized": "rloo"} | {
    name: name for name in ("remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk")
}
"""verl's algorithm.adv_estimator -> algorithm.name, where that is not grpo."""


def estimator(value: Any, verl: Verl) -> Outcome:
    if value in ("grpo", "grpo_vectorized"):
        return Translated({"training.scale_rewards": "group" if verl["algorithm.norm_adv_by_std_in_grpo"] else "none"})
    if value == "gpg" and _scored_with_signs(verl):
        note = "gpg's factor is 1 where verl scores rows -1 or 1, as none of them is 0: grpo without the deviation"
        return Translated({"training.scale_rewards": "none"}, note)
    if value in ESTIMATORS:
        return Translated({"algorithm.name": ESTIMATORS[value]})
    return Refused(f"{shown(value)}: this advantage estimator is not there; {', '.join(('grpo', *ESTIMATORS))} are")


def by_group(verl: Verl) -> bool:
    """Whether norm_adv_by_std_in_grpo has an effect."""
    return verl["algorithm.adv_estimator"] in ("grpo", "grpo_vectorized", "grpo_passk")


def scale_matters(verl: Verl) -> bool:
    """Whether twice the score is another run: a KL divergence is taken from it, or no deviation divides it."""
    whitened = verl["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    divided = verl["algorithm.norm_adv_by_std_in_grpo"] if by_group(verl) else whitened
    return verl["algorithm.use_kl_in_reward"] or not divided


def discounted(verl: Verl) -> bool:
    """Whether gamma has an effect."""
    return verl["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus")


def kl_control(value: Any, verl: Verl) -> Outcome:
    if value == "fixed":
        return NoEffect("the coefficient is fixed, as here")
    if value != "adaptive":
        return Refused(f"{shown(value)}: fixed and adaptive are known")
    target, horizon = (verl[f"algorithm.kl_ctrl.{name}"] for name in ("target_kl", "horizon"))
    return Translated(
        {"algorithm.kl_in_reward_target": number(target), "algorithm.kl_in_reward_horizon": positive(horizon)}
    )


def kl_loss(value: Any, verl: Verl) -> Outcome:
    return Translated({"training.beta": number(verl[f"{ACTOR}.kl_loss_coef"]) if verl[f"{ACTOR}.use_kl_loss"] else 0.0})


def kl_type(value: Any, verl: Verl) -> Outcome:
    if value not in KL_ESTIMATORS and str(value).removesuffix("+") in KL_ESTIMATORS:
        return Refused(f"{shown(value)}: its gradient is that of mse, only the logged value differs; write mse")
    ours = kl_estimator(value)
    other = {} if ours == "low_var_kl" else {"algorithm.kl_estimator": ours}
    return Translated({**other, "training.use_bias_correction_kl": False})  # TRL's default weighs it by the ratio


AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
"""verl's loss_agg_mode -> training.loss_type."""


def aggregation(value: Any, verl: Verl) -> Outcome:
    if value not in AGGREGATIONS:
        return Refused(f"{shown(value)}: not there; {', '.join(AGGREGATIONS)} are")
    if not is_cispo(verl):
        return Translated({"training.loss_type": AGGREGATIONS[value]})
    if value == "token-mean":
        return NoEffect("the loss cispo is a mean over the update's tokens")
    return Refused(f"{shown(value)}: the loss cispo is a mean over the update's tokens; token-mean")


def is_cispo(verl: Verl) -> bool:
    """Whether the loss becomes cispo; verl's gpg, -A log p, is the one whose ratio is held at 1."""
    return verl[f"{ACTOR}.policy_loss.loss_mode"] in ("cispo", "gpg")


def aggregated(verl: Verl) -> bool:
    """Whether loss_agg_mode has an effect."""
    return verl[f"{ACTOR}.policy_loss.loss_mode"] not in ("gspo", "sapo")


def clip_ratio(value: Any, verl: Verl) -> Outcome:
    if None in (verl[f"{ACTOR}.clip_ratio_low"], verl[f"{ACTOR}.clip_ratio_high"]):
        cispo = NoEffect("clip_ratio_low and clip_ratio_high have it")
        return cispo if is_cispo(verl) else Translated({"training.epsilon": number(value)})
    return NoEffect("in verl too: clip_ratio_low and clip_ratio_high, 0.2 by default, override it")


def clip_end(field: str, sign: int) -> Handler:
    """A bound of the ratio, so far from 1; cispo's is the ratio itself."""

    def handle(value: Any, verl: Verl) -> Outcome:
        far = number(verl[f"{ACTOR}.clip_ratio"] if value is None else value)
        if not is_cispo(verl):
            return Translated({field: far})
        if verl[f"{ACTOR}.policy_loss.loss_mode"] == "gpg":
            far = 0.0
        bound = float(f"{1 + sign * far:.12g}")
        if sign > 0:
            return Translated({field: bound})
        return Translated({"training.cispo_min_ratio": bound}) if bound > 0 else NoEffect("a ratio is above 0 anyway")

    return handle


def importance_correction(value: Any, verl: Verl) -> Outcome:
    """Truncated importance sampling: rollout_is of newer versions of verl."""
    if not value:
        return NoEffect(OFF.format(shown(value)))
    if value not in ("token", "sequence"):
        return Refused(f"{shown(value)}: only token and sequence are there")
    return _corrected(value, verl["algorithm.rollout_correction.rollout_is_threshold"], verl)


def importance_cap(value: Any, verl: Verl) -> Outcome:
    """tis_imp_ratio_cap of versions 0.5 and 0.6: the same, of tokens."""
    return _corrected("token", value, verl) if _capped(value) else NoEffect("off, as it is here")


def _capped(value: Any) -> bool:
    """verl 0.5 writes -1 for off."""
    return value is not None and number(value) > 0


def _corrected(level: str, limit: Any, verl: Verl) -> Outcome:
    """Ratios of `level`, cut at `limit`."""
    cut = {"training.vllm_importance_sampling_clip_max": number(limit)}
    return Translated({"rollout.importance_correction": level, **cut})


# Optimizer


def learning_rate(field: str, may_be_zero: bool) -> Handler:
    """By Verl.rate_factor, to twelve digits: 1e-6 tenfold is 1e-5."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if number(value) < 0 or (value == 0 and not may_be_zero):
            return Refused(f"{shown(value)} is {'below' if may_be_zero else 'not above'} 0")
        return Translated({field: float(f"{number(value) * verl.rate_factor(field == 'critic.lr'):.12g}")})

    return handle


def critic_model(value: Any, verl: Verl) -> Outcome:
    """The base of the critic, which is the policy's where verl loads the same model twice."""
    if not value or path(value) == path(verl[f"{MODEL}.path"]):
        return NoEffect("the critic computes on the policy's base")
    return Refused(f"{shown(value)}: the critic computes on the policy's base")


def schedule(value: Any, verl: Verl) -> Outcome:
    """lr_scheduler_type, its warm-up and its lowest rate, which TRL has in three fields."""
    optim = f"{ACTOR}.optim"
    kind = verl[f"{optim}.warmup_style"]  # in verl too it overrides the name that has taken its place
    kind = kind or verl.first(f"{optim}.lr_scheduler_type", f"{optim}.lr_decay_style") or "constant"
    steps, ratio, lowest = (verl[f"{optim}.{k}"] for k in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio"))
    if kind not in ("constant", "cosine"):
        return Refused(f"{shown(kind)}: constant and cosine are there")
    fields: dict[str, Any] = {"training.lr_scheduler_type": kind}
    if kind == "cosine" and lowest and number(lowest) > 0:
        fields["training.lr_scheduler_type"] = "cosine_with_min_lr"
        fields["training.lr_scheduler_kwargs"] = {"min_lr_rate": number(lowest)}
    if isinstance(steps, int) and steps > 0:
        fields["training.warmup_steps"] = updates(steps, verl)
    elif ratio and number(ratio) >= 1:
        return Refused(f"lr_warmup_steps_ratio={shown(ratio)}: from 1 on it is steps here; write a ratio below 1")
    elif ratio and number(ratio) > 0:
        fields["training.warmup_steps"] = number(ratio)
    if kind == "constant" and "training.warmup_steps" in fields:
        fields["training.lr_scheduler_type"] = "constant_with_warmup"
    return Translated(fields)


def betas(value: Any, verl: Verl) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        return Refused(f"{shown(value)}: two numbers, such as [0.9,0.999]")
    return Translated({"training.adam_beta1": value[0], "training.adam_beta2": value[1]})


# Data


def rollout_batch(value: Any, verl: Verl) -> Outcome:
    if value in (None, verl["data.train_batch_size"]) or verl["algorithm.filter_groups.enable"]:
        return NoEffect("as many prompts are drawn as data.train_batch_size says")
    return Refused("it differs from data.train_batch_size; drop it, or train on as many prompts as are drawn")


def filter_metric(value: Any, verl: Verl) -> Outcome:
    """What must differ within a group: acc and score are without the punishment of long completions."""
    if value in ("seq_reward", "seq_final_reward"):
        return Translated({"algorithm.dynamic_sampling_metric": "sum"})
    if value not in ("acc", "score"):
        return Refused(f"{shown(value)}: acc, score, seq_reward, seq_final_reward")
    return Translated({"algorithm.dynamic_sampling_metric": reward_functions(None, verl).fields["reward.functions"][0]})


def filter_limit(value: Any, verl: Verl) -> Outcome:
    """verl counts batches of data.gen_batch_size prompts."""
    if not isinstance(value, int) or value <= 0:
        return NoEffect("no limit in verl; here --config.algorithm.max_resample_factor is one, 10 unless it is said")
    batch = verl["data.train_batch_size"]
    return Translated(
        {"algorithm.max_resample_factor": value * (verl["data.gen_batch_size"] or batch) / batch},
        "at the limit verl ends the run; here groups of equal rewards fill the batch",
    )


def validation_is_due(verl: Verl) -> bool:
    every = verl["trainer.test_freq"]
    return bool(verl["trainer.val_before_train"]) or (isinstance(every, int) and every > 0)


def validates(verl: Verl) -> bool:
    """Whether it is due, on files that can be named."""
    try:
        return validation_is_due(verl) and bool(paths(verl["data.val_files"]))
    except ValueError:
        return False


def completion_length(value: Any, verl: Verl) -> Outcome:
    validation = {"validation.max_new_tokens": positive(value)} if validates(verl) else {}
    return Translated({"training.max_completion_length": positive(value), **validation})


def sampled_validation(verl: Verl) -> bool:
    """Whether validation draws; else it is greedy, as by verl's defaults."""
    draws = _by_agent_loop(verl) or verl[f"{ROLLOUT}.val_kwargs.do_sample"]
    return bool(draws) and verl[f"{ROLLOUT}.val_kwargs.temperature"] != 0


def _by_agent_loop(verl: Verl) -> bool:
    """Whether verl's agent loop validates, by default or in several turns: it reads all of val_kwargs but do_sample."""
    return verl[f"{ROLLOUT}.mode"] != "sync" or verl[f"{TURNS}.enable"] is True


def validation_n(value: Any, verl: Verl) -> Outcome:
    if positive(value) > 1 and not sampled_validation(verl):
        return Translated({"validation.n": 1}, "greedy completions of a problem are all the same")
    return Translated({"validation.n": value})


def validation_temperature(value: Any, verl: Verl) -> Outcome:
    temperature = verl[f"{ROLLOUT}.val_kwargs.temperature"]
    return Translated({"validation.temperature": not_negative(temperature) if sampled_validation(verl) else 0.0})


def validation_draws(value: Any, verl: Verl) -> Outcome:
    if yes_or_no(value) or _by_agent_loop(verl):
        return NoEffect("val_kwargs.temperature decides")
    return validation_temperature(value, verl)


# Model and rollouts


def full_parameters(value: Any, verl: Verl) -> Outcome:
    """lora_rank; 0 trains all weights in verl, and here a LoRA adapter unless the user wants all."""
    if value and not isinstance(value, bool) and isinstance(value, int):
        return Translated({"peft.type": "lora", "peft.r": value})
    if verl.is_lora:
        return NoEffect(f"model.{'lora_adapter_path' if verl[ADAPTER] else 'lora.rank'} overrides it")
    if verl.is_full:
        return Translated({"peft.type": "none"})
    return Translated({"peft.type": "lora", "peft.r": 16, "peft.lora_alpha": 32})


def with_lora(verl: Verl) -> bool:
    return verl.is_lora


def megatron_lora_modules(value: Any, verl: Verl) -> Outcome:
    if value == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]:
        return Translated({"peft.target_modules": "all-linear"})
    return Refused(f"{shown(value)}: Megatron's names; leave it out for all linear layers")


def engine(value: Any, verl: Verl) -> Outcome:
    if value not in ("vllm", "sglang", "hf", None):
        return Refused(f"{shown(value)}: vllm, sglang and hf are known")
    chosen = verl.choices.engine
    note = "" if chosen == value else "the same policy is sampled, by perl's own decode loop; --engine vllm takes vLLM"
    fields: dict[str, Any] = {"rollout.engine": chosen}
    if chosen == "vllm":
        fields["training.vllm_mode"] = "colocate"
        if not _capped(verl[f"{ACTOR}.tis_imp_ratio_cap"]) and not verl["algorithm.rollout_correction.rollout_is"]:
            fields["rollout.importance_correction"] = "none"  # with vLLM ours is token
    return Translated(fields, note)


def vllm_only(field: str, nearest: str) -> Handler:
    return when(_is_vllm, f"vLLM's; {nearest}")(to(field))


def _is_vllm(verl: Verl) -> bool:
    return verl.choices.engine == "vllm"


def eager(value: Any, verl: Verl) -> Outcome:
    if _is_vllm(verl):
        return NoEffect("vLLM starts as it decides; speed only")
    return Translated({"rollout.capture_graphs": False if value else "auto"})


def offload(value: Any, verl: Verl) -> Outcome:
    if not value:
        return NoEffect("nothing is moved to the host here either")
    files = "ACCELERATE_CONFIG=scripts/accelerate/npu_zero3.yaml or npu_fsdp2.yaml"
    if verl.is_full:
        return NoEffect(f"memory only; {files} splits weights and optimizer over the devices")
    frozen = "the base is frozen and the adapter's optimizer small. If the base does not fit a device"
    return NoEffect(f"memory only; {frozen}: {files}")


def model_dtype(value: Any, verl: Verl) -> Outcome:
    if value in ("fp32", "float32"):
        what = "weights are" if verl.is_full else "the adapter, over a base in the device's dtype, is"
        return NoEffect(f"{what} trained in float32")
    if value in ("bf16", "bfloat16"):
        return Translated({"model.dtype": "bfloat16"})
    return Refused(f"{shown(value)}: fp32 and bf16 are known")


# Several turns


def multi_turn(value: Any, verl: Verl) -> Outcome:
    """multi_turn.enable: the turns, where tools are named."""
    if not yes_or_no(value):
        return NoEffect("one turn, as here")
    if not verl[f"{TURNS}.tool_config_path"]:
        return Refused(
            "no tools are named: give multi_turn.tool_config_path, or enable=False and environment.tools here"
        )
    return Translated(_turns(verl))


def turns(value: Any, verl: Verl) -> Outcome:
    return Translated(_turns(verl))


def _turns(verl: Verl) -> dict[str, int]:
    """Turns of the assistant: verl ends when it has taken max_assistant_turns, or one behind max_user_turns answers;
    without either, when no token is left, and a turn has one at least."""
    most, answers = (verl[f"{TURNS}.max_{whose}_turns"] for whose in ("assistant", "user"))
    limits = [positive(most)] if most else []
    limits += [positive(answers) + 1] if answers else []
    return {"environment.max_turns": min(limits, default=positive(verl["data.max_response_length"]))}


def tools(value: Any, verl: Verl) -> Outcome:
    """The tool config."""
    known = read_tools(path(value))
    fields = {"environment.tools": [tool.name for tool in known], "environment.tool_timeout_s": allowed(known)}
    return Translated(fields, "; ".join(dict.fromkeys(tool.differs for tool in known)))


def observation(value: Any, verl: Verl) -> Translated:
    """max_tool_response_length: of each answer in verl, of all answers to a turn here."""
    most = positive(value) * positive(verl[f"{TURNS}.max_parallel_calls"])
    note = "verl counts characters of an answer, here tokens of a turn's: as many are seldom fewer characters"
    return Translated({"environment.max_observation_tokens": most}, note)


def parallel_calls(value: Any, verl: Verl) -> Outcome:
    """What differs, which is so where verl's default stands too, is one of the notes on the whole."""
    return Translated(observation(verl[f"{TURNS}.max_tool_response_length"], verl).fields)


# Rewards


SIGNED = re.compile(r"dapo|(?<![a-z])aime(?![a-z])|^math$")
"""Data sources (else names of files) whose rows verl scores with -1 or 1 (its reward_score/__init__.py, math_dapo)."""
OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg")  # fmt: skip
MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")


def reward_functions(value: Any, verl: Verl) -> Translated:
    """The reward: the user's function, or verl's by data source; with DAPO's punishment of long completions."""
    files = _files(verl)
    if file := custom_reward(verl):
        functions, note = [_custom_function(path(file), str(custom_reward(verl, "name") or "compute_score"))], ""
    elif _named(files, "gsm8k"):
        functions, note = ["strict"], "verl's rule for GSM8K, only `#### n` counts; accuracy takes other forms too"
    elif _named(files, "geo3k", "geometry3k"):
        note = "verl's score for geometry3k: 0.9 for the answer, 0.1 for its form"
        return Translated({"reward.functions": ["accuracy", "think"], "reward.weights": [0.9, 0.1]}, note)
    else:
        functions, note = ["accuracy"], "the rule of the rows' own task, as verl chooses by data_source"
    buffer, weight = punishment(verl), 1.0
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


def custom_reward(verl: Verl, name: str = "path") -> Any:
    """What the user says of a reward function of his own: its file, or another setting."""
    return verl.first(f"custom_reward_function.{name}", f"reward.custom_reward_function.{name}")


def _custom_function(file: str, name: str) -> str:
    """verl's own file for GSM8K is the rule `strict` here."""
    return "strict" if file.endswith("utils/reward_score/gsm8k.py") else f"{file}:{name}"


def _files(verl: Verl) -> list[str]:
    files = verl["data.train_files"]
    return [path(name) for name in (files if isinstance(files, list) else [files]) if name]


def _named(files: list[str], *names: str) -> bool:
    """Whether each of verl's train_files has one of `names` in its path."""
    return bool(files) and all(any(name in file.lower() for name in names) for file in files)


def _scored_with_signs(verl: Verl) -> bool:
    """Whether verl's own rules score all rows with -1 or 1, which accuracy scores with 0 or 1."""
    files = _files(verl)
    return not custom_reward(verl) and bool(files) and all(map(_is_signed, files))


def _is_signed(file: str) -> bool:
    """Whether verl's score of a file's rows is -1 or 1: by its first row's data_source, or, where the file is not here,
    by its path."""
    named = file
    with contextlib.suppress(UserError, StopIteration):
        if Path(file).exists():
            row, *_ = next(rows_of(file, None))
            named = str(row.get("data_source", ""))
    return SIGNED.search(named.lower()) is not None


def punishment(verl: Verl) -> tuple[int, float] | None:
    """(length, factor) of DAPO's soft punishment, where it is on: only the reward manager dapo looks at it."""
    for group in OVERLONG if _manager(verl) == "dapo" else ():
        if verl[f"{group}.enable"]:
            factor = verl[f"{group}.penalty_factor"]
            factor = 1.0 if factor is None else number(factor)
            return (whole(verl[f"{group}.len"]), factor) if factor else None
    return None


def _manager(verl: Verl) -> str:
    """The reward manager, naive where none is named."""
    named = [verl[key] for key in MANAGERS if key in verl.command.given] or [verl[key] for key in MANAGERS]
    return str(next(filter(None, named), "naive"))


def overlong(value: Any, verl: Verl) -> Outcome:
    if punishment(verl):
        return reward_functions(value, verl)
    if (manager := _manager(verl)) != "dapo":
        return NoEffect(f"only the reward manager dapo looks at it, and this one is {manager}")
    return NoEffect("overlong_buffer.enable is False, or its penalty_factor 0")


def reward_kwargs(value: Any, verl: Verl) -> Outcome:
    if _custom_function(str(custom_reward(verl)), "") == "strict":
        return Refused("verl's own gsm8k.py is the reward strict here, which takes no arguments; leave them out")
    arguments = custom_reward(verl, "reward_kwargs") or verl["reward.custom_reward_function.reward_kwargs"]
    return Translated({"reward.kwargs": arguments})


# Trainer


TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")


def report_to(value: Any, verl: Verl) -> Outcome:
    loggers = [str(name) for name in (value if isinstance(value, list) else [value])]
    known = ("console", "file", *TRACKERS)
    if unknown := [name for name in loggers if name not in known]:
        return Refused(f"{unknown[0]}: {', '.join(known)} are known")
    trackers = [name for name in loggers if name in TRACKERS]
    # One row of metrics for each step of verl, so that the curves can be compared.
    return Translated({"training.report_to": trackers or "none", "training.logging_steps": verl.updates_per_rollout})


def epochs(value: Any, verl: Verl) -> Outcome:
    if verl["trainer.total_training_steps"]:
        return NoEffect("total_training_steps decides here")
    return Translated({"training.num_train_epochs": positive(value), "training.max_steps": -1})


def training_steps(value: Any, verl: Verl) -> Outcome:
    epochs = f"total_epochs={shown(verl['trainer.total_epochs'])}"
    note = f"verl ends after {epochs} where that is earlier, here steps decide; leave them out to end by epochs"
    return Translated({"training.max_steps": updates(value, verl)}, note)


def critic_warmup(value: Any, verl: Verl) -> Outcome:
    """verl trains the policy from this step on, and its first one is 1."""
    if verl.has_critic:
        return Translated({"critic.warmup_steps": updates(value, verl) - verl.updates_per_rollout})
    return Refused("verl does not train the policy in these steps, without a critic either; write 0")


# Noise


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


def noise(value: Any, verl: Verl) -> Outcome:
    """Where the published meanings of AQN differ, --noise_rule decides (docs/aqn.md)."""
    enabled = yes_or_no(value or False)
    rule = NOISE_RULES[verl.choices.noise_rule] if enabled else {}
    rest = {name: fixed for name, fixed in rule.items() if f"trainer.{name}" not in verl.command.given}
    return Translated({"noise_injection.enabled": enabled, **rest})
