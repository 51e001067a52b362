"""perl.tools.plan.memory: by hand, and against what autograd, TRL, DeepSpeed and perl's own cache really take."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import trl.trainer.utils
from peft import get_peft_model
from transformers import Qwen2Config
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from perl.adapters import ADAPTERS
from perl.config.schema import CriticConfig, PeftConfig
from perl.engines.cache import BLOCK_SIZE, BlockCache, RowCache
from perl.models.folders import load_model
from perl.records import Trajectory
from perl.tools.plan import memory
from perl.tools.plan.devices import DEVICES
from perl.tools.plan.inputs import shape_of, vllm_room, workers_room
from perl.tools.plan.memory import (
    GB,
    Item,
    Job,
    Micro,
    Shape,
    activations,
    base_bytes,
    items,
    micro_batch,
    peak,
    quantised_bytes,
    states,
    update,
    vllm_least,
    vllm_weights,
    worker_items,
)
from perl.training.packing import Packing, enable_packing, forward_arguments, pack
from tests.tiny import tiny_model

PEFT = PeftConfig(r=4, lora_alpha=8)
SHAPE = Shape(
    parameters=1_000_000,
    linear=900_000,
    outputs=3000,
    adapter=1000,
    adapted={},
    rank=4,
    layers=2,
    hidden=10,
    query=10,
    key=5,
    intermediate=30,
    vocabulary=100,
)
JOB = Job(
    prompt=8,
    completion=4,
    group=4,
    micro_batch=4,
    accumulation=2,
    steps_per_generation=2,
    processes=4,
    parallel="ddp",
    weight_bytes=2,
    compute_bytes=2,
    checkpointing=False,
)
DEVICE = replace(DEVICES["910b"], runtime=0, communicator=0)


FULL = replace(JOB, weight_bytes=4, compute_bytes=2, full=True, reference=True)
"""bf16 mixed precision over float32 weights, a million of them, on four devices."""


@pytest.mark.parametrize(
    ("parallel", "weights", "gradients", "master", "adamw", "reference", "copies"),
    [
        ("ddp", 4, 4, 0, 8, 4, 2),
        ("zero2", 2, 0.5, 1, 2, 2, 0),
        ("zero3", 0.5, 0.5, 1, 2, 0.5, 0),
        ("fsdp2", 1, 1, 0, 2, 1, 0),
    ],
)
def test_states_of_all_weights_by_hand(parallel, weights, gradients, master, adamw, reference, copies):
    found = {item.name: item.bytes / SHAPE.parameters for item in states(SHAPE, replace(FULL, parallel=parallel))}
    assert found["weights"] == weights
    assert found["gradients"] == gradients
    assert found.get("float32 copy of the weights", 0) == master
    assert found["optimizer (AdamW)"] == adamw
    assert found["reference model"] == reference
    assert found.get("copies of the weights for rollouts", 0) == copies
    assert found.get("weights, cast by autocast", 0) == copies
    assert not [name for name in found if "adapter" in name]
    without = [item.name for item in states(SHAPE, replace(FULL, parallel=parallel, reference=False))]
    assert "reference model" not in without


def held(parallel, name, **changes):
    return sum(item.bytes for item in states(SHAPE, replace(JOB, parallel=parallel, **changes)) if item.name == name)


def test_states_by_hand():
    """Of 1000 trained parameters on 4 devices."""
    assert [held(p, "optimizer (AdamW)") for p in ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")] == [
        *(8000, 8000, 2000, 2000, 2000, 2000)
    ]
    assert [held(p, "gradients") for p in ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")] == [
        *(4000, 2000, 2000, 500, 500, 1000)
    ]
    assert [held(p, "adapter") for p in ("ddp", "zero2", "zero3", "fsdp2")] == [4000, 2000, 500, 1000]
    assert [held(p, "float32 copy of the adapter") for p in ("ddp", "zero0", "zero2")] == [0, 4000, 1000]
    assert [held(p, "weights") for p in ("ddp", "zero2", "zero3", "fsdp2")] == [2_000_000] * 2 + [500_000] * 2
    assert held("ddp", "DDP's buckets") == 4000
    assert held("single", "DDP's buckets", processes=1) == 0
    assert held("zero2", "DeepSpeed's bucket") == 1_000_000_000


def test_each_group_of_processes_has_buffers():
    """On an NPU: torch's group, and DeepSpeed's own; none of one process."""
    device = replace(DEVICE, runtime=10, communicator=3)
    found = {p: items(SHAPE, replace(JOB, parallel=p), device)[0].bytes for p in ("single", "ddp", "fsdp2", "zero2")}
    assert found == {"single": 10, "ddp": 13, "fsdp2": 13, "zero2": 16}
    assert worker_items(SHAPE, replace(JOB, parallel="zero2", piece=4), device)[0].bytes == 10


def test_zero3_holds_the_gathered_weights_in_the_rollout():
    assert held("zero3", "weights, gathered") == 1_500_000 + 2_000_000  # rollout: what others hold; update: at most all


def test_a_peak_is_what_stays_and_the_largest_moment():
    table = [Item("a", 5, "both"), Item("b", 7, "update"), Item("c", 2, "update", True), Item("d", 3, "update", True)]
    assert (peak(table, "update"), peak(table, "rollout")) == (15, 5)
    assert peak([*table, Item("h", 100, "host")], "update") == 15


def test_a_packed_micro_batch_computes_a_prompt_once():
    """4 rows of a prompt of 8: 7 shared tokens, and of each row the last prompt token and 4 of the completion."""
    assert micro_batch(JOB) == Micro(tokens=7 + 4 * 5, scored=16, keys=7 + 4 * 12)
    assert micro_batch(replace(JOB, packed=False)) == Micro(48, 48, 48)
    assert micro_batch(replace(JOB, critic=True)) == Micro(tokens=2 * 27, scored=16, keys=2 * 55)
    assert micro_batch(replace(JOB, micro_batch=8)).tokens == 2 * 27
    assert micro_batch(replace(JOB, group=8)).tokens == 27
    assert micro_batch(replace(JOB, accumulation=1)).tokens == 2 * 7 + 4 * 5  # two updates of one rollout
    assert micro_batch(replace(JOB, max_tokens=54)).tokens == 54
    assert micro_batch(replace(JOB, max_tokens=53)).tokens == 49  # 7 rows
    assert micro_batch(replace(JOB, max_tokens=5, group=1)).tokens == 12  # a row alone, whatever its length
    assert micro_batch(replace(JOB, max_tokens=10_000)).tokens == 2 * 27  # all that an update has


def test_rows_that_stay_where_they_were_dealt_to_share_few_prompts():
    """4 of the 8 rows of a rollout, in a random order: both of its prompts may be among them."""
    job = replace(JOB, rows_stand=True)
    assert micro_batch(job) == Micro(tokens=2 * 7 + 4 * 5, scored=16, keys=2 * 7 + 4 * 12)
    assert micro_batch(replace(job, max_tokens=5)) == micro_batch(replace(job, max_tokens=10_000)) == micro_batch(job)
    assert micro_batch(replace(job, steps_per_generation=8, accumulation=8)).tokens == 4 * 12  # 8 prompts, one each
    assert micro_batch(replace(job, group=8)).tokens == 27


def test_logits_are_a_tile_and_not_the_vocabulary():
    """No [N, V]: 4096 x 32,768 of them at most, with seven float32 copies and a mask where there is no Triton."""
    job = replace(JOB, packed=False, completion=2000 - JOB.prompt)  # 8000 rows of hidden states

    def logits(shape, job, device):
        return [item.bytes for item in update(shape, job, DEVICES[device]) if item.name.startswith("logits")]

    tile = 4096 * 32_768
    assert logits(replace(SHAPE, vocabulary=150_000), job, "a100") == [2 * tile + 8000 * 10 * 4]
    assert logits(replace(SHAPE, vocabulary=150_000), job, "910b") == [31 * tile + 8000 * 10 * 4]
    assert logits(SHAPE, JOB, "a100") == [2 * 16 * 100 + 16 * 10 * 4]


def test_the_cache_is_half_of_what_is_free():
    shape = replace(SHAPE, key=64)
    a_token = 2 * 2 * 64 * 2
    assert memory.a_token(shape, JOB) == a_token
    assert memory.kv_cache(shape, JOB, DEVICE, free=GB) == 8 * 128 * a_token  # 8 rows of 12 tokens: a block each
    assert memory.kv_cache(shape, JOB, DEVICE, free=2 * 5 * 128 * a_token) == 5 * 128 * a_token
    assert memory.kv_cache(shape, replace(JOB, max_batch_tokens=4 * 128), DEVICE, free=0) == 4 * 128 * a_token
    assert memory.kv_cache(shape, JOB, DEVICES["cpu"], free=0) == 8 * 12 * a_token  # the pages written to


def test_a_piece_is_drawn_by_itself_and_has_half_of_what_the_weights_leave():
    """Of a million numbers of 2 bytes and an adapter of 4000; int8 on an NPU copies 899,000 and 2,900 scales."""
    job = replace(JOB, alike=True, piece=4, completion=10**9)
    trained = {item.name: item.bytes for item in items(SHAPE, job, DEVICE, GB)}
    assert trained["KV cache"] == pytest.approx((GB - 2_004_000) / 2, abs=memory.a_token(SHAPE, JOB))
    assert trained["decode step (logits)"] == 4 * 100 * 16 + trained["KV cache"] // 2
    quantised = replace(job, quantization="int8", workers=1)
    for table in (items(SHAPE, replace(quantised, workers=0), DEVICE), worker_items(SHAPE, quantised, DEVICE)):
        found = {item.name: item.bytes for item in table}
        left = DEVICE.memory - 2_004_000 - found["int8 copy for rollouts"]
        assert found["KV cache"] == pytest.approx(left / 2, abs=memory.a_token(SHAPE, JOB))
    newest = {item.name: item.bytes for item in worker_items(SHAPE, replace(quantised, alike=False), DEVICE)}
    assert newest["KV cache"] == pytest.approx(left / 2, abs=memory.a_token(SHAPE, JOB) + 2000)


def test_greedy_completions_are_drawn_too():
    """Eight rows of two prompts, and one more of each: 10 x 12 tokens, and logits of 10 x 100 numbers four times."""
    job, cpu = replace(JOB, greedy=True), DEVICES["cpu"]
    table = {item.name: item.bytes for item in items(SHAPE, job, cpu)}
    assert table["KV cache"] == 10 * 12 * memory.a_token(SHAPE, job)
    assert table["decode step (logits)"] == 10 * 100 * 16
    of_three = replace(job, group=3)  # the second process draws the rows 8 to 15: of the prompts 2, 3, 4 and 5
    assert (of_three.prompts, of_three.sampled(cpu)) == (4, 12)
    longer = replace(job, steps_per_generation=128)
    assert (longer.sampled(cpu), longer.sampled(DEVICES["910b"])) == (64, 256)


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
def test_the_cache_leaves_room_for_what_the_update_allocates(parallel):
    """As `update_memory` of perl.engines has it: gradients and Adam's moments, but not DeepSpeed's, which are there."""
    job = replace(JOB, parallel=parallel, completion=10**8)  # more than there is
    table = {(item.name, item.phase): item.bytes for item in items(replace(SHAPE, adapter=10**6), job, DEVICE, GB)}
    there = sum(size for (name, phase), size in table.items() if phase == "both")
    reserved = 0 if parallel == "zero2" else table["gradients", "update"]
    assert table["KV cache", "rollout"] == pytest.approx((GB - there - reserved) / 2, abs=memory.a_token(SHAPE, JOB))


@pytest.mark.parametrize(("rows", "completion", "bound"), [(8, 400, 10**6), (64, 200, 10**6), (64, 200, 4096)])
def test_the_cache_is_as_large_as_perls_own(rows, completion, bound):
    """On an accelerator but for the block of rows without a sequence; on a CPU to the byte."""
    job = replace(JOB, completion=completion, micro_batch=rows // 2, max_batch_tokens=bound)
    keys = torch.empty(1, 1, 5, dtype=torch.bfloat16, device="meta")
    longest = -(-job.length // BLOCK_SIZE) * BLOCK_SIZE
    blocks = BlockCache([(keys, keys)] * 2, rows, longest, bound, BLOCK_SIZE).bytes
    assert memory.kv_cache(SHAPE, job, DEVICE, free=0) == pytest.approx(blocks, rel=0.15)
    if bound == 10**6:
        keys = torch.zeros(1, 1, 5, dtype=torch.bfloat16)
        own = RowCache([(keys, keys)] * 2, rows, job.length, bound).bytes
        assert memory.kv_cache(SHAPE, job, DEVICES["cpu"], free=0) == own


def test_the_cache_stays_for_the_update_where_a_quarter_is_left():
    names = [item.name for item in items(SHAPE, JOB, DEVICE, 64 * GB)]
    assert "KV cache, kept" in names
    here = [item for item in items(SHAPE, JOB, DEVICE, 64 * GB) if item.phase in ("both", "rollout")]
    held = sum(item.bytes for item in here if not item.moment)
    for capacity, kept in ((held * 4 // 3 + 1000, True), (held * 4 // 3 - 1000, False)):
        job = replace(JOB, max_batch_tokens=8 * 128)  # so that the cache does not follow the capacity
        assert ("KV cache, kept" in [item.name for item in items(SHAPE, job, DEVICE, capacity)]) == kept


def test_vllm_has_its_share_until_it_sleeps():
    job = replace(JOB, engine="vllm", vllm_share=0.3)
    assert Item("vLLM's share", int(0.3 * 64 * GB), "both") in items(SHAPE, job, DEVICE)
    assert Item("vLLM's share", int(0.3 * 64 * GB), "rollout") in items(SHAPE, replace(job, vllm_sleeps=True), DEVICE)
    assert not [i for i in items(SHAPE, replace(job, vllm_share=0.0), DEVICE) if i.name in ("KV cache", "vLLM's share")]


def test_a_workers_vllm_is_on_the_workers_device():
    """64 GB, of which 0.8 are 51.2; the base of 500,000 numbers takes next to nothing."""
    job = replace(JOB, engine="vllm", vllm_share=0.8, workers=2, processes=4)
    assert "vLLM's share" not in [item.name for item in items(SHAPE, job, DEVICE)]
    assert list(vllm_room(SHAPE, job, DEVICE)) == []
    (line,) = workers_room(SHAPE, job, DEVICE)
    assert line.startswith("4 + 2 devices: 2 workers draw; vLLM's share of 51.2 GB leaves 51.")
    held = [(item.name, item.bytes) for item in worker_items(SHAPE, job, replace(DEVICE, runtime=5), 100)]
    assert held == [("runtime (context, collectives)", 5), ("vLLM's share", 80)]


def test_float32_weights_are_laid_out_again_on_a_cpu():
    cpu = {item.name: item.bytes for item in items(SHAPE, replace(JOB, weight_bytes=4), DEVICES["cpu"])}
    assert cpu["weights in oneDNN's layout"] == 3_600_000


def test_a_quantised_base_by_hand():
    """Of a million numbers 899,000 are in linear layers but for the head of 100 x 10, with 2,900 outputs."""
    rest = 2 * (1_000_000 - 899_000)
    assert base_bytes(SHAPE, 2) == 2_000_000
    assert base_bytes(SHAPE, 2, "int8") == base_bytes(SHAPE, 2, "8bit") == 899_000 + 4 * 2900 + rest
    assert base_bytes(SHAPE, 2, "int4") == base_bytes(SHAPE, 2, "4bit") == 505_688 + rest  # 0.5625 bytes
    assert base_bytes(SHAPE, 2, "4bit, nested") == 463_766 + rest  # 0.5 + 1/64 + 1/4096
    assert base_bytes(SHAPE, 4, "int4") == 505_688 + 2 * rest
    assert quantised_bytes(900_000, 3000, "int8_w8a8") == 912_000


def test_engine_fast_draws_with_a_copy_besides():
    """The head is in it, and nothing else is laid out for oneDNN."""
    job = replace(JOB, weight_bytes=4, quantization="int8")
    table = {item.name: item for item in items(SHAPE, job, DEVICES["cpu"])}
    assert table["weights"].bytes == 4_000_000
    assert table["int8 copy for rollouts"] == Item("int8 copy for rollouts", 912_000, "both")
    assert "weights in oneDNN's layout" not in table


def test_vllm_draws_with_a_quantised_base_in_the_place_of_it():
    job = replace(JOB, engine="vllm", vllm_share=0.3)
    assert [vllm_weights(SHAPE, replace(job, quantization=name)) for name in ("none", "int8", "int4")] == [
        *(2_000_000, 1_112_600, 707_688)
    ]
    assert vllm_weights(SHAPE, replace(job, loaded="4bit")) == 707_688  # it reads the base as the trainer does
    assert vllm_weights(SHAPE, replace(job, loaded="4bit", quantization="int8", vllm_devices=2)) == 1_112_600 // 2
    assert vllm_least(SHAPE, job) == 2_000_000 + 12 * 2 * 2 * 5 * 2  # a completion of 12 tokens
    assert not [item for item in items(SHAPE, replace(job, quantization="int8"), DEVICE) if "copy" in item.name]


def test_an_adapter_above_a_base_that_is_loaded_in_4_bits():
    found = {item.name: item.bytes for item in states(SHAPE, replace(JOB, loaded="4bit"))}
    assert found["weights"] == 707_688
    assert (found["adapter"], found["gradients"], found["optimizer (AdamW)"]) == (4000, 4000, 8000)  # float32
    assert found["a layer's weights, dequantised"] == 10 * 30 * 2
    of_8 = {item.name: item.bytes for item in states(SHAPE, replace(JOB, loaded="8bit"))}
    assert (of_8["adapter"], of_8["gradients"], of_8["optimizer (AdamW)"]) == (2000, 2000, 4000)  # TRL: bfloat16


def test_a_worker_holds_the_base_in_4_bits_too():
    job = replace(JOB, loaded="4bit, nested", workers=1, piece=2)
    found = {item.name: item.bytes for item in worker_items(SHAPE, job, DEVICE)}
    assert found["weights"] == 463_766 + 202_000
    assert (found["a layer's weights, dequantised"], found["adapter"]) == (10 * 30 * 2, 4000)


def test_of_a_base_in_4_bits_the_head_alone_is_laid_out_again():
    cpu = {item.name: item.bytes for item in items(SHAPE, replace(JOB, weight_bytes=4, loaded="4bit"), DEVICES["cpu"])}
    assert cpu["weights in oneDNN's layout"] == 4 * 100 * 10


@pytest.mark.qlora
@pytest.mark.parametrize(
    ("loaded", "fields"),
    [
        ("8bit", {"load_in_8bit": True}),
        ("4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("4bit, nested", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
    ],
)
def test_bitsandbytes_holds_what_is_planned(loaded, fields, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=512, intermediate_size=1024, num_attention_heads=8, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    model = load_model(tmp_path, dtype=torch.bfloat16, quantization_config=fields)
    held = 0
    for parameter in model.parameters():
        held += parameter.nbytes
        if state := getattr(parameter, "quant_state", None):
            held += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        elif (scale := getattr(parameter, "SCB", None)) is not None:
            held += scale.nbytes
    assert held == pytest.approx(base_bytes(shape_of(model.config, PEFT), 2, loaded), rel=0.001)


def test_the_sizes_of_other_peoples_buffers_are_theirs():
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    assert (config.reduce_bucket_size, config.max_live_parameters) == (memory.REDUCE_BUCKET, memory.LIVE_PARAMETERS)
    assert memory.LOGIT_TILE == (TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def test_parameters_are_counted_without_weights():
    """Qwen2 of 2 layers, by hand."""
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    shape = shape_of(config, PEFT)
    layer = 8 * 8 + 8 + 2 * (8 * 4 + 4) + 8 * 8 + 3 * 8 * 12 + 2 * 8  # q, k and v with biases, o, MLP, norms
    assert shape.parameters == 100 * 8 + 2 * layer + 8
    assert shape.linear == 2 * (2 * 64 + 2 * 32 + 3 * 96) + 800  # with the head, which is tied
    assert shape.adapter == 2 * 4 * (2 * 16 + 2 * 12 + 3 * 20)
    assert shape.adapted["k_proj"] == (8, 4)
    critic = shape_of(config, PEFT, CriticConfig(r=3)).adapter - shape.adapter
    assert critic == 2 * 3 * (2 * 16 + 2 * 12 + 3 * 20) + 8 + 1  # A and B of each layer, the head and its bias


# Against autograd

ROWS, PROMPT, COMPLETION = 4, 24, 40


def saved_bytes(family, layers, dtype, dropout=0.0, **changes):
    """Bytes of the tensors that a packed forward keeps for its backward, parameters left out."""
    model = tiny_model(family, layers=layers, hidden_size=64, num_attention_heads=4, intermediate_size=96, **changes)
    config = ADAPTERS["lora"].build(replace(PEFT, lora_dropout=dropout))
    model: Any = get_peft_model(model.to(dtype), config)
    assert enable_packing(model) is None
    prompt, drawn = torch.randint(5, 20, (PROMPT,)).tolist(), torch.randint(5, 20, (ROWS, COMPLETION)).tolist()
    rows = [
        Trajectory(row={}, position=0, sample=i, prompt_ids=tuple(prompt), token_ids=ids) for i, ids in enumerate(drawn)
    ]
    packed = pack(rows, COMPLETION, "cpu")
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > 4 * 64:  # not a cast copy of an adapter's weight
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    arguments = forward_arguments(packed)
    arguments = {name: arguments[name] for name in ("input_ids", "position_ids", "attention_mask", "layout")}
    half = dtype == torch.bfloat16
    autocast = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_base_model().base_model(**arguments, use_cache=False)
    return sum(kept.values()), model


def test_row_by_row_each_row_keeps_its_prompts_keys(monkeypatch):
    """As on accelerators without a kernel for rows of different lengths; here by sdpa on a CPU."""

    def by_row(packing, query, key, value, dropout, scaling):
        packing.uses += 1
        return packing._by_row(query, key, value, dropout, scaling)

    monkeypatch.setattr(Packing, "attend", by_row)
    three, model = saved_bytes("qwen2", 3, torch.float32)
    two, _ = saved_bytes("qwen2", 2, torch.float32)
    job = replace(JOB, prompt=PROMPT, completion=COMPLETION, weight_bytes=4, compute_bytes=4)
    shape = shape_of(model.get_base_model().config, PEFT)
    assert activations(shape, job, DEVICE, micro_batch(job)) == pytest.approx(three - two, rel=0.15)


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("qwen2", torch.float32, {}),
        ("llama", torch.float32, {}),
        ("qwen3", torch.float32, {"head_dim": 16}),
        ("qwen2", torch.bfloat16, {}),
        ("qwen2", torch.float32, {"dropout": 0.1}),
        ("qwen2", torch.bfloat16, {"dropout": 0.1}),
    ],
)
def test_a_layer_keeps_what_the_formula_says(family, dtype, changes):
    """The difference between three layers and two, within 15 %: masks and the roots of norms are small."""
    three, model = saved_bytes(family, 3, dtype, **changes)
    two, _ = saved_bytes(family, 2, dtype, **changes)
    size = 4 if dtype == torch.float32 else 2
    dropout = bool(changes.get("dropout"))
    job = replace(JOB, prompt=PROMPT, completion=COMPLETION, weight_bytes=size, compute_bytes=size, dropout=dropout)
    shape = shape_of(model.get_base_model().config, PEFT)
    planned = activations(shape, job, DEVICES["cpu"], micro_batch(job))
    assert planned == pytest.approx(three - two, rel=0.15)
