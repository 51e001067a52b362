"""What tests of int8 products ask of the processor."""

import pytest

from perl.engines.quantised import SCHEMES, lacking

needs_int8 = pytest.mark.skipif(
    lacking(SCHEMES["int8"]) is not None, reason="no exact products of int8 numbers on this processor"
)
