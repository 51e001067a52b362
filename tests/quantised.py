"""What tests of int8 products ask of the processor."""

import pytest

from perl.engines.quantised import SCHEMES, available

needs_int8 = pytest.mark.skipif(
    not available(SCHEMES["int8"]), reason="no exact products of int8 numbers on this processor"
)
