"""On the same completions PerlGRPOTrainer learns what TRL's GRPOTrainer learns: losses, gradient norms, adapter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from perl.training.loss import policy_loss
from perl.training.trainer import PerlGRPOTrainer
from tests.tiny import save_tiny
from tests.trainers import reward_tokens
from tests.training.injected import LONGEST, completion, learn

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("quick_collections")]

ROOT = Path(__file__).parents[2]
LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
VARIANTS = {
    "one micro-batch a step": {"gradient_accumulation_steps": 1},
    "groups cut by micro-batches": {"num_generations": 8, "gradient_accumulation_steps": 4},
    "a rollout for two updates": {"steps_per_generation": 4},
    "a rollout used twice": {"num_iterations": 2, "beta": 0.1},
    "sequence-level ratios": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "truncated completions masked": {"mask_truncated_completions": True},
    "scaled over the batch": {"scale_rewards": "batch"},
    "unscaled": {"scale_rewards": "none"},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2, "epsilon": 5.22e-4},
    "off-policy mask": {"off_policy_mask_threshold": 1e-5, "num_iterations": 2},
    "top entropies": {"top_entropy_quantile": 0.608},
    "entropy bonus": {"entropy_coef": 0.1},
    "bias-corrected KL": {"beta": 0.1, "use_bias_correction_kl": True, "num_iterations": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "truncated completions masked, with KL": {"mask_truncated_completions": True, "beta": 0.1, "loss_type": "dr_grpo"},
    "micro-batches by tokens": {"max_tokens_per_microbatch": 150, **ONE_ROW, "loss_type": "grpo"},
    "micro-batches by tokens, cut": {"max_tokens_per_microbatch": 60, **ONE_ROW, "loss_type": "dr_grpo", "beta": 0.1},
    "micro-batches by too few tokens": {"max_tokens_per_microbatch": 20, "gradient_accumulation_steps": 2},
    "micro-batches by tokens, rows masked": {
        "max_tokens_per_microbatch": 100,
        **ONE_ROW,
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "mask_truncated_completions": True,
    },
    "groups without gradient": {"rewards": "ties", "loss_type": "grpo", "max_steps": 4},
    "groups without gradient, by tokens": {"rewards": "ties", "loss_type": "dapo", "max_steps": 4},
}


def assert_equal(**settings):
    theirs, mine = learn(GRPOTrainer, **settings), learn(PerlGRPOTrainer, **settings)
    assert len(theirs.losses) == len(mine.losses) > 0
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6, abs=1e-6)
    assert mine.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    assert max(theirs.grad_norms) > 0
    assert mine.adapter.keys() == theirs.adapter.keys()
    for name, tensor in theirs.adapter.items():
        assert (mine.adapter[name] - tensor).abs().max() <= 1e-6, name
        if "lora_B" in name:
            assert tensor.abs().max() > 1e-6, name  # has moved


def test_thirty_steps():
    assert_equal(max_steps=30, gradient_accumulation_steps=4)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_with_and_without_a_reference(loss_type, beta):
    assert_equal(loss_type=loss_type, beta=beta)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_that_shapes_an_update(variant):
    assert_equal(**VARIANTS[variant])


ALL_WEIGHTS = {
    "as it is": {},
    "with a reference, in several micro-batches": {"beta": 0.1, "gradient_accumulation_steps": 4, "num_iterations": 2},
}


@pytest.mark.parametrize("variant", ALL_WEIGHTS)
def test_all_weights_without_an_adapter(variant, tmp_path):
    """The bias of the keys has no gradient but rounding, which AdamW makes a whole step of: softmax ignores it."""
    folder = save_tiny(tmp_path, scale=4.0)
    settings = ALL_WEIGHTS[variant] | {"adapter": "none"}
    theirs, mine = (
        learn(kind, model=AutoModelForCausalLM.from_pretrained(folder).train(), **settings)
        for kind in (GRPOTrainer, PerlGRPOTrainer)
    )
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6, abs=1e-6)
    assert mine.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert mine.adapter.keys() == theirs.adapter.keys() == before.keys()
    for name, tensor in theirs.adapter.items():
        assert (tensor - before[name]).abs().max() > 1e-6, name
        if not name.endswith("k_proj.bias"):
            assert (mine.adapter[name] - tensor).abs().max() <= 1e-6, name


def tied(inputs):
    """Of a rollout's rows, those whose group has equal rewards (tests.training.injected.reward_with_ties)."""
    return torch.tensor([row["prompt"][-1]["content"].count("+") >= 2 for row in inputs])


class ExactZeros(GRPOTrainer):
    """TRL's, with the advantages of equal rewards set to the 0 that they are but for rounding."""

    rounding: ClassVar[list[float]] = []
    tied_rows: ClassVar[list[int]] = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        of_tied = output["advantages"][tied(inputs)]
        self.tied_rows.append(len(of_tied))
        self.rounding.append(of_tied.abs().max().item() if len(of_tied) else 0.0)
        output["advantages"][tied(inputs)] = 0.0
        return output


class Counting(PerlGRPOTrainer):
    """Ours, counting the rows that the loss computes, none of which is of a group of equal rewards."""

    computed = 0

    def compute_loss(self, model, inputs, **kwargs):
        if inputs.batch is not None and not inputs.padding:
            assert not tied([row.row for row in inputs.batch.rows]).any()
            Counting.computed += len(inputs.batch.rows)
        return super().compute_loss(model, inputs, **kwargs)


def test_groups_of_eight_equal_weighted_sums_are_left_out():
    """1.0 + 0.2 for every completion of a group: their mean is not 1.2 in floating point, and TRL learns from that."""
    settings = {"rewards": "ties of a sum", "reward_weights": [1.0, 0.2], "num_generations": 8, "max_steps": 4}
    settings |= {"gradient_accumulation_steps": 4, "loss_type": "grpo"}
    theirs, mine, rounded = (learn(kind, **settings) for kind in (ExactZeros, Counting, GRPOTrainer))
    assert max(ExactZeros.rounding) > 1e-4
    with_gradient = 4 * 16 - sum(int(rows) for rows in ExactZeros.tied_rows)
    assert 0 < Counting.computed == with_gradient < 4 * 16
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6, abs=1e-6)
    assert mine.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    apart = max((mine.adapter[n] - tensor).abs().max().item() for n, tensor in theirs.adapter.items())
    from_rounded = max((mine.adapter[n] - tensor).abs().max().item() for n, tensor in rounded.adapter.items())
    assert apart <= 1e-6
    assert from_rounded > 1e-5


@pytest.mark.slow
def test_two_ranks(tmp_path):
    settings = [
        {"loss_type": "dapo", "gradient_accumulation_steps": 4},
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "dr_grpo", "num_generations": 8},  # each rank holds half of a group
        {"loss_type": "dapo", "max_tokens_per_microbatch": 80, **ONE_ROW},
        {"loss_type": "grpo", "max_tokens_per_microbatch": 80, "rewards": "ties", "max_steps": 4, **ONE_ROW},
        {"loss_type": "grpo", "rewards": "ties", "max_steps": 6},  # at times one rank alone has rows to compute
    ]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    program = [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.training.injected"]
    done = subprocess.run(
        [*launcher, *program, str(tmp_path / "results.json"), json.dumps(settings)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(settings)
    for result in results:
        theirs, mine = result["losses"]
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
        assert result["grad_norms"][1] == pytest.approx(result["grad_norms"][0], rel=1e-4)
        assert result["adapter"] <= 1e-6 < result["moved"]


def test_no_entropy_stands_at_the_quantile(monkeypatch):
    """Rounding, which differs between processors, would choose whether its token is trained on."""
    choose, distances = GRPOTrainer.get_high_entropy_mask, []

    def measured(self, entropies, mask, threshold):
        counted = entropies[mask.bool()]
        distances.append((counted - counted.quantile(threshold)).abs().min().item())
        return choose(self, entropies, mask, threshold)

    monkeypatch.setattr(GRPOTrainer, "get_high_entropy_mask", measured)
    learn(GRPOTrainer, **VARIANTS["top entropies"])
    assert min(distances) > 1e-4


def test_no_ratio_stands_at_a_bound_of_the_clipping(monkeypatch):
    """Rounding would choose whether its token has a gradient."""
    variant, ratios = VARIANTS["two-sided clipping"], []

    def measured(inputs, settings, update):
        ratios.append((inputs.policy - inputs.old).detach().exp()[inputs.mask])
        return policy_loss(inputs, settings, update)

    monkeypatch.setattr("perl.training.step.policy_loss", measured)
    learn(PerlGRPOTrainer, **variant)
    difference = torch.cat(ratios) - 1
    assert (difference < -variant["epsilon"]).any()
    assert (difference > variant["epsilon"]).any()
    assert (difference.abs() - variant["epsilon"]).abs().min() > 5e-6  # rounding is below 5e-7


def test_the_injected_groups_differ_in_reward_and_length():
    """Else the comparisons above would show less than they say."""
    rows = [completion(1, place) for place in range(32)]
    assert any(len(row) == LONGEST for row in rows)
    assert min(map(len, rows)) < 4
    for rollout in range(1, 31):
        for group in range(8):
            rewards = reward_tokens([completion(rollout, 4 * group + i) for i in range(4)])
            assert max(rewards) - min(rewards) > 0.01
