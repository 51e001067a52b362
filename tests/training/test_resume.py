"""A resumed run is the run that was never interrupted: adapter, metrics and prompts, with every setting that keeps
something from step to step."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perl.config.schema import NoiseConfig, PeftConfig
from perl.runs.callbacks import MetricsWriter
from tests.trainers import SUMS, make_trainer, reward_tokens

ROOT = Path(__file__).parents[2]
STEPS, CUT = 4, 3
"""Of two steps an epoch and four a log: the cut lies in the second epoch, between two logs, and, where a rollout serves
two updates, between these."""
NOISE = {"enabled": True, "seed": 3, "sigma_start": 0.5, "sigma_end": 0.1, "num_stages": 3}
TARGET_KL = NOISE | {"schedule": "target_kl", "target_kl_start": 0.05, "target_kl_end": 0.01, "sigma_start": 0.1}
DAPO = {"name": "dapo", "dynamic_sampling": True, "max_resample_factor": 3.0}
WINDOW = {"steps_per_generation": 4}
SETTINGS = {
    "plain": {"engine": "generate"},
    "steps_per_generation": WINDOW,
    "num_iterations": {"num_iterations": 2, "prompts": SUMS[:2]},
    "noise": {"noise": NOISE | {"relative": True}, **WINDOW},
    "noise on trained norms": {"adapter": "none", "noise": NOISE | {"relative": True}, "learning_rate": 0.1},
    "target_kl": {"noise": TARGET_KL, **WINDOW},
    "old_logps noisy": {"noise": NOISE | {"old_logps": "noisy"}, **WINDOW},
    "quantised": {"noise": NOISE, "rollout": {"quantization": "int8_w8a8"}, **WINDOW},
    "dropout": {"peft": PeftConfig(r=4, lora_alpha=8, lora_dropout=0.3)},
    "dapo": {"algorithm": DAPO, **WINDOW},
    "ppo": {"algorithm": {"name": "ppo"}, "engine": "fast", "num_generations": 1, "prompts": SUMS, **WINDOW},
    "kl in the reward": {"algorithm": {"kl_in_reward": 0.1, "kl_in_reward_target": 0.01, "kl_in_reward_horizon": 20}},
}
TIMES = ("timing/", "perf/", "time", "step_time", "train_runtime", "train_samples_per", "train_steps_per")


def rows(folder):
    """metrics.jsonl without what is a time."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in found]


def run(folder, checkpoint=None, **settings):
    """Train in `folder`; the trained weights, and which prompts each rollout was for."""
    prompts = []

    def reward(prompts_seen=prompts, **columns):
        step = columns["trainer_state"].global_step
        prompts_seen.append((step, [prompt[-1]["content"] for prompt in columns["prompts"]]))
        columns["log_metric"]("rewarded", step)
        columns["log_extra"]("question", [{prompt[-1]["content"]} for prompt in columns["prompts"]])  # of any type
        return reward_tokens(columns["completion_ids"])

    fixed = {"engine": "fast", "max_steps": STEPS, "prompts": SUMS[:4], "logging_steps": STEPS}
    fixed |= {"save_strategy": "steps", "save_steps": CUT}
    fixed |= {"per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1"))}  # of the same batches
    noise = settings.pop("noise", None)
    trainer = make_trainer(
        folder,
        noise=noise and NoiseConfig(**noise),
        rewards=[reward],
        callbacks=[MetricsWriter(folder / "metrics.jsonl")],
        **(fixed | settings),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    if trainer.step.critic is not None:
        weights |= {f"critic {name}": tensor for name, tensor in trainer.step.critic.weights.state_dict().items()}
    return weights, prompts


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, name):
    whole, asked = run(tmp_path / "whole", **SETTINGS[name])
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    torch.manual_seed(123)  # whatever state a process is in must not matter
    resumed, rest = run(tmp_path / "cut", str(tmp_path / "cut" / f"checkpoint-{CUT}"), **SETTINGS[name])
    assert rest == asked[len(asked) - len(rest) :]
    assert len(rest) < len(asked)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[parameter]) for parameter, tensor in whole.items())
    expected = rows(tmp_path / "whole")
    assert [row["step"] for row in expected] == [STEPS, STEPS]  # the log, and the summary
    assert rows(tmp_path / "cut") == expected


@pytest.mark.parametrize(("accumulation", "per_generation", "prompts"), [(4, 2, 14), (2, 3, 9)])
def test_so_it_is_behind_an_epochs_last_step_of_fewer_micro_batches(tmp_path, accumulation, per_generation, prompts):
    """Of 4, 4, 4 and 2 micro-batches, a batch being two; of 2, 2, 2, 2 and 1, a batch being three. A checkpoint there
    held the state of an older step, or an AssertionError ended the training."""
    short = -(-prompts // accumulation)
    settings = {"gradient_accumulation_steps": accumulation, "steps_per_generation": per_generation}
    settings |= {"num_generations": 4, "prompts": SUMS[:prompts], "max_steps": short + 3, "logging_steps": 1}
    settings |= {"save_steps": 1}
    whole, asked = run(tmp_path / "whole", **settings)
    for cut in (short, short + 1):
        again, further = run(tmp_path / f"again_{cut}", tmp_path / f"whole/checkpoint-{cut}", **settings)
        assert further == [each for each in asked if each[0] >= cut]
        assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.slow
def test_so_it_is_with_two_processes_on_a_cpu(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    program = [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.training.resume_worker", str(tmp_path)]
    done = subprocess.run(
        [*launcher, *program, *SETTINGS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == dict.fromkeys(SETTINGS, [True] * 3)
