"""A real training of two steps that a test looks at afterwards: perl.train on a tiny model and eight sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.folders import write_sums
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 4,
    "training.num_generations": 4,
    "training.max_completion_length": 8,
    "training.learning_rate": 0.01,
    "training.logging_steps": 1,
    "training.gradient_checkpointing": "false",
    "noise_injection.enabled": "true",
    "peft.r": 4,
}
"""Flags of two steps of one group of four short completions."""


def small_run(folder: Path, name: str = "run", *words: str, **variables: str) -> Path:
    """Train with `words` as further flags in `folder`, which holds model/, sums.jsonl, digits.py and the run `name`;
    return the run's folder."""
    settings = write_inputs(folder) | {"training.output_dir": str(folder / name)}
    flags = [word for field, value in settings.items() for word in (f"--config.{field}", value)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "TENSORBOARD"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, "-m", "perl.train", *flags, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    return folder / name


def write_inputs(folder: Path) -> dict[str, str]:
    """Make model/, sums.jsonl and digits.py in `folder`, where they are not there; the flags that train on them."""
    model, data, reward = folder / "model", folder / "sums.jsonl", folder / "digits.py"
    if not model.exists():
        save_tiny(model, scale=4.0)
        write_sums(data)
        reward.write_text(  # a random model is never right; the share of digits differs between completions
            "def digits(completions, **kwargs):\n"
            "    texts = [c[0]['content'] for c in completions]\n"
            "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
        )
    own = {
        "model.model_name_or_path": str(model),
        "dataset.dataset_name_or_path": str(data),
        "training.save_steps": 1,
        "reward.functions": json.dumps(["accuracy", f"{reward}:digits"]),
    }
    return {name: str(value) for name, value in (SETTINGS | own).items()}
