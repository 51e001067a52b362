"""Tiny random models of any family with a tokenizer and a chat template, made on the spot: no hub, no files of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, Qwen2Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
WORDS = [*"0123456789+-=#.,?", "What", "is", "Answer:", "the", "answer", "####", "so"]
SPECIAL = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END = SPECIAL.index("<|end|>")
SHAPE: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
"""Two heads of 32, which is what vLLM's attention on a CPU wants, and the vocabulary of `tiny_tokenizer`."""


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """Token i is the i-th of SPECIAL and WORDS. Blanks and letters that belong to no word are dropped.

    It is of the class that AutoTokenizer takes for every Qwen2, whatever the folder says, so that the tokenizer read
    from a folder is the one that was saved: that class keeps a word of several letters only as an added token.
    """
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.add_tokens([AddedToken(word, single_word=word.isalpha()) for word in WORDS if len(word) > 1])
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    family: str = "qwen2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    scale: float = 1.0,
    **changes: Any,
) -> Any:
    """A random model for causal language modelling, in training mode, of SHAPE but for `changes`.

    Args:
        family: transformers' model type, such as "qwen2", "llama" or "mistral".
        scale: multiplies all weight matrices: 1 samples almost uniformly, with more the next token depends on the
            whole prompt and two tokens seldom tie.
        changes: fields of the family's configuration.
    """
    torch.manual_seed(seed)
    shape = SHAPE | {"num_hidden_layers": layers} | changes
    config = AutoConfig.for_model(family, **shape)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)  # from_config would partition it under ZeRO-3
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.to(dtype)


def save_tiny(folder: Path, **settings: Any) -> Path:
    """A model folder as a user would have it, of `tiny_model(**settings)`."""
    tiny_model(**settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


VISION_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    " {% endfor %}<|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def save_tiny_vision(folder: Path, *, seed: int = 0, scale: float = 4.0) -> Path:
    """A folder of a random Qwen2.5-VL as the hub has it: of SHAPE, with a vision tower of two layers, for which an
    image of n x m pixels, multiples of 8, becomes n m / 64 tokens."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tiny_tokenizer(VISION_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:], *VISION_TOKENS]})
    names = "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    tower |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=SHAPE | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config=tower,
        tie_word_embeddings=False,
        **dict(zip(names, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True)),
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096).save_pretrained(folder)
    return folder


def noise_png(width: int, height: int, seed: int = 0) -> bytes:
    """The file of an image of random pixels."""
    import io
    import random

    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, format="PNG")
    return file.getvalue()


def geometry_rows(counts: Sequence[int] = (1, 2, 1, 1, 2, 1, 1, 1)) -> list[dict[str, Any]]:
    """Rows as verl's examples/data_preprocess/geo3k.py writes them, with so many images each, of 6 to 12 tokens."""
    return [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": "<image> so " * count + f"What is {i} + 1 ?"}],
            "images": [{"bytes": noise_png(16 + 8 * k, 24, 10 * i + k), "path": None} for k in range(count)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "question": f"What is {i} + 1 ?"},
        }
        for i, count in enumerate(counts)
    ]


def geometry_file(path: Path, counts: Sequence[int] = (1, 2, 1, 1, 2, 1, 1, 1)) -> Path:
    """A parquet file of `geometry_rows`."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(geometry_rows(counts)), path)
    return path
