"""Captured graphs: operators recorded, and run again on the same tensors.

As on a device, capturing computes nothing (what was written meanwhile is undone), a graph reads and writes the memory
that it was captured with, a number or list of the host is the one that it was captured with, and what would wait for
the device or depend on its values is refused.

With auto_dispatch_capture, the host's lists of an attention operator can be updated. Like torch_npu, such a graph
waits before the operator for an event that each update records and each replay resets: a replay without an update
waits for ever. Nothing can be queued here, so that whatever is asked of the device after such a replay, and before the
update, is an error.
"""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import streams

_capturing = []
_ops = torch.ops.npuemu

_STUCK = (
    "npuemu: a replayed graph waits for NPUGraph.update(): on a device, everything on its stream waits too, for ever"
    " if no update comes (what is queued here before the update is not emulated)"
)


def is_current_stream_capturing():
    return bool(_capturing)


def graph_pool_handle():
    return (0, 1)


class NPUGraph:
    def __init__(self):
        self.operators = None
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode = _GraphDispatchMode()
        self._updated = False
        self._pending = False
        self._launched = self._ran = self._waits_then = 0

    def replay(self):
        if self.operators is None:
            raise RuntimeError("this graph has not been captured")
        _ops.check_not_stuck()
        self._launched = streams.next_replay()
        if self.graph_dispatch_mode.graph_dispatch_records and not self._updated:
            self._pending = True
            _ops.set_stuck(_STUCK)
        else:
            self._run()

    def update(self, cpu_update_input):
        """`cpu_update_input`: for each operator that was recorded, or one for all, new values of its arguments. An
        argument that an operator was not given when it was captured is left out without a word."""
        if not self.auto_dispatch_capture:
            raise RuntimeError(
                "The current graph configuration does not support update,"
                "Try to capture by setting auto_dispatch_capture=True during capture"
            )
        self._check_order()
        self.graph_dispatch_mode.update_capture_record(cpu_update_input)
        self._updated = True
        if self._pending:
            self._pending = False
            _ops.set_stuck("")
            self._run()

    def pool(self):
        return graph_pool_handle()

    def reset(self):
        self.operators = None
        self.graph_dispatch_mode.graph_dispatch_records = []

    def _run(self):
        for operation in self.operators:
            found = operation.operator(*operation.arguments, **operation.named)
            for new, old in zip(_tensors(found), operation.results, strict=True):
                if new is not old and not _same_memory(new, old):
                    old.copy_(new)
        self._updated = False
        self._ran, self._waits_then = self._launched, streams.host_waits()

    def _check_order(self):
        stream = self.graph_dispatch_mode.update_stream
        if self._pending and stream.behind >= self._launched:
            raise RuntimeError("npuemu: the update waits for the replay that waits for it: on a device, for ever")
        if self._ran and stream.behind < self._ran and not streams.has_finished(self._ran, self._waits_then):
            raise RuntimeError(
                "npuemu: NPUGraph.update() may overtake this graph's previous replay, which then resets the event that"
                " the next one waits for, on a device for ever: first let the update stream, or the host, wait for it"
            )


class graph:  # its real name
    """Context in which operators are recorded into a graph."""

    def __init__(
        self, npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode: str = "global"
    ):
        self.graph = npu_graph
        self.graph.auto_dispatch_capture = auto_dispatch_capture
        self.recorder = _Recorder()

    def __enter__(self):
        torch.npu.synchronize()
        torch.npu.empty_cache()
        _capturing.append(self)
        self.recorder.__enter__()
        if self.graph.auto_dispatch_capture:
            self.graph.graph_dispatch_mode.recorder = self.recorder
            self.graph.graph_dispatch_mode.__enter__()

    def __exit__(self, *exception):
        if self.graph.auto_dispatch_capture:
            self.graph.graph_dispatch_mode.__exit__(*exception)
        self.recorder.__exit__(*exception)
        _capturing.pop()
        for tensor, before in reversed(self.recorder.written):
            tensor.copy_(before)
        if exception[0] is None:
            self.graph.operators = self.recorder.operators
            for operation in self.recorder.operators:  # nothing was computed
                for result in operation.results:
                    if not any(_same_memory(result, tensor) for tensor, _ in self.recorder.written):
                        _spoil(result, self.recorder.made)


class _Operation:
    """One recorded call; of an attention operator the arguments may be updated."""

    def __init__(self, operator, arguments, named, results):
        self.operator, self.arguments, self.named, self.results = operator, arguments, named, results


class _GraphDispatchMode(TorchDispatchMode):
    """Makes of an attention operator the form that writes to given memory, and remembers the call for updates."""

    update_stream = None

    def __init__(self):
        super().__init__()
        if _GraphDispatchMode.update_stream is None:
            _GraphDispatchMode.update_stream = streams.Stream()
        self.graph_dispatch_records = []
        self.recorder = None

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        named = named or {}
        overloads = torch.ops.npu.npu_fused_infer_attention_score
        if operator not in (overloads.default, overloads.out):
            return operator(*arguments, **named)
        named = {name: copy.copy(value) if isinstance(value, list) else value for name, value in named.items()}
        if operator is overloads.default:
            named["workspace"] = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(*arguments, **named)
            kept = ("input_layout", "block_table", "num_heads", "num_key_value_heads", "softmax_lse_flag")
            kept = {name: named[name] for name in kept if name in named}
            output = torch.ops.npu._npu_fused_infer_attention_score_infer_output(arguments[0], arguments[2], **kept)
            named["out"] = list(output)
        overloads.out(*arguments, **named)
        self.graph_dispatch_records.append(self.recorder.operators[-1])
        return named["out"]

    def update_capture_record(self, cpu_update_input):
        records = self.graph_dispatch_records
        if len(cpu_update_input) == 1:
            cpu_update_input = [cpu_update_input[0].copy() for _ in records]
        if len(cpu_update_input) != len(records):
            raise RuntimeError(
                f"Currently, there are {len(records)} operators that need to be updated by capture, and there are only"
                f" {len(cpu_update_input)} elements in the incoming cpu_update_input list"
            )
        for record, update in zip(records, cpu_update_input, strict=True):
            record.named |= {name: copy.copy(value) for name, value in update.items() if name in record.named}


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
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.extend((tensor, tensor.clone()) for tensor in _tensors(value))
        before = {_memory(tensor) for tensor in _tensors([*arguments, *named.values()])}
        found = operator(*arguments, **named)
        results = _tensors(found)
        self.made |= {_memory(tensor) for tensor in results} - before
        self.operators.append(_Operation(operator, arguments, named, results))
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
