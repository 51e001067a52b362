"""Files of JSON that are damaged: each damage of each field is read, or one line that names the file."""

import json

import pytest

from perl.base.errors import UserError
from perl.models.folders import INDEX, require_adapter, require_plain_data
from perl.tools import real
from perl.tools.stages import read_score
from tests.reports.test_damage import SUMMARY, damaged

DEEP = "[" * 100_000
SETTINGS = {
    "seed": 1, "engine": "hf", "model": "smollm2", "data": "0" * 64, "sft_rows": 10, "sums": 2, "grpo_sums": 3,
    "sft_steps": None, "grpo_steps": 4, "held_out": 5, "dtype": "float32",
}  # fmt: skip


def tried(file, whole, call, write=json.dumps):
    """`call` with every damage in the place of what `file` holds; what it says, once each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    said = set()
    for content in [DEEP, "", "{", *map(write, damaged(whole))]:
        file.write_text(content)
        try:
            call()
        except UserError as error:
            said.add(str(error))
    assert all(file.name in each and "\n" not in each for each in said), said
    file.write_text(write(whole))
    call()
    return said


def test_scores_of_a_stage(tmp_path):
    file = tmp_path / "sums" / "summary.json"
    said = tried(file, SUMMARY, lambda: read_score(tmp_path, "sums"))
    assert all(each.endswith("; delete it, and start the same command again") for each in said)
    assert any("`$.metrics.accuracy.low`" in each for each in said)


def test_what_a_real_run_noted(tmp_path):
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    settings = real.Settings(**SETTINGS)
    said = tried(tmp_path / real.SETTINGS, SETTINGS, lambda: real.read_run(tmp_path, "sft", "--run"))
    assert any("`$.seed`" in each for each in said)
    file, row = tmp_path / real.STAGES, {"stage": "sft", "seconds": 1.5, "finished": True}
    tried(file, row, lambda: real.read_stages(tmp_path), lambda row: json.dumps(row) + "\n")
    (tmp_path / real.SETTINGS).write_text(DEEP)
    with pytest.raises(UserError, match=r"^--output_dir: .* is not readable \(maximum recursion"):
        real.is_of_this_run(tmp_path, settings)


def test_rows_of_svamp(tmp_path):
    rows = [{"Body": "Jo has 3.", "Question": "How many?", "Equation": "( 3.0 )", "Answer": 3.0}]
    assert tried(tmp_path / "SVAMP.json", rows, lambda: real.svamp_rows(tmp_path / "SVAMP.json"))


def test_the_index_of_a_models_weights(tmp_path):
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors"}}
    said = tried(tmp_path / INDEX, index, lambda: require_plain_data(tmp_path, "--model m"))
    assert any("names no weights" in each for each in said)


def test_an_adapters_configuration(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "m"}
    assert tried(tmp_path / "adapter_config.json", config, lambda: require_adapter(tmp_path))
