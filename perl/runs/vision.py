"""What a run on images does otherwise than one on texts.

check_images    before a model is loaded   what can't be had with images
language_part                              where the adapter goes
with_images     rows -> data set           the column `images`, which TRL shows the processor
rollout_images  TRL's fields -> request    each row's images, for the sampler
in_chunks       TRL's fields -> forward    those of a micro-batch's chunk
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, Features, Image, List

from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.schema import PeftConfig
from perl.models.images import has_images
from perl.models.pixels import ImageInputs, MakeImages, split_images

if TYPE_CHECKING:
    from perl.config.load import Config
    from perl.records import Problem

log = logging.getLogger(__name__)

IMAGE_FIELDS = "pixel_values", "image_grid_thw", "num_images"
"""What TRL keeps of the rows' images in a micro-batch."""
VISION_TOWER = r"(.*\.)?visual\..*"
"""Names of its layers, as PEFT's exclude_modules takes them."""


def check_images(config: Config, processing: Any) -> None:
    """Raise a UserError for what a model that takes images can't be trained with."""
    if not has_images(processing):
        return
    if config.training.use_vllm or config.training.use_transformers_continuous_batching:
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
    features = Dataset.from_list(list(rows)).features | {"images": List(Image())}
    files = ([{"bytes": file, "path": None} for file in problem.images] for problem in problems)
    found = [row | {"images": images} for row, images in zip(rows, files, strict=True)]
    return Dataset.from_list(found, features=Features(features))


def rollout_images(images: Sequence[Any] | None, fields: dict[str, Any]) -> list[MakeImages | None]:
    """Each row's, of what TRL's `_tokenize_prompts` gives; nothing where no row has any.

    Args:
        images: a list of images, or None, for each row.
        fields: what the processor has made of all of them.
    """
    if images is None:
        return []
    rows = split_images(fields["pixel_values"], fields["image_grid_thw"], [len(row or ()) for row in images])
    return [None if row is None else functools.partial(ImageInputs, *row) for row in rows]


def trl_fields(rows: Sequence[ImageInputs | None]) -> dict[str, Any]:
    """TRL's fields of these rows' images; nothing where no row has any: no model takes an empty tensor of pixels."""
    found = [row for row in rows if row is not None]
    if not found:
        return {}
    return {
        "pixel_values": torch.cat([row.pixel_values for row in found]),
        "image_grid_thw": torch.cat([row.grids for row in found]),
        "num_images": [0 if row is None else len(row.grids) for row in rows],
    }


def images_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """The columns of a batch that hold its images."""
    return {name: inputs[name] for name in IMAGE_FIELDS if name in inputs}


def in_chunks(fields: dict[str, Any], rows: int, size: int) -> list[dict[str, Any]]:
    """`fields`, as TRL passes them to a forward over `rows`, for each `size` rows. Which tokens are an image's is left
    out: that depends on the columns that are computed."""
    images = *IMAGE_FIELDS, "mm_token_type_ids"
    others = {name: value for name, value in fields.items() if name not in images and value is not None}
    each: list[ImageInputs | None] = [None] * rows
    if fields.get("num_images") and fields.get("pixel_values") is not None:
        each = split_images(fields["pixel_values"], fields["image_grid_thw"], fields["num_images"])
    return [others | trl_fields(each[start : start + size]) for start in range(0, rows, size)]
