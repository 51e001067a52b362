"""Linear layers whose weights are in 8 or 4 bits: how a weight becomes them, and their products on a CPU and on NPUs.

    int8, int8_w8a8   W[o, i] ~ scale[o] * w[o, i],      scale[o] = max_i |W[o, i]| / 127        (symmetric, per output;
                                                          on NPUs a bfloat16)
    int4              W[o, i] ~ scale[o, g] * w[o, i],   scale[o, g] = -(that of largest |W|) / 8,  -8 <= w <= 7
                                                          (g: a group of 32 inputs; the form of GGUF's Q4_0)
    fp8               W[o, i] ~ scale[o] * w[o, i],      scale[o] = max_i |W[o, i]| / 448,   w an e4m3
    nvfp4             W[o, i] ~ scale[o, g] / c * w[o, i],   scale[o, g] = c max_{i in g} |W[o, i]| / 6, an e4m3,
                                                          w an e2m1 (g: 16 inputs; c = 448 * 6 / the largest |W| of
                                                          all layers)

    int8, int8_w8a8   x[r, i] ~ s[r] * a[r, i],          s[r] = max_i |x[r, i]| / m[i]           (symmetric, per row)
                      m[i] = 127, or 127 * 128 for an input of 16 bits, where a = 128 h + l with h and l of int8
    fp8               x[r, i] ~ s[r] * a[r, i],          s[r] = max_i |x[r, i]| / 448,       a an e4m3
    int4, nvfp4       x in bfloat16

int8 has all inputs in 16 bits; int8_w8a8 the WIDE ones of each layer that are largest on a probe: a few columns of the
hidden states are so much larger than all others that one scale for both leaves the others few digits (LLM.int8(), arXiv
2208.07339).

A product of int8 numbers, y[r, o] = s[r] * scale[o] * sum_i a[r, i] w[o, i], is a sum of whole numbers, which no order
changes; torch's product of int4 weights adds up a row by itself. So a row's bits depend on nothing but the row. oneDNN
is given a + 128 without sign, and subtracts 128 itself: with signs it takes 3,000 times as long where the processor has
VNNI and no AMX.

On NPUs torch_npu multiplies, in bfloat16: int8 and int4 with x as it is, int8_w8a8 with all inputs in 8 bits. The head
stays as it is there. fp8 and nvfp4 (QeRL's, arXiv 2510.11696) are GPUs'; a CPU multiplies their values in bfloat16,
which holds them exactly, so that what they do to a policy can be tried; the head stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from perl import device
from perl.adapters.probe import probe_tokens
from perl.base.errors import UserError
from perl.device import products as npu

Quantisation = Literal["none", "int8", "int8_w8a8", "int4", "fp8", "nvfp4"]
ZERO_BYTES = 2
"""Of a group's zero, in bfloat16."""
GROUP = 32
"""Inputs whose int4 weights share a scale."""
WIDE = 32
"""Inputs of a layer that keep 16 bits where others have 8."""


@dataclass(frozen=True, slots=True)
class Scheme:
    bits: int
    """Of a weight."""
    group: int | None
    """Inputs whose weights share a scale; None: all of an output's."""
    activation_bits: int
    floating: bool = False

    @property
    def bytes_a_weight(self) -> float:
        """Of vLLM's weights, with the scales of groups, of whole numbers in bfloat16; torch has a zero beside each of
        these (ZERO_BYTES)."""
        of_a_scale = 1 if self.floating else 2
        return self.bits / 8 + (of_a_scale / self.group if self.group else 0.0)

    def copied_bytes(self, linear: int, outputs: int, head: int, vocabulary: int) -> int:
        """Of the copy that `QuantisedLayers` makes on a CPU, the head in 8 bits, or as it is beside values in bfloat16.

        Args:
            linear, outputs: weights and outputs of all linear layers but the head.
            head, vocabulary: of the head; 0 where there is none.
        """
        if self.floating:
            return 2 * linear + outputs * self.bytes_an_output
        zeros = ZERO_BYTES / self.group if self.group else 0.0
        layers = round(linear * (self.bytes_a_weight + zeros)) + outputs * self.bytes_an_output
        return layers + head + vocabulary * SCHEMES["int8"].bytes_an_output

    def npu_bytes(self, linear: int, outputs: int) -> int:
        """As `copied_bytes`, on an NPU: scales are bfloat16, beside activations of 8 bits float32."""
        scales = 0 if self.group else 4 if self.activation_bits == 8 else 2
        return round(linear * self.bytes_a_weight) + outputs * scales

    @property
    def bytes_an_output(self) -> int:
        """Its scale in float32. (What the WIDE inputs take besides is left out: vLLM has none.)"""
        return 0 if self.group else 4


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(bits=8, group=None, activation_bits=16),
    "int8_w8a8": Scheme(bits=8, group=None, activation_bits=8),
    "int4": Scheme(bits=4, group=GROUP, activation_bits=16),
    "fp8": Scheme(bits=8, group=None, activation_bits=8, floating=True),
    "nvfp4": Scheme(bits=4, group=16, activation_bits=16, floating=True),
}
LARGEST = 127
"""Of an int8 number: -128 has no counterpart."""
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
SMALLEST = 2.0**-100
"""Of a scale: its reciprocal is a number too."""
HIGH = 128
"""What the high digit of an activation counts for."""
ZERO = 128
"""What stands for 0 among the unsigned numbers of activations."""
BLOCK = 2**24
"""Numbers of a weight that are float32 at a time, while it is quantised."""
INT4_OUTPUTS = 16
"""What torch's product of int4 weights has a multiple of."""


def by_size(names: Collection[str]) -> list[str]:
    """Of these of SCHEMES, one of each size, the largest first."""
    of_a_size = {scheme.bytes_a_weight: name for name, scheme in reversed(SCHEMES.items()) if name in names}
    return [of_a_size[size] for size in sorted(of_a_size, reverse=True)]


class QuantisedLayers:
    """Copies of the linear layers of a model that compute in their place inside `applied`. The head keeps 8 bits; on an
    NPU, and beside fp8 and nvfp4, all that it has.

    Args:
        layers: whose weights are whole, all on a CPU or an NPU, and stay as they are.
        head: of them, the one that gives logits, or None.
        wide: by layer, which inputs keep 16 bits where others have 8 (`wide_inputs`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        head: nn.Module | None,
        scheme: Scheme,
        wide: Mapping[nn.Linear, torch.Tensor] | None = None,
    ):
        self._states = states = HiddenStates()
        none = torch.empty(0, dtype=torch.int64)
        by_npu = npu.multiply_on(layers[0].weight.device.type)
        without_head = [layer for layer in layers if layer is not head]
        self.layers = without_head if by_npu or scheme.floating else layers
        grouped = scheme.floating and scheme.group
        fraction = global_scale(layer.weight for layer in self.layers) if grouped else 1.0

        def product(layer: nn.Linear) -> QuantisedProduct:
            if scheme.floating:
                return FloatProduct(layer.weight, layer.bias, scheme, fraction)
            if by_npu:
                return NPUProduct(layer.weight, layer.bias, scheme)
            if scheme.bits == 4 and layer is not head:
                return Int4Product(layer.weight, layer.bias)
            inputs = None if scheme.activation_bits == 16 else (wide or {}).get(layer, none)
            return Int8Product(layer.weight, layer.bias, states, inputs)

        self.products = [product(layer) for layer in self.layers]
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


@torch.no_grad()
def wide_inputs(model: Any, layers: Sequence[nn.Linear], scheme: Scheme) -> dict[nn.Linear, torch.Tensor]:
    """By layer, the WIDE inputs that are largest anywhere in a forward of the probe's tokens, int64 in ascending order;
    a quarter of them at most. None where all of a scheme's have 16 bits, of fp8, and on NPUs.

    Args:
        model: in evaluation mode, without an adapter in its forward.
    """
    if scheme.activation_bits == 16 or scheme.floating or npu.multiply_on(layers[0].weight.device.type):
        return {}
    found: dict[nn.Linear, torch.Tensor] = {}

    def look(layer: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        largest = arguments[0].float().flatten(0, -2).abs().amax(dim=0)
        found[layer] = largest.topk(min(WIDE, len(largest) // 4)).indices.sort().values

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        model(input_ids=probe_tokens(model.get_input_embeddings().num_embeddings), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class HiddenStates:
    """Hidden states as whole numbers: those read last, as several layers read the same (query, key and value)."""

    def __init__(self) -> None:
        self._read: torch.Tensor | None = None
        self._numbers = torch.empty(0), torch.empty(0), torch.empty(0)

    def numbers(
        self, x: torch.Tensor, wide: torch.Tensor | None, largest: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of [..., in]: the low digits, uint8 [rows, in], the high ones of the inputs of 16 bits, uint8 [rows, wide],
        both ZERO more than they are, and the rows' scale, float32 [rows, 1]. A single row comes twice: some shapes'
        products of one row take a hundred times as long.

        Args:
            wide: the inputs of 16 bits, in all layers that read `x`; None: all are.
            largest: of an input's numbers, float32 [in] or one for all.
        """
        if x is not self._read:
            rows = x.reshape(-1, x.shape[-1]).float()
            rows = rows.expand(2, -1) if len(rows) == 1 else rows
            low, scale = quantise_rows(rows, largest)
            both = low if wide is None else low[:, wide]
            high = both.mul(1 / HIGH).round_()
            if wide is None:
                low.sub_(high, alpha=HIGH)
            elif len(wide):
                low[:, wide] = both.sub_(high, alpha=HIGH)
            self._read, self._numbers = x, (unsigned(low), unsigned(high), scale)
        return self._numbers

    def forget(self) -> None:
        """Let go of them; a tensor of another run may be the same object."""
        self._read = None
        self._numbers = torch.empty(0), torch.empty(0), torch.empty(0)


def unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Float numbers from -127 to 127 as uint8, ZERO added."""
    return numbers.add_(ZERO).to(torch.uint8)


class QuantisedProduct(Protocol):
    """The forward of a quantised layer."""

    nbytes: int
    """Of the copy."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., out] of hidden states [..., in], in their dtype. A row with a NaN or an infinity gives no
        finite number."""
        ...


class Int8Product:
    """By oneDNN. See `QuantisedProduct`.

    Args:
        weight: floating [out, in]; it may go, the copy stays.
        bias: floating [out], or None.
        states: of all layers of a model.
        wide: inputs of 16 bits; None: all.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, states: HiddenStates, wide: torch.Tensor | None = None
    ):
        numbers, scale = quantise_by_blocks(weight.detach(), functools.partial(quantise_rows, largest=LARGEST))
        self.weight = self.high = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.largest: torch.Tensor | int = LARGEST * HIGH
        self.nbytes = weight.numel() + 4 * len(weight)
        if wide is not None:
            self.high = torch.ops.onednn.qlinear_prepack(numbers[:, wide], None) if len(wide) else None
            self.largest = torch.full((weight.shape[1],), float(LARGEST))
            self.largest[wide] *= HIGH
            self.nbytes += len(weight) * len(wide)
        self.wide = wide
        self.scale = scale.flatten()
        """float32 [out]."""
        self.zero = torch.zeros(len(weight), dtype=torch.int32)
        self.bias = None if bias is None else bias.detach().float()
        self.states = states

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        low, high, scale = self.states.numbers(x, self.wide, self.largest)
        product = self._product(low, self.weight, 1.0)
        if self.high is not None:
            product.add_(self._product(high, self.high, float(HIGH)))
        product.mul_(scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product[: x.numel() // x.shape[-1]].to(x.dtype).view(*x.shape[:-1], product.shape[-1])

    def _product(self, digits: torch.Tensor, weight: torch.Tensor, counts: float) -> torch.Tensor:
        """float32 [rows, out], in units of the row's scale.

        Args:
            digits: uint8 [rows, in], ZERO more than they are.
            weight: packed, of these inputs.
            counts: what each digit counts for, a power of two.
        """
        return torch.ops.onednn.qlinear_pointwise(
            digits, counts, ZERO, weight, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )


class Int4Product:
    """By torch's own kernel of weights in groups. See `QuantisedProduct`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        numbers, scale = quantise_by_blocks(weight.detach(), quantise_groups)
        self.outputs = len(weight)
        missing = -self.outputs % INT4_OUTPUTS
        numbers, scale = F.pad(numbers + 8, (0, 0, 0, missing), value=8), F.pad(scale, (0, 0, 0, missing))
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
        return product.to(x.dtype).view(*x.shape[:-1], product.shape[-1])


class FloatProduct:
    """By torch's product of bfloat16. See `QuantisedProduct`. A row's last bits may depend on its neighbours'.

    Args:
        scale: of `global_scale`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme, scale: float):
        self.by_rows = scheme.activation_bits == 8
        if scheme.group:
            numbers, scales = quantise_by_blocks(weight.detach(), functools.partial(quantise_nvfp4, scale=scale))
            groups = numbers.to(torch.bfloat16).mul_(0.5).unflatten(1, (-1, scheme.group))
            self.weight = groups.mul_(scales.to(torch.bfloat16)[..., None]).flatten(1)
            self.scale = torch.tensor(1.0 / scale)
        else:
            numbers, scales = quantise_by_blocks(weight.detach(), quantise_e4m3, torch.float8_e4m3fn)
            self.weight, self.scale = numbers.to(torch.bfloat16), scales.flatten()
        self.bias = None if bias is None else bias.detach().float()
        self.nbytes = self.weight.nbytes + (self.scale.nbytes if self.scale.ndim else 0)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows, of_rows = x, None
        if self.by_rows:
            rows, of_rows = quantise_e4m3(x.float())
        product = F.linear(rows.to(torch.bfloat16), self.weight).float().mul_(self.scale)
        if of_rows is not None:
            product.mul_(of_rows)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(x.dtype)


class NPUProduct:
    """By torch_npu, in bfloat16. See `QuantisedProduct`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme):
        weight, self.group = weight.detach(), 0
        if scheme.bits == 4:
            numbers, scale = quantise_by_blocks(weight, quantise_groups)
            self.weight, scale = npu.pack_int4(numbers), scale.t().contiguous()
            self.group = GROUP if len(scale) > 1 else 0
        else:
            numbers, scale = quantise_by_blocks(weight, quantise_outputs)
            self.weight, scale = numbers.t(), scale.t().contiguous()
        self.by_rows = scheme.activation_bits == 8
        if self.by_rows:
            self.weight = self.weight.contiguous()
        self.scale = scale.flatten() if self.by_rows else scale.to(torch.bfloat16)
        self.bias = None if bias is None else bias.detach().float()
        self.outputs, self.nbytes = len(weight), self.weight.nbytes + self.scale.nbytes

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        if not len(rows):
            return x.new_empty((*x.shape[:-1], self.outputs))
        if self.by_rows:
            product = npu.by_rows(rows, self.weight, self.scale, self.bias)
        else:
            product = npu.weight_only(rows, self.weight, self.scale, self.bias, self.group)
        return product.to(x.dtype).view(*x.shape[:-1], self.outputs)


def quantise_by_blocks(
    weight: torch.Tensor,
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.int8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantise` makes of a floating weight [out, in], the numbers in `dtype`: of BLOCK numbers at a time, as a
    head in float32 takes gigabytes."""
    rows = max(1, BLOCK // weight.shape[1])
    made = [(numbers.to(dtype), scale) for numbers, scale in (quantise(b.float()) for b in weight.split(rows))]
    return torch.cat([numbers for numbers, _ in made]), torch.cat([scale for _, scale in made])


def quantising_bytes(numbers: int, scheme: Scheme) -> int:
    """What quantising a weight of so many numbers takes for a moment: BLOCK of them in float32 and what is made of
    them, and all in 8 bits; of int4 all in 32 and 8 bits, twice, to be packed. Measured with [18944, 3584]: int8 3.7
    bytes a number, int4 5.8."""
    return max(12 * min(BLOCK, numbers) + numbers, 6 * numbers if scheme.bits == 4 else 0)


def quantise_rows(rows: torch.Tensor, largest: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] as whole numbers, still float32, and the scale of each row, [rows, 1]: their product is `rows`
    within half a scale. A row of zeros has a scale of next to nothing.

    Args:
        largest: without its sign, of all numbers, or of each column's, float32 [n].
    """
    sizes = rows.abs()
    if isinstance(largest, torch.Tensor):
        sizes.div_(largest)
    scale = sizes.amax(dim=1, keepdim=True)
    if not isinstance(largest, torch.Tensor):
        scale.div_(largest)
    scale.clamp_min_(SMALLEST)
    return (rows * scale.reciprocal()).round_(), scale  # to divide takes three times as long


def quantise_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantise_rows` of a weight, float32 [out, in], with scales that have the value of a bfloat16."""
    scale = weight.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_min_(SMALLEST).to(torch.bfloat16).float()
    return (weight / scale).round_().clamp_(-LARGEST, LARGEST), scale


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] as whole numbers from -8 to 7, still float32, and the scale of each GROUP inputs, float32
    [out, in / GROUP] with the value of a bfloat16. The weight of a group that is largest without its sign is -8."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = largest.div(-8).to(torch.bfloat16).float()
    scale[scale == 0.0] = SMALLEST
    return (groups / scale).round_().clamp_(-8, 7).flatten(1), scale[..., 0]


def quantise_e4m3(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as numbers that an e4m3 holds, still float32, and the scale of each row, [..., 1]."""
    scale = rows.abs().amax(dim=-1, keepdim=True).div_(LARGEST_E4M3).clamp_min_(SMALLEST)
    return (rows / scale).to(torch.float8_e4m3fn).float(), scale


def quantise_nvfp4(weight: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] as twice the nearest e2m1, whole numbers from -12 to 12, still float32, and the scale of each
    16 inputs, float32 [out, in / 16] with the value of an e4m3: `weight` is about numbers / 2 * scales / scale. A tie
    goes to the even mantissa, as with compressed-tensors.

    Args:
        scale: of `global_scale`.
    """
    groups = weight.unflatten(1, (-1, 16))
    scales = groups.abs().amax(dim=2).mul_(scale / LARGEST_E2M1).clamp_max_(LARGEST_E4M3)
    scales = scales.to(torch.float8_e4m3fn).float()
    x = groups / (torch.where(scales == 0.0, 1.0, scales) / scale)[..., None]
    step = torch.where(x.abs() < 2.0, 0.5, torch.where(x.abs() < 4.0, 1.0, 2.0))  # an e2m1 has one bit of mantissa
    numbers = (x / step).round_().mul_(step).clamp_(-LARGEST_E2M1, LARGEST_E2M1).mul_(2.0)
    return torch.where(scales[..., None] == 0.0, 0.0, numbers).flatten(1), scales


def global_scale(weights: Iterable[torch.Tensor]) -> float:
    """nvfp4's scale of all scales: the largest number of all weights becomes the largest e4m3 times the largest e2m1.
    It is the same for all layers, as vLLM takes one for those that it computes together."""
    largest = max((float(weight.detach().abs().amax()) for weight in weights), default=0.0)
    return float(torch.tensor(LARGEST_E4M3 * LARGEST_E2M1 / max(largest, SMALLEST)))


def require_products(kind: str, quantization: str, flag: str, by_vllm: str | None) -> None:
    """A UserError where a kind of device has no products of such weights.

    Args:
        flag: that asks for them, with its value.
        by_vllm: what is to be written for vLLM; None: it is vLLM that multiplies.
    """
    own, vllms = device.OWN_QUANTIZES.get(kind, ()), device.VLLM_QUANTIZES.get(kind, ())
    known = vllms if by_vllm is None else own
    if quantization in known:
        return
    instead = [by_vllm] if by_vllm and quantization in vllms else []
    who = "vLLM has" if by_vllm is None else "without vLLM there are"
    options = " or ".join([*instead, *known, "none"])
    raise UserError(f"{flag}: {who} no products of such weights on {kind}; write {options}")


@functools.cache
def lacking(scheme: Scheme, kind: str = "cpu") -> str | None:
    """Why this process has no such products on a kind of device, for a message, or None. On a CPU those of int8
    numbers, as in the head beside int4, have to be exact: without VNNI (or ARM's like) oneDNN adds pairs of them up in
    16 bits, where they do not fit. They are torch's own compiler's, there are no public ones."""
    if npu.multiply_on(kind):
        return npu.missing()
    if scheme.floating:
        return None
    none = f"no exact {scheme.bits}-bit products by this torch on this processor"
    fours = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    if scheme.bits == 4 and not all(hasattr(torch.ops.aten, name) for name in fours):
        return none
    names = ("qlinear_prepack", "qlinear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.onednn, name) for name in names):
        return none
    product = Int8Product(torch.ones(64, 64), None, HiddenStates(), torch.empty(0, dtype=torch.int64))
    exact = all(bool((product(torch.ones(rows, 64)) - 64.0).abs().max() < 1e-3) for rows in (1, 64))
    return None if exact else none
