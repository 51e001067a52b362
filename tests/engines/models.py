"""Prompts and sequences for the engines' tests, and both ways to complete them, with a model of three layers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from perl.engines import Engine
from perl.engines.decoder import Decoder
from perl.engines.scheduler import Sequence
from perl.records import Completion, Prompt, Sampling
from tests.tiny import tiny_model

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EOS = frozenset({2})
GREEDY = Sampling(temperature=0)


def tiny(family: str = "qwen2", seed: int = 0, spread: float = 4.0, **changes):
    """`tiny_model` of this file's SHAPE in evaluation mode, its matrices scaled by `spread`."""
    return tiny_model(family, seed=seed, scale=spread, **(SHAPE | changes)).eval()


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[tuple[int, ...]]:
    """Prompts of 1 to `longest` tokens, none of them special."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 61) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def make_sequences(
    prompt_ids: list[tuple[int, ...]], *, max_new_tokens: int = 24, group_size: int = 1
) -> list[Sequence]:
    """Prompt by prompt, each seeded with its index."""
    repeated = [prompt for prompt in prompt_ids for _ in range(group_size)]
    return [Sequence(ids, i, max_new_tokens) for i, ids in enumerate(repeated)]


def decoder(model, **options) -> Decoder:
    settings = {"eos_token_ids": EOS, "pad_token_id": 0, "max_batch_tokens": 1_000}
    return Decoder(model, **(settings | options))


def complete(machine: Decoder, sequences: list[Sequence], sampling: Sampling = GREEDY) -> list[Sequence]:
    """`sequences`, when all are finished."""
    assert len(list(machine.run(sequences, sampling))) == len(sequences)
    return sequences


def decode(model, sequences: list[Sequence], sampling: Sampling = GREEDY, **options) -> list[Sequence]:
    """`sequences`, completed by the decode loop."""
    return complete(decoder(model, **options), sequences, sampling)


def completions(engine: Engine, asked: Iterable[Prompt], sampling: Sampling) -> dict[int, Completion]:
    """What `engine` gives back for each prompt, drawn with `sampling`."""
    return dict(engine.stream(replace(prompt, sampling=sampling) for prompt in asked))


def stock(model, sequences: list[Sequence], sampling: Sampling = GREEDY, processors=(), **options) -> list[Sequence]:
    """`sequences`, completed by the model's own generate."""
    machine = decoder(model, stock=True, **options)
    machine.processors = list(processors)
    return complete(machine, sequences, sampling)
