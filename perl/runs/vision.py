"""What a run on images does otherwise than one on texts.

check_images    before a model is loaded   what can't be had with images; check_mixed_rows, with weights that are split
language_part                              where the adapter goes
with_images     rows -> data set           the column `images`: their files
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, Image, List

from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.schema import PeftConfig
from perl.models.images import has_images

if TYPE_CHECKING:
    from perl.config.load import Config
    from perl.records import Problem

log = logging.getLogger(__name__)

VISION_TOWER = r"(.*\.)?visual\..*"
"""Names of its layers, as PEFT's exclude_modules takes them."""


def check_images(config: Config, processing: Any) -> None:
    """Raise a UserError for what a model that takes images can't be trained with."""
    if not has_images(processing):
        return
    if config.training.use_vllm:
        raise UserError(
            f"--config.rollout.engine {config.rollout.engine}: completes prompts without their images; use"
            " --config.rollout.engine fast, which has the model's own generate complete them"
        )
    algorithm = config.algorithm
    further = {"dynamic_sampling": algorithm.dynamic_sampling, "kl_in_reward": algorithm.kl_in_reward > 0}
    further |= {f"name {algorithm.name}": ALGORITHMS[algorithm.name].critic}
    if asked := [name for name, on in further.items() if on]:
        raise UserError(
            f"--config.algorithm.{asked[0]}: its passes see prompts without their images; name a model of texts, or"
            " leave it out"
        )
    if config.peft.type == "vera" and config.peft.target_modules == "all-linear":
        raise UserError(
            "--config.peft.type vera: reads no exclude_modules, which leaves the vision tower out; name the layers of"
            ' the language model, --config.peft.target_modules \'["q_proj","k_proj","v_proj"]\', or write dora'
        )
    data = config.dataset
    if data.truncation != "error" and not data.filter_overlong_prompts:
        raise UserError(
            f"--config.dataset.truncation {data.truncation}: a prompt with images can't be cut; use"
            " --config.dataset.filter_overlong_prompts true"
        )


def check_mixed_rows(dataset: Dataset, strategy: str) -> None:
    """Raise a UserError for rows with and without images where every forward gathers split weights: a process whose
    micro-batch has no image skips the vision tower, and the others wait for it for ever.

    Args:
        strategy: as perl.adapters.checks.strategy_of has it.
    """
    if strategy not in ("zero3", "fsdp2") or "images" not in dataset.column_names:
        return
    counts = [len(images) for images in dataset.data.column("images")]
    if any(counts) and not all(counts):
        raise UserError(
            f"--config.dataset: {len(counts) - sum(map(bool, counts))} of {len(counts)} rows have no image, and with"
            f" {strategy} processes whose rows have none would not meet the others in the vision tower; leave these"
            " rows out, or train with DDP or ZeRO-2"
        )


def language_part(config: PeftConfig, processing: Any) -> PeftConfig:
    """`config` with the vision tower left out of a new adapter, unless it says itself what is."""
    new = config.type != "none" and (config.adapter is None or config.adapter_mode == "merge")
    if not (has_images(processing) and new) or config.exclude_modules is not None:
        return config
    log.info(
        "the adapter is on the linear layers of the language model, the vision tower has none; --config.peft."
        "exclude_modules '[]' gives it one"
    )
    return replace(config, exclude_modules=VISION_TOWER)


def with_images(rows: Sequence[dict[str, Any]], problems: Sequence[Problem]) -> Dataset:
    """The data set of `rows`, with the images of their problems where any has some."""
    if not any(problem.images for problem in problems):
        return Dataset.from_list(list(rows))
    features = Dataset.from_list(list(rows)).features | {"images": List(Image(decode=False))}
    files = ([{"bytes": file, "path": None} for file in problem.images] for problem in problems)
    rows_with_images = [row | {"images": images} for row, images in zip(rows, files, strict=True)]
    return Dataset.from_list(rows_with_images, features=Features(features))
