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
from perl.runs.out_of_memory import explain_out_of_memory, message, set_first, settings

ROOT = Path(__file__).parents[2]


def config(**settings):
    words = [word for name, value in settings.items() for word in (f"--config.{name.replace('__', '.')}", str(value))]
    return parse([*words, "--config.training.output_dir", "unused"]).build()


def flags(phase, **given):
    return [flag for flag, _ in settings(phase, config(**given))]


BATCH = {
    "training__per_device_train_batch_size": 4,
    "training__gradient_accumulation_steps": 8,
    "training__num_generations": 8,
    "training__max_completion_length": 1024,
    "training__gradient_checkpointing": "false",
}


def test_the_update_first_takes_smaller_micro_batches_then_recomputes_then_cuts():
    assert flags("update", **BATCH) == [
        "training.per_device_train_batch_size",
        "training.gradient_checkpointing true",
        "training.max_completion_length",
        "peft.r",
    ]
    least = BATCH | {"training__per_device_train_batch_size": 1, "training__gradient_checkpointing": "true"}
    assert flags("update", **least) == ["training.max_completion_length", "peft.r"]


def test_the_rollout_decodes_fewer_rows_then_fewer_groups():
    assert flags("rollout", **BATCH)[:2] == ["rollout.max_batch_tokens", "training.steps_per_generation"]
    stock = BATCH | {"rollout__engine": "generate"}
    assert flags("rollout", **stock, training__generation_batch_size=64)[0] == "training.generation_batch_size"
    assert flags("rollout", **stock, training__steps_per_generation=2)[0] == "training.max_completion_length"  # a group


def test_a_validation_of_the_tasks_own_length_is_not_made_longer():
    """GSM8K's completions have 256 tokens at most where nothing is said."""
    datasets = {"validation__datasets": '["gsm8k"]'}
    assert flags("validation", **datasets) == ["rollout.max_batch_tokens", "peft.r"]
    assert "validation.max_new_tokens" in flags("validation", **datasets, validation__max_new_tokens=100)


def test_vllms_base_in_fewer_bits_comes_after_what_keeps_what_is_learned():
    vllm = BATCH | {"training__use_vllm": "true"}
    first = flags("rollout", **vllm)
    assert first[0] == "training.vllm_gpu_memory_utilization"
    at = first.index("rollout.quantization")
    assert first[at + 1] == "training.max_completion_length"
    for phase in ("rollout", "update"):
        assert "rollout.quantization" not in flags(phase, **BATCH)  # a CPU's copy is one more
    assert "rollout.quantization" not in flags("rollout", **vllm, peft__type="none")


def test_the_line_names_the_phase_and_present_values_of_three_settings():
    assert message("update", config(**BATCH)) == (
        "out of memory in the update on rank 0. Set the first of these that is enough, a number lower:"
        " --config.training.per_device_train_batch_size (now 4: same batch with gradient_accumulation_steps as much"
        " higher, slower);"
        " --config.training.gradient_checkpointing true (now false: same result, a second forward);"
        " --config.training.max_completion_length (now 1024: cuts long answers)"
    )
    assert "gradient_accumulation_steps and steps_per_generation as much higher" in message(
        "update", config(**BATCH, training__steps_per_generation=8)
    )


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
    assert str(caught.value).startswith(f"{lost}. Set the first of these")
    assert "--config.rollout.max_batch_tokens (now null: same batch, slower)" in str(caught.value)
    vllm = config(**BATCH, rollout__engine="vllm", rollout__workers=1)
    share = "--config.training.vllm_gpu_memory_utilization (now 0.3: slower sampling); --config.rollout.quantization"
    assert share in set_first("worker", vllm)
    with pytest.raises(RunError, match="all is lost"), explain_out_of_memory(config()):
        raise RunError("all is lost")


def test_a_trainer_that_draws_nothing_computes_fewer_tokens_at_once():
    workers = BATCH | {"rollout__workers": 1}
    assert flags("rollout", **workers)[0] == "training.max_completion_length"
    bounded = flags("rollout", **workers, training__max_tokens_per_microbatch=8192)
    assert bounded[:2] == ["training.max_tokens_per_microbatch", "training.max_completion_length"]


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
