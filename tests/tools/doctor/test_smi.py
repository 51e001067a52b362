"""npu-smi's output in the shapes that real versions print."""

from pathlib import Path

import pytest

from perl.tools.doctor import smi

OUTPUTS = Path(__file__).parent / "outputs"


def text(name):
    return (OUTPUTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "version", "count", "chip"),
    [
        ("info_910b2_23.0.3", "23.0.3", 8, smi.Chip(7, 7, 0, "910B2", "OK", 3421, 65536)),
        ("info_910b3_24.1.rc3", "24.1.rc3", 8, smi.Chip(0, 0, 0, "910B3", "OK", 3372, 65536)),
        ("info_910b3_25.5.0_busy", "25.5.0", 8, smi.Chip(1, 1, 0, "910B3", "OK", 41842, 65536)),
        ("info_910b4_26.0.rc1_container", "26.0.rc1", 1, smi.Chip(0, 5, 0, "910B4", "OK", 2922, 32768)),
        ("info_910c_24.1.rc3.7", "24.1.rc3.7", 16, smi.Chip(3, 1, 1, "Ascend910", "OK", 2877, 65536)),
        ("info_910c_26.0.rc2", "26.0.rc2", 16, smi.Chip(15, 7, 1, "Ascend910", "OK", 31877, 65536)),
    ],
)
def test_info(name, version, count, chip):
    table = smi.parse_info(text(name))
    assert table.version == version
    assert len(table.chips) == count
    assert [c.index for c in table.chips] == list(range(count))
    assert chip in table.chips


def test_holders_with_and_without_the_column_of_the_container():
    assert smi.parse_info(text("info_910b3_25.5.0_busy")).holders == (
        smi.Holder(0, 0, 3072791, "VLLMWorker_TP", 38170, None),
        smi.Holder(1, 0, 3072792, "VLLMWorker_TP", 38170, None),
    )
    assert smi.parse_info(text("info_910c_26.0.rc2")).holders == (
        smi.Holder(0, 0, 632268, "python3.1", 197, None),
        smi.Holder(7, 0, 632301, "python3.1", 28441, 88),
        smi.Holder(7, 1, 632302, "python3.1", 28440, 89),
    )
    assert smi.parse_info(text("info_910b3_24.1.rc3")).holders == ()


def test_health_of_each_chip():
    health = {c.npu: c.health for c in smi.parse_info(text("info_910b3_25.5.0_alarm")).chips}
    assert health == {0: "OK", 1: "OK", 2: "Warning", 3: "OK", 4: "OK", 5: "Alarm", 6: "OK", 7: "OK"}


@pytest.mark.parametrize("name", ["info_8005", "info_8020"])
def test_error_instead_of_a_table(name):
    assert smi.parse_info(text(name)) == smi.Table()
    assert smi.dcmi_error(text(name)) == "-" + name.removeprefix("info_")
    assert smi.dcmi_error(text("info_910b3_25.5.0")) == ""
