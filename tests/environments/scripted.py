"""Tokenizers of bytes with the chat templates of real models, and an engine that says what it is told."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trl
from transformers import Qwen2Tokenizer
from transformers.utils import get_json_schema

from perl.config.schema import EnvironmentConfig
from perl.engines.base import Feed
from perl.environments.conversation import Conversations
from perl.environments.template import ConversationTemplate
from perl.environments.tools import EnvironmentSource, ToolUse
from perl.records import Asked, Completion, Prompt, Sampling, Trajectory

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' +"
    " message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""HuggingFaceTB/SmolLM2-1.7B-Instruct's."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]


def template_of(family: str) -> str:
    """The chat template of a family, as TRL ships it but for SmolLM2's."""
    return (
        SMOLLM2 if family == "smollm2" else (Path(trl.__file__).parent / f"chat_templates/{family}.jinja").read_text()
    )


def byte_tokenizer(family: str) -> Any:
    """Each byte is a token, and each of SPECIAL."""
    from tokenizers import pre_tokenizers

    words = ["<pad>", *SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        pad_token="<pad>",
        unk_token=None,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>" if family.startswith("llama") else "<|im_end|>",
        additional_special_tokens=SPECIAL,
    )
    tokenizer.chat_template = template_of(family)
    return tokenizer


class Scripted:
    """An Engine that completes what it has been given in a random order; what, `say` knows of a row's prompt."""

    max_num_seqs = 4

    def __init__(self, say: Callable[[Prompt], Completion], order: random.Random | None = None):
        self.say, self.order = say, order or random.Random(0)
        self.prompts: list[Prompt] = []

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        under_way, first = list[int](), len(self.prompts)
        waiting = deque([iter(feed)])
        while waiting or under_way:
            prompt = next(waiting[0], waiting) if waiting else None
            if prompt is waiting:
                waiting.clear()
            elif prompt is not None:
                under_way.append(len(self.prompts))
                self.prompts.append(prompt)  # type: ignore[arg-type]
            else:
                assert under_way, "the feed has nothing, and nothing is under way"
                place = under_way.pop(self.order.randrange(len(under_way)))
                yield place - first, self.say(self.prompts[place])

    def close(self) -> None:
        pass


def rows_of(
    conversations: Conversations, count: int, budget: int = 10_000, context: int = 1_000_000, **columns: Any
) -> list[Trajectory]:
    """What the collector makes of a prompt, but that its sampling's seed is the row's place here, by which an engine
    knows it."""
    prompt = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = tuple(conversations.template.prompt(prompt))
    asked = [Sampling(max_new_tokens=budget, seed=place) for place in range(count)]
    return [
        Trajectory(
            row={"prompt": prompt} | columns,
            position=place,
            sample=0,
            prompt_ids=ids,
            asked=Asked(sampling=sampling, key=f"stream-{place}", longest=context),
        )
        for place, sampling in enumerate(asked)
    ]


def text_completion(tokenizer: Any, text: str, end: str | None) -> Completion:
    """Of a text and the token that ends it; None: cut off."""
    ids = tokenizer(text + (end or ""), add_special_tokens=False)["input_ids"]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(-float(number) for number in range(len(ids))),
        finish_reason="length" if end is None else "stop",
    )


def talking(
    tokenizer: Any, *tools: Callable[..., Any], source: EnvironmentSource | None = None, **settings: Any
) -> Conversations:
    """With these tools, or the environments of `source`."""
    config = EnvironmentConfig(**settings)
    functions = {tool.__name__: tool for tool in tools}
    made = source or EnvironmentSource(
        make=lambda: ToolUse(functions), schemas=[get_json_schema(tool) for tool in tools]
    )
    template = ConversationTemplate(
        tokenizer, made.schemas, made.role, config.tool_call_parser, most=config.max_observation_tokens
    )
    return Conversations(source=made, template=template, config=config)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b
