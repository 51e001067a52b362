"""Images of a row: read from what data sets hold, and put into its messages where their markers stand.

column images -> Problem.images, each the bytes of a file -> messages of parts -> processor -> perl.models.pixels
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.models import folders
from perl.records import Message

if TYPE_CHECKING:
    from PIL.Image import Image

MARKER = "<image>"
"""Stands in a text where an image belongs, as in verl's and LLaMA-Factory's data."""


def load_processing(folder: str | Path, flag: str = "--model", **options: Any) -> Any:
    """What makes a model's inputs: its tokenizer, or for a model that takes images its processor, which has the
    tokenizer's methods that prompts need. A UserError names `flag`.

    Args:
        options: transformers', for the tokenizer.
    """
    tokenizer = folders.load_tokenizer(folder, flag, **options)
    if not folders.takes_images(folders.load_config(folder, flag)):
        return tokenizer
    try:
        from perl.models.processors import load_processor

        return load_processor(folder, tokenizer)
    except (OSError, ValueError, ImportError) as error:  # transformers 4 has no such module
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{flag} {folder}: the model's image processor cannot be loaded: {reason}") from error


def tokenizer_of(processing: Any) -> Any:
    """The tokenizer in a processor, or the tokenizer itself."""
    return getattr(processing, "tokenizer", processing)


def has_images(processing: Any) -> bool:
    """Whether the model of this tokenizer or processor takes images."""
    return hasattr(processing, "image_processor")


def read_images(row: Mapping[str, Any], where: str) -> tuple[bytes, ...]:
    """The files of a row's images, from the column `images` (a list) or `image`: as `datasets` stores them ({bytes,
    path}), as bytes, as paths, or as PIL images. A UserError for one that can't be decoded."""
    stored = row.get("images") or row.get("image") or ()
    images = stored if isinstance(stored, list | tuple) else [stored]
    return tuple(_file(image, f"{where}: image {number}") for number, image in enumerate(images, start=1))


def _file(image: Any, where: str) -> bytes:
    if isinstance(image, Mapping):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if hasattr(image, "save"):  # PIL's, as `datasets` decodes them
        file = io.BytesIO()
        try:
            image = image.convert("RGB") if image.mode in ("CMYK", "YCbCr") else image  # of a JPEG, as processors do
            image.save(file, format="PNG")  # without loss
        except OSError as error:  # a mode that PNG has not
            raise UserError(f"{where}: {_plain(error)}; store it as RGB, or as the bytes of its file") from error
        return file.getvalue()
    try:
        content = user_path(image).read_bytes() if isinstance(image, str) else image
    except OSError as error:
        raise UserError(f"{where}: {image}: {error.strerror or error}; a path counts from this folder") from error
    except ValueError as error:  # a zero byte in it
        raise UserError(f"{where}: {image!r:.60} is no path: {error}") from error
    if not isinstance(content, bytes):
        raise UserError(f"{where}: {content!r:.60} is no image; write {{bytes, path}}, bytes or a path")
    try:
        decoded(content)
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises for broken files
        raise UserError(f"{where} can't be decoded: {_plain(error)}") from error
    return content


def _plain(error: Exception) -> str:
    """PIL's words, without the name of an object in memory."""
    return " ".join(re.sub(r" <_io.*?>", "", str(error)).split())[:120]


def decoded(file: bytes) -> Image:
    """The image in a file's bytes, its pixels read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("the rows have images, and Pillow is not installed: pip install pillow") from error

    try:
        image = Image.open(io.BytesIO(file))
        image.load()
    except Image.DecompressionBombError as error:  # an Exception of its own, of more pixels than fit into memory
        raise ValueError(str(error)) from error
    return image


def fitted(messages: Sequence[Message], images: Sequence[bytes], takes_images: bool, where: str) -> list[Message]:
    """`messages` as the model takes them: texts, or for a model that takes images a list of parts, one of type image
    for each MARKER. A UserError unless there is an image for each of these, and no other.

    Args:
        takes_images: the model does.
        where: the row, for messages to the user.
    """
    if not takes_images:
        if images:
            raise UserError(
                f"{where}: the row has {len(images)} image(s), but the model takes texts only; name a model that takes"
                " images (Qwen2.5-VL), or rows without the column images"
            )
        return list(messages)
    markers = sum(message["content"].count(MARKER) for message in messages)
    if markers != len(images):
        raise UserError(
            f"{where}: {markers} {MARKER} in the prompt, but {len(images)} image(s); write one {MARKER} for each image,"
            " where it belongs"
        )
    return [message | {"content": _parts(message["content"])} for message in messages]


def _parts(text: str) -> list[dict[str, str]]:
    parts = []
    for number, piece in enumerate(text.split(MARKER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def filled(messages: Sequence[Message], images: Sequence[bytes]) -> list[Message]:
    """The `fitted` messages with the images in their parts, as a processor's chat template takes them."""
    left = iter(images)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": decoded(next(left))} if given["type"] == "image" else given

    return [message | {"content": [part(p) for p in message["content"]]} for message in messages]
