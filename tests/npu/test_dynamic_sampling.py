"""Dynamic sampling on two emulated NPUs: each draws as many prompts as it needs, and all stay in step."""

import json
import sys

import pytest

from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.training.test_collect import check_ranks, ranks_of

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize(
    ("strategy", "engines"),
    [("npu_4", ["fast"]), ("zero3", ["fast", "generate"]), ("npu_fsdp2", ["fast", "generate"])],
)
def test_both_ranks_fill_their_parts_of_the_batch(run_npu, tmp_path, strategy, engines):
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    settings = [json.dumps({"bf16": False, "max_steps": 2, "engine": engine}) for engine in engines]
    words = ["--num_processes", "2", "-m", "tests.training.test_collect", str(tmp_path), *settings]
    run_npu([*launcher, *words], devices=2, timeout=400)
    for number in range(len(engines)):
        ranks = ranks_of(tmp_path, number)
        check_ranks(ranks, 2)
        assert ranks[0]["device"] == "npu:0"
