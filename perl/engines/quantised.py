"""Linear layers whose weights are int8 numbers, on a CPU: a sampler's copy of a frozen base.

    weight     W[o, i] ~ scale[o] * w[o, i],   scale[o] = max_i |W[o, i]| / 127         (symmetric, per output)
    int8_w8a8  x[r, i] ~ s[r] * a[r, i],       s[r] = max_i |x[r, i]| / 127             (symmetric, per row)
    int8       x[r, i] ~ s[r] * (128 h + l),   s[r] = max_i |x[r, i]| / (127 * 128)     (h and l are int8)
    product    y[r, o] = s[r] * scale[o] * sum_i a[r, i] w[o, i]

The sum is one of whole numbers, which no order changes: a row's bits depend on nothing but the row. Where the processor
has AMX a product of int8 numbers takes a tenth of the time of one of float32, so that activations of two digits are
much cheaper than float32 too; and they lose next to nothing (docs/performance.md).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

Quantisation = Literal["none", "int8", "int8_w8a8"]
DIGITS = {"int8": 2, "int8_w8a8": 1}
"""Of eight bits, of an activation."""
LARGEST = 127
"""Of an int8 number: -128 has no counterpart."""
SMALLEST = 2.0**-100
"""Of a scale: its reciprocal is a number too."""
HIGH = 128
"""What the high digit of an activation counts for."""


class HiddenStates:
    """Hidden states as whole numbers: those read last, as several layers read the same (query, key and value).

    Args:
        digits: of an activation, of eight bits each.
    """

    def __init__(self, digits: int):
        self.digits = digits
        self._read: torch.Tensor | None = None
        self._numbers: tuple[list[torch.Tensor], torch.Tensor] = [], torch.empty(0)

    def numbers(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Of [..., in]: the digits from the lowest on, int8 [rows, in] each, and the rows' scale, float32 [rows, 1]. A
        single row comes twice: some shapes' products of one row take a hundred times as long."""
        if x is not self._read:
            rows = x.reshape(-1, x.shape[-1]).float()
            rows = rows.expand(2, -1) if len(rows) == 1 else rows
            numbers, scale = quantise_rows(rows, LARGEST if self.digits == 1 else LARGEST * HIGH)
            digits = [numbers]
            if self.digits == 2:
                high = numbers.mul(1 / HIGH).round_()
                digits = [numbers.sub_(high, alpha=HIGH), high]
            self._read, self._numbers = x, ([digit.to(torch.int8) for digit in digits], scale)
        return self._numbers

    def forget(self) -> None:
        """Let go of them; a tensor of another run may be the same object."""
        self._read, self._numbers = None, ([], torch.empty(0))


class QuantisedProduct:
    """The forward of a quantised layer.

    Args:
        weight: floating [out, in]; it may go, the copy stays.
        bias: floating [out], or None.
        states: of all layers of a model.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, states: HiddenStates):
        numbers, scale = quantise_rows(weight.detach().float(), LARGEST)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers.to(torch.int8), None)
        self.scale = scale.flatten()
        """float32 [out]."""
        self.zero = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = None if bias is None else bias.detach().float()
        self.states = states
        self.nbytes = weight.numel() + self.scale.nbytes
        """Of the copy."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., out] of hidden states [..., in], in their dtype. A row with a NaN or an infinity becomes NaN."""
        (low, *high), scale = self.states.numbers(x)
        product = self._product(low, 1.0)
        if high:
            product.add_(self._product(high[0], float(HIGH)))
        product.mul_(scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product[: x.numel() // x.shape[-1]].to(x.dtype).view(*x.shape[:-1], -1)

    def _product(self, digits: torch.Tensor, counts: float) -> torch.Tensor:
        """float32 [rows, out], in units of the row's scale.

        Args:
            digits: int8 [rows, in].
            counts: what each counts for, a power of two.
        """
        return torch.ops.onednn.qlinear_pointwise(
            digits, counts, 0, self.weight, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )


def quantise_rows(rows: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] as whole numbers from -largest to largest, still float32, and the scale of each row, [rows, 1]:
    their product is `rows` within half a scale. A row of zeros has a scale of next to nothing."""
    scale = rows.abs().amax(dim=1, keepdim=True).div_(largest).clamp_min_(SMALLEST)
    return (rows * scale.reciprocal()).round_(), scale  # to divide takes three times as long


@functools.cache
def available() -> bool:
    """Whether this torch has the products: they are its own compiler's, there are no public ones."""
    names = ("qlinear_prepack", "qlinear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.onednn, name) for name in names)
