"""What stops a run whose worker can't read its policy, or holds it and draws with another (benchmarks.delivery)."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from perl.base.errors import RankError
from perl.config.schema import RolloutConfig
from perl.engines.torch_copy import TorchCopy
from perl.engines.torch_policy import TorchRules
from perl.records import Trajectory, Weights
from perl.training.batch import Batch
from perl.workers.rollouts import Piece, RolloutJob, Version
from perl.workers.worker import Ready, Result
from tests.tiny import save_tiny
from tests.training.compared import compared


class Inbox:
    """Two pieces of one version, whose bytes are not whole."""

    payload = b"half", []

    def __init__(self, version):
        self.version, self.left = version, [Piece((0, 0), ()), Piece((0, 1), ())]

    def next_weights(self, *, wait):
        return self.version if self.left else None

    def take(self):
        return self.left.pop(0)


def test_a_worker_says_of_each_piece_what_it_cannot_read_and_lives_on(tmp_path):
    base = str(save_tiny(tmp_path))
    rules = TorchRules(
        rollout=RolloutConfig(engine="fast"), processing=None, generation_config=GenerationConfig(pad_token_id=0),
        generation_kwargs={}, dtype=torch.float32,
    )  # fmt: skip
    copy = partial(TorchCopy, base, rules=rules, load={"dtype": torch.float32}, peft_config=None, noise=None)
    job = RolloutJob(base=base, open_copy=copy, piece_size=2, newest=False, talks=None, threads=torch.get_num_threads())
    version = Version("run", Weights(version=2), "a" * 64)
    ready, *answers = job.serve(version, Inbox(version))
    assert isinstance(ready, Ready)
    assert [answer.id for answer in answers if isinstance(answer, Result)] == [(0, 0), (0, 1)]
    assert all("the policy that was sent can't be read" in answer.completion.error for answer in answers)


@pytest.mark.parametrize(("pieces", "wrong", "stops"), [(2, 7, True), (2, 0, True), (16, 0, False), (2, None, False)])
def test_a_row_of_each_piece_is_compared_as_another_worker_may_have_drawn_it(pieces, wrong, stops):
    """Sixteen rows, of which one piece is 0.5 nats off: with pieces of two, eight rows are compared; with one of
    sixteen, four. (That of 16 is off in its last row alone, which is not compared.)"""
    rows = [
        Trajectory(row={}, position=i, sample=0, prompt_ids=(1,), token_ids=[2], sampled=[True], logprobs=[-1.0])
        for i in range(16)
    ]
    for i in range(16):
        if (pieces == 2 and i // 2 == wrong) or (pieces == 16 and i == 15):
            rows[i].logprobs = [-1.5]
    asked = []

    def logps(policy, some, width):
        asked.extend(row.position for row in some)
        return torch.full((len(some), width), -1.0)

    comparison = compared(
        clock=lambda name: nullcontext(),
        metrics=SimpleNamespace(value=lambda name, value: None),
        engine=SimpleNamespace(not_comparable=lambda sampling: None, itemsize=4, remote=True, piece_size=pieces),
        processes=SimpleNamespace(
            added_up=lambda numbers: numbers, gathered=lambda things: things, device=torch.device("cpu")
        ),
        passes=SimpleNamespace(logps=logps),
    )
    batch = Batch.of(rows, torch.device("cpu"), False, 1, True)
    if stops:
        with pytest.raises(RankError, match="a worker holds the policy that it was sent, and does not draw with it"):
            comparison.compare(batch)
    else:
        comparison.compare(batch)
    assert asked == list(range(0, 16, min(pieces, 4)))
