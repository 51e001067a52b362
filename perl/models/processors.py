"""Processors: the tokenizer of a vision-language model together with what makes pixels of its images.

transformers' own wants a video processor too, and that one torchvision, which no text or image needs. The one here
does without, and has PIL resize images, so that training and evaluation see the same pixels wherever they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import ProcessorMixin
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as transformers_processor


class Qwen2VLImageProcessorPil(transformers_processor.Qwen2VLImageProcessorPil):  # the name that it is saved under
    """transformers' of that name. An image that comes several times, once for each completion of its prompt, is
    computed once."""

    def _preprocess(self, images: list[np.ndarray], *args: Any, **kwargs: Any) -> Any:
        distinct: dict[Any, int] = {}
        places = [distinct.setdefault((image.shape, image.tobytes()), len(distinct)) for image in images]
        inputs = super()._preprocess([images[places.index(place)] for place in range(len(distinct))], *args, **kwargs)
        grids = inputs["image_grid_thw"]
        ends = np.cumsum(np.prod(np.asarray(grids), axis=1))  # of each image's patches
        starts = np.append(0, ends)
        rows = np.concatenate([np.arange(starts[place], ends[place]) for place in places])
        inputs["pixel_values"], inputs["image_grid_thw"] = inputs["pixel_values"][rows], grids[places]
        return inputs


class Qwen2_5_VLProcessor(transformers.Qwen2_5_VLProcessor):  # the name that it is saved under
    """transformers' of that name, for texts and images alone."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def load_processor(folder: str | Path, tokenizer: Any) -> Qwen2_5_VLProcessor:
    """The processor of the model in `folder`, around its tokenizer."""
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    template = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template") or tokenizer.chat_template
    return Qwen2_5_VLProcessor(images, tokenizer, chat_template=template)
