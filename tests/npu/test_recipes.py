"""The recipes for models that one NPU does not hold, by the launch script on two emulated NPUs with the accelerate file
that each names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.test_launch_script import ROOT, SCRIPT
from tests.test_recipes import require_run, tiny_flags
from tests.tiny import save_tiny

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize("name", ["gsm8k_qwen2_5_14b", "gsm8k_qwen2_5_32b", "dapo_lora_14b"])
def test_a_partitioned_recipe_trains_for_two_steps(name, run_npu, tmp_path):
    recipe = ROOT / "recipes" / f"{name}.yaml"
    (config,) = re.findall(r"ACCELERATE_CONFIG=(\S+)", recipe.read_text())
    model = save_tiny(tmp_path / "model", scale=4.0)
    words = ["--recipe", str(recipe), *tiny_flags(name, {"qwen2": model}, tmp_path)]
    variables = {"PYTHON": sys.executable, "ACCELERATE_CONFIG": str(ROOT / config)}
    done = run_npu(["bash", str(SCRIPT), *words], devices=2, check=False, cwd=tmp_path, **variables)
    log = Path(tmp_path / "run" / "output.log")
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    assert "num_processes: 2\n" in log.read_text()
    require_run(name, tmp_path / "run")
