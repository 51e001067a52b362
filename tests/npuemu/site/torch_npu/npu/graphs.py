"""Captured graphs: operators recorded, and run again on the same tensors.

As on a device, capturing computes nothing (what was written meanwhile is undone), a graph reads and writes the memory
that it was captured with, and what would wait for the device or depend on its values is refused.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_capturing = []


def is_current_stream_capturing():
    return bool(_capturing)


def graph_pool_handle():
    return (0, 1)


class NPUGraph:
    def __init__(self):
        self.operators = None

    def replay(self):
        if self.operators is None:
            raise RuntimeError("this graph has not been captured")
        for operator, arguments, named, results in self.operators:
            found = operator(*arguments, **named)
            for new, old in zip(_tensors(found), results, strict=True):
                if new is not old and not _same_memory(new, old):
                    old.copy_(new)

    def pool(self):
        return graph_pool_handle()

    def reset(self):
        self.operators = None


class graph:  # its real name
    """Context in which operators are recorded into a graph."""

    def __init__(self, npu_graph, pool=None, stream=None, capture_error_mode="global"):
        self.graph = npu_graph
        self.recorder = _Recorder()

    def __enter__(self):
        _capturing.append(self)
        self.recorder.__enter__()

    def __exit__(self, *exception):
        self.recorder.__exit__(*exception)
        _capturing.pop()
        for tensor, before in reversed(self.recorder.written):
            tensor.copy_(before)
        if exception[0] is None:
            self.graph.operators = self.recorder.operators
            for _, _, _, results in self.recorder.operators:  # nothing was computed
                for result in results:
                    if not any(_same_memory(result, tensor) for tensor, _ in self.recorder.written):
                        _spoil(result, self.recorder.made)


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []
        self.written = []
        """Tensors that were written to in place, with what they held before."""
        self.made = set()
        """Memory that was allocated while capturing."""

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        reason = _refused(operator, arguments, named)
        if reason:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        schema = operator._schema.arguments
        for place, argument in enumerate(schema):
            value = arguments[place] if place < len(arguments) else named.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.written.append((value, value.clone()))
        before = {_memory(tensor) for tensor in _tensors([*arguments, *named.values()])}
        found = operator(*arguments, **named)
        results = _tensors(found)
        self.made |= {_memory(tensor) for tensor in results} - before
        self.operators.append((operator, arguments, named, results))
        return found


def _refused(operator, arguments, named):
    name = operator._schema.name
    if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"):
        return f"{name} waits for the device"
    if name == "aten::lift_fresh":  # torch.tensor([...], device="npu")
        return "a copy between host and device"
    devices = {tensor.device.type for tensor in _tensors([*arguments, *named.values()])}
    target = named.get("device")
    if name in ("aten::_to_copy", "aten::copy_") and (len(devices) > 1 or (target and devices - {target.type})):
        return f"{name}, a copy between host and device"
    return None


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _same_memory(one, other):
    return _memory(one) == _memory(other)


def _spoil(tensor, made):
    if _memory(tensor) in made and tensor.is_floating_point():
        tensor.fill_(float("nan"))
