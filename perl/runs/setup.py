"""Tokenizer, dataset and base model of a training run, each checked before the next, costlier one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl import device
from perl.adapters.checks import check_base, check_stored
from perl.adapters.none import loses_updates, trained_dtype
from perl.adapters.start import continued, merge_into
from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.config.load import Config
from perl.config.schema import data_sets
from perl.models import folders
from perl.models.context import most_tokens
from perl.models.few_bits import require_bitsandbytes
from perl.models.folders import resolve_model
from perl.models.images import fitted, has_images, load_processing, tokenizer_of
from perl.prompts import (
    ChatTemplate,
    PromptStyle,
    build_messages,
    require_chat_template,
    require_known,
    require_vocabulary,
)
from perl.records import Problem
from perl.rewards.files import ROW, row_of
from perl.runs.vision import with_images
from perl.tasks import TASKS, load_problems, training_split
from perl.tasks.trained import asked_hash

if TYPE_CHECKING:
    from peft import PeftModel

    from perl.config.schema import DatasetConfig
    from perl.config.sft import SFTRunConfig
    from perl.config.training import SFTTrainingConfig, TrainingConfig

log = logging.getLogger(__name__)


PROBLEM = "problem"
"""Column of a row's identity (perl.tasks.trained.asked_hash)."""
MODEL_FLAG = "--config.model.model_name_or_path"


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `model` (a folder or hub name), padding and cutting on the left, of a model that
    takes images its processor. A missing model or chat template is a UserError."""
    folder = resolve_model(model, MODEL_FLAG)
    folders.require_whole_weights(folder, f"{MODEL_FLAG} {model}")
    tokenizer = load_processing(folder, MODEL_FLAG, padding_side="left", truncation_side="left")
    require_chat_template(tokenizer, model)
    require_vocabulary(tokenizer_of(tokenizer), _text_config(model).vocab_size, model)
    return tokenizer


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can be given."""

    vocabulary: int
    """Tokens that it knows."""
    context: int | None
    """Tokens of prompt and completion together that it was made for; None: its configuration names no limit."""
    most: tuple[int, str] | None
    """As `most_tokens` has it."""


def limits_of(model: str) -> ModelLimits:
    """Of `model`, a folder or hub name."""
    config = _text_config(model)
    context = getattr(config, "max_position_embeddings", None)
    return ModelLimits(config.vocab_size, context, most_tokens(config))


def _text_config(model: str) -> Any:
    return folders.load_config(resolve_model(model, MODEL_FLAG), MODEL_FLAG).get_text_config()


def model_dtype(config: Config | SFTRunConfig) -> torch.dtype:
    """Of the base's weights. A UserError where two flags say different things."""
    default = trained_dtype(config.training) if config.peft.type == "none" else device.default_dtype()
    dtype = getattr(torch, config.model.dtype) if config.model.dtype else default
    given: Any = (config.training.model_init_kwargs or {}).get("dtype", dtype)  # type: ignore[union-attr]
    if given not in (dtype, str(dtype).removeprefix("torch.")):
        raise UserError(
            f"--config.training.model_init_kwargs: dtype {given} is not that of --config.model.dtype"
            f" ({str(dtype).removeprefix('torch.')}); give one of them"
        )
    return dtype


def check_quantization(config: Config | SFTRunConfig, strategy: str) -> None:
    """What a base that is quantised, as it loads or in its files, can't be had with.

    Args:
        strategy: as perl.adapters.checks.strategy_of has it.
    """
    check_base(config, strategy)
    if config.model.quantization != "none":
        require_bitsandbytes(f"--config.model.quantization {config.model.quantization}")
    elif not strategy:
        return
    folder = resolve_model(config.model.model_name_or_path, MODEL_FLAG)
    check_stored(config, folders.load_config(folder, MODEL_FLAG), strategy)


def load_model(config: Config | SFTRunConfig) -> PreTrainedModel | PeftModel:
    """The base model on the CPU (the trainer moves it), with the adapter that is trained further, if there is one;
    under ZeRO-3 its weights are partitioned as they load.

    It is given to the trainer loaded, without a device_map: TRL asks for device_map "auto" on several NPUs, with which
    DDP refuses to work.
    """
    dtype = model_dtype(config)
    if config.peft.type == "none":
        check_full(config, dtype)
    extra: dict[str, Any] = dict(config.training.model_init_kwargs or {})  # type: ignore[arg-type]
    config.training.model_init_kwargs = None  # used here; TRL would warn that it ignores them
    extra.pop("dtype", None)
    if config.model.attn_implementation is not None:
        extra["attn_implementation"] = config.model.attn_implementation
    name = config.model.model_name_or_path
    folder = resolve_model(name, MODEL_FLAG)
    if config.peft.adapter is not None and config.peft.adapter_mode == "merge":
        folder = merge_base(config, folder, dtype)
        name = str(folder)
    model = folders.load_model(folder, MODEL_FLAG, quantization=config.model.quantization, dtype=dtype, **extra)
    model.name_or_path = name  # PEFT writes it into adapter_config.json: the hub's name, not a cache's folder
    if config.peft.adapter is not None and config.peft.adapter_mode == "continue":
        return continued(model, Path(config.peft.adapter))
    return model


def check_full(config: Config | SFTRunConfig, dtype: torch.dtype) -> None:
    """Where all weights are trained: a line where their dtype loses updates; a UserError where ZeRO-3 would leave none
    of them but in DeepSpeed's own files."""
    training = config.training
    if loses_updates(dtype, training):
        log.warning(
            "--config.model.dtype %s: the optimizer writes to weights of this dtype, and an update smaller than half of"
            " a weight's spacing (in bfloat16 1/512 of the weight) is lost; leave the flag out for float32 weights",
            str(dtype).removeprefix("torch."),
        )
    deepspeed = training.deepspeed_plugin and training.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if deepspeed and deepspeed["stage"] == 3 and not deepspeed.get("stage3_gather_16bit_weights_on_model_save"):
        raise UserError(
            "--config.peft.type none: ZeRO-3 saves no whole model without stage3_gather_16bit_weights_on_model_save;"
            " set it to true in DeepSpeed's file, or zero3_save_16bit_model in accelerate's"
            " (scripts/accelerate/npu_zero3.yaml has it)"
        )


def merged_base(config: Config | SFTRunConfig) -> Path:
    """Where the base lies that peft.adapter_mode merge trains on."""
    return Path(config.training.output_dir or ".") / "base"


def merge_base(config: Config | SFTRunConfig, model: Path, dtype: torch.dtype) -> Path:
    """The model with peft.adapter in its weights, written by the main process."""
    output = merged_base(config)
    with config.training.main_process_first(local=False, desc="merging the adapter into the base"):
        if config.training.process_index == 0:
            merge_into(model, Path(config.peft.adapter or ""), output, dtype)
            log.info("the adapter is trained on %s; score it with --model %s --adapter …", output, output)
    return output


def build_dataset(
    config: DatasetConfig,
    template: ChatTemplate,
    graded: bool = True,
    limits: ModelLimits | None = None,
    completion: int | None = None,
    columns: bool = False,
) -> Dataset:
    """Rows for TRL: `prompt` (messages), and for the rewards `gold` (None: none), `task` ("": none) and `row`
    (perl.rewards.files); which problem each is, in PROBLEM.

    Rows whose prompt is longer than max_prompt_length tokens are dropped, or are an error, or are left to the trainer
    to cut.

    Args:
        template: what words the prompts.
        graded, columns: as load_problems has them.
        limits: of the model, that prompts are held against.
        completion: the longest, in tokens.
    """
    problems = _problems(config, graded, columns)
    rows = [_row(problem, config.system_prompt, has_images(template.tokenizer)) for problem in problems]
    prompts = [template.prompt(row["prompt"], p.images, p.source) for row, p in zip(rows, problems, strict=True)]
    if limits is not None:
        for token_ids, problem in zip(prompts, problems, strict=True):
            require_known(token_ids, limits.vocabulary, problem.source)
    lengths = [len(token_ids) for token_ids in prompts]
    kept = _within_length(lengths, problems, config)
    rows, problems = [rows[i] for i in kept], [problems[i] for i in kept]
    lengths = [lengths[i] for i in kept]
    names = data_sets(config.dataset_name_or_path)
    if not rows:
        raise UserError(
            f"--config.dataset: no row of {', '.join(names)} is left to train on;"
            " raise --config.dataset.max_prompt_length"
        )
    log.info("%d prompts from %s", len(rows), ", ".join(names))
    _warn_of_repeats([row[PROBLEM] for row in rows], ", ".join(names))
    if limits is not None and completion is not None:
        _check_context(min(max(lengths), config.max_prompt_length or max(lengths)), completion, limits)
    return with_images(rows, problems)


def _warn_of_repeats(problems: Sequence[str], named: str) -> None:
    if repeats := len(problems) - len(set(problems)):
        log.warning(
            "%s: %d of %d prompts are repeats of others: each is drawn as often as it stands there",
            named, repeats, len(problems),
        )  # fmt: skip


def _check_context(prompt: int, completion: int, limits: ModelLimits) -> None:
    if limits.most is not None and prompt + completion > limits.most[0]:
        most, why = limits.most
        fits = f"write at most {most - prompt}" if prompt < most else "lower --config.dataset.max_prompt_length too"
        raise UserError(
            f"--config.training.max_completion_length {completion}: with the longest prompt ({prompt} tokens) more than"
            f" {most} tokens, and {why}; {fits}"
        )
    if limits.context is not None and prompt + completion > limits.context:
        log.warning(
            "--config.training.max_completion_length %d: with the longest prompt (%d tokens) more than the %d tokens"
            " that the model was made for (max_position_embeddings)",
            completion, prompt, limits.context,
        )  # fmt: skip


def _problems(config: DatasetConfig, graded: bool, columns: bool = False) -> list[Problem]:
    """Of all data sets, one after the other, up to example_numbers."""
    flag, named = "--config.dataset.dataset_name_or_path", config.dataset_name_or_path
    if isinstance(named, str) and "," in named and not os.path.exists(user_path(named)):
        raise UserError(f"{flag} {named}: several data sets are a list; write '{_as_list(named)}'")
    if not named:
        raise UserError(f"{flag} is empty; name a task, a data set on the hub, a file or a folder")
    problems: list[Problem] = []
    for spec in data_sets(named):
        left = None if config.example_numbers is None else config.example_numbers - len(problems)
        if left == 0:
            log.info("%s is not read: example_numbers %d is reached before", spec, config.example_numbers)
            continue
        split = config.split or training_split(spec)
        problems += load_problems(spec, split=split, limit=left, task=config.task, graded=graded, columns=columns)
    return problems


def _as_list(named: str) -> str:
    """What to write for several data sets: those of a list that YAML can read (one that holds a number is no list of
    names, and arrives as its text), else what stands between commas."""
    try:
        listed = yaml.safe_load(named)
    except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError: a date that there is not
        listed = None
    return json.dumps([str(item) for item in listed] if isinstance(listed, list) else named.split(","))


def _row(problem: Problem, system_prompt: str | None, takes_images: bool) -> dict:
    style = TASKS[problem.task].style if problem.task else PromptStyle()
    if system_prompt is not None:
        style = replace(style, system_prompt=system_prompt)
    messages = fitted(build_messages(problem, style), problem.images, takes_images, problem.source)
    return {
        "prompt": messages,
        "gold": problem.gold or None,
        "task": problem.task,
        ROW: row_of(problem),
        PROBLEM: asked_hash(problem),
    }


def _within_length(lengths: Sequence[int], problems: Sequence[Problem], config: DatasetConfig) -> list[int]:
    """The places of the prompts that stay: all that are not longer than max_prompt_length, or all that are to be cut.
    A UserError for a longer one where the configuration says so."""
    limit = config.max_prompt_length
    overlong = [] if limit is None else [index for index, length in enumerate(lengths) if length > limit]
    if not overlong:
        return list(range(len(lengths)))
    if config.filter_overlong_prompts:
        log.info("%d of %d prompts are longer than %d tokens: dropped", len(overlong), len(lengths), limit)
        return sorted(set(range(len(lengths))) - set(overlong))
    if config.truncation == "error":
        first = overlong[0]
        raise UserError(
            f"--config.dataset.max_prompt_length: {len(overlong)} prompts are longer than {limit} tokens, the first"
            f" ({problems[first].source}) has {lengths[first]}; raise it, or set"
            " --config.dataset.filter_overlong_prompts true or --config.dataset.truncation left, right or middle"
        )
    log.info(
        "%d of %d prompts are longer than %d tokens: cut, at the %s",
        len(overlong), len(lengths), limit, config.truncation,
    )  # fmt: skip
    return list(range(len(lengths)))


def check_processes(module: str = "perl.train") -> None:
    """As many processes as devices at most, one device for each. Before the configuration is built, which starts the
    process group."""
    devices, local = device.detect(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    variable = device.VISIBILITY_VARIABLE[devices.kind]
    if variable is None:
        return
    device.require_all_visible()
    if local > devices.count:
        raise UserError(
            f"{local} processes but only {devices.count} {devices.kind} device(s) are visible;"
            f" start accelerate with --num_processes {devices.count}, or look at {variable}"
        )
    if "LOCAL_RANK" not in os.environ and devices.count > 1:
        raise UserError(
            f"one process sees {devices.count} {devices.kind} devices; set {variable}=0, or start with"
            f" accelerate launch --num_processes {devices.count} -m {module}"
        )


def check_checkpoints(training: TrainingConfig | SFTTrainingConfig) -> None:
    """What a run could not go on from as if it had never been interrupted."""
    if training.save_only_model:
        raise UserError(
            "--config.training.save_only_model true: a run that goes on would begin with a new optimizer and schedule;"
            " leave it out (--config.training.save_total_limit bounds what is kept)"
        )
    if training.enable_jit_checkpoint:
        raise UserError(
            "--config.training.enable_jit_checkpoint true: perl saves a checkpoint at SIGTERM by itself; leave it out"
        )


def check_length(training: TrainingConfig | SFTTrainingConfig) -> None:
    """There must be a step to make."""
    if training.max_steps == 0 or training.max_steps < -1:
        raise UserError(
            f"--config.training.max_steps {training.max_steps}: no step to train; write a number from 1, or -1 to train"
            " for num_train_epochs"
        )
    if training.max_steps == -1 and training.num_train_epochs <= 0:
        raise UserError(
            f"--config.training.num_train_epochs {training.num_train_epochs}: no step to train; write a number above 0"
        )
