"""The fused attention operators of the emulated NPU against plain PyTorch, and perl.device's way to them."""

import inspect
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.attention import varlen

from perl import device
from perl.device import kernels
from perl.engines.cache import BLOCK_SIZE

pytestmark = pytest.mark.npu

PLAIN = """
    import torch_npu
    from perl import device
    torch.manual_seed(0)
    SCALE = 0.25

    def plain(query, key, value, hidden=None):
        # [heads, queries, D] over [key heads, keys, D], on the host in float64
        query, key, value = (tensor.cpu().double() for tensor in (query, key, value))
        key, value = (tensor.repeat_interleave(len(query) // len(key), 0) for tensor in (key, value))
        scores = query @ key.mT * SCALE
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ value

    def close(one, other, tolerance=1e-2):
        return one.shape == other.shape and (one.cpu().double() - other.cpu().double()).abs().max().item() < tolerance

    def draw(*shape):
        return torch.randn(*shape, device="npu").bfloat16()

    def said(function):
        try:
            function()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return type(error).__name__ + ": " + str(error)
        return "fine"
"""

PAGES = (
    PLAIN
    + """
    # Two rows of 130 and 3 tokens in blocks of 128: row 0 has blocks 4 and 1, row 1 has block 2.
    key_cache, value_cache = draw(5, 128, 2, 16), draw(5, 128, 2, 16)
    query = draw(2, 4, 16)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32, device="npu")

    def row_of(cache, blocks, length):
        return torch.cat([cache[block] for block in blocks])[:length].transpose(0, 1)

    def expected(lengths):
        rows = [plain(query[row][:, None], row_of(key_cache, blocks, length), row_of(value_cache, blocks, length))[:, 0]
                for row, (blocks, length) in enumerate(zip(((4, 1), (2,)), lengths))]
        return torch.stack(rows)
"""
)


def test_inference_attention_by_layout(answer):
    """Without pages: BNSD, BSND, BSH and TND of the same numbers; lengths cut keys off; masks hide them."""
    found = answer(
        PLAIN
        + """
    infer = torch_npu.npu_fused_infer_attention_score
    query, key, value = draw(2, 4, 3, 16), draw(2, 2, 5, 16), draw(2, 2, 5, 16)          # BNSD
    whole = torch.stack([plain(query[row], key[row], value[row]) for row in range(2)])
    shared = dict(num_heads=4, num_key_value_heads=2, scale=SCALE)
    swapped = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
    flat = [tensor.flatten(2) for tensor in swapped]
    packed = [tensor.flatten(0, 1) for tensor in swapped]
    triangle = torch.ones(2048, 2048, device="npu").triu(1).bool()
    corner = torch.ones(3, 5).triu(3).bool()
    hidden = torch.tensor([[0, 1, 0, 0, 1]] * 3, device="npu").bool()
    bsnd = infer(*swapped, input_layout="BSND", **shared)[0]
    answer = dict(
        BNSD=close(infer(query, key, value, input_layout="BNSD", **shared)[0], whole),
        BSND=close(bsnd, whole.transpose(1, 2)),
        BSH=close(infer(*flat, input_layout="BSH", **shared)[0], whole.transpose(1, 2).flatten(2)),
        BNSD_BSND=torch.equal(infer(query, key, value, input_layout="BNSD_BSND", **shared)[0], bsnd),
        TND=close(infer(*packed, input_layout="TND", actual_seq_lengths=[3, 6], actual_seq_lengths_kv=[5, 10],
                        **shared)[0], whole.transpose(1, 2).flatten(0, 1)),
        causal=close(infer(query, key, value, input_layout="BNSD", sparse_mode=3, atten_mask=triangle, **shared)[0],
                     torch.stack([plain(query[row], key[row], value[row], corner) for row in range(2)])),
        mask=close(infer(query, key, value, input_layout="BNSD", atten_mask=hidden, **shared)[0],
                   torch.stack([plain(query[row], key[row], value[row], hidden.cpu()) for row in range(2)])),
        lengths=close(infer(query, key, value, input_layout="BNSD", actual_seq_lengths_kv=[5, 2], **shared)[0][1],
                      plain(query[1], key[1, :, :2], value[1, :, :2])),
        no_keys=bool(infer(query, key, value, input_layout="BNSD", actual_seq_lengths_kv=[5, 0], **shared)[0][1].any()),
        sums=[list(infer(query, key, value, input_layout="BNSD", softmax_lse_flag=flag, **shared)[1].shape)
              for flag in (True, False)])
    """
    )
    assert found.pop("no_keys") is False
    assert found.pop("sums") == [[2, 4, 3, 1], [1]]
    assert set(found.values()) == {True}, found


def test_pages_are_read_by_the_table(answer):
    found = answer(
        PAGES
        + """
    attend = device.paged_attention(True)
    before = torch_npu._emulator_counters()
    own = attend(query, key_cache, value_cache, table, [130, 3], SCALE)
    waits = torch_npu._emulator_counters()["blocking"] - before["blocking"]
    heads_first = [cache.transpose(1, 2).contiguous() for cache in (key_cache, value_cache)]
    direct = torch_npu.npu_fused_infer_attention_score(
        query[:, :, None], *heads_first, num_heads=4, num_key_value_heads=2, scale=SCALE, input_layout="BNSD",
        block_table=table, block_size=128, actual_seq_lengths_kv=[130, 3])[0]
    packed = torch_npu.npu_fused_infer_attention_score(
        query, key_cache.flatten(2), value_cache.flatten(2), num_heads=4, num_key_value_heads=2, scale=SCALE,
        input_layout="TND", block_table=table, block_size=128, actual_seq_lengths=[1, 2], sparse_mode=3,
        atten_mask=torch.ones(2048, 2048, device="npu").triu(1).bool(), actual_seq_lengths_kv=[130, 3])[0]
    answer = [close(own, expected([130, 3])), torch.equal(direct[:, :, 0], own), torch.equal(packed, own), waits,
              str(own.dtype), list(own.shape)]
    """
    )
    assert found == [True, True, True, 0, "torch.bfloat16", [2, 4, 16]]


def test_inference_attention_refuses(answer):
    errors = {
        "attend(query.float(), key_cache.float(), value_cache.float(), table, [9, 3], SCALE)": "float16 or bfloat16",
        "attend(query, key_cache, value_cache, table.long(), [9, 3], SCALE)": "block_table must be int32",
        "attend(query, key_cache, value_cache, table[:1], [9, 3], SCALE)": "block_table (1, 2) for 2 rows",
        "attend(query, key_cache, value_cache, table, [300, 3], SCALE)": "too narrow for 300 keys",
        "attend(query, key_cache, value_cache, table, [9, 3, 1], SCALE)": "fine",
        "attend(query, key_cache[:, :100], value_cache[:, :100], table, [9, 3], SCALE)": "contiguous",
        "attend(query, key_cache, value_cache, table, torch.tensor([9, 3]).npu(), SCALE)": "TypeError: npu_fused",
        "attend(query, key_cache, value_cache, table.cpu(), [9, 3], SCALE)": "block_table is on cpu",
        "infer(query, key_cache, value_cache, None)": "takes 3 positional argument",
        "infer(query[:, :, None], *flat, input_layout='BNSD', block_size=128, **keys)": "pages need actual_seq",
        "infer(query[:, :, None], *flat, input_layout='BNSD', num_heads=3, block_table=table)": "num_heads is 3",
        "infer(query[:, None], *whole, input_layout='BSND', block_size=128, **paged)": "wants BNSD or TND",
        "infer(query[:, :, None], *flat, input_layout='BNSD', block_size=64, **paged)": "should be ('blocks', 64, 32)",
        "infer(query[:, :, None], *flat, input_layout='BNSD_BSND', block_size=128, **paged)": "more than one query",
        "infer(query.cpu(), key_cache.cpu(), value_cache.cpu())": "'CPU' backend",
    }
    program = f"""
    attend, infer = device.paged_attention(True), torch_npu.npu_fused_infer_attention_score
    whole = [cache.transpose(1, 2).contiguous() for cache in (key_cache, value_cache)]
    flat = [cache.flatten(2) for cache in (key_cache, value_cache)]
    keys = dict(num_heads=4, num_key_value_heads=2, block_table=table)
    paged = dict(keys, actual_seq_lengths_kv=[9, 3])
    answer = [said(lambda call=call: eval(call)) for call in {list(errors)}]
    """
    for said, error in zip(answer(PAGES + program), errors.values(), strict=True):
        assert error in said


def test_packed_rows_see_their_own_keys_and_gradients_are_right(answer):
    """Rows of 2 queries over 4 keys and 3 over 3: causal to the bottom right, checked with the gradients of sdpa."""
    found = answer(
        PLAIN
        + """
    import torch.nn.functional as F
    attend = device.varlen_attention(True)
    make = lambda *shape: torch.randn(*shape, device="npu", requires_grad=True)
    query, key, value = make(5, 4, 16), make(7, 2, 16), make(7, 2, 16)
    weights = torch.randn(5, 4, 16, device="npu")
    output = attend(query, key, value, [0, 2, 5], [0, 4, 7], SCALE)
    gradients = torch.autograd.grad((output * weights).sum(), (query, key, value))
    visible = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0],
                            [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]], device="npu").bool()
    heads_first = (query.transpose(0, 1), *(t.repeat_interleave(2, 1).transpose(0, 1) for t in (key, value)))
    right = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=SCALE).transpose(0, 1)
    wanted = torch.autograd.grad((right * weights).sum(), (query, key, value))
    answer = [close(output, right, 1e-5), *(close(one, other, 1e-4) for one, other in zip(gradients, wanted))]
    """
    )
    assert found == [True] * 4


def test_fusion_attention_refuses(answer):
    errors = {
        "fused(x, x, x, 2, 'TND')": "TND needs actual_seq_qlen",
        "fused(x, x, x, 2, 'TND', actual_seq_qlen=[2, 4], actual_seq_kvlen=[2, 5])": "tokens 5: [2, 4]",
        "fused(x, x, x, 2, 'TND', actual_seq_qlen=[0, 2, 5], actual_seq_kvlen=[2, 5])": "differ in length",
        "fused(x, x, x, 4, 'TND', actual_seq_qlen=[5], actual_seq_kvlen=[5])": "head_num is 4, but query has 2",
        "fused(x, x, x, 2, 'TND', actual_seq_qlen=[5], actual_seq_kvlen=[5], sparse_mode=3)": "[2048, 2048]",
        "fused(x, x, x.float(), 2, 'TND', actual_seq_qlen=[5], actual_seq_kvlen=[5])": "must share",
        "fused(x, x, x, 2, 'NTD')": "BSH/SBH/BNSD/BSND/TND(case-insensitive), but got NTD",
        "fused(x, x, x, 2, 'TND', sparse_mode=5)": "[0,5) or (5,8], but got 5",
        "fused(x.cpu(), x.cpu(), x.cpu(), 2, 'TND')": "only npu tensor is supported",
        "fused(x, x, x, 'TND', 2)": "Expected a value of type 'int' for argument 'head_num'",
    }
    program = f"""
    x, fused = draw(5, 2, 16), torch_npu.npu_fusion_attention
    answer = [said(lambda call=call: eval(call)) for call in {list(errors)}]
    """
    for said, error in zip(answer(PLAIN + program), errors.values(), strict=True):
        assert error in said


STEP = (
    PAGES
    + """
    attend, pool = device.paged_attention(True), device.graph_pool()
    scale = torch.ones(1, device="npu", dtype=torch.bfloat16)
    def step():  # two layers, the second of which does not hide the first
        return attend(query, key_cache, value_cache, table, [128, 1], SCALE) + scale * attend(
            query, key_cache, value_cache, table, [128, 1], SCALE)
    zero = scale * 0
"""
)


def test_a_captured_step_computes_with_the_lengths_of_its_update(answer):
    found = answer(
        STEP
        + """
    graph, result = device.capture(step, pool, host_lengths=True)
    results, counters = [bool(result.isnan().all())], torch_npu._emulator_counters()
    reads = []
    for lengths in ([129, 2], [130, 3], [131, 4]):
        graph.update_lengths(lengths)
        graph.replay()
        reads.append(device.start_read(result))
    after = torch_npu._emulator_counters()
    waits = after["blocking"] - counters["blocking"] + after["upload"] - counters["upload"]
    results += [close(read.wait(), 2 * expected([129 + i, 2 + i]), 3e-2) for i, read in enumerate(reads)]
    answer = [results, waits, [read.event.query() for read in reads], said(graph.replay)]
    """
    )
    results, waits, ready, replayed_again = found
    assert results == [True] * 4  # nothing was computed by capturing
    assert waits == 0
    assert ready == [True] * 3
    assert "needs update_lengths() before each replay" in replayed_again


def test_without_updates_a_graph_goes_on_with_the_lengths_it_was_captured_with(answer):
    """The trap: no error, another step's numbers."""
    found = answer(
        STEP
        + """
    graph, result = device.capture(step, pool)
    graph.update_lengths([130, 3])
    graph.replay()
    answer = [close(result, 2 * expected([130, 3]), 3e-2), close(result, 2 * expected([128, 1]), 3e-2),
              said(lambda: graph._graph.update(cpu_update_input=[{}]))]
    """
    )
    assert found[:2] == [False, True]
    assert "setting auto_dispatch_capture=True" in found[2]


UPDATABLE = (
    STEP
    + """
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool, None, True):     # pool, stream, auto_dispatch_capture
        result = step()
    update = lambda *lengths: graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(one)} for one in lengths])
    stream = graph.graph_dispatch_mode.update_stream
    ordered = lambda: stream.wait_stream(torch.npu.current_stream())
"""
)


def test_a_replay_waits_for_its_update_which_may_come_behind_it(answer):
    """As vllm-ascend does: the update's stream waits for what is before the replay, then replay, then update."""
    found = answer(
        UPDATABLE
        + """
    results = []
    for lengths in ([129, 2], [130, 3]):
        ordered()
        graph.replay()
        stuck = [said(lambda: result + 1), said(torch.npu.synchronize), said(lambda: result.cpu())]
        update(lengths)
        results.append(close(result, 2 * expected(lengths), 3e-2))
    ordered()
    update([131, 4], [131, 5])                          # one for each layer
    graph.replay()
    both = expected([131, 4]) + expected([131, 5])
    answer = [results, close(result, both, 3e-2), stuck, said(lambda: (ordered(), update([1, 1], [1, 1], [1, 1])))]
    """
    )
    results, each, stuck, miscounted = found
    assert results == [True, True]
    assert each is True
    assert all("a replayed graph waits for NPUGraph.update()" in text for text in stuck)
    assert "there are 2 operators that need to be updated by capture, and there are only 3 elements" in miscounted


def test_an_update_must_not_overtake_the_previous_replay(answer):
    """On a device the replay would reset the event that the next one waits for."""
    found = answer(
        UPDATABLE
        + """
    def first():
        ordered()
        update([129, 2])
        graph.replay()
    def follow(wait):
        first()
        wait()
        return said(lambda: update([130, 3]))
    event = torch.npu.Event()
    too_early = lambda: (event.record(), graph.replay(), ordered())   # waits for the replay that waits for it
    answer = dict(
        nothing=follow(lambda: None), stream=follow(ordered), host=follow(torch.npu.synchronize),
        read=follow(lambda: result.cpu()), event=follow(lambda: (event.record(), event.synchronize())),
        waiting=follow(lambda: (event.record(), stream.wait_event(event))))
    first()
    old = torch.npu.Event()
    answer["unknown_names"] = said(lambda: (ordered(), graph.update(cpu_update_input=[{"lengths": [130, 3]}])))
    graph.replay()
    answer["unchanged"] = close(result, 2 * expected([129, 2]), 3e-2)
    answer["circle"] = said(lambda: (graph.replay(), ordered(), update([130, 3])))
    """
    )
    assert "may overtake this graph's previous replay" in found.pop("nothing")
    assert "the update waits for the replay that waits for it" in found.pop("circle")
    assert found.pop("unchanged") is True  # a name that the operator was not given is left out without a word
    assert set(found.values()) == {"fine"}, found


def test_the_out_form_writes_to_given_memory(answer):
    found = answer(
        PAGES
        + """
    infer = torch_npu.npu_fused_infer_attention_score
    arguments = (query[:, :, None], key_cache.flatten(2), value_cache.flatten(2))
    settings = dict(num_heads=4, num_key_value_heads=2, scale=SCALE, input_layout="BNSD", block_table=table,
                    block_size=128, actual_seq_lengths_kv=[130, 3])
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(*arguments, **settings)
    out = [torch.empty_like(arguments[0]), torch.empty(1, device="npu")]
    infer.out(*arguments, **settings, workspace=workspace, out=out)
    answer = [torch.equal(out[0], infer(*arguments, **settings)[0]), str(workspace.dtype),
              said(lambda: infer.out(*arguments, **settings, out=[out[0][:1], out[1]]))]
    """
    )
    assert found[:2] == [True, "torch.uint8"]
    assert "out is (1, 4, 1, 16), not (2, 4, 1, 16)" in found[2]


def test_what_a_kernel_cannot_do_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cpu", 1))
    for kernel in (device.paged_attention(True), device.varlen_attention(True)):
        assert kernel.missing(torch.bfloat16, 64) == "there is no such kernel on a cpu"
        with pytest.raises(RuntimeError, match="there is no such kernel on a cpu"):
            kernel(torch.zeros(1, 1, 16))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setenv("CC", "gcc")
    paged, varlen = kernels.PAGED["cuda"], kernels.VARLEN["cuda"]
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert paged.missing(torch.bfloat16, 64, 256) == "triton is not installed"
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    for kernel in (paged, varlen):
        reason = f"{kernel.name} needs an Ampere GPU or a later one, not Tesla T4"
        assert kernel.missing(torch.float16, 64) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert paged.missing(torch.float32, 64, 256) is None
    monkeypatch.delenv("CC")
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert paged.missing(torch.float32, 64, 256) == "triton finds no C compiler: install gcc, or name one in CC"
    monkeypatch.setenv("CC", "gcc")
    with monkeypatch.context() as patched:
        patched.setattr(kernels.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        assert paged.missing(torch.float32, 64, 256) == "triton finds no Python.h: install python3-dev"
    assert varlen.missing(torch.float32, 64) == "varlen_attn does not compute in float32"
    monkeypatch.setattr(kernels, "_varlen_parameters", frozenset)
    assert varlen.missing(torch.bfloat16, 64) == f"torch {torch.__version__} has no varlen_attn with a scale, 2.11 has"
    assert paged.missing(torch.bfloat16, 288, 256) == "paged_decode has no heads of 288"
    assert paged.missing(torch.bfloat16, 64, 96) == "paged_decode takes blocks of a multiple of 64 tokens, not 96"
    assert (paged.host_lengths, kernels.PAGED["npu"].host_lengths) == (False, True)
    assert all(BLOCK_SIZE in kernels.PAGED[kind].block_sizes for kind in ("cuda", "npu"))


def test_that_none_can_be_had_on_cuda_is_a_line(monkeypatch, caplog):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cuda", 1))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        assert [device.paged_attention("auto") for _ in range(2)] == [None, None]
    assert caplog.messages == ["attention is computed by sdpa: triton is not installed"]


def test_an_npu_has_both_kernels(answer):
    found = answer("""
    from perl import device
    paged, varlen = device.paged_attention(True), device.varlen_attention(True)
    answer = [paged.missing(torch.bfloat16, 128, 128), varlen.missing(torch.float32, 64),
              paged.missing(torch.float32, 128, 128), paged.missing(torch.bfloat16, 128, 64)]
    """)
    assert found == [
        None,
        None,
        "npu_fused_infer_attention_score does not compute in float32",
        "npu_fused_infer_attention_score takes blocks of a multiple of 128 tokens, not 64",
    ]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_call_of_varlen_attn(monkeypatch, grouped):
    """Arguments by name and place; the numbers are the `gpu` tests' business."""
    calls = []

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        calls.append((cu_seq_q.tolist(), cu_seq_k.tolist(), max_q, max_k, scale, window_size))
        return query

    def of_2_13(*args, enable_gqa=False, **kwargs):
        assert enable_gqa
        return of_2_11(*args, **kwargs)

    of_2_13.__signature__ = inspect.signature(varlen.varlen_attn)
    monkeypatch.setattr(varlen, "varlen_attn", of_2_13 if grouped else of_2_11)
    monkeypatch.setattr(kernels, "_varlen_parameters", kernels._varlen_parameters.__wrapped__)
    monkeypatch.setattr(kernels, "_on_device", lambda cu, where: torch.tensor(cu, dtype=torch.int32))
    query, states = torch.zeros(5, 4, 16), torch.zeros(7, 2, 16)
    assert kernels.VARLEN["cuda"](query, states, states, [0, 2, 5], [0, 4, 7], 0.25) is query
    assert calls == [([0, 2, 5], [0, 4, 7], 3, 4, 0.25, (-1, 0))]


def test_the_paged_kernel_in_tritons_interpreter():
    """On a CPU, in a process of its own: Triton decides when it is imported. Lengths at, below and above the ends of
    splits and blocks, fewer key heads than query heads, and a head_dim that is no power of two."""
    pytest.importorskip("triton")
    program = """
    import json, torch
    from perl.device.paged_decode import paged_decode
    made = torch.Generator().manual_seed(0)
    apart = []
    for heads, key_heads, dim, block in ((14, 2, 64, 256), (3, 3, 80, 128)):
        lengths = [1, block, 2 * block + 17, 3 * block - 1]
        keys, values = torch.randn(2, 13, block, key_heads, dim, generator=made)
        table = (1 + torch.randperm(12, generator=made)).view(4, 3).int()
        query = torch.randn(4, heads, 1, dim, generator=made)[:, :, 0]
        found = paged_decode(query, keys, values, table, torch.tensor(lengths, dtype=torch.int32), 0.125)
        for row, length in enumerate(lengths):
            k, v = (states[table[row].long()].flatten(0, 1)[:length].double() for states in (keys, values))
            k, v = (states.repeat_interleave(heads // key_heads, dim=1) for states in (k, v))
            scores = 0.125 * torch.einsum("hd,nhd->hn", query[row].double(), k)
            expected = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), v)
            apart.append((found[row] - expected).abs().max().item())
    print(json.dumps(apart))
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    apart = json.loads(ran.stdout.splitlines()[-1])
    assert len(apart) == 8
    assert max(apart) < 1e-5


@pytest.mark.parametrize(("capability", "shared_memory"), [(80, 166_912), (89, 101_376), (90, 232_448)])
def test_the_paged_kernel_compiles_for_gpus_and_fits_into_their_shared_memory(capability, shared_memory):
    """Triton compiles for a GPU that is not there."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from perl.device import paged_decode

    def taken(kernel, pointers: dict[str, str], constants: dict[str, int]) -> int:
        types = (
            dict.fromkeys(kernel.arg_names, "i32")
            | {"scale": "fp32"}
            | pointers
            | dict.fromkeys(constants, "constexpr")
        )
        signature = {name: types[name] for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        return compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32)).metadata.shared

    made = {"out_ptr": "*fp32", "lse_ptr": "*fp32", "lengths_ptr": "*i32", "table_ptr": "*i32"}
    for dtype, dim, group in (("bf16", 128, 7), ("bf16", 256, 8), ("fp32", 80, 1), ("fp32", 256, 8)):
        exact = dtype == "fp32"
        sizes = {"DIM": dim, "PADDED_DIM": max(16, 1 << (dim - 1).bit_length()), "SPLIT": paged_decode.SPLIT}
        split = {"GROUP": group, "PADDED_GROUP": 16, "BLOCK": BLOCK_SIZE, "EXACT": exact}
        split |= {"TILE": paged_decode._tile(exact, dim)}
        read = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), f"*{dtype}")
        assert taken(paged_decode._attend_split, made | read, sizes | split) <= shared_memory
        assert taken(paged_decode._merge_splits, made | {"result_ptr": f"*{dtype}"}, sizes) <= shared_memory


def test_packed_rows_by_the_kernel_have_the_gradients_of_sdpa(answer):
    found = answer(
        """
    import sys
    sys.path.insert(0, ".")
    from trl.trainer.utils import add_fused_lm_head
    from perl import device
    from perl.training.packing import enable_packing, forward_arguments, pack
    from tests.engines.models import tiny
    from tests.training.test_packing import rows_of

    rows, width = rows_of(), 4
    results, calls = [], []
    import torch_npu
    kernel = torch_npu.npu_fusion_attention
    torch_npu.npu_fusion_attention = lambda *args, **kw: (calls.append(1), kernel(*args, **kw))[1]
    for wanted in (False, True):
        model = tiny().to("npu:0")
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        assert enable_packing(model) is None
        packed = pack(rows, width, "npu:0", device.varlen_attention(wanted))
        logps = packed.unpack(model(**forward_arguments(packed)).log_probs)
        logps.sum().backward()
        grad = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
        results.append((logps.detach().cpu(), grad, len(calls)))
    (a, g, none), (b, h, some) = results
    answer = [none, some, (a - b).abs().max().item(), ((g - h).abs().max() / g.abs().max()).item()]
    """
    )
    none, some, apart, gradient = found
    assert none == 0
    assert some >= 3  # layers
    assert apart < 1e-4
    assert gradient < 1e-4


def test_an_update_of_the_trainer_is_computed_by_the_kernel_that_was_asked_for(answer, tmp_path):
    found = answer(
        f"""
    import sys
    sys.path.insert(0, ".")
    import torch_npu
    from tests.training.test_trainer import adapter_state, make_trainer

    calls, moved = [], []
    kernel = torch_npu.npu_fusion_attention
    torch_npu.npu_fusion_attention = lambda *args, **kw: (calls.append(1), kernel(*args, **kw))[1]
    plain = dict(max_steps=1, engine="fast", bf16=False, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant")
    for wanted in (False, True):
        trainer = make_trainer({str(tmp_path)!r}, attention_kernels=wanted, **plain)
        before = adapter_state(trainer)
        trainer.train()
        after = adapter_state(trainer)
        moved.append(torch.cat([(after[name] - before[name]).flatten().cpu() for name in before]))
        calls.append(0)
    answer = [calls.index(0), sum(calls), ((moved[0] - moved[1]).abs().max() / moved[0].abs().max()).item()]
    """
    )
    without, with_kernel, apart = found
    assert without == 0
    assert with_kernel >= 2 * 2  # layers, micro-batches
    assert apart < 1e-4
