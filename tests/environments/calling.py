"""A tiny model that calls tools by itself: whole calls are words of its vocabulary, and random weights draw them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from perl.config.schema import EnvironmentConfig
from perl.environments.conversation import Conversations
from perl.environments.template import ChatTemplate
from perl.environments.tools import EnvironmentSource, ToolUse, _schema
from tests.tiny import tiny_model, tiny_tokenizer

CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>',
    '<tool_call>{"name": "add", "arguments"',
]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def calling_tokenizer(chat_template: str | None = None) -> Any:
    """`tiny_tokenizer` with CALLS behind its words."""
    tokenizer = tiny_tokenizer() if chat_template is None else tiny_tokenizer(chat_template)
    tokenizer.add_tokens([AddedToken(call) for call in CALLS])
    return tokenizer


def calling_model(**settings: Any) -> Any:
    return tiny_model(vocab_size=len(calling_tokenizer()), **({"scale": 4.0} | settings))


def save_calling(folder: Path, **settings: Any) -> Path:
    calling_model(**settings).save_pretrained(folder)
    calling_tokenizer().save_pretrained(folder)
    return folder


def conversations(
    tokenizer: Any, *tools: Callable[..., Any], source: EnvironmentSource | None = None, **settings: Any
) -> Conversations:
    """With these tools (`add` where none is given), or an environment of `source`."""
    config = EnvironmentConfig(**settings)
    functions = {tool.__name__: tool for tool in tools or (add,)}
    made = source or EnvironmentSource(
        make=lambda: ToolUse(functions), schemas=[_schema(tool, "tools") for tool in functions.values()]
    )
    template = ChatTemplate(
        tokenizer, made.schemas, made.role, config.tool_call_parser, most=config.max_observation_tokens
    )
    return Conversations(source=made, template=template, config=config)
