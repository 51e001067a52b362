"""perl.device on emulated NPUs: the only file of the package that tells an NPU from a GPU from a CPU."""

import sys

import pytest
import torch

from perl import device

pytestmark = pytest.mark.npu

WORKERS = """
from perl import device
from perl.base import errors
def worker(*arguments):
    try:
        return device.worker_environment(*arguments)
    except errors.UserError as error:
        return str(error)
def workers(devices, visible):   # read again each time, as no device is used
    os.environ["NPUEMU_DEVICES"] = str(devices)
    os.environ.pop("ASCEND_RT_VISIBLE_DEVICES", None)
    if visible:
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible
    return [worker(0), worker(1), worker(0, 2), worker(1, 2)]
answer = [workers(2, None), workers(8, "4,6"), workers(2, "1,7")]
"""


def test_each_worker_is_shown_its_own_devices(answer):
    unset, chosen, dropped = answer(WORKERS)

    assert unset[:3] == [{"ASCEND_RT_VISIBLE_DEVICES": ids} for ids in ("0", "1", "0,1")]
    assert "worker 1 needs 2 npu device(s), but only 2 are visible" in unset[3]

    assert chosen[:3] == [{"ASCEND_RT_VISIBLE_DEVICES": ids} for ids in ("4", "6", "4,6")]
    assert "ASCEND_RT_VISIBLE_DEVICES=4,6" in chosen[3]

    assert dropped[0] == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    for message in dropped[1:]:  # CANN drops 7, which does not exist
        assert "only 1 are visible (ASCEND_RT_VISIBLE_DEVICES=1,7)" in message


@pytest.mark.parametrize(
    ("visible", "said"), [("0, 1", "0, 1: names 2 devices, of which 1 are"), ("0,5", "0,5: names")]
)
def test_a_run_on_fewer_devices_than_were_named_is_refused(run_npu, visible, said):
    """It ran on one of four, with another batch, without a word."""
    done = run_npu(
        [sys.executable, "-m", "perl.tools.launch", "--recipe", "recipes/quickstart.yaml"],
        check=False,
        ASCEND_RT_VISIBLE_DEVICES=visible,
    )
    assert done.returncode == 2
    assert f"ASCEND_RT_VISIBLE_DEVICES={said}" in done.stderr


def test_a_visibility_variable_that_leaves_no_device_is_said(run_npu):
    program = "import logging; logging.basicConfig(); from perl import device; print(device.detect().kind)"
    done = run_npu([sys.executable, "-c", program], ASCEND_RT_VISIBLE_DEVICES="1,0")
    assert done.stdout == "cpu\n"
    assert done.stderr.count("ASCEND_RT_VISIBLE_DEVICES=1,0 leaves no npu visible") == 1


def test_a_workers_environment_leaves_it_its_device(run_npu):
    """The second of two workers sees one device, the physical device 1, which is lost."""
    program = """
import os, torch
from perl import device
os.environ |= device.worker_environment(1)
print(torch.npu.device_count())
torch.ones(1, device="npu:0")
"""
    done = run_npu([sys.executable, "-c", program], check=False, NPUEMU_LOSE_DEVICE_AFTER="1:0")
    assert (done.stdout, done.returncode) == ("1\n", 1)
    assert "Device[1] lost heartbeat" in done.stderr


def test_peak_memory_is_the_allocators(answer):
    found = answer("""
        from perl import device
        x = torch.empty(1024, device="npu")
        y = x * 2
        del y
        answer = device.peak_memory().allocated
    """)
    assert found == 2 * 4608


def test_a_read_is_started_and_taken_later(answer):
    found = answer("""
        import torch_npu
        from perl import device
        tokens = torch.arange(3, device="npu")
        before = torch_npu._emulator_counters()
        reads = [device.start_read(tokens), device.start_read(tokens + 1)]
        tokens.add_(10)                                   # behind the copies
        unwaited = torch_npu._emulator_counters() == before
        values = [read.wait().tolist() for read in reads]
        after = torch_npu._emulator_counters()
        answer = [reads[0].value.is_pinned(), unwaited, values, after["event"] - before["event"],
                  after["blocking"] - before["blocking"]]
    """)
    assert found == [True, True, [[0, 1, 2], [1, 2, 3]], 2, 0]


def test_on_a_cpu_a_read_is_there_at_once(monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cpu", 1))
    assert device.start_read(torch.arange(3)).wait().tolist() == [0, 1, 2]


def test_outside_of_the_emulation_there_is_no_npu():
    """This process was not started on the emulated machine."""
    assert not hasattr(torch, "npu")
    assert device.detect().kind in ("cuda", "cpu")


TALKS = """
import torch
from tests.environments.test_conversation import asked, saying, shown, talk

def plain(word: str) -> str:
    '''Plain.

    Args:
        word: None.
    '''
    return str(torch.ones(1, device="npu").device)

async def awaited(word: str) -> str:
    '''Awaited.

    Args:
        word: None.
    '''
    return plain(word)

before = talk(saying(asked("plain"), "so"), plain)
torch.npu.set_device(1)  # as accelerate does it in the process of rank 1
after = talk(saying(asked("plain") + asked("awaited"), "so"), plain, awaited)
answer = [[said for role, said in shown(row) if role == "tool"] for row in (*before, *after)]
"""


def test_tools_compute_on_the_device_of_whoever_talks(answer):
    """Their threads begin on the first one."""
    assert answer(TALKS) == [["npu:0"], ["npu:1", "npu:1"]]
