"""GRPO with AQN, the adapter merged while sampling, on two emulated NPUs: DDP, ZeRO-2, ZeRO-3 and FSDP2.

The emulation shows the control flow: which weights are whole, sharded or gathered when the noise is added. It shows
nothing of CANN's numerics.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from perl.noise.schedule import Adapted, adapt
from tests.ranks import reports

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts" / "accelerate"
pytestmark = [pytest.mark.npu, pytest.mark.slow]


def zero3_with_nothing_persistent(folder: Path) -> Path:
    """ZeRO-3 keeps parameters below a threshold whole on every rank, and a tiny model has no others: with threshold
    0 its norm weights are partitioned as a real model's would be."""
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    (folder / "zero3.json").write_text(json.dumps(deepspeed))
    config = yaml.safe_load((CONFIGS / "npu_zero3.yaml").read_text())
    config["deepspeed_config"] = {"deepspeed_config_file": str(folder / "zero3.json"), "zero3_init_flag": False}
    (folder / "zero3.yaml").write_text(yaml.safe_dump(config))
    return folder / "zero3.yaml"


def fsdp2_without_resharding(folder: Path) -> Path:
    config = yaml.safe_load((CONFIGS / "npu_fsdp2.yaml").read_text())
    config["fsdp_config"]["fsdp_reshard_after_forward"] = False
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    return folder / "fsdp2.yaml"


FLOAT32 = {"bf16": False, "per_device_train_batch_size": 2}
"""Two devices must then agree with a CPU to rounding."""


def start(run_npu, folder, config, content, processes=2, worker="train_worker", **variables):
    """A module of this folder as the program of each process, given `folder` and `content` as JSON."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command = [*launcher, "--num_processes", str(processes), "-m", f"tests.npu.{worker}", str(folder)]
    run_npu([*command, json.dumps(content)], devices=processes, timeout=400, **variables)


def launch(run_npu, folder, config, settings=None, processes=2, **options):
    start(run_npu, folder, config, FLOAT32 | (settings or {}), processes, **options)
    return reports(folder, processes)


KL = {"schedule": "target_kl", "relative": True, "target_kl_start": 1e-4, "target_kl_end": 1e-4}
RUNS = {
    "generate": ("train_worker", {"engine": "generate"}),
    "fast": ("train_worker", {"engine": "fast"}),
    "target_kl": ("train_worker", {"engine": "fast", "max_steps": 3, "noise": KL}),
    "norms": ("noise_worker", {"engine": "fast"}),
}
"""(module, settings) of what both ranks train one after the other: a start takes longer than a run."""
MADE = {"zero3": zero3_with_nothing_persistent, "fsdp2": fsdp2_without_resharding}
STRATEGIES = ("npu_ddp", "npu_4", "zero3", "npu_fsdp2")  # npu_4: ZeRO-2


@pytest.fixture(scope="module")
def folder_of(run_npu, tmp_path_factory):
    """`folder_of(strategy)`: in which each of RUNS has left its folder, for "fsdp2" "norms" alone."""
    done: dict[str, Path] = {}

    def run(strategy):
        if strategy not in done:
            folder = tmp_path_factory.mktemp(strategy)
            config = MADE[strategy](folder) if strategy in MADE else CONFIGS / f"{strategy}.yaml"
            names = RUNS if strategy in STRATEGIES else ["norms"]
            runs = {name: (RUNS[name][0], FLOAT32 | RUNS[name][1]) for name in names}
            start(run_npu, folder, config, runs, worker="runs_worker")
            done[strategy] = folder
        return done[strategy]

    return run


@pytest.mark.parametrize("engine", ["generate", "fast"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_is_the_same_on_both_ranks_and_gone_in_the_loss(folder_of, strategy, engine):
    folder = folder_of(strategy) / engine
    ranks = reports(folder)
    assert [rank["world_size"] for rank in ranks] == [2, 2]
    assert [rank["device"] for rank in ranks] == ["npu:0", "npu:1"]
    for rank in ranks:
        first, last = (torch.tensor(weights) for weights in rank["generate"])
        clean = torch.ones(64)
        # 64 numbers of sigma 0.5 and 0.1: their RMS has a standard error of 9 %
        assert (first - clean).square().mean().sqrt().item() == pytest.approx(0.5, rel=0.35)
        assert (last - clean).square().mean().sqrt().item() == pytest.approx(0.1, rel=0.35)
        for weights in rank["loss"]:
            assert torch.equal(torch.tensor(weights), clean)
        assert rank["sigma"] == [0.5, 0.1]
        assert rank["merged"] == [[True], [True]]
        assert rank["tolerance"] == 1e-3  # sampler and trainer agreed
    assert ranks[0]["generate"] == ranks[1]["generate"]
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    moved = [tensor.abs().max().item() for name, tensor in adapter.items() if "lora_B" in name]
    assert len(moved) == 14  # 7 linears in each of 2 layers
    assert all(value > 0 for value in moved)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_relative_noise_that_holds_a_kl_divergence_is_the_same_on_both_ranks(folder_of, strategy):
    first, second = reports(folder_of(strategy) / "target_kl")
    assert first["rms"] == second["rms"] == [1.0, 1.0]  # of the whole weights, which are 1
    assert first["sigma"][:2] == [0.5, 0.25]  # far above the target: halved
    for name in ("sigma", "kl", "adapted", "generate"):
        assert first[name] == second[name], name
    assert all(kl > 0 for kl in first["kl"])
    adapted = Adapted(0.5)
    for sigma, kl in zip(first["sigma"], first["kl"], strict=True):
        assert adapted.sigma == sigma
        adapted = adapt(adapted, kl, 1e-4, 0.5)
    assert first["adapted"] == asdict(adapted)
    for rank in (first, second):
        assert all(torch.equal(torch.tensor(weights), torch.ones(64)) for weights in rank["loss"])


@pytest.mark.parametrize("strategy", [*STRATEGIES, "fsdp2"])
def test_noise_and_merge_are_in_every_module_while_sampling_and_gone_bit_for_bit_in_the_loss(folder_of, strategy):
    """The final norm included, which FSDP2 keeps gathered after a forward, as it does everything without resharding."""
    for rank in reports(folder_of(strategy) / "norms"):
        assert len(rank["norms"]) == 5  # two in each of two layers, and the final one
        assert len(rank["in_rollout"]) == 5 + 14
        for name in rank["in_rollout"]:
            assert rank["last_in_rollout"][name], name
            if name in rank["norms"]:
                assert rank["in_rollout"][name], name  # B is zero in the first rollout, so the others differ later
            passes, exact = rank["exact_in_loss"][name]
            assert passes >= 4, name
            assert exact, name


def cpu(folder, settings):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu.yaml")]
    command = [*launcher, "--num_processes", "2", "-m", "tests.npu.train_worker", str(folder)]
    settings = FLOAT32 | settings
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, json.dumps(settings)], check=True, env=env, cwd=ROOT, timeout=400)
    return json.loads((folder / "rank0.json").read_text())


@pytest.mark.parametrize(
    ("engine", "captures", "variables"),
    [("generate", False, {"NPUEMU_CPU_GENERATOR": 1}), ("fast", False, {}), ("fast", True, {})],
)
def test_the_same_seeds_give_the_same_losses_as_a_cpu(run_npu, tmp_path, engine, captures, variables):
    """Two emulated NPUs against two CPU processes, float32, same code but for the device and captured graphs.

    With `generate` an NPU samples from a generator of its own, and is given the CPU's here so that both sample the same
    tokens. The fast engine's random numbers do not come from the device.
    """
    (tmp_path / "npu").mkdir()
    (tmp_path / "cpu").mkdir()
    settings = {"engine": engine, "rollout": {"capture_graphs": captures}}
    on_npu = launch(run_npu, tmp_path / "npu", CONFIGS / "npu_ddp.yaml", settings, **variables)
    on_cpu = cpu(tmp_path / "cpu", {"engine": engine})
    assert on_npu[0]["generate"][0] == on_cpu["generate"][0]  # the noise is drawn on the CPU
    assert (on_npu[0]["graphs"] > 0) == captures
    assert on_npu[0]["losses"] == pytest.approx(on_cpu["losses"], abs=1e-5)
    assert on_npu[0]["rewards"] == pytest.approx(on_cpu["rewards"], abs=1e-6)
