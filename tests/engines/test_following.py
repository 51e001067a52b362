"""A prompt that goes on from a completion: the tokens that it would get alone, at the cost of the new ones."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from perl.engines.torch_engine import TorchEngine
from perl.records import Completion, Prompt, Sampling, row_seed
from tests.tiny import END, tiny_model, tiny_tokenizer

TURNS, ROWS = 3, 6
OBSERVED = (3, 9, 4)


def engine(model, **settings) -> TorchEngine:
    fixed = {"pad_token_id": 0, "max_num_seqs": 4}
    return TorchEngine(
        model,
        tiny_tokenizer(),
        eos_token_ids=[END],
        context=None,
        applied=contextlib.nullcontext,
        **(fixed | settings),
    )


def conversations(drawing: TorchEngine, following: bool, limit: int = 24) -> dict[int, list[Completion]]:
    """By row: TURNS completions, each behind all before it and OBSERVED; rows 0 and 1 begin alike, as 2 and 3 do."""
    ready = deque(range(ROWS))
    tokens = {row: tuple(range(6, 12 + row // 2)) for row in range(ROWS)}
    made: dict[int, list[Completion]] = {row: [] for row in range(ROWS)}
    given: list[int] = []
    latest: dict[int, int] = {}

    def feed() -> Iterator[Prompt | None]:
        while ready or len(given) > sum(map(len, made.values())):
            if not ready:
                yield None
                continue
            row = ready.popleft()
            prompt = Prompt(
                token_ids=tokens[row],
                seed=row_seed(0, str(row), 0, len(made[row])),
                sampling=Sampling(max_new_tokens=limit),
            )
            if following:
                prompt = replace(prompt, follows=latest.get(row), followed=len(made[row]) < TURNS - 1)
            latest[row] = len(given)
            given.append(row)
            yield prompt

    for place, completion in drawing.stream(feed()):
        row = given[place]
        made[row].append(completion)
        if len(made[row]) < TURNS:
            tokens[row] += (*completion.token_ids, *OBSERVED)
            ready.append(row)
    return made


@pytest.fixture(scope="module")
def model():
    return tiny_model(scale=3.0, dtype=torch.float64).eval()


@pytest.mark.parametrize("settings", [{}, {"block_size": 8}, {"block_size": 8, "max_batch_tokens": 80},
                                      {"max_batch_tokens": 90}, {"max_num_seqs": 1}])  # fmt: skip
def test_the_same_as_from_the_start(model, settings):
    """With rows and with blocks, where memory is short too, so that what was kept is forgotten."""
    expected = conversations(engine(model), following=False)
    assert any(completion.finish_reason == "stop" for turns in expected.values() for completion in turns)
    found = conversations(engine(model, **settings), following=True)
    assert found == expected
    for row, turns in found.items():
        for turn, other in zip(turns, expected[row], strict=True):
            assert turn.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("block_size", [None, 8])
def test_only_new_tokens_are_computed(model, block_size):
    """One row at a time, so that nothing is padded. Kept is all but the last token, which is drawn and not computed, of
    turns that end by a token of the end, but a first one: a row that is cut off is gone before that is known."""
    computed = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drawing = engine(model, max_num_seqs=1, block_size=block_size)
    try:
        again = conversations(drawing, following=False)
        without = sum(size for size in computed if size > 1)
        computed.clear()
        conversations(drawing, following=True)
    finally:
        hook.remove()
    once = sum(size for size in computed if size > 1)
    ended = [turn for turns in again.values() for turn in turns[:-1] if turn.finish_reason == "stop"]
    saved = without - once
    assert ended
    kept = 0
    for row, turns in again.items():
        length = 6 + row // 2
        for turn in turns[:-1]:
            length += len(turn.token_ids)
            kept += (length - 1) if len(turn.token_ids) > 1 and turn.finish_reason == "stop" else 0
            length += len(OBSERVED)
    assert saved == kept > 0
