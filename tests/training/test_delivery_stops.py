"""What stops a run whose worker can't read its policy, or holds it and draws with another (benchmarks.delivery)."""

import math
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GenerationConfig

from perl.adapters.delivery import base_digest, delivered, digest, from_bytes, put_into, to_bytes
from perl.base.errors import RunError
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.device.numerics import Numerics
from perl.engines.torch_copy import TorchCopy
from perl.engines.torch_policy import TorchRules
from perl.noise.injector import NoiseInjector
from perl.records import Trajectory, Weights
from perl.training.batch import Batch
from perl.training.passes import SamplerCheck, Samplers
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


APART = "a worker holds the policy that it was sent, and does not draw with it"


@pytest.mark.parametrize(
    ("pieces", "wrong", "logprob", "stops"),
    [(2, 7, -1.5, APART), (2, 0, -1.5, APART), (16, 0, -1.5, ""), (2, None, -1.5, ""),
     (2, 7, math.nan, "a worker computes no numbers: 1 log-probabilities are NaN")],
)  # fmt: skip
def test_a_row_of_each_piece_is_compared_as_another_worker_may_have_drawn_it(pieces, wrong, logprob, stops):
    """Sixteen rows, of which one piece is 0.5 nats off: with pieces of two, eight rows are compared; with one of
    sixteen, four. (That of 16 is off in its last row alone, which is not compared.) NaN stood for "not given"."""
    rows = [
        Trajectory(row={}, position=i, sample=0, prompt_ids=(1,), token_ids=[2], sampled=[True], logprobs=[-1.0])
        for i in range(16)
    ]
    for i in range(16):
        if (pieces == 2 and i // 2 == wrong) or (pieces == 16 and i == 15):
            rows[i].logprobs = [logprob]
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
        with pytest.raises(RunError, match=stops):
            comparison.compare(batch)
    else:
        comparison.compare(batch)
    assert asked == list(range(0, 16, min(pieces, 4)))


def checked(trainer, without, sampler, check=None):
    """A comparison of rows by a SamplerCheck, which is returned: log-probabilities [rows, tokens] of the policy that
    was sent, of that without its adapter, and those that a worker has told."""

    class Computed(Samplers):
        def logps(self, batch, *, noisy=True, adapted=True):
            return trainer if adapted else without

    samplers: Any = Computed.__new__(Computed)
    samplers.processes = SimpleNamespace(added_up=lambda numbers: numbers, largest=lambda numbers: numbers)
    none: Any = None
    check = check or SamplerCheck(
        samplers=samplers, metrics=none, clock=none, sampling=none, batches_ahead=0, itemsize=2, sends_adapter=True
    )
    check.samplers = samplers
    few: Any = SimpleNamespace(sampler=sampler)
    check._require_adapter(few, trainer, torch.ones_like(trainer, dtype=torch.bool), 0.05)
    return check


def signs(period):
    """[4, 50]: 1 and -1. Those of 1 and of 2 have no direction in common."""
    return torch.where(torch.arange(50) // period % 2 == 0, 1.0, -1.0).repeat(4, 1)


def rounded(share, *, effect=0.05, rounding=0.004, rows=(0, 1, 2, 3), before=0.0):
    """Four rows of 50 tokens, drawn with `share` of what leaving out the adapter changes (in `rows`, else nothing of
    it) and with rounding."""
    trainer = torch.full((4, 50), -1.0)
    drew = torch.tensor([share if row in rows else 0.0 for row in range(4)])[:, None]
    check = checked(trainer, trainer, trainer)
    check.rounding = before
    return checked(
        trainer, trainer + effect * signs(1), trainer + drew * effect * signs(1) + rounding * signs(2), check
    ).rounding


def test_what_rounding_or_too_small_an_adapter_leaves_ends_no_run():
    """Within 0.2 nats all of them."""
    assert rounded(0.0) == pytest.approx(0.004, rel=0.02)
    assert rounded(0.0, rounding=0.15) == pytest.approx(0.15, rel=0.02)  # that grows
    assert rounded(0.4) == pytest.approx(0.004, rel=0.02)  # a part of it is lost
    assert rounded(1.0, effect=0.009, rounding=0.001) == pytest.approx(0.001, rel=0.02)
    assert rounded(1.0, before=0.02) == pytest.approx(0.018)  # rounding was half as large as this
    assert rounded(0.0, effect=0.0) == pytest.approx(0.004, rel=0.02)  # before the first update


def test_the_trainers_own_rounding_is_not_taken_for_the_adapter():
    """It is in both: what the worker drew and what the adapter does are seen from the trainer."""
    numbers, check = torch.Generator().manual_seed(0), None
    for _ in range(20):
        policy = torch.full((8, 2000), -1.0)
        trainer, worker, without = (policy + 0.01 * torch.randn(policy.shape, generator=numbers) for _ in range(3))
        check = checked(trainer, without + 0.002 * torch.randn(policy.shape, generator=numbers), worker, check)
    trainer = torch.full((4, 50), -1.0)
    trainer[2, 7] = -3.0
    policy = torch.full((4, 50), -1.0)
    checked(trainer, policy + 0.02 * signs(1), policy + 0.004 * signs(2))


def test_a_worker_that_never_had_its_adapter_is_found_as_the_adapter_grows():
    policy, check = torch.full((4, 50), -1.0), None

    def after(steps):
        without = policy + 0.002 * steps * signs(1)
        return checked(policy, without, without + 0.0005 * signs(2), check)

    for steps in range(5):  # below 0.01 nats nothing is said
        check = after(steps)
    with pytest.raises(RunError, match="100% of the way to those without the adapter"):
        after(6)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"share": 1.0},
            "are 0.05 nats from the trainer's, 100% of the way to those without the adapter, which is off",
        ),
        ({"share": 0.6}, ", 60% of the way"),  # a prefix that is the base's
        ({"share": -1.0}, "100% of the way to those of twice the adapter, which is merged twice"),
        ({"share": 1.0, "rows": (2,)}, ", 100% of the way"),  # one worker of four
    ],
)
def test_a_worker_that_draws_without_its_adapter_ends_the_run_within_rounding_too(how, said):
    with pytest.raises(RunError, match="does not draw with it") as stopped:
        rounded(**how)
    assert said in str(stopped.value)


def test_an_adapter_is_looked_for_where_workers_have_one_and_do_not_round_it_away():
    def looks(peft="lora", **rollout):
        config: Any = SimpleNamespace(
            rollout=RolloutConfig(**rollout), peft=PeftConfig(type=peft), noise_injection=NoiseConfig(),
            training=SimpleNamespace(off_policy_mask_threshold=None),
        )  # fmt: skip
        none: Any = dict.fromkeys(("samplers", "metrics", "clock", "sampling", "itemsize"))
        return SamplerCheck.of(config, **none).sends_adapter

    assert looks(workers=1)
    assert not looks(workers=0)
    assert not looks(workers=1, peft="none")
    assert not looks(workers=1, quantization="int8")
    assert not looks(workers=1, merge_adapter=True)


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
