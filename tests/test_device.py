"""perl.device with a torch.cuda that says what other machines' would; the NPU's part is in tests/npu."""

import pytest
import torch

from perl import device


@pytest.mark.parametrize(("native", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_emulated_bfloat16_is_not_the_default(monkeypatch, native, dtype):
    """T4, V100 and RTX 20xx: torch says that they take bfloat16, unless it is asked without emulation."""
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert device.default_dtype() == dtype


def test_processes_on_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cpu", 1))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = device.available_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device.available_memory() < alone / 2


def test_a_training_on_npus_starts_with_hccls_settings_unless_the_user_has_set_them(monkeypatch, tmp_path):
    for name in ("HCCL_CONNECT_TIMEOUT", "ASCEND_HOME_PATH", *device.START_VARIABLES["npu"]):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    found = device.start_environment("npu")
    assert "HCCL_BUFFSIZE" not in found
    assert (found["HCCL_CONNECT_TIMEOUT"], found["ASCEND_HOME_PATH"]) == ("1200", str(tmp_path))
    assert device.start_environment("cuda") == {}


def test_a_training_on_a_cpu_keeps_freed_memory_unless_the_user_has_set_it(monkeypatch):
    for name in device.START_VARIABLES["cpu"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    found = device.start_environment("cpu")
    assert found == {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}


def test_products_are_timed_in_both_dtypes_in_turn(monkeypatch):
    """Medians: what runs beside for a moment does not count."""
    clock = iter(
        seconds
        for repeat in range(5)
        for float32, bfloat16 in [(9.0, 9.0) if repeat == 1 else (0.002, 0.001)]
        for seconds in (0.0, float32, 0.0, bfloat16)
    )
    calls, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(device, "WARM_UP", 0)
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *pair: calls.append((pair[0].dtype, linear(*pair).shape)))
    assert device.time_products(4, 3, 2, repeats=5) == {"float32": 2.0, "bfloat16": 1.0}
    assert calls == [(torch.float32, (4, 2)), (torch.bfloat16, (4, 2))] * 5
