"""The emulated NPU itself: what the other NPU tests stand on must be true."""

import sys

import pytest

pytestmark = pytest.mark.npu


def test_sum_on_the_second_device(run_npu):
    code = "import torch; print((torch.ones(2, device='npu:1') + 1).sum())"
    assert run_npu([sys.executable, "-c", code]).stdout == "tensor(4., device='npu:1')\n"
