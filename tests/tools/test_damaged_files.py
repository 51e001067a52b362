"""Files of JSON that are damaged: each damage of each field is read, or one line that names the file."""

import json

import pytest

from perl.base.errors import UserError
from perl.config.schema import PeftConfig
from perl.models.folders import INDEX, load_config, require_adapter, require_plain_data
from perl.tools import course, real
from perl.tools.plan.inputs import MODEL_FLAG, read_config, shape_of
from perl.tools.stages import read_score
from tests.reports.test_damage import SUMMARY, damaged

DEEP = "[" * 100_000
SETTINGS = {
    "seed": 1, "engine": "hf", "model": "smollm2", "data": "0" * 64, "sft_rows": 10, "sums": 2, "grpo_sums": 3,
    "sft_steps": None, "grpo_steps": 4, "held_out": 5, "dtype": "float32",
}  # fmt: skip
CONFIG = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": [1, 2],
    "vocab_size": 100, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "tie_word_embeddings": True,
}  # fmt: skip


def tried(file, whole, call, write=json.dumps, named=None):
    """`call` with every damage in the place of what `file` holds; what it says, once each, with the file's name in it,
    or what else it is `named` by."""
    file.parent.mkdir(parents=True, exist_ok=True)
    said = set()
    for content in [DEEP, "", "{", *map(write, damaged(whole))]:
        file.write_text(content)
        try:
            call()
        except UserError as error:
            said.add(str(error))
    assert all((named or file.name) in each and "\n" not in each for each in said), said
    file.write_text(write(whole))
    call()
    return said


def test_scores_of_a_stage(tmp_path):
    file = tmp_path / "sums" / "summary.json"
    said = tried(file, SUMMARY, lambda: read_score(tmp_path, "sums"))
    assert all(each.endswith("; delete it, and start the same command again") for each in said)
    assert any("`$.metrics[...].low`" in each for each in said)


def test_what_a_real_run_noted(tmp_path):
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    settings = real.Settings(**SETTINGS)
    said = tried(tmp_path / course.SETTINGS, SETTINGS, lambda: real.read_run(tmp_path, "sft", "--run"))
    assert any("`$.seed`" in each for each in said)
    file, row = tmp_path / course.STAGES, {"stage": "sft", "seconds": 1.5, "finished": True}
    tried(file, row, lambda: course.read_stages(tmp_path), lambda row: json.dumps(row) + "\n")
    (tmp_path / course.SETTINGS).write_text(DEEP)
    with pytest.raises(UserError, match=r"^--output_dir: .* is not readable \(maximum recursion"):
        course.is_of_this_run(tmp_path, settings)


def test_rows_of_svamp(tmp_path):
    rows = [{"Body": "Jo has 3.", "Question": "How many?", "Equation": "( 3.0 )", "Answer": 3.0}]
    assert tried(tmp_path / "SVAMP.json", rows, lambda: real.svamp_rows(tmp_path / "SVAMP.json"))


def test_a_models_configuration(tmp_path):
    said = tried(tmp_path / "config.json", CONFIG, lambda: load_config(tmp_path, "--model config.json"))
    assert any("config.json: num_hidden_layers is over 1000, as in no model" in each for each in said)
    assert any("field 'hidden_size'" in each and "NoneType" in each for each in said)


def test_a_models_configuration_that_a_plan_counts_the_weights_of(tmp_path):
    file = tmp_path / "config.json"
    said = tried(file, CONFIG, lambda: shape_of(read_config(str(tmp_path)), PeftConfig()), named=MODEL_FLAG)
    assert any("config.json: num_hidden_layers is over 1000, as in no model" in each for each in said)
    assert any("field 'hidden_size'" in each and "NoneType" in each for each in said)


@pytest.mark.parametrize("damage", [10**400, 10**9], ids=["10^400", "10^9"])
def test_a_size_that_no_model_has_is_refused_before_a_list_is_made_of_it(damage, tmp_path):
    file = tmp_path / "config.json"
    for fields in ({"num_hidden_layers": damage}, {"num_labels": damage}, {"text_config": {"n_layer": damage}}):
        file.write_text(json.dumps(CONFIG | fields))
        for read in (load_config, lambda folder: read_config(str(folder))):
            with pytest.raises(UserError, match=r"config\.json: n[a-z_]+ is over 10+, as in no model; copy it again$"):
                read(tmp_path)
    file.write_text(json.dumps(CONFIG | {"num_training_tokens": 10**12}))
    assert load_config(tmp_path).num_training_tokens == read_config(str(file)).num_training_tokens == 10**12


def test_the_index_of_a_models_weights(tmp_path):
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors"}}
    said = tried(tmp_path / INDEX, index, lambda: require_plain_data(tmp_path, "--model m"))
    assert any("names no weights" in each for each in said)


def test_an_adapters_configuration(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "m"}
    assert tried(tmp_path / "adapter_config.json", config, lambda: require_adapter(tmp_path))
