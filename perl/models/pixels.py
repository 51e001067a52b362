"""Pixels: what a processor makes of images, row by row, and the arguments of a model that computes on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from perl.models.images import decoded


class ImageInputs(NamedTuple):
    """What a vision tower computes on: the images of one prompt, or of several, one after the other."""

    pixel_values: torch.Tensor
    """float32 [patches, numbers of a patch]."""
    grids: torch.Tensor
    """int64 [images, 3]: patches of each in time, height and width."""


MakeImages = Callable[[], ImageInputs]
"""Makes them when they are needed: those of a whole data set would fill the memory."""


def make_images(processing: Any, files: Sequence[bytes]) -> MakeImages | None:
    """Of one prompt's images, None where it has none."""
    return functools.partial(image_inputs, processing, files) if files else None


def image_inputs(processing: Any, files: Sequence[bytes]) -> ImageInputs:
    """Of one prompt's images."""
    made = processing.image_processor(images=[decoded(file) for file in files], return_tensors="pt")
    return ImageInputs(made["pixel_values"], made["image_grid_thw"])


def image_arguments(rows: Sequence[ImageInputs | None], input_ids: torch.Tensor, config: Any) -> dict[str, Any]:
    """Arguments of the model's forward, or of `generate`, besides `input_ids` [rows, tokens]: those of the rows'
    images, and which tokens stand for them; nothing where no row has one."""
    images = [row for row in rows if row is not None]
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([row.pixel_values for row in images]).to(input_ids.device),
        "image_grid_thw": torch.cat([row.grids for row in images]).to(input_ids.device),
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
    }
