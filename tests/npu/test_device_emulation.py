"""Values, memory, operators and collectives of the emulated NPU: what the other NPU tests stand on must be true.

Each program runs in a process of its own and leaves what it found in `answer`; this process knows what is right.
"""

import json
import sys

import pytest
import torch

pytestmark = pytest.mark.npu

MIB = 2**20


# ---------------------------------------------------------------------------------------------- values

VALUES = """
import torch
import torch.nn.functional as F

def values(device):
    torch.manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, device=device)
    x, w = draw(5, 8), draw(8, 3).requires_grad_()
    image, kernel = draw(1, 2, 6, 6), draw(4, 2, 3, 3).requires_grad_()
    query = draw(2, 2, 4, 8).requires_grad_()
    attended = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    loss = F.cross_entropy(x @ w, torch.tensor([0, 1, 2, 1, 0], device=device))
    loss = loss + F.conv2d(image, kernel, stride=2, padding=1).square().mean() + attended.square().mean()
    loss.backward()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        low = x @ w
    viewed = x.clone()
    viewed.view(-1)[3:6] = 1.0            # written through a view
    viewed[torch.tensor([0, 2])] += 2.0   # indexed with a tensor of the host
    grown = torch.ones(2, device=device).resize_(3).fill_(4.0)
    sort = draw(6).sort()
    found = [x.sum(), x @ w, loss, w.grad, kernel.grad, query.grad, low, viewed, grown, sort.values, sort.indices,
             torch.randperm(9, device=device), torch.multinomial(x.softmax(-1), 2), F.dropout(x, 0.5)]
    return [tensor.detach().to("cpu") for tensor in found]
"""


def test_operators_and_gradients_are_the_cpus(run_npu, tmp_path):
    file = tmp_path / "values.pt"
    program = f"{VALUES}\ntorch.save(values('npu:1'), {str(file)!r})"
    run_npu([sys.executable, "-c", program])
    space: dict = {}
    exec(VALUES, space)
    expected = space["values"]("cpu")
    found = torch.load(file)
    assert len(found) == len(expected) == 14
    for ours, theirs in zip(found, expected, strict=True):
        # Attention is decomposed on an npu and fused on a CPU; all else is the same kernel.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert found[6].dtype == torch.bfloat16


def test_random_numbers_follow_the_seed(answer):
    """A device has a stream of its own; with NPUEMU_CPU_GENERATOR=1 it is the host's, drawn from in turn."""
    program = """
        def draws():
            torch.manual_seed(5)
            host = torch.rand(2).tolist()
            return host, torch.rand(2, device="npu:1").tolist()
        first, again = draws(), draws()
        state = torch.npu.get_rng_state("npu:1")
        one = torch.rand(2, device="npu:1").tolist()
        torch.npu.set_rng_state(state, "npu:1")
        answer = dict(first=first, again=again, repeated=torch.rand(2, device="npu:1").tolist() == one)
    """
    own, shared = answer(program), answer(program, NPUEMU_CPU_GENERATOR=1)
    torch.manual_seed(5)
    expected = [torch.rand(2).tolist(), torch.rand(2).tolist()]
    assert own["first"] == own["again"] == [expected[0], expected[0]]
    assert shared["first"] == shared["again"] == expected
    assert own["repeated"] is shared["repeated"] is True


def test_a_cast_to_float64_gives_float32_with_a_warning(run_npu):
    casts = "print([x.double().dtype for _ in range(2)], x.cpu().double().dtype)"
    program = f"import torch; x = torch.ones(2, device='npu'); {casts}"
    done = run_npu([sys.executable, "-c", program])
    assert done.stdout == "[torch.float32, torch.float32] torch.float64\n"
    assert done.stderr.count("Device do not support double dtype now, dtype cast replace with float.") == 1


def test_a_result_stays_on_its_device_and_devices_do_not_mix(answer):
    found = answer("""
        def message(function):
            try:
                function()
            except RuntimeError as error:
                return str(error)
        here, there = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
        torch.npu.set_device(1)
        moved = torch.nn.Linear(2, 2)
        weight = moved.weight
        moved.npu()
        answer = dict(
            result=str((there * 2).device), current=str(torch.empty(1, device="npu").device),
            moved=str(weight.device), same_parameter=moved.weight is weight,
            two_npus=message(lambda: here + there), npu_and_cpu=message(lambda: here + torch.ones(2)),
            no_such=message(lambda: torch.ones(1, device="npu:2")), pinned=torch.ones(2).pin_memory().is_pinned(),
            emulated=__import__("torch_npu").__version__, name=torch.npu.get_device_name(0))
    """)
    assert found["result"] == found["current"] == found["moved"] == "npu:1"
    assert found["same_parameter"] is True
    assert "at least two devices, npu:0 and npu:1!" in found["two_npus"]
    assert "at least two devices, npu:0 and cpu!" in found["npu_and_cpu"]
    assert "Invalid device ID" in found["no_such"]
    assert "error code is 107001" in found["no_such"]
    assert found["pinned"] is True
    assert found["emulated"].endswith("+emulated")
    assert found["name"] == "Ascend-emulated"


def test_fused_attention_masks_as_documented(answer):
    """sparse_mode 2 is causal from the top left, 3 to the bottom right; TND packs sequences of 3 and 2 tokens."""
    found = answer("""
        import torch_npu, torch.nn.functional as F
        torch.manual_seed(0)
        mask = torch.ones(2048, 2048, device="npu").triu(1).bool()
        q, k, v = (torch.randn(1, n, heads, 8, device="npu") for n, heads in ((2, 4), (5, 2), (5, 2)))
        fused = lambda mode: torch_npu.npu_fusion_attention(
            q, k, v, 4, "BSND", atten_mask=mask, scale=8**-0.5, sparse_mode=mode)[0]
        def plain(hidden):
            heads_first = (q.transpose(1, 2), *(t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v)))
            visible = ~torch.tensor(hidden, device="npu").bool()
            return F.scaled_dot_product_attention(*heads_first, attn_mask=visible).transpose(1, 2)
        packed = torch.randn(5, 1, 8, device="npu")
        ends = (3, 5)
        both = torch_npu.npu_fusion_attention(packed, packed, packed, 1, "TND", actual_seq_qlen=ends,
                                              actual_seq_kvlen=ends)[0]
        last = packed[3:].squeeze(1)
        answer = dict(
            top_left=torch.allclose(fused(2), plain([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]), atol=1e-5),
            bottom_right=torch.allclose(fused(3), plain([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]), atol=1e-5),
            differ=not torch.allclose(fused(2), fused(3)),
            packed=torch.allclose(both[3:].squeeze(1), (last @ last.T).softmax(-1) @ last, atol=1e-5))
    """)
    assert found == {"top_left": True, "bottom_right": True, "differ": True, "packed": True}


# ---------------------------------------------------------------------------------------------- waits of the host


def test_the_waits_of_the_host_are_counted_by_kind(answer):
    """What does not wait is not counted: copies with non_blocking=True to and from pinned memory, events recorded."""
    found = answer("""
        import torch_npu
        def counted(function):
            before = torch_npu._emulator_counters()
            function()
            after = torch_npu._emulator_counters()
            return {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]}
        x, two = torch.arange(6.0, device="npu").view(2, 3), torch.tensor([1, 2], device="npu")
        plain, pinned, event = torch.empty(2, 3), torch.empty(2, 3, pin_memory=True), torch.npu.Event()
        stream = torch.npu.Stream()
        calls = dict(
            item=lambda: x.sum().item(), truth=lambda: bool(x.any()), equal=lambda: torch.equal(x, x),
            tolist=lambda: x.tolist(), cpu=lambda: x.cpu(), to_pinned=lambda: pinned.copy_(x),
            to_plain_unasked=lambda: plain.copy_(x, non_blocking=True),
            nonzero=lambda: x.nonzero(), boolean_index=lambda: x[x > 2], unique=lambda: x.unique(),
            repeats=lambda: two.repeat_interleave(two), synchronize=torch.npu.synchronize,
            stream=lambda: stream.synchronize(), event=lambda: (event.record(), event.synchronize()),
            upload=lambda: x.copy_(plain), new=lambda: torch.tensor([1.0], device="npu"),
            asynchronous=lambda: pinned.copy_(x, non_blocking=True),
            part=lambda: pinned[1].copy_(x[1], non_blocking=True),
            to=lambda: x.to("cpu", non_blocking=True), up=lambda: x.copy_(pinned, non_blocking=True),
            events=lambda: (event.record(stream), event.wait(), event.query(), stream.wait_event(event)),
            on_the_device=lambda: (x[two - 1] + 1, two.repeat_interleave(two, output_size=3), x.clone().copy_(x)))
        answer = {name: counted(function) for name, function in calls.items()}
        answer["pinned"] = [x.to("cpu", non_blocking=True).is_pinned(), plain.pin_memory().is_pinned()]
    """)
    assert found.pop("pinned") == [True, True]
    item, copy, nonzero, synchronize, upload = (
        {"item": 1, "blocking": 1},
        {"copy": 1, "blocking": 1},
        {"nonzero": 1, "blocking": 1},
        {"synchronize": 1, "blocking": 1},
        {"upload": 1},
    )
    assert found == {
        "item": item,
        "truth": item,
        "equal": item,
        "tolist": copy,
        "cpu": copy,
        "to_pinned": copy,
        "to_plain_unasked": copy,
        "nonzero": nonzero,
        "boolean_index": nonzero,
        "unique": nonzero,
        "repeats": nonzero,
        "synchronize": synchronize,
        "stream": synchronize,
        "event": {"event": 1},
        "upload": upload,
        "new": upload,
        **{name: {} for name in ("asynchronous", "part", "to", "up", "events", "on_the_device")},
    }


# ---------------------------------------------------------------------------------------------- memory


def test_memory_is_booked_as_torch_npu_books_it(answer):
    """A request of n bytes is a block of n + 32, rounded up to 512; blocks come from segments of 2 MiB or 20 MiB."""
    found = answer("""
        npu, steps = torch.npu, []
        def book():
            steps.append([npu.memory_allocated(), npu.max_memory_allocated(), npu.memory_reserved()])
        book()
        small = torch.empty(1024, device="npu")          # 4,096 bytes
        book()
        view = small.view(2, 512)                        # no memory of its own
        large = torch.empty(2**20, device="npu")         # 4 MiB
        book()
        result = large + 1                               # 4 MiB, made by an operator
        book()
        del result
        book()
        npu.reset_peak_memory_stats()
        book()
        del large
        npu.empty_cache()
        book()
        stats = npu.memory_stats()
        answer = dict(
            steps=steps, info=npu.mem_get_info(), other=npu.memory_allocated(1),
            reserved_peak=npu.max_memory_reserved(),
            counts=[stats[f"allocation.all.{kind}"] for kind in ("current", "peak", "allocated", "freed")],
            total=npu.get_device_properties(0).total_memory)
    """)
    small, large = 4608, 4 * MIB + 512
    assert found["steps"] == [
        [0, 0, 0],
        [small, small, 2 * MIB],
        [small + large, small + large, 22 * MIB],
        [small + 2 * large, small + 2 * large, 22 * MIB],
        [small + large, small + 2 * large, 22 * MIB],
        [small + large, small + large, 22 * MIB],
        [small, small + large, 2 * MIB],
    ]
    assert found["counts"] == [1, 2, 3, 2]
    assert found["info"] == [64 * 1024 * MIB - 2 * MIB, 64 * 1024 * MIB]
    assert found["total"] == 64 * 1024 * MIB
    assert found["reserved_peak"] == 22 * MIB
    assert found["other"] == 0


def test_out_of_memory_is_torchs_error_in_torch_npus_words(answer):
    """On 64 MiB: 30 MiB and a 2 MiB segment with 1 KiB in it leave 32; an operator's result must fit like a tensor."""
    found = answer(
        """
        def message(function):
            try:
                function()
            except torch.OutOfMemoryError as error:
                return str(error).splitlines()[0]
        half = torch.ones(30 * 2**18 - 8, device="npu:1")
        little = torch.ones(256, device="npu:1")
        by_tensor = message(lambda: torch.empty(40 * 2**20, dtype=torch.uint8, device="npu:1"))
        by_operator = message(lambda: torch.cat([half, half]))
        fits = torch.empty(32 * 2**20 - 32, dtype=torch.uint8, device="npu:1")
        del half, fits
        after = torch.empty(60 * 2**20, dtype=torch.uint8, device="npu:1")  # what was cached is given back first
        stats = torch.npu.memory_stats(1)
        answer = dict(by_tensor=by_tensor, by_operator=by_operator, after=after.numel(), ooms=stats["num_ooms"],
                      other=torch.npu.mem_get_info(0)[0])
        """,
        NPUEMU_MEMORY_BYTES=64 * MIB,
    )
    assert found["by_tensor"] == (
        "NPU out of memory. Tried to allocate 42.00 MiB (NPU 1; 64.00 MiB total capacity; 30.00 MiB already allocated;"
        " 30.00 MiB current active; 32.00 MiB free; 32.00 MiB reserved in total by PyTorch) If reserved memory is >>"
        " allocated memory try setting max_split_size_mb to avoid fragmentation."
    )
    assert found["by_operator"].startswith("NPU out of memory. Tried to allocate 60.00 MiB (NPU 1;")
    assert found["after"] == 60 * MIB
    assert found["ooms"] == 2
    assert found["other"] == 64 * MIB


# ---------------------------------------------------------------------------------------------- operators

ISIN = """
import torch
ids, wanted = torch.arange(4, device="npu:1"), torch.tensor([1, 3], device="npu:1")
print([torch.isin(ids, wanted).tolist() for _ in range(3)][-1])
"""


def test_unsupported_operator_falls_back_with_a_warning(run_npu, tmp_path):
    log = tmp_path / "operators"
    done = run_npu([sys.executable, "-c", ISIN], NPUEMU_UNSUPPORTED_OPS="aten::isin,aten::nms", NPUEMU_OP_LOG=log)
    assert done.stdout == "[False, True, False, True]\n"
    warning = (
        "CAUTION: The operator 'aten::isin.Tensor_Tensor_out' is not currently supported on the NPU backend and will"
        " fall back to run on the CPU. This may have performance implications. (function npu_cpu_fallback)"
    )
    assert done.stderr.count("CAUTION") == done.stderr.count(warning) == 1
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    calls = {(place, name): int(number) for _, place, _, number, name in rows}
    assert calls["npu:1", "aten::isin.Tensor_Tensor_out"] == 3
    assert {place for place, _ in calls} == {"npu:1"}


def test_unsupported_operator_is_an_error_where_fallback_is_disabled(run_npu):
    settings = {"NPUEMU_UNSUPPORTED_OPS": "aten::isin.Tensor_Tensor_out", "TORCH_NPU_FALLBACK_CPU_DISABLE": 1}
    done = run_npu([sys.executable, "-c", ISIN], check=False, **settings)
    assert done.returncode == 1
    assert "The operator 'aten::isin.Tensor_Tensor_out' would execute its main computation on CPU" in done.stderr
    assert "CAUTION" not in done.stderr


# ---------------------------------------------------------------------------------------------- hccl

COLLECTIVES = """
import json, os, sys, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
mine = torch.tensor([1.0, 10.0], device="npu") * (rank + 1)       # [1, 10] and [2, 20]
total, mean = mine.clone(), mine.clone()
dist.all_reduce(total)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
gathered = torch.empty(4, device="npu")
dist.all_gather_into_tensor(gathered, mine)
part = torch.empty(1, device="npu")
dist.reduce_scatter_tensor(part, mine)
sent = mine.clone()
dist.broadcast(sent, src=1)
refused = []
for tensor in (torch.zeros(2, dtype=torch.float64, device="npu"), mine.cpu()):
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        refused.append(str(error))
dist.barrier()
found = dict(backend=dist.get_backend(), device=str(total.device), total=total.tolist(), mean=mean.tolist(),
             gathered=gathered.tolist(), part=part.tolist(), sent=sent.tolist(), refused=refused)
json.dump(found, open(os.path.join(sys.argv[1], f"{rank}.json"), "w"))
dist.destroy_process_group()
"""


def test_collectives_of_two_processes(run_npu, tmp_path):
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_npu([*launch, str(script), str(tmp_path)])
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (found["backend"], found["device"]) == ("hccl", f"npu:{rank}")
        assert found["total"] == [3.0, 30.0]
        assert found["mean"] == [1.5, 15.0]
        assert found["gathered"] == [1.0, 10.0, 2.0, 20.0]
        assert found["part"] == [3.0 if rank == 0 else 30.0]
        assert found["sent"] == [2.0, 20.0]
        float64, host = found["refused"]
        assert "Unsupported data type at::kDouble" in float64
        assert "cpu" in host.lower()
