"""`perl.train` on emulated NPUs that are too small: one line with the phase and what to set, exit code 1."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.folders import write_sums
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.npu, pytest.mark.slow]

HOG = """
import os, torch
kept = []
def full_on_rank_1(completions, **kwargs):
    if os.environ.get("RANK") == "1":
        while True:  # until nothing fits
            kept.append(torch.empty(2**18, dtype=torch.uint8, device="npu"))
    return [float(i % 2) for i in range(len(completions))]
def alternating(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.fixture
def flags(tmp_path):
    """Flags of a run of a tiny model; the reward differs within a group."""
    (tmp_path / "hog.py").write_text(HOG)
    write_sums(tmp_path / "sums.jsonl", 64)
    settings = {
        "model.model_name_or_path": save_tiny(tmp_path / "model", scale=4.0),
        "dataset.dataset_name_or_path": tmp_path / "sums.jsonl",
        "training.output_dir": tmp_path / "run",
        "training.max_steps": 1,
        "training.num_generations": 4,
        "training.gradient_accumulation_steps": 2,
        "training.gradient_checkpointing": "false",
        "training.report_to": "none",
    }

    def make(reward="alternating", **changes):
        both = settings | {"reward.functions": json.dumps([f"{tmp_path / 'hog.py'}:{reward}"])}
        both |= {name.replace("__", "."): value for name, value in changes.items()}
        return [word for name, value in both.items() for word in (f"--config.{name}", str(value))]

    return make


def errors(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("phase", "megabytes", "settings", "first"),
    [
        (
            "in the rollout",  # 64 sequences, in micro-batches of 4
            6,
            {
                "training__per_device_train_batch_size": 4,
                "training__gradient_accumulation_steps": 16,
                "training__max_completion_length": 400,
            },
            "--config.training.steps_per_generation (now 16",
        ),
        (
            "in the update",
            24,
            {
                "training__per_device_train_batch_size": 64,
                "training__max_completion_length": 16,
                "rollout__max_batch_tokens": 2000,
            },
            "--config.training.per_device_train_batch_size (now 64",
        ),
        (
            "before the first step",
            1,
            {"training__per_device_train_batch_size": 4, "training__max_completion_length": 8},
            "--config.peft.r (now 16",
        ),
    ],
)
def test_one_line_names_the_phase_and_the_first_thing_to_set(run_npu, flags, phase, megabytes, settings, first):
    done = run_npu(
        [sys.executable, "-m", "perl.train", *flags(**settings)],
        devices=1,
        check=False,
        NPUEMU_MEMORY_BYTES=megabytes * 2**20,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert len(errors(done)) == 1
    sizes = r"\([\d.]+ \w*B asked for, 0\.\d\d GiB free\)"
    assert re.match(rf"error: out of memory {phase} on rank 0 {sizes}\. Set the first of these", errors(done)[0])
    assert first in errors(done)[0]
    assert "Traceback" not in done.stderr


def test_memory_is_measured_and_the_utilisation_of_an_unknown_chip_is_not(run_npu, flags, tmp_path):
    settings = {"training__per_device_train_batch_size": 4, "training__max_completion_length": 8}
    done = run_npu([sys.executable, "-m", "perl.train", *flags(**settings)], devices=1, NPUEMU_MEMORY_BYTES=64 * 2**20)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["perf/max_memory_allocated_gb"] < 64 / 1024
    reserved = row["perf/hbm_utilization"] * 32  # in segments of 2 MiB of 64
    assert reserved == pytest.approx(round(reserved), abs=1e-4)
    assert reserved >= 1
    assert "perf/mfu" not in row
    assert "perf/mfu is left out: no peak FLOP/s is known for Ascend-emulated" in done.stdout
    assert " GB" in next(line for line in done.stdout.splitlines() if line.startswith("progress: "))


def test_one_full_rank_speaks_and_the_other_does_not_hang(run_npu, flags):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launcher += ["--config_file", str(ROOT / "scripts" / "accelerate" / "npu_ddp.yaml"), "-m", "perl.train"]
    settings = {"training__per_device_train_batch_size": 2, "training__max_completion_length": 8}
    done = run_npu(
        [*launcher, *flags("full_on_rank_1", **settings)], check=False, timeout=200, NPUEMU_MEMORY_BYTES=32 * 2**20
    )
    assert done.returncode == 1
    (line,) = errors(done)
    assert line.startswith("error: out of memory in the reward on rank 1 (")
    assert line.endswith(
        "over the 2 devices with ZeRO-3: accelerate launch --config_file scripts/accelerate/npu_zero3.yaml"
        " --num_processes 2"
    )
