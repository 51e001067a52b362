"""What an accelerator without memory left says: the settings that need less, cheapest first, with present values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perl import device
from perl.base.errors import RankError, RunError
from perl.config.load import parse
from perl.runs.out_of_memory import changes, explain_out_of_memory, fewer_bits, message

ROOT = Path(__file__).parents[2]


def config(**settings):
    words = [word for name, value in settings.items() for word in (f"--config.{name.replace('__', '.')}", str(value))]
    return parse([*words, "--config.training.output_dir", "unused"]).build()


def flags(phase, **settings):
    return [text.split(" (")[0] for text in changes(phase, config(**settings))]


BATCH = {
    "training__per_device_train_batch_size": 4,
    "training__gradient_accumulation_steps": 8,
    "training__num_generations": 8,
    "training__max_completion_length": 1024,
    "training__gradient_checkpointing": "false",
}


def test_the_update_first_takes_smaller_micro_batches_then_recomputes_then_cuts():
    assert flags("update", **BATCH) == [
        "--config.training.per_device_train_batch_size 2 --config.training.gradient_accumulation_steps 16",
        "--config.training.gradient_checkpointing true",
        "--config.training.max_completion_length 512",
        "--config.peft.r 8",
    ]


def test_what_is_at_its_least_already_is_not_advised():
    settings = BATCH | {
        "training__per_device_train_batch_size": 1,
        "training__gradient_checkpointing": "true",
    }
    assert flags("update", **settings) == [
        "--config.training.max_completion_length 512",
        "--config.peft.r 8",
    ]


def test_the_rollout_first_decodes_fewer_rows_at_once():
    # 4 x 8 sequences of 512 + 1024 tokens are 49152; half of what they come to, or of the present bound below that
    assert flags("rollout", **BATCH)[0] == "--config.rollout.max_batch_tokens 24576"
    assert flags("rollout", **BATCH, rollout__max_batch_tokens=8192)[0] == "--config.rollout.max_batch_tokens 4096"


def test_the_rollout_samples_its_batch_in_parts_of_whole_groups():
    # 4 sequences a step and device, 8 generations: parts of 2 steps or more, that divide 8
    stock = BATCH | {"rollout__engine": "generate"}
    assert flags("rollout", **BATCH)[1] == "--config.training.steps_per_generation 4"
    assert flags("rollout", **stock)[0] == "--config.training.steps_per_generation 4"
    assert flags("rollout", **stock, training__steps_per_generation=4)[0] == "--config.training.steps_per_generation 2"
    one_group = flags("rollout", **stock, training__steps_per_generation=2)
    assert one_group[0] == "--config.training.max_completion_length 512"


def test_a_validation_of_the_tasks_own_length_is_not_made_longer():
    """GSM8K's completions have 256 tokens at most where nothing is said."""
    datasets = {"validation__datasets": '["gsm8k"]', "rollout__max_batch_tokens": 4096}
    assert flags("validation", **datasets) == ["--config.rollout.max_batch_tokens 2048", "--config.peft.r 8"]
    assert "--config.validation.max_new_tokens 50" in flags("validation", **datasets, validation__max_new_tokens=100)


@pytest.mark.parametrize("given", [{}, {"generation_batch_size": 64}, {"steps_per_generation": 8}])
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_the_advice_makes_a_configuration_that_is_accepted(phase, given):
    """Each setting applied alone; the batch of an update stays 32 sequences with those that promise it."""
    batch = BATCH | {f"training__{name}": value for name, value in given.items()}
    drawn = config(**batch).training.generation_batch_size
    for text in changes(phase, config(**batch)):
        words = text.split(" (")[0].split()
        changed = dict(
            zip([w.removeprefix("--config.").replace(".", "__") for w in words[::2]], words[1::2], strict=True)
        )
        training = config(**(batch | changed)).training
        if "same batch, slower" in text:
            assert training.generation_batch_size == drawn
        if "same batch" in text:
            assert training.per_device_train_batch_size * training.gradient_accumulation_steps == 32
        assert training.generation_batch_size % training.num_generations == 0


def test_vllms_base_in_fewer_bits_comes_after_what_keeps_what_is_learned():
    vllm = BATCH | {"training__use_vllm": "true"}
    text = list(changes("rollout", config(**vllm)))
    at = text.index("--config.rollout.quantization int8_w8a8 (now none: rounds the base that draws)")
    assert text[0].startswith("--config.training.vllm_gpu_memory_utilization")
    assert text[at + 1].startswith("--config.training.max_completion_length 512")
    for phase in ("rollout", "update"):
        assert not [flag for flag in flags(phase, **BATCH) if "quantization" in flag]  # a CPU's copy is one more
    assert not [flag for flag in flags("rollout", **vllm, peft__type="none") if "quantization" in flag]
    assert (fewer_bits("none", "cuda"), fewer_bits("none", "npu")) == ("int8", "int8_w8a8")
    assert fewer_bits("int8", "cuda") == fewer_bits("int8_w8a8", "cuda") == "int4"
    assert fewer_bits("int4", "cuda") is fewer_bits("int8_w8a8", "npu") is None


def test_the_line_names_the_phase_and_present_values_of_three_settings():
    text = message("update", config(**BATCH))
    assert text.startswith("out of memory in the update on rank 0. Set the first of these")
    assert "(now 4, 8: same batch, slower)" in text
    assert "(now false: same result, a second forward)" in text
    assert "(now 1024: cuts long answers)" in text
    assert "peft.r" not in text
    assert "ZeRO-3" not in text  # one device


def test_the_line_says_how_much_was_asked_for_and_how_much_is_free(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda: 3 * 2**29)
    said = r"rank 0 \(2\.00 GiB asked for, 1\.50 GiB free\)\. Set"
    with pytest.raises(RankError, match=said), explain_out_of_memory(config()):
        raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total")
    with pytest.raises(RankError, match=r"before the first step on rank 0\. Set"), explain_out_of_memory(config()):
        raise torch.OutOfMemoryError("NPU out of memory")


def test_a_workers_error_gets_advice_for_what_workers_hold():
    lost = "rollout: an error came back: torch.OutOfMemoryError: CUDA out of memory; checkpoint-2 is saved"
    with pytest.raises(RunError) as caught, explain_out_of_memory(config(**BATCH, rollout__workers=1)):
        raise RunError(lost)
    # A piece is a quarter of the 32 sequences: 8 of 1,536 tokens are 12,288, and half of that was asked for.
    advice = "Set the first of these that is enough: --config.rollout.max_batch_tokens 6144"
    assert str(caught.value).startswith(f"{lost}. {advice}")
    vllm = {"rollout__engine": "vllm", "rollout__workers": 1}
    assert flags("worker", **BATCH, **vllm)[:2] == [
        "--config.training.vllm_gpu_memory_utilization 0.21",
        "--config.rollout.quantization int8_w8a8",
    ]
    with pytest.raises(RunError, match="all is lost"), explain_out_of_memory(config()):
        raise RunError("all is lost")


def test_a_trainer_that_draws_nothing_computes_fewer_tokens_at_once():
    bounded = {"rollout__workers": 1, "training__max_tokens_per_microbatch": 8192}
    shorter = "--config.training.max_completion_length 512"
    assert flags("rollout", **BATCH, rollout__workers=1)[0] == shorter
    assert flags("rollout", **BATCH, **bounded)[:2] == ["--config.training.max_tokens_per_microbatch 4096", shorter]


def test_errors_of_old_and_new_libraries_are_recognised():
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert device.is_out_of_memory(RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB"))
    assert not device.is_out_of_memory(RuntimeError("size mismatch"))
    assert not device.is_out_of_memory(ValueError("NPU out of memory"))


def test_a_higher_rank_says_what_it_alone_meets():
    program = (
        "from perl.base.errors import RankError, report_errors\nwith report_errors(): raise RankError('it is full')"
    )
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: it is full\n")
