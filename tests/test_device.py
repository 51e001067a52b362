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
