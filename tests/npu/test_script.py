"""The launch script on 1, 2 and 4 emulated NPUs: every strategy file, checkpoints, and what goes wrong on a device.

Real processes all the way: bash, accelerate, perl.train, DeepSpeed or FSDP2. tests/test_launch_script.py has ZeRO-2 on
two NPUs; here are the others.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.folders import adapter_of, metrics
from tests.test_launch_script import SCRIPT, flags, run_folder
from tests.tiny import save_tiny

CONFIGS = Path(__file__).parents[2] / "scripts" / "accelerate"
pytestmark = [pytest.mark.npu, pytest.mark.slow]

REWARD = """
import os
from pathlib import Path

calls = 0

def digits(completions, **kwargs):
    "A random model is never right; the share of digits differs from completion to completion."
    global calls
    calls += 1
    if calls == 3 and os.environ.get("RANK") == "1" and "LOSE_DEVICE" in os.environ:
        Path(os.environ["LOSE_DEVICE"]).touch()  # in the middle of the third step
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts]
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("Qwen2.5-Tiny"), scale=4.0)


@pytest.fixture(scope="session")
def given(base, tmp_path_factory) -> list[str]:
    """Flags of a run of four steps, LoRA and AQN as the recipe has them."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "digits.py").write_text(REWARD)
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return flags(
        base,
        folder / "sums.jsonl",
        **{
            "training.max_steps": 4,
            "training.save_steps": 2,
            "training.gradient_accumulation_steps": 1,
            "training.per_device_train_batch_size": 4,
            "training.num_generations": 4,
            "training.learning_rate": 0.01,
            "reward.functions": json.dumps([f"{folder / 'digits.py'}:digits"]),
        },
    )


@pytest.fixture
def train(run_npu, given, tmp_path):
    """`train("out", "npu_ddp", devices=4, **flags)`: the finished process; the run's folder is tmp_path/out."""

    def run(name: str, strategy: str | None = None, devices: int = 2, variables=None, **more):
        extra = {"training.output_dir": tmp_path / name} | {key.replace("__", "."): v for key, v in more.items()}
        words = [word for key, value in extra.items() for word in (f"--config.{key}", str(value))]
        operators = tmp_path / f"{name}.operators"
        operators.unlink(missing_ok=True)  # processes append
        env = {"PYTHON": sys.executable, "NPUEMU_OP_LOG": operators} | (variables or {})
        if strategy:
            env["ACCELERATE_CONFIG"] = CONFIGS / f"{strategy}.yaml"
        return run_npu(["bash", str(SCRIPT), *given, *words], devices=devices, check=False, cwd=tmp_path, **env)

    return run


def steps(folder: Path) -> list[int]:
    rows = metrics(folder)
    assert all(row["aqn/num_modules"] == 2 and row["aqn/sigma"] > 0 for row in rows if "reward" in row)
    return [row["step"] for row in rows if "reward" in row]


def same(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same adapter, bit for bit."""
    a, b = adapter_of(one), adapter_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def require_whole(done, folder: Path, devices: int, base: Path, first_step: int = 1) -> None:
    """A run on `devices` NPUs that trained all of them together and left an adapter that PEFT takes."""
    log = folder / "output.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    assert run_folder(done) == folder
    assert f"num_processes: {devices}\n" in log.read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["device"], environment["num_processes"], environment["devices_visible"]) == (
        *("npu", devices, devices),
    )
    assert steps(folder) == [*range(first_step, 5)]

    places = defaultdict(set)
    for line in (folder.parent / f"{folder.name}.operators").read_text().splitlines():
        process, place, physical, _, _ = line.split("\t")
        places[process].add((place, int(physical)))
    assert sorted(map(sorted, places.values())) == [[(f"npu:{rank}", rank)] for rank in range(devices)]

    adapter = adapter_of(folder)
    assert len(adapter) == 28  # A and B of 7 linears in each of 2 layers; no norm weight, so no noise
    assert all(".lora_A." in name or ".lora_B." in name for name in adapter)
    assert all(tensor.abs().max() > 0 for name, tensor in adapter.items() if ".lora_B." in name)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.arange(6, 16).unsqueeze(0)
    with torch.no_grad():
        before = model(tokens).logits
        peft = PeftModel.from_pretrained(model, folder / "adapter")
        loaded = peft.state_dict()
        for name, tensor in adapter.items():
            assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor.float())
        assert (peft(tokens).logits - before).abs().max() > 1e-3


def test_one_npu_that_lacks_an_operator(train, tmp_path, base):
    """The fall-back to the CPU costs time and nothing else: it is said on the screen, once, and the run goes on."""
    done = train("out", devices=1, variables={"NPUEMU_UNSUPPORTED_OPS": "aten::searchsorted"})
    require_whole(done, tmp_path / "out", 1, base)
    said = "The operator 'aten::searchsorted.Tensor' is not currently supported on the NPU backend"
    assert (tmp_path / "out" / "output.log").read_text().count(said) == 1
    assert done.stdout.count(said) == 1
    assert "1 process(es) on npu, single.yaml" in done.stdout
    assert not (tmp_path / "out" / "checkpoint-2" / "global_step2").exists()  # one device needs no DeepSpeed


def test_four_npus_data_parallel(train, tmp_path, base):
    done = train("out", "npu_ddp", devices=4)
    require_whole(done, tmp_path / "out", 4, base)
    assert "4 process(es) on npu, npu_ddp.yaml" in done.stdout
    assert (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").is_file()


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [
        ("npu_zero3", [f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]),
        ("npu_fsdp2", ["pytorch_model_fsdp.bin", "optimizer.bin"]),
    ],
)
def test_a_sharded_run_goes_on_from_its_checkpoint_as_if_never_cut(train, tmp_path, base, strategy, shards):
    whole = train("whole", strategy)
    require_whole(whole, tmp_path / "whole", 2, base)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert all((checkpoint / shard).is_file() for shard in shards)
    resumed = train("resumed", strategy, training__resume_from_checkpoint=checkpoint)
    require_whole(resumed, tmp_path / "resumed", 2, base, first_step=3)
    assert same(tmp_path / "whole", tmp_path / "resumed")


def test_a_device_is_lost_and_the_same_command_goes_on(train, tmp_path, base):
    """ZeRO-2. Device 1 stops answering in the third step: the run ends, says why, and leaves no adapter that looks
    finished. Started again from its checkpoint it ends with the adapter of a run that nothing happened to."""
    gone = tmp_path / "gone"
    lost = train("cut", variables={"NPUEMU_LOSE_DEVICE_AFTER": f"1:{gone}", "LOSE_DEVICE": gone})
    folder = tmp_path / "cut"
    assert gone.exists()
    assert lost.returncode not in (0, 2)
    assert "error code is 507010" in lost.stdout
    assert f"the whole log is in {folder / 'output.log'}" in lost.stderr
    assert "adapter: " not in lost.stdout
    assert not (folder / "adapter").exists()
    assert steps(folder) == [1, 2]

    resumed = train("cut", training__resume_from_checkpoint="true")
    require_whole(resumed, folder, 2, base)
    whole = train("whole")
    require_whole(whole, tmp_path / "whole", 2, base)
    assert same(tmp_path / "whole", folder)
