"""Adapters of strangers: what their folders may not lead to, and what no match would end of."""

from __future__ import annotations

import json
import logging

import pytest

from perl.base.errors import UserError
from perl.models.adapter_files import require_contained
from perl.models.folders import copy_side_files, require_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "base", "target_modules": ["q_proj", "v_proj"]}


def write_adapter(folder, **fields):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("megatron_config", {"x": 1}, "megatron_config names a Python module to import"),
        ("tokenizer_name_or_path", "../other", "tokenizer_name_or_path names a tokenizer"),
        ("tokenizer_kwargs", {"trust_remote_code": True}, "tokenizer_kwargs names a tokenizer's arguments"),
        ("prompt_tuning_init_state_dict_path", "/x.bin", "prompt_tuning_init_state_dict_path names a file"),
        ("corda_config", {"cache_file": "/x.pt"}, r"corda_config\.cache_file names a file"),
        ("adapters", {"0": "/other"}, "adapters names other adapters"),
        ("layer_replication", [[0, 2], [0, 2]], "layer_replication names copies of the base's layers"),
    ],
)
def test_a_field_that_leads_out_is_refused(tmp_path, field, value, said):
    folder = write_adapter(tmp_path / "a", **{field: value})
    with pytest.raises(UserError, match=rf"^--adapter .*adapter_config\.json: {said} .*; take it out$"):
        require_adapter(folder)


def test_what_peft_writes_of_its_own_is_taken():
    from peft import LoraConfig

    written = LoraConfig(r=4, target_modules=r".*\.(q_proj|v_proj)", modules_to_save=["lm_head"]).to_dict()
    require_contained(json.loads(json.dumps(written, default=str)), "here")
    auto = {"auto_mapping": {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers"}}
    require_contained(PLAIN | auto, "here")  # nothing reads it


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|k_proj|v_proj)))"
)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"(.*\.)?visual\..*",
        "[(a+)+]q",
        r"\(a+\)+",
        r".*\.(q|v)_proj$",
        "|".join(rf"(model\.layers\.{layer}\.self_attn\.q_proj)" for layer in range(24)),
        r"model(\.layers)+\.0\.q_proj",
        r"^(?!.*visual).*(?:q_proj|up_proj).*",
        UNSLOTH,
    ],
)
def test_expressions_that_end_are_taken(pattern):
    require_contained(PLAIN | {"target_modules": pattern}, "here")


ENDLESS = ["(a+)+$", "(.*)*x", "(a|aa)+$", "((a?){30}){30}", "(?=(a+))*", ".*.*.*.*.*.*x"]
OBSCURED = ["(?#[)(a+)+(?#])", "(?x)(a+) +", "[]](a+)+", r"\((a+){2,}", "a?" * 11, "(?:m|.)" * 24 + "!"]


@pytest.mark.parametrize("pattern", ENDLESS + OBSCURED)
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_expressions_that_may_never_end_are_refused(pattern, field):
    value = {pattern: 8} if field == "rank_pattern" else pattern
    with pytest.raises(UserError, match=f"^here: {field} .* may take for ever to match"):
        require_contained(PLAIN | {field: value}, "here")


def test_what_is_no_expression_is_one_line():
    with pytest.raises(UserError, match=r"^here: target_modules '\(q' is no regular expression"):
        require_contained(PLAIN | {"target_modules": "(q"}, "here")
    with pytest.raises(UserError, match=r"^here: target_modules has 1001 characters"):
        require_contained(PLAIN | {"target_modules": "q" * 1001}, "here")


def test_an_adapters_link_out_of_its_folder_is_refused(tmp_path):
    (tmp_path / "token").write_text("s3cret")
    folder = write_adapter(tmp_path / "a")
    (folder / "notes.md").symlink_to(tmp_path / "token")
    with pytest.raises(UserError, match=r"^--adapter .*notes\.md: is a link out of the adapter's folder"):
        require_adapter(folder)


def test_links_between_adapters_and_into_the_hubs_cache_are_taken(tmp_path):
    other = write_adapter(tmp_path / "other")
    linked = tmp_path / "linked"
    linked.mkdir()
    blobs, snapshot = tmp_path / "models--o--a" / "blobs", tmp_path / "models--o--a" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in other.iterdir():
        (linked / file.name).symlink_to(file)
        (blobs / f"blob-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    assert require_adapter(linked) == require_adapter(snapshot) == PLAIN


def test_a_merged_model_gets_no_file_that_a_link_leads_to(tmp_path, caplog):
    (tmp_path / "token").write_text("s3cret")
    model, out = tmp_path / "model", tmp_path / "out"
    for folder in (model, out):
        folder.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    (model / "vocab.txt").symlink_to(tmp_path / "token")
    (model / "merges.txt").symlink_to(model / "tokenizer_config.json")
    with caplog.at_level(logging.WARNING):
        copy_side_files(model, out)
    assert sorted(file.name for file in out.iterdir()) == ["merges.txt", "tokenizer_config.json"]
    assert f"{model / 'vocab.txt'} is a link out of the model's folder" in caplog.text
