"""A tiny model that calls tools by itself: whole calls are words of its vocabulary, and random weights draw them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.tiny import tiny_model, tiny_tokenizer

CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>',
    '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments"',
]


def calling_tokenizer() -> Any:
    """`tiny_tokenizer` with CALLS behind its words."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(call) for call in CALLS])
    return tokenizer


def calling_model(**settings: Any) -> Any:
    return tiny_model(**({"scale": 4.0, "vocab_size": len(calling_tokenizer())} | settings))


def save_calling(folder: Path) -> Path:
    """As tests.tiny.save_tiny."""
    calling_model().save_pretrained(folder)
    calling_tokenizer().save_pretrained(folder)
    return folder
