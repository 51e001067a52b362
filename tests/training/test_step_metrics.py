"""What a step measures, by hand: means and extremes, the difference between sampler and trainer, warnings."""

import math
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from perl.base.errors import RunError, say_once
from perl.records import Trajectory, Weights
from perl.training.loss import LossInputs, LossOutputs, Measured
from perl.training.metrics import Metrics
from perl.training.passes import require_same_policy
from perl.training.processes import Processes
from perl.training.step import Step
from tests.training.compared import compared


def processes():
    return Processes(
        SimpleNamespace(process_index=0, num_processes=1, gather=lambda t: t, device="cpu", reduce=lambda t, **_: t)
    )


def metrics(correction="none"):
    say_once.cache_clear()
    return Metrics(processes(), defaultdict(list), correction)


def mask_of(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_means_and_extremes_over_what_counts():
    made = metrics()
    made.mean("a", torch.tensor([[1.0, 5.0], [3.0, 9.0]]), mask_of([1, 1], [1, 0]))
    made.mean("a", torch.tensor([[7.0]]), mask_of([1]))
    made.mean("nothing", torch.tensor([[7.0]]), mask_of([0]))
    made.extreme("high", torch.tensor([[1.0, 8.0]]), mask_of([1, 0]))
    made.extreme("low", torch.tensor([[1.0, 8.0]]), mask_of([0, 1]), lowest=True)
    made.extreme("low", torch.tensor([[9.0]]), mask_of([1]), lowest=True)
    made.flush()
    assert made.logged == {"a": [4.0], "high": [1.0], "low": [8.0]}
    made.flush()
    assert made.logged["a"] == [4.0]  # nothing was added


def test_difference_and_kl_by_hand():
    made = metrics()
    made.add_sampler(torch.tensor([[-0.5, -1.0]]), torch.tensor([[0.0, -1.0]]), mask_of([1, 1]), noisy=False)
    made.add_sampler(torch.tensor([[-1.5, math.nan]]), torch.tensor([[-2.0, 7.0]]), mask_of([1, 1]), noisy=False)
    made.add_sampler(torch.tensor([[-9.0]]), torch.tensor([[-2.0]]), mask_of([0]), noisy=False)
    made.flush()
    k3 = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.5) - 1 + 0.5)
    assert made.logged["rollout/logp_mismatch"] == pytest.approx([1 / 3])
    assert made.logged["rollout/logp_kl"] == pytest.approx([k3 / 3])


def test_the_kl_divergence_of_the_noise_is_taken_by_itself():
    made = metrics()
    made.kl("aqn/kl", torch.tensor([[-0.5]]), torch.tensor([[0.0]]), mask_of([1]))
    assert made.take_mean("aqn/kl") == pytest.approx(math.exp(0.5) - 1.5)
    assert made.logged["aqn/kl"] == pytest.approx([math.exp(0.5) - 1.5])
    assert made.take_mean("aqn/kl") is None


def test_what_a_critic_said_and_is_to_learn_by_hand():
    made = metrics()
    values, returns = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[1.0, 3.0, 9.0]])
    made.add_returns(values, returns, mask_of([1, 1, 0]))
    made.add_returns(values, values, mask_of([0, 0, 0]))
    assert made.logged == {
        "critic/values_mean": [0.5],
        "critic/values_max": [1.0],
        "critic/values_min": [0.0],
        "critic/returns_mean": [2.0],
        "critic/returns_max": [3.0],
        "critic/returns_min": [1.0],
        "critic/explained_variance": [0.75],  # errors 1 and 2, returns 1 and 3
    }
    made.add_returns(values, torch.ones(1, 3), mask_of([1, 1, 1]))
    made.add_returns(torch.arange(64.0)[None] / 100, torch.full((1, 64), 0.9), torch.ones(1, 64, dtype=torch.bool))
    assert len(made.logged["critic/explained_variance"]) == 1  # equal returns leave nothing to explain, rounded or not


def test_the_drift_of_the_policy_is_verls_ppo_kl():
    """Tokens 1 and 2 of the first row, and the only one of the second: 0.5, -0.25 and 30, which is cut at 20."""
    made, mask = metrics(), mask_of([1, 1, 0], [1, 0, 0])
    policy = torch.tensor([[-1.5, -1.0, -9.0], [-31.0, 0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.25, 0.0], [-1.0, 5.0, 5.0]])
    inputs = LossInputs(policy=policy, old=old, mask=mask, advantages=torch.ones(2, 1))
    made.add_loss(inputs, LossOutputs(torch.zeros(()), {}))
    made.flush()
    assert made.logged["approx_kl"] == pytest.approx([(0.5 - 0.25 + 20) / 3])


def test_another_policy_is_refused_and_rounding_is_not():
    require_same_policy(None, 1e-3)
    require_same_policy(1e-3, 1e-3)
    for apart in (2e-3, math.nan):
        with pytest.raises(RunError, match="the sampler does not run the policy that is trained"):
            require_same_policy(apart, 1e-3)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_whether_there_are_log_probabilities_is_decided_by_all_processes(elsewhere):
    """This process has none of the sampler's; where another has, both compare them, and both losses are corrected."""
    batches, forwards = [], []

    def logps(policy, rows, width):
        forwards.append(len(rows))
        return torch.full((len(rows), width), -1.0)

    def compare(batch):
        batches.append(batch)
        comparison.compare(batch)

    def clock(name):
        if name == "old_logps":
            raise StopIteration
        return nullcontext()

    row = Trajectory(
        row={}, position=0, sample=0, prompt_ids=(1,), token_ids=[2, 3], sampled=[True, True], finish="stop"
    )
    processes = SimpleNamespace(
        largest=lambda numbers: [max(n, int(elsewhere)) for n in numbers],
        added_up=lambda numbers: [0.0, 2.0, 0.0] if len(numbers) == 3 else [2.0],  # 2 tokens, no nats apart
        gathered=lambda things: things,
        device=torch.device("cpu"),
    )
    comparison = compared(
        clock=clock,
        metrics=SimpleNamespace(),
        engine=SimpleNamespace(not_comparable=lambda sampling: None, itemsize=4, remote=False),
        processes=processes,
        passes=SimpleNamespace(logps=logps),
    )
    step = SimpleNamespace(
        comparison=SimpleNamespace(compare=compare),
        collector=SimpleNamespace(sampling=None, collect=lambda weights, left: ([row], {})),
        processes=processes,
        args=SimpleNamespace(bf16=False, fp16=False, mask_truncated_completions=False),
        clock=clock,
        _publish=lambda step: Weights(version=step),
        _finite_rewards=lambda rows, step: None,
        weights=Weights(version=-1),
    )
    with pytest.raises(StopIteration):
        Step.batch(step, 0, 1)
    assert (batches[0].sampler is not None) is elsewhere
    assert forwards == ([1] if elsewhere else [])
    assert comparison.tolerance is not None
    assert math.isfinite(comparison.tolerance) is elsewhere


def add_apart(made, apart, tolerance=1e-3, noisy=False):
    made.add_sampler(torch.zeros(1, 1), torch.full((1, 1), apart), mask_of([1]), noisy)
    made.flush(tolerance)


def test_a_difference_that_grows_is_said_once(caplog):
    made = metrics()
    add_apart(made, 5.0, tolerance=None)  # nothing was compared at the start
    add_apart(made, 1e-4)
    add_apart(made, 0.3, noisy=True)  # one clean rollout after noisy ones is no reason to compare all by rounding
    assert caplog.messages == []
    for apart in (0.25, 0.5):
        add_apart(made, apart)
    (line,) = caplog.messages
    assert "more than 0.001 nats from the trainer's" in line


def test_ratios_that_take_most_of_the_gradient_are_said_once(caplog):
    inputs = LossInputs(policy=torch.zeros(1, 1), old=torch.zeros(1, 1), mask=mask_of([1]), advantages=torch.ones(1, 1))
    for mode, says in (
        ("sequence_mask", "write --config.rollout.importance_correction token"),
        ("token", "sampler and trainer are far apart"),
    ):
        made = metrics(mode)
        for mean in (1.0, 0.6, 0.4, 0.4):
            ratio = Measured(torch.full((1, 1), mean), mask_of([1]))
            made.add_loss(inputs, LossOutputs(torch.zeros(()), {"sampling/importance_sampling_ratio/mean": ratio}))
            made.flush()
        assert made.logged["sampling/importance_sampling_ratio/min"] == pytest.approx([1.0, 0.6, 0.4, 0.4])
        assert [says in message for message in caplog.messages] == [True]
        caplog.clear()


def test_what_was_added_goes_on_in_another_process():
    first, second = metrics(), metrics()
    first.mean("a", torch.tensor([[1.0]]), mask_of([1]))
    first.noisy = True
    second.restore(first.state())
    second.mean("a", torch.tensor([[3.0]]), mask_of([1]))
    assert second.noisy
    second.flush()
    assert second.logged["a"] == [2.0]
