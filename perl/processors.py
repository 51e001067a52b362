"""Processors: the tokenizer of a vision-language model together with what makes pixels of its images.

transformers' own wants a video processor too, and that one torchvision, which no text or image needs. The one here
does without, and has PIL resize images, so that training and evaluation see the same pixels wherever they run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from perl import checkpoints
from perl.errors import UserError
from perl.images import decoded


class Qwen2_5_VLProcessor(transformers.Qwen2_5_VLProcessor):  # the name that it is saved under
    """transformers' of that name, for texts and images alone."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def load_processing(folder: str | Path, flag: str = "--model", **options: Any) -> Any:
    """What makes a model's inputs: its tokenizer, or for a model that takes images its processor, which has the
    tokenizer's methods that prompts need. A UserError names `flag`.

    Args:
        options: transformers', for the tokenizer.
    """
    tokenizer = checkpoints.load_tokenizer(folder, flag, **options)
    if not checkpoints.takes_images(checkpoints.load_config(folder, flag)):
        return tokenizer
    try:
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        template = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template") or tokenizer.chat_template
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{flag} {folder}: the model's image processor cannot be loaded: {reason}") from error
    return Qwen2_5_VLProcessor(images, tokenizer, chat_template=template)


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


def split_images(pixel_values: Any, grids: Any, counts: Sequence[int]) -> list[ImageInputs | None]:
    """The images of each row, None for a row without any.

    Args:
        pixel_values, grids: as in ImageInputs, of all rows; arrays or tensors.
        counts: images of each row.
    """
    pixels, grids = torch.as_tensor(pixel_values), torch.as_tensor(grids)
    of_row = grids.split(list(counts))
    patches = pixels.split([int(grid.prod(dim=-1).sum()) for grid in of_row])
    return [ImageInputs(*pair) if count else None for *pair, count in zip(patches, of_row, counts, strict=True)]


def image_arguments(rows: Sequence[ImageInputs | None], input_ids: torch.Tensor, config: Any) -> dict[str, Any]:
    """Arguments of the model's forward, or of `generate`, besides `input_ids` [rows, tokens]: those of the rows'
    images, and which tokens stand for them; nothing where no row has one."""
    found = [row for row in rows if row is not None]
    if not found:
        return {}
    return {
        "pixel_values": torch.cat([row.pixel_values for row in found]).to(input_ids.device),
        "image_grid_thw": torch.cat([row.grids for row in found]).to(input_ids.device),
        "mm_token_type_ids": (input_ids == config.image_token_id).int(),
    }
