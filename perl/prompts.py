"""From a Problem to the tokens that an engine completes: template, few-shot examples, chat template, seed; and back to
text."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from perl.base.errors import UserError
from perl.models.images import filled, tokenizer_of
from perl.records import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEMPLATE_LIMIT_S = 20.0
"""A chat template takes milliseconds; one whose loops never end is told after as long as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStyle:
    """Everything around the question. A score can move by ten points on this alone, so it is recorded with it."""

    template: str = "{question}"
    """Text of the user's turn; `{question}` is replaced, other braces stand for themselves."""
    system_prompt: str | None = None
    few_shot: tuple[tuple[str, str], ...] = ()
    """(question, worked answer) pairs, given as earlier turns of the same chat."""


def build_messages(problem: Problem, style: PromptStyle) -> list[Message]:
    """The chat that asks `problem`: the system prompt, the examples, the question. A ready-made prompt
    (`problem.messages`) keeps its own wording, and its own system prompt where it brings one."""
    prompt = None if problem.messages is None else [dict(message) for message in problem.messages]
    messages: list[Message] = []
    if prompt and prompt[0]["role"] == "system":
        messages.append(prompt.pop(0))
    elif style.system_prompt is not None:
        messages.append({"role": "system", "content": style.system_prompt})
    for question, answer in style.few_shot:
        messages.append({"role": "user", "content": style.template.replace("{question}", question)})
        messages.append({"role": "assistant", "content": answer})
    if prompt is not None:
        messages.extend(prompt)
    else:
        messages.append({"role": "user", "content": style.template.replace("{question}", problem.question)})
    return messages


def require_chat_template(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Raise a UserError unless the tokenizer of `model` has a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"{model}: the tokenizer has no chat template; add a chat_template.jinja to the model's folder,"
            " or use an instruct version of the model"
        )


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    images: Sequence[bytes] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    answered: bool = False,
    where: str = "",
) -> list[int]:
    """Token ids of `messages` under the tokenizer's chat template, ending where the assistant's turn begins.

    Args:
        tokenizer: for a model that takes images its processor (perl.models.processors): messages are of parts then.
        images: the files of the images in the messages.
        template_kwargs: what the chat template is given besides (training.chat_template_kwargs).
        answered: the assistant's turn is the last of `messages`; nothing begins behind it.
        where: the row, for messages to the user.

    Raises a UserError where the chat template fails, makes nothing, or takes longer than TEMPLATE_LIMIT_S.
    """
    chat = filled(messages, images) if images else list(messages)
    # The tokenizer's own warning of a long text says of rows that are dropped for their length that they would fail.
    quiet: dict[str, Any] = {} if hasattr(tokenizer, "image_processor") else {"tokenizer_kwargs": {"verbose": False}}
    given = {"tokenize": True, "return_dict": False, **quiet}
    return list(_apply(tokenizer, chat, template_kwargs, not answered, where, **given))


def worded(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
    answered: bool = False,
    where: str = "",
) -> str:
    """What the tokens of `messages` say. Arguments and errors as in `encode`."""
    return _apply(tokenizer, list(messages), template_kwargs, not answered, where, tokenize=False)


def _apply(
    tokenizer: Any, chat: list[Any], given: Mapping[str, Any] | None, asks: bool, where: str, **options: Any
) -> Any:
    from jinja2 import TemplateError

    whose = f"{where}: {_name(tokenizer)}" if where else _name(tokenizer)
    try:
        with _limited(TEMPLATE_LIMIT_S):
            made = tokenizer.apply_chat_template(chat, add_generation_prompt=asks, **options, **(given or {}))
    except TimeoutError as error:
        raise UserError(
            f"{whose}: the chat template takes more than {TEMPLATE_LIMIT_S:g} s for a prompt; correct"
            " chat_template.jinja"
        ) from error
    except (TemplateError, TypeError, KeyError) as error:  # what a template's own expressions raise
        raise UserError(
            f"{whose}: the chat template fails: {error}; correct the prompt, or chat_template.jinja"
        ) from error
    made = made[0] if made and isinstance(made[0], list) else made  # a processor gives a list of one
    if not made:
        raise UserError(f"{whose}: the chat template makes no tokens of a prompt; correct chat_template.jinja")
    return made


class ChatTemplate:
    """A model's chat template, and what it is given besides the messages.

    Args:
        tokenizer: whose template it is; for a model that takes images its processor (perl.models.processors).
        given: besides (training.chat_template_kwargs).
    """

    def __init__(self, tokenizer: Any, given: Mapping[str, Any] | None = None):
        self.tokenizer, self.given = tokenizer, dict(given or {})

    def prompt(self, messages: Sequence[Message], images: Sequence[bytes] = (), where: str = "") -> list[int]:
        """The tokens of a prompt, ending where the assistant's turn begins.

        Args:
            images: the files of the images in the messages.
            where: the row, for messages to the user.
        """
        return encode(self.tokenizer, messages, images, self.given, where=where)

    def text(self, messages: Sequence[Message]) -> str:
        """What the tokens of a prompt say."""
        return worded(self.tokenizer, messages, self.given)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the block when it takes longer. Only the main thread, which builds the first prompts of
    every run, can be interrupted; in another the block has no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def decode(tokenizer: Any, content_ids: Sequence[int]) -> str:
    """The text of a completion (Completion.content_ids), without special tokens. `tokenizer` may be a processor
    (perl.models.processors)."""
    return tokenizer_of(tokenizer).decode(content_ids, skip_special_tokens=True)


def require_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary: int, model: str) -> None:
    """Raise a UserError where the tokens that pad and end a text are none of the model's.

    Args:
        vocabulary: rows of the model's embeddings.
        model: named in the message.
    """
    for name in ("pad_token", "eos_token", "bos_token"):
        number = getattr(tokenizer, f"{name}_id")
        if number is not None and number >= vocabulary:
            raise UserError(
                f"{model}: the tokenizer's {name} {getattr(tokenizer, name)!r} is token {number}, but the model knows"
                f" {vocabulary} tokens; name one of them in tokenizer_config.json, or copy the model's own tokenizer"
            )


def require_known(token_ids: Sequence[int], vocabulary: int, where: str) -> None:
    """Raise a UserError for a prompt with tokens that the model has no embeddings for.

    Args:
        vocabulary: rows of the model's embeddings.
        where: the prompt's row, named in the message.
    """
    if (highest := max(token_ids)) >= vocabulary:
        raise UserError(
            f"{where}: the prompt holds token {highest}, but the model knows {vocabulary} tokens; copy the model's own"
            " tokenizer into its folder"
        )


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the tokenizer"


def truncated(token_ids: list[int], limit: int, side: Literal["left", "right", "middle"]) -> list[int]:
    """At most `limit` of the tokens, those cut off being at the left, at the right, or in the middle, as verl does: the
    first limit // 2 stay there, and the last ones."""
    if len(token_ids) <= limit:
        return token_ids
    first = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return token_ids[:first] + token_ids[len(token_ids) - (limit - first) :]
