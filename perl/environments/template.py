"""The tokens that a chat template puts around the turns of a conversation, found without encoding a turn again.

    prompt + drawn tokens … <end of turn> + observed tokens + drawn tokens … <end of turn>

What is observed is the difference of two renderings of a conversation made up for it, with and without the observation,
from the end of the assistant's turn on, which is one token: the policy draws it, and it stands there once. That a
template renders earlier turns alike whatever follows is tested when this is made, on turns of the kind that come.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perl.base.errors import UserError
from perl.environments.calls import PARSER_FLAG, PARSERS, Parser, read_calls
from perl.prompts import ChatTemplate, decode, encode
from perl.records import Message

log = logging.getLogger(__name__)

ASKED: Message = {"role": "user", "content": "question"}
LETTERS = 64
"""Of a token, at most, so that a text of megabytes is not encoded to be cut."""
NAME, VALUE = "tool_e2b1", "value_a9f3"
"""Words that no template has of its own."""
SCHEMA = {
    "type": "function",
    "function": {"name": NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
LISTED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's templates say of tools, for those that say nothing."""
FENCED = """Code in a block
```python
...
```
is run, and what it prints is shown to you."""


class ConversationTemplate(ChatTemplate):
    """
    Args:
        tokenizer: whose chat template it is.
        schemas: of the tools.
        role: of an observation.
        parser: environment.tool_call_parser.
        given: what the template is given besides (training.chat_template_kwargs).
        most: tokens of an observation's texts.

    Attributes:
        kwargs: `given`, and TRL's template for training where it takes the place of the tokenizer's.
        end: the token that ends a turn in the template.
        thinking: a turn begins inside a thought.
        between: what stands behind it before the policy's next turn, where nothing is observed.

    Raises:
        UserError: the template does not keep earlier turns, nobody knows how its model writes calls, or they are to be
            read in another form than they are asked for.
    """

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[dict[str, Any]],
        role: Literal["tool", "user"],
        parser: str,
        given: Mapping[str, Any] | None = None,
        most: int = 512,
    ):
        super().__init__(tokenizer, given)
        self.kwargs, self.most = dict(self.given), most
        self._control = _control_tokens(tokenizer)
        self.lists_tools = NAME in self._text([ASKED], tools=[SCHEMA])
        self.parser = self._parser(parser) if schemas else None
        self.fenced = parser == "python_fence"
        self.schemas = list(schemas)
        self.role = role if self.lists_tools else "user"
        self._choose_kept()
        if schemas and not self.lists_tools and not self.fenced:
            log.info("tools: the chat template lists none; the system prompt does, as Qwen's does (Hermes form)")

    # What stands in the policy's context

    def prompt(self, messages: Sequence[Message], images: Sequence[bytes] = (), where: str = "") -> list[int]:
        """The tokens of a prompt, its tools listed, ending where the assistant's turn begins."""
        messages, further = self._asked(messages)
        return encode(self.tokenizer, messages, images, {**self.kwargs, **further}, where=where)

    def text(self, messages: Sequence[Message]) -> str:
        messages, further = self._asked(messages)
        return self._text(messages, **further)

    def _asked(self, messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Any]]:
        """A prompt's messages, and what the template is given besides, its tools listed in one of them."""
        if self.schemas and self.lists_tools and not self.fenced:
            return messages, {"tools": self.schemas}
        return self._told(messages), {}

    def message(self, content_ids: Sequence[int]) -> Message:
        """A turn that was drawn, its calls apart."""
        text = decode(self.tokenizer, content_ids)
        if self.parser is None:
            return {"role": "assistant", "content": text}
        whole = self.tokenizer.decode(content_ids, skip_special_tokens=False)
        rest, calls = read_calls(whole, self.parser, self.thinking)
        if not calls:
            return {"role": "assistant", "content": text}
        for token in self.tokenizer.all_special_tokens:
            rest = rest.replace(token, "")
        return {"role": "assistant", "content": rest, "tool_calls": calls}

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens behind the end of the policy's turn: these messages, and the beginning of its next.

        Raises:
            ValueError: the template renders no such messages behind an assistant's.
        """
        named = [{**each, "name": self.plain(each["name"])} if "name" in each else each for each in messages]
        return self._behind(answers_of_user(named) if self.role == "user" else named)

    def _behind(self, shown: Sequence[Message]) -> list[int]:
        answered = self._answered(shown)
        kept = encode(self.tokenizer, [ASKED, answered], template_kwargs=self.kwargs, answered=True)
        whole = encode(self.tokenizer, [ASKED, answered, *shown], template_kwargs=self.kwargs)
        end = _last(kept, self.end)
        roles = ", ".join(message["role"] for message in shown)
        if whole[:end] != kept[:end]:
            raise ValueError(f"the chat template renders an earlier turn otherwise before messages of role {roles}")
        if whole[end:] == self.between:
            raise ValueError(f"the chat template shows nothing of messages of role {roles}")
        return whole[end:]

    def _told(self, messages: Sequence[Message]) -> list[Message]:
        """With what a template does not say of tools in the system prompt."""
        if not self.schemas:
            return list(messages)
        listed = LISTED.format(schemas="\n".join(json.dumps(schema) for schema in self.schemas))
        text = FENCED if self.fenced else listed
        first, *rest = messages
        if first["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]

    def plain(self, text: str, behind: int = 0) -> str:
        """A text from outside as words alone: in what would be read as a control token, such as the end of a turn, a
        zero-width space stands behind the first character. What is no Unicode is replaced.

        Args:
            behind: so many characters are not from outside; a token that ends in them stays.
        """

        def broken(match: re.Match[str]) -> str:
            return f"{match[0]}\u200b" if match.end(1) > behind else match[0]

        return self._control.sub(broken, text.encode(errors="replace").decode())

    def cut(self, text: str, messages: int = 1) -> str:
        """What is shown of an observed text: `plain`, and the middle of one that is longer than allowed is left out.

        Args:
            messages: of the observation; each has its share.
        """
        most = max(1, self.most // messages)
        if len(text) > (longest := LETTERS * most):
            text = f"{text[: longest // 2]}{text[len(text) - longest // 2 :]}"
        ids = self.tokenizer(text := self.plain(text), add_special_tokens=False)["input_ids"]
        if len(ids) <= most:
            return text
        first = most // 2
        ends = ids[:first], ids[len(ids) - (most - first) :]
        return "\n…\n".join(self.tokenizer.decode(part) for part in ends)

    def _answered(self, shown: Sequence[Message]) -> Message:
        """The turn before these messages."""
        content = f"<think>\n{VALUE}\n</think>\n\n{VALUE}" if self._thinks else VALUE
        message = {"role": "assistant", "content": content}
        if shown[0]["role"] != "tool" or self.fenced:
            return message
        call = {"name": shown[0].get("name", NAME), "arguments": {}}
        return {**message, "tool_calls": [{"type": "function", "function": call}]}

    # What kind of template it is

    def _text(self, messages: Sequence[Message], begins: bool = True, **further: Any) -> str:
        from jinja2 import TemplateError

        options = {"add_generation_prompt": begins, "tokenize": False, **self.kwargs, **further}
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(
                f"--config.environment: the chat template takes no messages of roles"
                f" {', '.join(message['role'] for message in messages)}: {error}; use a model whose template does"
            ) from error

    def _parser(self, asked: str) -> Parser:
        if not self.lists_tools and asked not in ("auto", "hermes", "python_fence"):
            raise UserError(
                f"{PARSER_FLAG} {asked}: the chat template lists no tools, and the system prompt that does asks for"
                " Hermes' form; write auto"
            )
        if asked != "auto":
            return PARSERS[asked]
        if not self.lists_tools:
            return PARSERS["hermes"]
        call = {"name": NAME, "arguments": {"argument": VALUE}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        text = self._text([ASKED, called], begins=False)
        for name, marks in (("hermes", ("<tool_call>", '"arguments"')), ("llama3_json", ('"parameters"',))):
            if all(mark in text for mark in marks):
                return PARSERS[name]
        raise UserError(
            f"{PARSER_FLAG} auto: the chat template writes calls in no form that is known here"
            f" ({', '.join(PARSERS)}); name the one that the model was trained on"
        )

    def _choose_kept(self) -> None:
        """TRL's template for training in the place of one that does not keep its prefix, where there is one."""
        if (why := self._not_kept()) is None:
            return
        if patched := training_template(self.tokenizer):
            original, self.kwargs["chat_template"] = self.kwargs.get("chat_template"), patched
            if self._not_kept() is None:
                log.info("tools: the chat template %s; TRL's template for training, which does not, words prompts", why)
                return
            self.kwargs["chat_template"] = original
        raise UserError(
            f"--config.environment: the chat template {why}, so that the policy would be trained on other tokens than"
            " it is asked with later; use a model whose template keeps earlier turns as they were, such as Qwen2.5's,"
            " or write one (chat_template.jinja in the model's folder)"
        )

    def _not_kept(self) -> str | None:
        """Why a conversation can't be made by appending tokens, or None where it can; finds out `end`."""
        begun = self._text([ASKED])
        self.thinking = begun.rstrip().endswith("<think>")
        self._thinks = "<think>" in self._text([ASKED, {"role": "assistant", "content": ""}], begins=False) or (
            "<think>" in str(self.kwargs.get("chat_template") or self.tokenizer.chat_template)
        )
        self._thinks &= not begun.rstrip().endswith(("<think>", "</think>"))
        ids = encode(self.tokenizer, [ASKED, {"role": "assistant", "content": VALUE}], (), self.kwargs, answered=True)
        before = encode(self.tokenizer, [ASKED], (), self.kwargs)
        added = self.tokenizer.added_tokens_decoder
        turn = encode(self.tokenizer, [ASKED, {"role": "assistant", "content": VALUE}], (), self.kwargs)
        same = (one == other for one, other in zip(ids, turn, strict=False))
        stays = sum(itertools.takewhile(bool, same))  # Phi-3's ends the last turn alone by <|endoftext|> besides
        ends = [token for token in turn[len(before) : stays] if token in added]
        if not ends:
            return "ends a turn by no token of its own"
        self.end = ends[-1]
        self.between = turn[_last(turn[:stays], self.end) :]
        shown: list[Message] = [{"role": self.role, "content": VALUE} | ({"name": NAME} if self.role == "tool" else {})]
        answered = self._answered(shown)
        kept, whole = self._text([ASKED, answered], begins=False), self._text([ASKED, answered, *shown])
        if not kept.startswith(begun) or not whole.startswith(begun):
            return "begins the assistant's turn otherwise once it is answered"
        try:
            self._behind(shown)
        except ValueError:
            return f"renders an earlier turn otherwise once a message of role {self.role} follows"
        if whole.count(VALUE) == kept.count(VALUE):
            return f"leaves messages of role {self.role} out"
        return None


def answers_of_user(messages: Sequence[Message]) -> list[Message]:
    """What tools have answered as Qwen's template words it, in a message of the user, for a template that knows no
    tools."""
    shown: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            shown.append(message)
            continue
        answer = f"<tool_response>\n{message['content']}\n</tool_response>"
        if shown:
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{answer}"}
        else:
            shown.append({"role": "user", "content": answer})
    return shown


def training_template(tokenizer: Any) -> str | None:
    """TRL's for training with this tokenizer's; None where there is none, or it is that already."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        return None


def _control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """The first character of each, wherever it begins, and itself as a group. Other added tokens, such as runs of
    blanks, control nothing."""
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
    control = [each.content for each in tokens if each.special or (each.content[0], each.content[-1]) == ("<", ">")]
    control.sort(key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, control)) or '(?!)'})).", re.DOTALL)


def _last(ids: Sequence[int], token: int) -> int:
    """The place behind the last `token`."""
    return len(ids) - list(reversed(ids)).index(token)
