"""rollout.quantization on emulated NPUs: torch_npu's products, and trainings that draw by them."""

import json
import sys

import pytest

from tests.npu.test_evaluation import EVAL
from tests.npu.test_pool import SMALL, by_workers
from tests.reliability.place import Place
from tests.test_launch_script import SCRIPT
from tests.tiny import save_tiny

pytestmark = pytest.mark.npu

PRODUCTS = """
from perl.engines.quantised import GROUP, SCHEMES, NPUProduct, quantise_groups, quantise_outputs

torch.manual_seed(0)
weight, bias = torch.randn(24, 96, dtype=torch.bfloat16), torch.randn(24)
x = torch.randn(2, 3, 96, dtype=torch.bfloat16)
answer = {}
for name, scheme in ((name, scheme) for name, scheme in SCHEMES.items() if not scheme.floating):
    product = NPUProduct(weight.to("npu"), bias.to("npu"), scheme)
    numbers, scale = (quantise_groups if scheme.bits == 4 else quantise_outputs)(weight.float())
    stands_for = numbers * scale.repeat_interleave(96 // scale.shape[1], dim=1)
    exact = x.float() @ stands_for.t() + bias
    found = product(x.to("npu")).cpu()
    error = ((found.float() - exact).norm() / exact.norm()).item()
    none = list(product(x.to("npu")[:, :0]).shape)
    answer[name] = [error, list(found.shape), str(found.dtype), none, product.nbytes]
"""


def test_the_products_are_those_of_what_the_whole_numbers_stand_for(answer):
    found = answer(PRODUCTS, devices=1)
    assert set(found) == {"int8", "int8_w8a8", "int4"}
    for name, (error, *shape, nbytes) in found.items():
        assert error < (0.02 if name == "int8_w8a8" else 0.004)  # x in 8 bits, or y in bfloat16 alone
        assert shape == [[2, 3, 24], "torch.bfloat16", [2, 0, 24]]
        scales = {"int8": 2 * 24, "int8_w8a8": 4 * 24, "int4": 2 * 24 * 3}[name]
        assert nbytes == 24 * 96 * (0.5 if name == "int4" else 1) + scales


TRAINING = """
from pathlib import Path
from perl.config.schema import NoiseConfig
from tests.training.test_quantised import NOISE, trained

folder, quantization = {folder!r}, {quantization!r}
settings = {{"noise": NoiseConfig(**NOISE), "rollout": {{"quantization": quantization}}, "max_steps": 3}}
settings |= {{"save_strategy": "steps", "save_steps": 1}}
whole, logged = trained(Path(folder), **settings)
resumed, _ = trained(Path(folder), checkpoint=folder + "/checkpoint-1", **settings)
answer = {{
    "devices": sorted({{str(tensor.device) for tensor in whole.values()}}),
    "same": all(torch.equal(whole[name], tensor) for name, tensor in resumed.items()),
    "kl": [row["rollout/quantization_kl"] for row in logged],
    "noise": [row["aqn/kl"] for row in logged],
}}
"""


@pytest.mark.parametrize("quantization", ["int8", "int8_w8a8", "int4"])
def test_a_training_draws_by_them_and_goes_on_from_a_checkpoint(answer, tmp_path, quantization):
    found = answer(TRAINING.format(folder=str(tmp_path / "run"), quantization=quantization), devices=1)
    assert found["devices"] == ["npu:0"]
    assert found["same"]
    assert len(found["kl"]) == 3
    assert min(found["kl"]) > 1e-6
    assert min(found["noise"]) > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["npu_4", "zero3", "npu_fsdp2"])
def test_workers_of_two_processes_draw_by_them(run_npu, tmp_path, strategy):
    said = by_workers(run_npu, tmp_path, strategy, 1, noise=True, quantization="int8")
    assert said["same"]
    assert min(said["quantization_kl"]) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3"])
def test_two_processes_draw_by_them_themselves(run_npu, tmp_path, strategy):
    said = by_workers(run_npu, tmp_path, strategy, 0, noise=True, quantization="int4", workers=0, piece_size=None)
    assert said["same"]
    assert min(said["quantization_kl"]) > 1e-6


@pytest.mark.slow
def test_by_the_launch_script_and_by_the_evaluator(run_npu, tmp_path):
    words = Place(tmp_path).train(None, rollout__quantization="int8", **SMALL)
    variables = {"PYTHON": sys.executable, "NUM_PROCESSES": 1}
    done = run_npu(["bash", str(SCRIPT), *words], devices=1, check=False, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "int8: " in (tmp_path / "run" / "output.log").read_text()
    model = save_tiny(tmp_path / "scored", scale=8.0)
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 3 + 4 ?", "answer": "#### 7"}\n')
    flags = ["--model", str(model), "--dataset", str(tmp_path / "sums.jsonl"), "--max_new_tokens", "8"]
    flags += ["--quantization", "int4", "--result_dir", str(tmp_path / "scores")]
    done = run_npu([sys.executable, str(EVAL), *flags], devices=1, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    generation = json.loads((tmp_path / "scores" / "sums" / "summary.json").read_text())["generation"]
    assert generation["device"] == "npu"
