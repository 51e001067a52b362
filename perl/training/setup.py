"""Tokenizer, dataset and base model of a training run, each checked before the next, costlier one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl import checkpoints, device
from perl.adapters.none import loses_updates, trained_dtype
from perl.adapters.start import continued, merge_into
from perl.checkpoints import resolve_model
from perl.config.load import Config
from perl.config.schema import data_sets
from perl.errors import UserError
from perl.images import fitted, has_images
from perl.processors import load_processing
from perl.prompts import PromptStyle, build_messages, encode, require_chat_template
from perl.records import Problem
from perl.reward_files import ROW, row_of
from perl.tasks import TASKS, load_problems, training_split
from perl.tasks.trained import problem_hash
from perl.training.vision import with_images

if TYPE_CHECKING:
    from peft import PeftModel

    from perl.config.schema import DatasetConfig
    from perl.config.sft import SFTRunConfig

log = logging.getLogger(__name__)


PROBLEM = "problem"
"""Column of a row's identity (perl.tasks.trained.problem_hash)."""
MODEL_FLAG = "--config.model.model_name_or_path"


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `model` (a folder or hub name), padding and cutting on the left, of a model that
    takes images its processor. A missing model or chat template is a UserError."""
    folder = resolve_model(model, MODEL_FLAG)
    checkpoints.load_config(folder, MODEL_FLAG)
    tokenizer = load_processing(folder, MODEL_FLAG, padding_side="left", truncation_side="left")
    require_chat_template(tokenizer, model)
    return tokenizer


def model_dtype(config: Config | SFTRunConfig) -> torch.dtype:
    """Of the base's weights. A UserError where two flags say different things."""
    own = trained_dtype(config.training) if config.peft.type == "none" else device.default_dtype()
    dtype = getattr(torch, config.model.dtype) if config.model.dtype else own
    given: Any = (config.training.model_init_kwargs or {}).get("dtype", dtype)  # type: ignore[union-attr]
    if given not in (dtype, str(dtype).removeprefix("torch.")):
        raise UserError(
            f"--config.training.model_init_kwargs: dtype {given} is not that of --config.model.dtype"
            f" ({str(dtype).removeprefix('torch.')}); give one of them"
        )
    return dtype


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
    model = checkpoints.load_model(folder, MODEL_FLAG, dtype=dtype, **extra)
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


def build_dataset(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, graded: bool = True) -> Dataset:
    """Rows for TRL: `prompt` (messages), and for the rewards `gold` (None: none), `task` ("": none) and `row`
    (perl.reward_files); which problem each is, in PROBLEM.

    Rows whose prompt is longer than max_prompt_length tokens are dropped, or are an error, or are left to the trainer
    to cut.

    Args:
        graded: as load_problems has it.
    """
    problems = _problems(config, graded)
    rows = [_row(problem, config.system_prompt, has_images(tokenizer)) for problem in problems]
    if config.max_prompt_length is not None:
        rows, problems = _check_lengths(rows, problems, config, tokenizer)
    names = data_sets(config.dataset_name_or_path)
    if not rows:
        raise UserError(
            f"--config.dataset: no row of {', '.join(names)} is left to train on;"
            " raise --config.dataset.max_prompt_length"
        )
    log.info("%d prompts from %s", len(rows), ", ".join(names))
    return with_images(rows, problems)


def _problems(config: DatasetConfig, graded: bool) -> list[Problem]:
    """Of all data sets, one after the other, up to example_numbers."""
    flag, named = "--config.dataset.dataset_name_or_path", config.dataset_name_or_path
    if isinstance(named, str) and "," in named and not Path(named).expanduser().exists():
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
        problems += load_problems(spec, split=split, limit=left, task=config.task, graded=graded)
    return problems


def _as_list(named: str) -> str:
    """What to write for several data sets: those of a list that YAML can read (one that holds a number is no list of
    names, and arrives as its text), else what stands between commas."""
    try:
        listed = yaml.safe_load(named)
    except yaml.YAMLError:
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
        PROBLEM: problem_hash(problem),
    }


def _check_lengths(
    rows: list[dict], problems: list[Problem], config: DatasetConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[dict], list[Problem]]:
    limit = config.max_prompt_length
    assert limit is not None
    prompts = zip(rows, problems, strict=True)
    lengths = [len(encode(tokenizer, row["prompt"], problem.images)) for row, problem in prompts]
    overlong = [index for index, length in enumerate(lengths) if length > limit]
    if not overlong:
        return rows, problems
    if config.filter_overlong_prompts:
        log.info("%d of %d prompts are longer than %d tokens: dropped", len(overlong), len(rows), limit)
        kept = sorted(set(range(len(rows))) - set(overlong))
        return [rows[index] for index in kept], [problems[index] for index in kept]
    if config.truncation == "error":
        first = overlong[0]
        raise UserError(
            f"--config.dataset.max_prompt_length: {len(overlong)} prompts are longer than {limit} tokens, the first"
            f" ({problems[first].source}) has {lengths[first]}; raise it, or set"
            " --config.dataset.filter_overlong_prompts true or --config.dataset.truncation left, right or middle"
        )
    log.info(
        "%d of %d prompts are longer than %d tokens: cut, at the %s", len(overlong), len(rows), limit, config.truncation
    )
    return rows, problems
