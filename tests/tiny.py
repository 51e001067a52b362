"""A tiny Qwen2 with its own tokenizer and chat template, made on the spot: no hub, no files of ours."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
WORDS = [*"0123456789+-=#.,?", "What", "is", "Answer:", "the", "answer", "####", "so"]
SPECIAL = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Whole words and single digits; every other word is <unk>."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[3:],
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2, scale: float = 1.0):
    """Random Qwen2, hidden 64, two heads of 32 (vLLM's CPU attention wants 32), vocabulary of `tiny_tokenizer`.

    `scale` multiplies all weight matrices: 1 samples almost uniformly, larger makes some tokens likelier.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.to(dtype)


def save_tiny(folder: Path, **kwargs) -> Path:
    """A model folder as a user would have it."""
    tiny_model(**kwargs).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
