"""What stops a run whose worker can't read its policy, or holds it and draws with another (benchmarks.delivery)."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GenerationConfig

from perl.adapters.delivery import base_digest, delivered, digest, from_bytes, put_into, to_bytes
from perl.base.errors import RankError
from perl.config.schema import RolloutConfig
from perl.device.numerics import Numerics
from perl.engines.torch_copy import TorchCopy
from perl.engines.torch_policy import TorchRules
from perl.noise.injector import NoiseInjector
from perl.records import Trajectory, Weights
from perl.training.batch import Batch
from perl.workers.rollouts import Piece, RolloutJob, Version
from perl.workers.worker import Ready, Result
from tests.tiny import save_tiny, tiny_model
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
    job = RolloutJob(
        base=base,
        open_copy=copy,
        piece_size=2,
        newest=False,
        talks=None,
        numerics=Numerics.now(torch.get_num_threads()),
    )
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


def test_workers_that_are_further_from_the_trainer_than_rounding_was_are_told_of(caplog):
    """In 16 bits a policy without its adapter may be within the tolerance."""
    none: dict = dict.fromkeys(("clock", "metrics", "engine", "processes", "passes"))
    comparison = compared(**none)
    comparison.tolerance = 0.2
    for apart in (0.0078, 0.03):
        comparison._tell_growth(apart)
    assert not caplog.text
    comparison._tell_growth(0.04)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "0.04 nats from the trainer's, and were 0.0078 at first: rounding may reach 0.2" in said


def test_a_policy_under_activation_checkpointing_is_the_one_that_a_worker_holds():
    """FSDP's own wraps each layer, and the wrapper's name stood in those of the tensors and of the noise."""

    def policy():
        return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))

    sender, worker = policy(), policy()
    layers = sender.get_base_model().model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)
    put_into(worker, from_bytes(to_bytes(delivered(sender))))
    injectors = [
        NoiseInjector(each, ["post_attention_layernorm"], [], seed=5, relative=False) for each in (sender, worker)
    ]
    digests = set()
    for each, noise in zip((sender, worker), injectors, strict=True):
        with noise.applied(0.1, (3, 1)):
            digests.add(digest(each, base_digest(each), noise.held()))
    assert len(digests) == 1


def test_a_process_that_keeps_nothing_of_a_policy_packs_nothing():
    tensors = {"a": torch.ones(3)}
    assert to_bytes(tensors, kept=False) == b""
    assert from_bytes(to_bytes(tensors))["a"].tolist() == [1, 1, 1]


def test_a_worker_computes_as_its_trainer():
    code = """
import os, torch
from perl.device.numerics import Numerics
plain = Numerics.now(1)
torch.use_deterministic_algorithms(True)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
if hasattr(torch.backends, "fp32_precision"):
    torch.backends.fp32_precision = "tf32"
else:
    torch.set_float32_matmul_precision("high")
trainer = Numerics.now(2)
plain.take()
del os.environ["CUBLAS_WORKSPACE_CONFIG"]
assert Numerics.now(1) == plain != trainer
trainer.take()
assert Numerics.now(2) == trainer
assert torch.get_num_threads() == 2 and torch.are_deterministic_algorithms_enabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
