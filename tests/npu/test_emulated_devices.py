"""How many emulated NPUs there are, which are visible, and what happens when one is lost or used after a fork."""

import pytest

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8])
def test_machine_with_devices(answer, count):
    found = answer(
        """
        from perl import device
        seen = device.detect()
        sums = [torch.ones(3, device=f"npu:{index}").sum().item() for index in range(torch.npu.device_count())]
        answer = dict(available=torch.npu.is_available(), sums=sums, kind=seen.kind, count=seen.count,
                      dtype=str(device.default_dtype()), first=str(device.torch_device()))
        """,
        devices=count,
    )
    assert found["available"] is (count > 0)
    assert found["sums"] == [3.0] * count
    if count:
        assert (found["kind"], found["count"], found["first"]) == ("npu", count, "npu:0")
        assert found["dtype"] == "torch.bfloat16"
    else:
        assert (found["kind"], found["first"], found["dtype"]) == ("cpu", "cpu", "torch.float32")


def test_visible_devices_by_canns_rules(answer):
    """Of two devices. Read until the first use of a device, and not afterwards."""
    found = answer("""
        def count(variable):
            os.environ["ASCEND_RT_VISIBLE_DEVICES"] = variable
            return torch.npu.device_count()
        counts = {v: count(v) for v in ("0", "1", "0,1", "0,9", "9,0", "0, 1", "0,,1", "1,0", "0,0", "", "x", "-1")}
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
        initialized = [torch.npu.is_initialized()]
        torch.ones(1, device="npu:0")
        initialized.append(torch.npu.is_initialized())
        answer = dict(counts=counts, initialized=initialized, after_use=count("0,1"))
    """)
    assert found["counts"] == {
        "0": 1,
        "1": 1,
        "0,1": 2,
        "0,9": 1,  # the id that does not exist ends the list without a word
        "9,0": 0,
        "0, 1": 1,  # nothing is read behind the blank
        "0,,1": 1,
        "1,0": 0,  # ids must ascend
        "0,0": 0,
        "": 0,
        "x": 0,
        "-1": 0,
    }
    assert found["initialized"] == [False, True]
    assert found["after_use"] == 1


LOSE = """
def attempt(function):
    try:
        function()
        return "fine"
    except RuntimeError as error:
        return str(error)
"""


def test_device_lost_after_some_operators(answer):
    """The device with physical id 1 is npu:0 where it alone is visible; every use of it fails from then on."""
    program = f"""{LOSE}
x = torch.ones(4, device="npu:0")
outcomes = [attempt(lambda: x.add_(1)) for _ in range(30)]
answer = dict(outcomes=outcomes, synchronize=attempt(torch.npu.synchronize), copy=attempt(x.cpu),
              new=attempt(lambda: torch.empty(1, device="npu:0")), still=torch.npu.device_count())
"""
    variables = {"NPUEMU_LOSE_DEVICE_AFTER": "1:20"}
    found = answer(program, ASCEND_RT_VISIBLE_DEVICES="1", **variables)
    lost = [outcome != "fine" for outcome in found["outcomes"]]
    assert lost == sorted(lost)
    assert lost[0] is False
    assert lost[-1] is True
    for outcome in (found["outcomes"][-1], found["synchronize"], found["copy"], found["new"]):
        assert "error code is 507010" in outcome
        assert "Device[1] lost heartbeat" in outcome
    assert found["still"] == 1
    assert set(answer(program, ASCEND_RT_VISIBLE_DEVICES="0", **variables)["outcomes"]) == {"fine"}


def test_device_lost_when_a_file_appears(answer, tmp_path):
    found = answer(
        f"""{LOSE}
x, other = torch.ones(4, device="npu:0"), torch.ones(4, device="npu:1")
before = attempt(lambda: x.add_(1))
open({str(tmp_path / "lost")!r}, "w").close()
answer = dict(before=before, after=attempt(lambda: x.add_(1)), other=attempt(lambda: other.add_(1)))
""",
        NPUEMU_LOSE_DEVICE_AFTER=f"0:{tmp_path / 'lost'}",
    )
    assert found["before"] == found["other"] == "fine"
    assert "Device[0] lost heartbeat" in found["after"]


def test_a_forked_process_may_not_use_the_device(answer):
    found = answer(f"""{LOSE}
def in_a_fork():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, attempt(lambda: torch.ones(1, device="npu:0")).encode())
        os._exit(0)
    os.close(writer)
    return os.fdopen(reader).read()
before = in_a_fork()
torch.ones(1, device="npu:0")
answer = dict(before=before, after=in_a_fork())
""")
    assert found["before"] == "fine"
    assert "Cannot re-initialize NPU in forked subprocess" in found["after"]
