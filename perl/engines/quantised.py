"""Linear layers whose weights are whole numbers: how a weight becomes them, and their products on a CPU.

    int8, int8_w8a8   W[o, i] ~ scale[o] * w[o, i],      scale[o] = max_i |W[o, i]| / 127        (symmetric, per output)
    int4              W[o, i] ~ scale[o, g] * w[o, i],   scale[o, g] = -(that of largest |W|) / 8,  -8 <= w <= 7
                                                          (g: a group of 32 inputs; the form of GGUF's Q4_0)

    int8_w8a8         x[r, i] ~ s[r] * a[r, i],          s[r] = max_i |x[r, i]| / 127            (symmetric, per row)
    int8              x[r, i] ~ s[r] * (128 h + l),      s[r] = max_i |x[r, i]| / (127 * 128)    (h and l are int8)
    int4              x in bfloat16

A product of int8 numbers, y[r, o] = s[r] * scale[o] * sum_i a[r, i] w[o, i], is a sum of whole numbers, which no order
changes; torch's product of int4 weights adds up a row by itself. So a row's bits depend on nothing but the row. oneDNN
is given a + 128 without sign, and subtracts 128 itself: with signs it takes 3,000 times as long where the processor has
VNNI and no AMX.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

Quantisation = Literal["none", "int8", "int8_w8a8", "int4"]
GROUP = 32
"""Inputs whose int4 weights share a scale."""


@dataclass(frozen=True, slots=True)
class Scheme:
    bits: int
    """Of a weight."""
    group: int | None
    """Inputs whose weights share a scale; None: all of an output's."""
    activation_bits: int

    @property
    def bytes_a_weight(self) -> float:
        """With its share of the scales, which are bfloat16 where they are of groups."""
        return self.bits / 8 + (2 / self.group if self.group else 0.0)


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(bits=8, group=None, activation_bits=16),
    "int8_w8a8": Scheme(bits=8, group=None, activation_bits=8),
    "int4": Scheme(bits=4, group=GROUP, activation_bits=16),
}
LARGEST = 127
"""Of an int8 number: -128 has no counterpart."""
SMALLEST = 2.0**-100
"""Of a scale: its reciprocal is a number too."""
HIGH = 128
"""What the high digit of an activation counts for."""
ZERO = 128
"""What stands for 0 among the unsigned numbers of activations."""
INT4_OUTPUTS = 16
"""What torch's product of int4 weights has a multiple of."""


class QuantisedLayers:
    """Copies of the linear layers of a model that compute in their place inside `applied`. The head keeps 8 bits, and
    computes with hidden states of the scheme's activations.

    Args:
        layers: whose weights are whole, on a CPU, and stay as they are.
        head: of them, the one that gives logits, or None.
    """

    def __init__(self, layers: Sequence[nn.Linear], head: nn.Module | None, scheme: Scheme):
        self.layers = layers
        self._states = states = HiddenStates(scheme.activation_bits // 8)
        self.products: list[QuantisedProduct] = [
            Int4Product(layer.weight, layer.bias)
            if scheme.bits == 4 and layer is not head
            else Int8Product(layer.weight, layer.bias, states)
            for layer in layers
        ]
        self.nbytes = sum(product.nbytes for product in self.products)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        try:
            for layer, product in zip(self.layers, self.products, strict=True):
                layer.forward = product  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:
            self._states.forget()
            for layer in self.layers:
                vars(layer).pop("forward", None)


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
        """Of [..., in]: the digits from the lowest on, uint8 [rows, in] each and ZERO more than they are, and the rows'
        scale, float32 [rows, 1]. A single row comes twice: some shapes' products of one row take a hundred times as
        long."""
        if x is not self._read:
            rows = x.reshape(-1, x.shape[-1]).float()
            rows = rows.expand(2, -1) if len(rows) == 1 else rows
            numbers, scale = quantise_rows(rows, LARGEST if self.digits == 1 else LARGEST * HIGH)
            digits = [numbers]
            if self.digits == 2:
                high = numbers.mul(1 / HIGH).round_()
                digits = [numbers.sub_(high, alpha=HIGH), high]
            self._read, self._numbers = x, ([digit.add_(ZERO).to(torch.uint8) for digit in digits], scale)
        return self._numbers

    def forget(self) -> None:
        """Let go of them; a tensor of another run may be the same object."""
        self._read, self._numbers = None, ([], torch.empty(0))


class QuantisedProduct(Protocol):
    """The forward of a quantised layer."""

    nbytes: int
    """Of the copy."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., out] of hidden states [..., in], in their dtype. A row with a NaN or an infinity gives no
        finite number."""
        ...


class Int8Product:
    """By oneDNN. See `QuantisedProduct`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, states: HiddenStates):
        numbers, scale = quantise_rows(weight.detach().float(), LARGEST)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers.to(torch.int8), None)
        self.scale = scale.flatten()
        """float32 [out]."""
        self.zero = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = None if bias is None else bias.detach().float()
        self.states = states
        self.nbytes = weight.numel() + self.scale.nbytes

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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
            digits: uint8 [rows, in].
            counts: what each counts for, a power of two.
        """
        return torch.ops.onednn.qlinear_pointwise(
            digits, counts, ZERO, self.weight, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )


class Int4Product:
    """By torch's own kernel of weights in groups. See `QuantisedProduct`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        numbers, scale = quantise_groups(weight.detach().float())
        self.outputs = len(weight)
        missing = -self.outputs % INT4_OUTPUTS
        numbers, scale = F.pad(numbers + 8, (0, 0, 0, missing), value=8.0), F.pad(scale, (0, 0, 0, missing))
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
        scales_and_zeros = torch.stack([scale.t(), torch.zeros_like(scale.t())], dim=-1)
        self.scales_and_zeros = scales_and_zeros.to(torch.bfloat16).contiguous()
        """[groups, out, 2]."""
        self.bias = None if bias is None else bias.detach().float()
        self.nbytes = self.weight.nbytes + self.scales_and_zeros.nbytes

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales_and_zeros)
        product = product[:, : self.outputs].float()
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype).view(*x.shape[:-1], -1)


def quantise_rows(rows: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] as whole numbers from -largest to largest, still float32, and the scale of each row, [rows, 1]:
    their product is `rows` within half a scale. A row of zeros has a scale of next to nothing."""
    scale = rows.abs().amax(dim=1, keepdim=True).div_(largest).clamp_min_(SMALLEST)
    return (rows * scale.reciprocal()).round_(), scale  # to divide takes three times as long


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] as whole numbers from -8 to 7, still float32, and the scale of each GROUP inputs, float32
    [out, in / GROUP] with the value of a bfloat16. The weight of a group that is largest without its sign is -8."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = largest.div(-8).to(torch.bfloat16).float()
    scale[scale == 0.0] = SMALLEST
    return (groups / scale).round_().clamp_(-8, 7).flatten(1), scale[..., 0]


@functools.cache
def available(scheme: Scheme) -> bool:
    """Whether this torch has the products: they are its own compiler's, there are no public ones."""
    if scheme.bits == 4:
        names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
        return all(hasattr(torch.ops.aten, name) for name in names)
    names = ("qlinear_prepack", "qlinear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.onednn, name) for name in names)
