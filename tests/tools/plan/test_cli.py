"""python -m perl plan: the real command, in a process of its own where that matters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.config.sft import SFT
from perl.device import Devices
from perl.tools.plan.devices import DEVICES
from perl.tools.plan.inputs import parallel_of
from perl.tools.recipe_flags import program_of

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "recipes" / "dapo_lora.yaml")
QWEN = str(Path(__file__).parent / "qwen2_5_7b_instruct.json")
MODEL = "--config.model.model_name_or_path"


@pytest.fixture
def plan(capsys):
    """From a command line to what is printed."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        return capsys.readouterr().out

    return run


def process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "perl", "plan", *arguments], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120, env=env)


def test_all_weights_of_a_recipe(plan):
    flags = ("--config.peft.type", "none", "--config.training.beta", "0.001", "--count", "8", "--device", "910b")
    found = json.loads(plan(RECIPE, *flags, MODEL, QWEN, "--json"))
    held = {item["name"]: item["bytes"] for item in found["items"]}
    assert held["weights"] == held["reference model"] == 2 * 7_615_616_512  # bfloat16 under ZeRO-2
    assert held["float32 copy of the weights"] == 4 * 7_615_616_512 // 8
    assert held["optimizer (AdamW)"] == 8 * 7_615_616_512 // 8
    assert "all trained" in " ".join(plan(RECIPE, *flags, MODEL, QWEN).split())  # a long path breaks the line


def test_remax_draws_a_greedy_completion_of_each_prompt(plan):
    caches = []
    for name in ("rloo", "remax"):
        flags = ("--config.algorithm.name", name, "--config.training.num_generations", "2", "--device", "cpu")
        found = json.loads(plan(RECIPE, *flags, MODEL, QWEN, "--json"))
        caches += [item["bytes"] for item in found["items"] if item["name"] == "KV cache"]
    assert caches[1] == 1.5 * caches[0]


def test_a_7b_recipe_from_config_json_alone(tmp_path):
    """The folder holds nothing else: no weights, no tokenizer, and the recipe's data set is not read."""
    (tmp_path / "config.json").write_text(Path(QWEN).read_text())
    done = process(RECIPE, "--device", "910b", "--count", "4", "--json", MODEL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert (found["parameters"], found["adapter_parameters"]) == (7_615_616_512, 40_370_176)  # as Qwen's card has it
    held = {(item["name"], item["phase"]): item["bytes"] for item in found["items"]}
    assert held["weights", "both"] == 2 * 7_615_616_512
    assert held["optimizer (AdamW)", "both"] == 8 * 40_370_176 // 4  # ZeRO-2, as the launch script has it for four
    assert found["parallel"] == "zero2"
    assert set(found["by_parallel"]) == {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"}
    assert set(found["fits"]) == {"32", "64", "80", "141"}
    assert found["fits"]["64"]
    flags = found["proposal"]
    rows = flags["--config.training.per_device_train_batch_size"]
    assert rows * flags["--config.training.gradient_accumulation_steps"] == 16  # the recipe's: 1 x 16
    assert rows * flags["--config.training.steps_per_generation"] == 16


@pytest.mark.parametrize("flag", ["loss_type bnpo", "entropy_coef 0.01", "top_entropy_quantile 0.2"])
def test_a_loss_that_depends_on_the_rows_of_a_micro_batch_takes_each_row_with_its_prompt(plan, flag):
    """8 rows of 1024 + 1024 tokens, of 8 prompts; without checkpointing of the layers' inputs and the end."""
    name, value = flag.split()
    sizes = "per_device_train_batch_size 8 gradient_accumulation_steps 8 num_generations 8 max_completion_length 1024"
    words = [*sizes.split(), "max_prompt_length", "1024", "gradient_checkpointing", "true", name, value]
    words += ["max_tokens_per_microbatch", "4096"]
    flags = [word if i % 2 else f"--config.training.{word}" for i, word in enumerate(words)]
    found = json.loads(plan(RECIPE, MODEL, QWEN, *flags, "--device", "910b", "--json"))
    held = {item["name"]: item["bytes"] for item in found["items"]}
    assert held["inputs of the layers"] == 8 * 2048 * 3584 * (28 * 2 + 4 + 2)


def test_the_table_for_a_person(plan):
    flags = "--device", "h200", "--config.training.gradient_checkpointing", "false"
    lines = plan(RECIPE, MODEL, QWEN, *flags).splitlines()
    assert "h200 x 1, single, gradient checkpointing off, rollouts by fast" in lines
    (weights,) = [line.split() for line in lines if line.startswith("weights ")]
    assert weights == ["weights", "14.19", "14.19"]
    assert any(line.startswith("peak ") for line in lines)
    assert any("--config.training.per_device_train_batch_size" in line for line in lines)


def test_a_fine_tunings_recipe_is_planned_as_such(plan):
    """4 rows of 1024 tokens a device, padded; nothing is sampled, and ZeRO-3 gathers nothing for it."""
    sft = str(ROOT / "recipes" / "real_sft.yaml")
    checkpointing = "--config.training.gradient_checkpointing", "true"
    found = json.loads(plan(sft, MODEL, QWEN, *checkpointing, "--device", "910b", "--count", "2", "--json"))
    assert (found["method"], set(found["peak"])) == ("sft", {"update"})
    held = {(item["name"], item["phase"]): item["bytes"] for item in found["items"]}
    assert not [name for name, phase in held if phase == "rollout" or "KV" in name]
    # With gradient_checkpointing each layer's input, 28 x 4 x 1024 tokens of 3584 numbers, and the end.
    assert held["inputs of the layers", "update"] == 4 * 1024 * 3584 * (28 * 2 + 4 + 2)
    assert "--config.training.steps_per_generation" not in found["proposal"]
    zero3 = found["by_parallel"]["zero3"]["checkpointing_true"]["update"]
    assert zero3 < found["by_parallel"]["ddp"]["checkpointing_true"]["update"]
    text = plan(sft, MODEL, QWEN, "--device", "910b", "--count", "2")
    assert "supervised fine-tuning" in text
    assert "rows: 8 an update, 4 a forward and device, of up to 1024 tokens" in text
    assert "rollout" not in text


def test_a_base_in_the_home_folder_says_whose_recipe_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "sft.yaml").write_text("training: {packing: true}")
    (tmp_path / "mine.yaml").write_text("base: ~/sft.yaml")
    assert program_of(str(tmp_path / "mine.yaml"), [], None) == (SFT, [])


def test_a_recipe_of_either_is_taken_as_grpos_with_a_line(plan, tmp_path):
    (tmp_path / "either.yaml").write_text("training:\n  learning_rate: 1.0e-4\n")
    flags = str(tmp_path / "either.yaml"), MODEL, QWEN, "--device", "h200", "--json"
    found = json.loads(plan(*flags))
    assert found["method"] == "grpo"
    assert any("nothing in" in note and "--method sft" in note for note in found["notes"])
    assert json.loads(plan(*flags, "--config.training.max_length", "512"))["method"] == "sft"


@pytest.mark.parametrize("recipe", ["gsm8k_aqn_hbm", "gsm8k_pool_7b", "real_sft"])
def test_the_text_fits_a_terminal(plan, recipe):
    words = str(ROOT / "recipes" / f"{recipe}.yaml"), MODEL, QWEN, "--device", "910b", "--count", "8"
    long = plan(*words, "--config.training.per_device_train_batch_size", "256").splitlines()
    assert [line for line in [*plan(*words).splitlines(), *long] if len(line) > 90 and QWEN not in line] == []


def test_what_is_not_counted_is_told(plan, tmp_path):
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").touch()
    flags = "--device", "h200", "--config.validation.datasets", '["gsm8k"]', "--config.training.beta", "0.1"
    found = json.loads(plan(RECIPE, MODEL, QWEN, *flags, "--config.peft.adapter", str(tmp_path), "--json"))
    assert found["adapter_parameters"] == 28 * 8 * (3584 + 3584)  # the adapter's own rank and layers
    assert any(note.startswith("validation is left out") for note in found["notes"])
    assert any(note.startswith("the frozen copy of peft.adapter") for note in found["notes"])


@pytest.mark.parametrize(
    ("optimizer", "exact"),
    [("adamw_torch", True), ("paged_adamw_8bit", False), ("adamw_torch_4bit", False), ("adafactor", False)],
)
def test_an_optimizer_with_other_states_than_adamws_is_told(plan, optimizer, exact):
    flags = "--device", "h200", "--config.training.optim", optimizer, "--json"
    told = f"optimizer {optimizer} is counted as AdamW" in json.loads(plan(RECIPE, MODEL, QWEN, *flags))["notes"]
    assert told is not exact


NF4 = "--config.model.quantization", "nf4"
LINEAR, OUTPUTS = 28 * 233_046_016, 28 * 49_664
"""Of Qwen2.5-7B, without the head: q, k, v and o, gate, up and down in 28 layers."""


def test_a_base_in_4_bits_by_flag_and_by_its_own_config(plan, tmp_path):
    fields = json.loads(Path(QWEN).read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": stored}))
    rest = 2 * (7_615_616_512 - LINEAR)
    for flags, expected in (
        ((*NF4, MODEL, QWEN), round(LINEAR * (0.5 + 1 / 64 + 1 / 4096)) + rest),
        ((MODEL, str(tmp_path)), LINEAR * 9 // 16 + rest),
    ):
        found = json.loads(plan(RECIPE, "--device", "h100", "--json", *flags))
        held = {item["name"]: item["bytes"] for item in found["items"]}
        assert (held["weights"], held["adapter"]) == (expected, 4 * found["adapter_parameters"])
    text = plan(RECIPE, "--device", "h100", *NF4, MODEL, QWEN)
    assert "two bytes a number, loaded in 4bit, nested" in " ".join(text.split())
    assert "loaded in 4 bits (this)" in text
    with pytest.raises(UserError, match=r"--config\.model\.quantization nf4: .* is quantised already"):
        plan(RECIPE, "--device", "h100", *NF4, MODEL, str(tmp_path))
    with pytest.raises(UserError, match=r"stored in 4 bits \(bitsandbytes, fp4\), and such weights can't be trained"):
        plan(RECIPE, "--device", "h100", MODEL, str(tmp_path), "--config.peft.type", "none")


@pytest.mark.parametrize(("parallel", "name"), [("zero3", "ZeRO-3"), ("fsdp2", "FSDP2")])
def test_a_base_that_is_stored_in_4_bits_is_not_split(plan, tmp_path, parallel, name):
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads(Path(QWEN).read_text()) | {"quantization_config": stored})
    )
    flags = RECIPE, "--device", "h100", "--count", "2", MODEL, str(tmp_path)
    with pytest.raises(UserError, match=rf"is stored in 4 bits \(bitsandbytes, fp4\), and {name} would split"):
        plan(*flags, "--parallel", parallel)
    assert json.loads(plan(*flags, "--parallel", "zero2", "--json"))["fits"]["80"]


def test_what_splits_weights_is_not_offered_to_a_base_in_4_bits(plan):
    flags = RECIPE, MODEL, QWEN, "--device", "h100", "--count", "2", "--json"
    assert json.loads(plan(*flags, *NF4))["by_parallel"].keys() == {"ddp", "zero0", "zero1", "zero2"}
    assert json.loads(plan(*flags, "--parallel", "zero3"))["by_quantisation"].keys() == {"as it is"}


def test_a_base_in_4_bits_is_offered_where_bitsandbytes_has_kernels(plan):
    for device, offered in (("910b", False), ("h100", True), ("cpu", True)):
        found = json.loads(plan(RECIPE, MODEL, QWEN, "--device", device, "--json"))
        assert ("loaded in 4 bits" in found["by_quantisation"]) == offered
    with pytest.raises(UserError, match=r"quantization nf4: bitsandbytes has no kernels for a device of kind npu"):
        plan(RECIPE, MODEL, QWEN, *NF4, "--device", "910b")


def test_rollouts_by_a_copy_on_a_cpu(plan):
    flags = RECIPE, MODEL, QWEN, "--device", "cpu", "--config.rollout.quantization", "int8_w8a8"
    found = json.loads(plan(*flags, "--json"))
    copy = LINEAR + 152_064 * 3584 + 4 * (OUTPUTS + 152_064)
    assert [item["bytes"] for item in found["items"] if "copy" in item["name"]] == [copy]
    options = found["by_quantisation"]
    assert (options["rollouts in int8"]["sampler"], options["as it is"]["sampler"]) == (copy, 0)
    assert options["as it is"]["weights"] == 4 * 7_615_616_512  # float32
    assert options["rollouts in int8"]["peak"] == found["peak"]
    (this,) = [line for line in plan(*flags).splitlines() if line.startswith("this run (this)")]
    assert f"{copy / 2**30:.2f}" in this


def test_rollouts_by_a_copy_on_an_npu(plan):
    """The head stays as it is; int4 has a bfloat16 scale for 32 weights. A layer is packed in 6 bytes a number."""
    flags = RECIPE, MODEL, QWEN, "--device", "910b", "--config.rollout.quantization", "int4", "--json"
    sizes = {item["name"]: item["bytes"] for item in json.loads(plan(*flags))["items"]}
    assert sizes["int4 copy for rollouts"] == LINEAR // 2 + 2 * LINEAR // 32
    assert sizes["quantising a layer"] == 6 * 3584 * 18944
    split = json.loads(plan(*flags[:5], "--json", "--count", "2", "--parallel", "fsdp2"))
    assert split["by_quantisation"].keys() == {"as it is"}


def test_a_trainer_that_validates_above_a_quantised_base_holds_a_copy_too(plan):
    """With workers it draws nothing, and its copy was not counted."""
    flags = [RECIPE, MODEL, QWEN, "--device", "910b", "--config.rollout.quantization", "int8", "--json"]
    flags += ["--config.rollout.workers", "4", "--config.validation.quantized", "true"]

    def copies(*more):
        return [
            item["bytes"] for item in json.loads(plan(*flags, *more))["items"] if "copy for rollouts" in item["name"]
        ]

    assert copies("--config.validation.datasets", "[]") == []
    assert copies("--config.validation.datasets", '["gsm8k"]') == [LINEAR + 2 * OUTPUTS]


def test_which_devices_a_quantised_base_is_enough_for(plan):
    """Qwen2.5-7B next to vLLM, whose share of 0.3 holds 14.2 GB on 64 GB, and not on 32."""
    flags = RECIPE, MODEL, QWEN, "--device", "h100", "--config.training.use_vllm", "true", "--json"
    found = json.loads(plan(*flags))
    options = found["by_quantisation"]
    assert options["as it is"]["sampler"] == 2 * 7_615_616_512
    assert options["rollouts in int8"]["sampler"] == LINEAR + 4 * OUTPUTS + 2 * (7_615_616_512 - LINEAR)
    assert {name: option["fits"] for name, option in options.items() if name != "rollouts in int4"} == {
        "as it is": ["64", "80", "141"],
        "rollouts in int8": ["32", "64", "80", "141"],
    }
    small = "--config.training.vllm_gpu_memory_utilization", "0.1"
    assert not json.loads(plan(*flags, *small))["fits"]["80"]  # 8 GB hold no 14.2
    text = " ".join(plan(*flags[:-1], *small).split())
    assert "vLLM's share of 8.0 GB is less than its weights, 14.2 GB" in text
    assert "vLLM does not start on h100, 80 GB with a share of 0.1" in text
    assert "--config.training.vllm_gpu_memory_utilization 0.18; or a base in fewer bits" in text


@pytest.fixture
def of_32b(tmp_path):
    """Folder of a config.json with Qwen2.5-32B's sizes: 32.76 B weights, of which two bytes each are 61.03 GB."""
    changes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    fields = json.loads(Path(QWEN).read_text()) | changes | {"num_key_value_heads": 8, "max_window_layers": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("engine", "fits", "peak", "said"),
    [
        ("fast", ["141"], (69, 70), "a worker takes 69.85 GB, more than 90% of 910b, 64 GB: larger devices"),
        (
            "vllm",
            ["80", "141"],  # with a share of 0.8: 64 of 80 GB
            (54, 55),
            "with a share of 0.8, which does not hold its weights, 61.03 GB, and a completion: a base in fewer bits",
        ),
    ],
)
def test_what_a_worker_does_not_hold_fits_nowhere(plan, of_32b, engine, fits, peak, said):
    """FSDP2 splits the trainer's base over four devices, and each worker has it whole: 61.03 GB."""
    flags = [str(ROOT / "recipes" / "gsm8k_qwen2_5_32b.yaml"), MODEL, of_32b, "--device", "910b", "--count", "4"]
    flags += ["--parallel", "fsdp2", "--config.rollout.workers", "4", "--config.rollout.engine", engine]
    found = json.loads(plan(*flags, "--json"))
    assert [size for size, enough in found["fits"].items() if enough] == fits
    assert found["by_quantisation"]["as it is"]["fits"] == fits
    assert found["proposal"] is None
    assert peak[0] < found["worker_peak"] / 2**30 < peak[1]
    text = plan(*flags)
    (this,) = [line for line in text.splitlines() if line.startswith("fsdp2 (this)")]
    assert this.endswith("  " + ", ".join(fits))
    assert said in " ".join(text.split())


def test_a_workers_share_is_no_more_than_is_free(plan):
    """Of 64 GB 60.5 are free, 0.945."""
    flags = [str(ROOT / "recipes" / "gsm8k_pool_7b.yaml"), MODEL, QWEN, "--device", "910b", "--count", "4"]
    flags += ["--config.rollout.engine", "vllm", "--config.training.vllm_gpu_memory_utilization"]
    said = "with a share of 0.97, as 60.50 GB are free: --config.training.vllm_gpu_memory_utilization 0.94; or larger"
    assert said in " ".join(plan(*flags, "0.97").split())
    assert json.loads(plan(*flags, "0.94", "--json"))["proposal"]


def test_the_figures_of_the_readme(plan, of_32b):
    found = {}
    for size, model in (("7B", QWEN), ("32B", of_32b)):
        for engine in ("fast", "vllm"):
            flags = MODEL, model, "--device", "h100", "--config.rollout.engine", engine, "--json"
            for name, option in json.loads(plan(RECIPE, *flags))["by_quantisation"].items():
                fits = [fit for fit in option["fits"] if fit in ("64", "80")]
                peak = round(max(option["peak"].values()) / 2**30, 1) if engine == "fast" else None
                found[size, engine, name] = (peak, fits)
    assert found["32B", "vllm", "rollouts in int8"] == (None, [])
    assert {key: value for key, value in found.items() if not key[2].startswith("rollouts")} == {
        ("7B", "fast", "as it is"): (17.3, ["64", "80"]),
        ("7B", "fast", "loaded in 4 bits"): (8.4, ["64", "80"]),
        ("7B", "vllm", "as it is"): (None, ["64", "80"]),
        ("32B", "fast", "as it is"): (68.6, ["80"]),
        ("32B", "fast", "loaded in 4 bits"): (25.7, ["64", "80"]),
        ("32B", "vllm", "as it is"): (None, []),
    }


def test_a_base_that_plan_does_not_know_the_bytes_of_is_told(plan, tmp_path):
    fields = json.loads(Path(QWEN).read_text()) | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = json.loads(plan(RECIPE, "--device", "h100", "--json", MODEL, str(tmp_path)))
    assert "the base is stored in 4 bits (awq), and counted as if it were not quantised" in found["notes"]


@pytest.mark.parametrize("batch", [(), ("--config.training.generation_batch_size", "1024")])
def test_what_is_proposed_is_accepted_and_fits(plan, batch):
    """The flags go back in: the same peaks as the proposal promised."""
    flags = RECIPE, MODEL, QWEN, *batch, "--device", "a100", "--count", "2", "--json"
    first = json.loads(plan(*flags))
    again = json.loads(plan(*flags, *(str(word) for pair in first["proposal"].items() for word in pair)))
    assert again["peak"] == first["proposal_peak"]
    assert again["fits"]["80"]


def test_the_accelerate_file_of_the_environment_decides(plan, monkeypatch):
    monkeypatch.setenv("ACCELERATE_CONFIG", str(ROOT / "scripts" / "accelerate" / "npu_fsdp2.yaml"))
    flags = RECIPE, MODEL, QWEN, "--device", "910c", "--count", "2", "--json"
    assert json.loads(plan(*flags))["parallel"] == "fsdp2"
    assert json.loads(plan(*flags, "--parallel", "zero3"))["parallel"] == "zero3"


@pytest.mark.parametrize(
    ("name", "device", "kinds"),
    [
        ("npu_zero3", "cpu", "npu or cuda"),
        ("npu_fsdp2", "cpu", "npu or cuda"),
        ("npu_ddp", "h100", "npu"),
        ("cuda_ddp", "910b", "cuda"),
        ("cpu", "h100", "cpu"),
    ],
)
def test_the_accelerate_file_of_another_kind_of_device_is_one_line(monkeypatch, name, device, kinds):
    file = ROOT / "scripts" / "accelerate" / f"{name}.yaml"
    monkeypatch.setenv("ACCELERATE_CONFIG", str(file))
    with pytest.raises(UserError) as error:
        parallel_of(DEVICES[device], 8)
    assert str(error.value).startswith(f"ACCELERATE_CONFIG={file}: is for {kinds}, this plan for {device}")


@pytest.mark.parametrize(
    ("name", "device", "parallel"),
    [
        ("npu_zero3", "h100", "zero3"),  # docs/training.md gives both for GPUs too
        ("npu_fsdp2", "h100", "fsdp2"),
        ("cuda_zero2", "910b", "zero2"),
        ("npu_ddp", "910b", "ddp"),
        ("cuda_ddp", "h100", "ddp"),
        ("cpu", "cpu", "ddp"),
        ("single", "cpu", "ddp"),
    ],
)
def test_what_an_accelerate_file_holds_says_which_devices_it_fits(monkeypatch, name, device, parallel):
    monkeypatch.setenv("ACCELERATE_CONFIG", str(ROOT / "scripts" / "accelerate" / f"{name}.yaml"))
    assert parallel_of(DEVICES[device], 8) == parallel


def test_as_many_processes_as_the_launch_script_starts(plan, monkeypatch):
    """Four of the eight devices draw."""
    monkeypatch.setattr("perl.device.detect", lambda: Devices("cuda", 8))
    flags = str(ROOT / "recipes" / "gsm8k_pool_7b.yaml"), MODEL, QWEN, "--device", "h100", "--json"
    assert json.loads(plan(*flags))["count"] == 4
    monkeypatch.setenv("NUM_PROCESSES", "2")
    assert json.loads(plan(*flags))["count"] == 2


def test_num_processes_counts_for_devices_that_are_elsewhere_too(plan, monkeypatch):
    monkeypatch.setattr("perl.device.detect", lambda: Devices("cuda", 1))
    flags = RECIPE, MODEL, QWEN, "--device", "910b", "--json"
    assert json.loads(plan(*flags))["count"] == 1
    monkeypatch.setenv("NUM_PROCESSES", "4")
    found = json.loads(plan(*flags))
    assert (found["count"], found["parallel"]) == (4, "zero2")
    monkeypatch.setenv("NUM_PROCESSES", "four")
    with pytest.raises(UserError, match="NUM_PROCESSES=four: give a whole number from 1"):
        plan(*flags)


def test_workers_for_which_there_is_no_piece_are_told(plan):
    """A quarter of a generation batch is a piece."""
    flags = RECIPE, MODEL, QWEN, "--device", "h100", "--json", "--config.rollout.workers"
    told = [note for note in json.loads(plan(*flags, "5"))["notes"] if "never draw" in note]
    assert len(told) == 1
    assert told[0].startswith("--config.rollout.workers 5: no more than 4 pieces of ")
    assert not any("never draw" in note for note in json.loads(plan(*flags, "4"))["notes"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "not a readable YAML file ('utf-8' codec can't decode"),
        (b"a: [", "not a readable YAML file (while parsing"),
        (b"a: 1\na: 2", "not a readable YAML file (a stands in line 1 and again in line 2; write it once); take"),
        (b"", "holds no settings; take one of "),
    ],
)
def test_an_accelerate_file_that_says_nothing_is_one_line(plan, monkeypatch, tmp_path, content, said):
    (tmp_path / "mine.yaml").write_bytes(content)
    monkeypatch.setenv("ACCELERATE_CONFIG", str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError) as error:
        plan(RECIPE, MODEL, QWEN, "--device", "910b", "--count", "2")
    assert str(error.value).startswith(f"ACCELERATE_CONFIG={tmp_path / 'mine.yaml'}: {said}")


TORN = '{"model_type": "qwen2", "hidden_size": 35'
IMAGES = json.dumps({"model_type": "qwen2_vl"})
OTHER = json.dumps({"model_type": "gpt2", "n_layer": 2})
MIXTURE = json.dumps({"model_type": "qwen2_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_experts": 4})


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--device", "h800"], None, "--device: unknown device 'h800'; did you mean 'h"),
        (["--count", "0"], None, "--count 0: write a number of devices from 1"),
        (["--device", "910b", "--count", "2", "--parallel", "single"], None, "--parallel single: a single process"),
        (["--parallel", "zero4"], None, "unknown way to share the work 'zero4'"),
        ([], TORN, "config.json: not a readable config.json"),
        ([], "[]", "config.json: not a readable config.json: it holds no object"),
        ([], "{}", "it names no model_type"),
        ([], json.dumps({"model_type": "qwen9"}), "transformers cannot read it"),
        ([], IMAGES, "qwen2_vl takes more than text"),
        ([], OTHER, "plan has no formulas for gpt2"),
        ([], MIXTURE, "plan has no formulas for qwen2_moe"),
        (["--config.peft.target_modules", '["nothing"]'], None, "--config.peft: this model cannot be made"),
        (
            ["--config.peft.type", "oft", "--config.peft.r", "4"],
            None,
            "--config.peft.r 4: peft.type oft does not read it",
        ),
        (
            ["--config.peft.type", "hra", "--device", "910b", "--count", "2", "--parallel", "zero3"],
            None,
            "can't be trained with ZeRO-3",
        ),
        (["--config.training.num_generations", "3"], None, "num_generations 3 does not divide the 16 completions"),
        (["--config.dataset.max_prompt_length", "null"], None, "plan needs the longest prompt"),
        ([*NF4, "--config.peft.type", "none"], None, "--config.peft.type none: 4 bits can't be trained; write lora"),
        ([*NF4, "--config.rollout.engine", "vllm"], None, "quantization nf4: vLLM is not given such a base"),
        (
            [*NF4, "--device", "h100", "--count", "2", "--parallel", "zero3"],
            None,
            "quantization nf4: ZeRO-3 would split the packed weights; start with DDP or ZeRO-2",
        ),
        (
            ["--config.training.model_init_kwargs", '{"quantization_config": {"load_in_8bit": true}}'],
            None,
            "quantization_config has no place there; write --config.model.quantization nf4",
        ),
        (
            ["--config.rollout.quantization", "int8", "--device", "h100"],
            None,
            "no products of such weights on cuda; write --config.rollout.engine vllm or none",
        ),
        (
            ["--config.rollout.quantization", "fp8", "--device", "910b"],
            None,
            "no products of such weights on npu; write int8 or int8_w8a8 or int4 or none",
        ),
        (
            ["--config.rollout.quantization", "int8", "--device", "910b", "--count", "2", "--parallel", "fsdp2"],
            None,
            "int8: FSDP2 gathers each layer's own weights to draw; write --config.rollout.workers 1 or more",
        ),
        (["--method", "rl"], None, "--method: unknown method 'rl'"),
        (["--config.training.nothing", "3"], None, "unknown flag --config.training.nothing"),
        ([MODEL, "no/where/at_all"], None, "no such folder"),
        ([MODEL, "perl-tests/not-there"], None, "the hub gave nothing"),
    ],
    ids=lambda value: None,
)
def test_mistakes_are_one_line(flags, config, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError) as error:
        main(["plan", RECIPE, MODEL, str(tmp_path) if config is not None else QWEN, *flags])
    assert message in str(error.value)


TOOLS = '''
def untold(a: int) -> int:
    """Add one."""
    return a + 1


class Mute:
    pass
'''


@pytest.mark.parametrize(
    ("flag", "named", "message"),
    [
        ("tools", '["pyhton"]', "--config.environment.tools: unknown tool 'pyhton'; did you mean 'python'"),
        ("tools", '["{}:missing"]', "'missing' is not defined there; functions there: untold, Mute"),
        ("tools", '["{}:untold"]', "--config.environment.tools: untold: "),
        ("factory", "{}:Mute", "has no reset; write def reset(self, **row): ..."),
        ("factory", "nowhere.py:Mute", "no such file"),
    ],
)
def test_a_mistake_in_an_environment_is_one_line_as_in_a_training(tmp_path, flag, named, message):
    (tmp_path / "tools.py").write_text(TOOLS)
    words = [RECIPE, MODEL, QWEN, f"--config.environment.{flag}", named.replace("{}", str(tmp_path / "tools.py"))]
    with pytest.raises(UserError) as error:
        main(["plan", *words])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_environment_that_is_right_is_planned(plan):
    assert json.loads(plan(RECIPE, MODEL, QWEN, "--config.environment.tools", '["python"]', "--json"))["items"]


def test_a_hub_that_does_not_answer_is_one_line():
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "PERL_USE_MODELSCOPE": ""}
    done = process(RECIPE, "--device", "910b", MODEL, "perl-tests/not-there", **nobody)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "real_accelerator" not in line)
    assert line.startswith(f"error: {MODEL} perl-tests/not-there: no such folder, and the hub gave nothing (")


def test_a_recipe_that_is_not_there():
    with pytest.raises(UserError, match=r"no file no\.yaml"):
        main(["plan", "no.yaml", "--device", "910b"])
