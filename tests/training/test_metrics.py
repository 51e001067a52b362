"""What is measured of a step: FLOPs by hand, seconds of a clock that is set, averages over steps and ranks."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, TrainingArguments
from transformers.trainer_callback import TrainerState

from perl import device
from perl.runs.callbacks import MetricsWriter, ProgressLine
from perl.runs.metrics import (
    PHASES,
    ModelSize,
    RankStep,
    StepClock,
    forward_flops,
    model_size,
    sequences,
    step_metrics,
    update_flops,
)
from perl.training.metrics import rollout_metrics
from perl.training.processes import Processes
from tests.folders import metrics
from tests.tiny import tiny_model
from tests.trainers import make_trainer

TINY = ModelSize(base=2 * (4 * 64 * 64 + 3 * 64 * 64) + 64 * 30, adapter=2 * 7 * (64 * 4 + 4 * 64), attention=2 * 64)
"""tests/tiny.py: two layers of q, k, v, o and gate, up, down, all 64 x 64, a head of 64 x 30 words; LoRA of rank 4."""


def lora_model():
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))


def test_the_size_of_the_tiny_model():
    model = lora_model()
    assert model_size(model) == TINY == ModelSize(base=59264, adapter=7168, attention=128)


def test_a_mixture_of_experts_is_not_counted():
    model = lora_model()
    model.config = MixtralConfig(num_local_experts=8)
    assert model_size(model) is None


def test_flops_by_hand():
    size = ModelSize(base=1000, adapter=10, attention=6)
    # lengths 3 and 2: 5 tokens; pairs 1+2+3 and 1+2 = 9
    assert forward_flops(size, sequences([3, 2])) == 2 * 1010 * 5 + 4 * 6 * 9
    assert update_flops(size, sequences([3, 2])) == (4 * 1000 + 6 * 10) * 5 + 12 * 6 * 9


def test_flops_are_those_that_torch_counts():
    """torch counts the matrix products that run: the masked half of attention too, and the 512 FLOPs of the rotary
    angles, but no gradient of what enters the first layer's q, k, v, as the embedding is frozen."""
    from torch.utils.flop_counter import FlopCounterMode

    model, n = lora_model(), 16
    model.base_model.model.set_attn_implementation("eager")  # the counter does not know the CPU's fused kernel
    ids = torch.randint(5, 20, (1, n))
    masked = 4 * TINY.attention * (n * n - n * (n + 1) // 2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    assert counter.get_total_flops() == forward_flops(TINY, sequences([n])) + masked + 512

    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    first_inputs = 3 * 2 * n * (64 * 64 + 64 * 4)
    assert counter.get_total_flops() == update_flops(TINY, sequences([n])) + 3 * masked + 512 - first_inputs


def one_rank(**changes):
    values = {"step": 10.0, "rollout": 6.0, "reward": 1.0, "advantages": 0.5, "old_logps": 0.0, "update": 2.0}
    values |= {"tokens": 1000.0, "flops": 5e12, "memory_gb": 20.0, "hbm_utilization": 0.5}
    return RankStep(**(values | changes))


def test_several_ranks_the_slowest_the_fullest_and_sums():
    other = one_rank(step=8.0, rollout=3.0, update=4.0, tokens=600.0, flops=3e12, memory_gb=30.0, hbm_utilization=0.75)
    assert step_metrics([one_rank(), other], peak_flops=1e12, has_memory=True) == {
        "timing/rollout": 6.0,
        "timing/reward": 1.0,
        "timing/advantages": 0.5,
        "timing/old_logps": 0.0,
        "timing/update": 4.0,
        "timing/step": 10.0,
        "perf/throughput": 1600 / 10 / 2,
        "perf/mfu": 8e12 / 10 / 2e12,
        "perf/max_memory_allocated_gb": 30.0,
        "perf/hbm_utilization": 0.75,
    }


def test_what_is_not_known_is_left_out():
    unknown_device = step_metrics([one_rank()], peak_flops=None, has_memory=False)
    assert not {"perf/mfu", "perf/max_memory_allocated_gb", "perf/hbm_utilization"} & unknown_device.keys()
    assert "perf/mfu" not in step_metrics([one_rank(flops=0.0)], peak_flops=1e12, has_memory=True)
    assert device.PEAK_FLOPS.get("Ascend-emulated") is None
    assert device.PEAK_FLOPS.get("cpu") is None
    assert device.PEAK_FLOPS["Ascend910B3"] == pytest.approx(294.9e12, rel=1e-3)


def statistics(prompts, tokens, advantages, rewards):
    """Of one rollout; the lengths of prompts, how many tokens of each completion are trained on."""
    rows = [SimpleNamespace(prompt_ids=[0] * n, sampled=[True] * 4, finish="stop", failure=None) for n in prompts]
    mask = torch.arange(4) < torch.tensor(tokens)[:, None]
    batch = SimpleNamespace(rows=rows, mask=mask, advantages=torch.tensor(advantages))
    alone = SimpleNamespace(num_processes=1, gather=lambda t: t, device="cpu")
    rewards = torch.tensor(rewards)[:, None]
    return rollout_metrics(batch, rewards, ["digits"], torch.ones(1), Processes(alone))


BY_HAND = {
    "prompts/mean_length": 5.0,
    "prompts/max_length": 7.0,
    "prompts/min_length": 2.0,
    "advantages/mean": (-1 + 3 + 4 * 0.5) / 8,
    "advantages/std": ((1 + 3 + 4 * 0.25) / 8 - 0.5**2) ** 0.5,
    "advantages/max": 1.0,
    "advantages/min": -1.0,
    "reward/max": 2.0,
    "reward/min": 0.0,
}
"""Each advantage counts once a token, as in verl, and not at all where its completion has none."""


def test_statistics_of_a_rollout_by_hand():
    found = statistics([5, 7, 6, 2], [1, 3, 0, 4], [[-1.0], [1.0], [9.0], [0.5]], [0.0, 1.0, 2.0, math.nan])
    assert {name: found[name] for name in BY_HAND} == pytest.approx(BY_HAND)


def test_advantages_of_tokens_count_once_each():
    found = statistics([5, 7], [1, 3], [[-1.0, 9.0, 9.0, 9.0], [0.5, 1.0, 1.5, 9.0]], [0.0, 0.0])
    assert (found["advantages/max"], found["advantages/min"], found["advantages/mean"]) == (1.5, -1.0, 0.5)
    assert found["advantages/std"] == pytest.approx(((1 + 0.25 + 1 + 2.25) / 4 - 0.25) ** 0.5)


def test_extremes_of_advantages_that_are_not_finite_are_no_numbers():
    found = statistics([5, 7], [1, 3], [[math.nan], [math.nan]], [math.nan, math.nan])
    assert all(math.isnan(found[f"advantages/{name}"]) for name in ("max", "min", "mean"))


def test_a_rollout_without_a_token_or_a_reward_has_no_such_metric():
    found = statistics([5], [0], [[1.0]], [math.nan])
    assert not {"advantages/mean", "advantages/max", "reward/max", "reward/min"} & found.keys()
    assert {name: found[f"prompts/{name}_length"] for name in ("mean", "max", "min")} == dict.fromkeys(
        ("mean", "max", "min"), 5.0
    )


def test_a_run_logs_the_statistics_of_its_own_rollouts(tmp_path):
    """Rewards 0, 1, 2, 3 in each group: the advantages are those of four numbers in a row."""
    kept = []

    def places(completions, completion_ids, prompts, **_):
        kept.append((prompts, completion_ids))
        return [float(place % 4) for place in range(len(completions))]

    trainer = make_trainer(tmp_path, rewards=(places,), num_iterations=2, max_steps=2, learning_rate=0.1)
    trainer.train()
    first, second = [row for row in trainer.state.log_history if "reward" in row or "approx_kl" in row][:2]
    ((prompts, completion_ids),) = kept  # one rollout for both steps
    lengths = [
        len(trainer.processing_class.apply_chat_template(p, add_generation_prompt=True)["input_ids"]) for p in prompts
    ]
    assert first["prompts/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert (first["prompts/min_length"], first["prompts/max_length"]) == (min(lengths), max(lengths))
    assert (first["reward/min"], first["reward/max"]) == (0.0, 3.0)
    spread = (5 / 3) ** 0.5 + 1e-4
    advantages = [(place % 4 - 1.5) / spread for place, ids in enumerate(completion_ids) for _ in ids]
    assert first["advantages/mean"] == pytest.approx(sum(advantages) / len(advantages), abs=1e-6)
    assert first["advantages/max"] == pytest.approx(1.5 / spread)
    assert first["advantages/min"] == pytest.approx(-1.5 / spread)
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-6)  # the policy that sampled
    assert second["approx_kl"] != pytest.approx(0.0, abs=1e-3)
    assert not {"prompts/mean_length", "advantages/mean", "reward/max"} & second.keys()


class Hands:
    """A clock whose hands are set, and whether the device was waited for before each reading."""

    def __init__(self):
        self.time, self.waited = 0.0, False

    def synchronize(self):
        self.waited = True

    def now(self):
        assert self.waited
        self.waited = False
        return self.time


def step_of(clock, hands, *work, extra=0.0):
    """Runs work ("rollout", 3.0) in the preparation, 1 s of preparation around it, then `extra` seconds of update."""
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
    clock.on_step_begin(args, TrainerState(), None)
    with clock("prepare"):
        for phase, seconds in work:
            with clock(phase):
                hands.time += seconds
        hands.time += 1.0
    hands.time += extra
    clock.on_step_end(args, TrainerState(), None)


def make_clock(size=None, workers=0):
    hands, found = Hands(), []
    clock = StepClock(size, lambda t: t, found.append, workers, hands.now, hands.synchronize)
    return clock, hands, found


def test_seconds_go_to_the_innermost_phase_and_are_summed_over_micro_batches():
    clock, hands, found = make_clock()
    step_of(clock, hands, ("rollout", 3.0), ("reward", 0.5), ("rollout", 2.0), ("old_logps", 0.25), extra=4.0)
    hands.time += 100.0  # saving, logging
    step_of(clock, hands, ("rollout", 1.0), extra=2.0)
    timing = [
        {name: row[f"timing/{name}"] for name in ("rollout", "reward", "old_logps", "update", "step")} for row in found
    ]
    assert timing[0] == {"rollout": 5.0, "reward": 0.5, "old_logps": 0.25, "update": 4.0, "step": 10.75}
    assert timing[1] == {"rollout": 1.0, "reward": 0.0, "old_logps": 0.0, "update": 2.0, "step": 4.0}


def test_memory_is_in_2_to_the_30_bytes_as_verls(monkeypatch):
    monkeypatch.setattr(device, "peak_memory", lambda: device.Memory(3 * 2**30, 4 * 2**30, 8 * 2**30))
    clock, hands, found = make_clock()
    step_of(clock, hands, extra=1.0)
    assert (found[0]["perf/max_memory_allocated_gb"], found[0]["perf/hbm_utilization"]) == (3.0, 0.5)


@pytest.mark.parametrize(("workers", "a_device"), [(0, 15.0), (2, 5.0)])
def test_tokens_are_those_that_are_trained_on(workers, a_device):
    """30 in 2 s, over the device that trains and the workers'."""
    clock, hands, found = make_clock(TINY, workers)
    clock.count_trained(50)  # of no step
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
    clock.on_step_begin(args, TrainerState(), None)
    clock.count_forward(sequences([10, 20]))
    clock.count_trained(30)
    hands.time += 2.0
    clock.on_step_end(args, TrainerState(), None)
    assert found[0]["perf/throughput"] == a_device


def test_the_phase_that_failed_is_the_innermost():
    clock, _, _ = make_clock()
    assert clock.phase == "setup"
    with pytest.raises(RuntimeError), clock("prepare"), clock("rollout"):
        raise RuntimeError
    assert clock.failed_in == "rollout"
    assert clock.phase == "setup"


def test_a_run_has_the_metrics_in_its_file_and_on_its_line(tmp_path, capsys):
    """Four steps, logged every second one: the mean of two sums, each over two micro-batches."""
    trainer = make_trainer(
        tmp_path,
        max_steps=4,
        logging_steps=2,
        beta=0.1,
        callbacks=[MetricsWriter(tmp_path / "metrics.jsonl"), ProgressLine()],
    )
    steps = []
    clock, counted = trainer.clock, []
    report, forward, update, trained = clock.report, clock.count_forward, clock.count_update, clock.count_trained
    clock.report = lambda metrics: steps.append(metrics) or report(metrics)
    clock.count_forward = lambda work: counted.append(("forward", work)) or forward(work)
    clock.count_update = lambda work: counted.append(("update", work)) or update(work)
    clock.count_trained = lambda tokens: counted.append(("trained", tokens)) or trained(tokens)
    begun = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - begun

    logged = [row for row in metrics(tmp_path) if "reward" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert len(steps) == 4
    for name in (
        "timing/rollout",
        "timing/reward",
        "timing/advantages",
        "timing/old_logps",
        "timing/update",
        "timing/step",
        "perf/throughput",
    ):
        assert all(step[name] > 0 for step in steps), name
        assert logged[0][name] == pytest.approx((steps[0][name] + steps[1][name]) / 2), name
        assert logged[1][name] == pytest.approx((steps[2][name] + steps[3][name]) / 2), name
    for step in steps:
        parts = sum(step[f"timing/{name}"] for name in PHASES)
        assert parts <= step["timing/step"] * (1 + 1e-5)
    assert sum(step["timing/step"] for step in steps) < wall
    assert not {"perf/mfu", "perf/hbm_utilization"} & logged[0].keys()

    # A step: 8 sequences are sampled, go through the reference policy together, and are trained on in two
    # micro-batches; what goes through the model packed is less than what is trained on. (In the first step the
    # sampler's log-probabilities are compared besides, in one forward.)
    last = counted[-6:]
    assert len(counted) == 1 + 4 * 6
    assert [kind for kind, _ in last] == ["forward", "forward", "trained", "update", "trained", "update"]
    sampled, together, half, one, other, two = (what for _, what in last)
    assert sampled.tokens == half + other
    assert together.tokens == one.tokens + two.tokens < half + other
    assert steps[-1]["perf/throughput"] * steps[-1]["timing/step"] == pytest.approx(half + other, rel=1e-5)

    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("progress: step 2/4"))
    assert " tok/s" in line
    assert "GB" not in line  # a CPU


def test_the_line_stays_one_line_of_a_terminal(capsys):
    state = TrainerState(global_step=800, max_steps=1000, is_world_process_zero=True)
    line = ProgressLine()
    line.first_step, line.started = 0, time.perf_counter() - 800 * 45.3
    logs = {"reward": -0.512, "loss": -0.0012, "completions/mean_length": 812.3, "aqn/sigma": 0.012345}
    logs |= {"aqn/sigma_relative": 0.2172}
    logs |= {"perf/throughput": 1234.5, "perf/max_memory_allocated_gb": 61.23}
    line.on_log(None, state, None, logs)
    shown = capsys.readouterr().out
    assert "sigma 0.0123  (22%)  1234 tok/s  61.2 GB" in shown
    assert shown.count("\n") == 1
    assert len(shown.removeprefix("progress: ").rstrip()) <= 120
