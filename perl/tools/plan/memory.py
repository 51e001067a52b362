"""What a run of GRPO, or a fine-tuning, holds in memory, counted from the model's shape and the batch: arithmetic
alone, all in bytes.

    items(shape, job, device) -> the table     each item belongs to a phase (both, rollout, update, host)
    peak(items, phase)        -> its peak      what stays, and the largest of the moments, which never meet

Lengths are the longest that the configuration allows: every prompt and every completion is as long as it may be, and
no row is left out for having no advantage. So these are upper bounds of a real run, and equal to one of full length.

T tokens of a micro-batch, N of which are of completions; h hidden size, q = heads x head size, k = key heads x head
size, i intermediate size, V vocabulary, r the adapter's rank, c bytes of a number that is computed with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from perl.device import Kind
from perl.engines import graphs
from perl.engines.cache import BLOCK_SIZE, BlockCache
from perl.engines.decoder import CACHE_SHARE, KEPT_SHARE, MAX_NUM_SEQS, PREFILL_TOKENS
from perl.engines.linear import SHARE_OF_FREE_MEMORY
from perl.training.packing import prompt_work, row_work

GB = 2**30
"""As nvidia-smi and npu-smi mean it."""
VOCABULARY_CHUNK = 32_768
"""Columns of a tile of logits in TRL's fused head (its utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE)."""
REDUCE_BUCKET = 500_000_000
"""Numbers in DeepSpeed's buffer of gradients (reduce_bucket_size): scripts/accelerate leaves its default."""
LIVE_PARAMETERS = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered at most (stage3_max_live_parameters), its default too."""

Phase = Literal["both", "rollout", "update", "host"]
Parallel = Literal["single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"]
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder of Llama's family (RMSNorm, rotary positions, grouped heads, gated MLP) with LoRA, or with all weights
    trained."""

    parameters: int
    """Of the base; tied weights count once."""
    linear: int
    """Weights of the base's linear layers, the output head with them even where it is tied."""
    adapter: int
    """Trained parameters, those of a critic too."""
    largest_adapted: int
    """Weights of the largest layer that has an adapter."""
    adapted_weights: int
    """Weights of all layers that have one."""
    adapted: dict[str, tuple[int, int]]
    """In one layer, the linears that are trained, by their adapter or themselves: name -> (in, out)."""
    rank: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    head_norms: bool = False
    """Queries and keys are normalised (Qwen3)."""

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.key_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What it holds, and which way perl computes on it."""

    name: str
    kind: Kind
    memory: int
    runtime: int
    """Taken before a tensor is made: context, kernels, buffers of collectives. Assumed, not measured here."""
    fused_tiles: bool = False
    """TRL folds a tile of logits in one Triton kernel, elsewhere by torch, which takes several copies of it."""
    attention: Literal["kernel", "rows", "cpu"] = "rows"
    """Of a packed micro-batch: by a kernel for rows of different lengths, row by row, or perl's for CPUs."""
    cpu: bool = False
    """Weights are laid out again for oneDNN while completions are sampled; the cache goes with the rollout."""
    captures: bool = False
    """Decode steps are captured graphs unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, as far as its memory goes; of one process."""

    prompt: int
    completion: int
    """Longest, in tokens."""
    group: int
    """Completions of a prompt."""
    micro_batch: int
    """per_device_train_batch_size."""
    accumulation: int
    steps_per_generation: int
    processes: int
    parallel: Parallel
    weight_bytes: int
    """Of a number of the base."""
    compute_bytes: int
    checkpointing: bool
    max_tokens: int | None = None
    """max_tokens_per_microbatch."""
    max_batch_tokens: int | None = None
    """rollout.max_batch_tokens."""
    engine: Literal["fast", "generate", "vllm"] | None = "fast"
    """None: a fine-tuning, which samples nothing; `completion` is its longest row then, and `prompt` 0."""
    block_size: int = BLOCK_SIZE
    capture: bool = False
    merge: bool = True
    dropout: bool = False
    truncates: bool = False
    """top_p below 1: the vocabulary is sorted."""
    packed: bool = True
    """Micro-batches are packed, not padded (perl.training.packing)."""
    regrouped: bool = True
    """The rows of a prompt are put together (perl.training.microbatches)."""
    vllm_share: float = 0.0
    """gpu_memory_utilization of a vLLM in the trainer's process; 0 with a server."""
    vllm_sleeps: bool = False
    vllm_devices: int = 1
    """vllm_tensor_parallel_size."""
    critic: bool = False
    """The packed rows are computed twice, by the policy and by a critic on its base (perl.training.critic)."""
    full: bool = False
    """All weights are trained (peft.type none)."""
    reference: bool = False
    """A reference model is held besides (beta > 0, without an adapter that could be switched off)."""

    @property
    def phases(self) -> tuple[Literal["rollout", "update"], ...]:
        """On the device."""
        return ("update",) if self.engine is None else ("rollout", "update")

    @property
    def rows(self) -> int:
        """Completions that a process samples at once."""
        return self.micro_batch * self.steps_per_generation

    @property
    def update_rows(self) -> int:
        """Completions of a process in an optimizer update."""
        return self.micro_batch * self.accumulation

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def adapter_bytes(self) -> int:
        """Of a number of the adapter: float32, but DeepSpeed casts all to the compute dtype."""
        return self.compute_bytes if self.parallel.startswith("zero") else 4

    @property
    def adapter_computes(self) -> int:
        """Of a number that a layer's adapter is given without a cast; FSDP2 casts weights, not inputs."""
        return self.compute_bytes if self.full or self.parallel == "fsdp2" else self.adapter_bytes

    @property
    def held_bytes(self) -> int:
        """Of a number of the weights as they are held: where all are trained DeepSpeed casts them to the compute dtype,
        and FSDP2 under mixed precision to float32."""
        if not self.full or self.parallel in ("single", "ddp"):
            return self.weight_bytes
        return 4 if self.parallel == "fsdp2" and self.compute_bytes < 4 else self.compute_bytes

    @property
    def sampled_bytes(self) -> int:
        """Of a number of the weights, and of keys and values, while completions are drawn."""
        return self.compute_bytes if self.full else self.weight_bytes

    @property
    def casts(self) -> bool:
        """Whether autocast computes with copies of float32 weights."""
        return self.full and self.parallel in ("single", "ddp") and self.compute_bytes < self.weight_bytes


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the table."""

    name: str
    bytes: int
    phase: Phase
    moment: bool = False
    """It is there for a moment; of a phase's moments only the largest counts."""


def items(shape: Shape, job: Job, device: Device, capacity: int | None = None) -> list[Item]:
    """All that a process holds on a device of `capacity` bytes (None: its own memory)."""
    capacity = capacity or device.memory
    stays = [Item("runtime (context, collectives)", device.runtime, "both"), *states(shape, job)]
    before = sum(item.bytes for item in stays if item.phase == "both")
    rollout = list(_rollout(shape, job, device, capacity, before))
    table = [*stays, *rollout, *update(shape, job, device)]
    return [item for item in [*table, *_kept_cache(job, device, table, capacity)] if item.bytes]


def _kept_cache(job: Job, device: Device, table: Sequence[Item], capacity: int) -> Iterator[Item]:
    """perl's cache stays for the next rollout where enough is free after one (Decoder.release_if_short)."""
    left = capacity - sum(item.bytes for item in table if item.phase in ("both", "rollout") and not item.moment)
    if job.engine == "fast" and not device.cpu and left >= KEPT_SHARE * capacity:
        yield from (Item(f"{KV_CACHE}, kept", item.bytes, "update") for item in table if item.name == KV_CACHE)


def peak(table: Sequence[Item], phase: Literal["rollout", "update"]) -> int:
    """The most that is held at once in a phase."""
    here = [item for item in table if item.phase in ("both", phase)]
    return sum(item.bytes for item in here if not item.moment) + max(
        (item.bytes for item in here if item.moment), default=0
    )


# What stays: weights and optimizer


def states(shape: Shape, job: Job) -> Iterator[Item]:
    """Weights, adapter, its gradients and its optimizer.

    ZeRO (arXiv 1910.02054, section 3 and figure 1), with the base frozen so that only the adapter of P parameters has
    gradients and AdamW's 8 P bytes (exp_avg, exp_avg_sq in float32):

        DDP      4 P + 4 P + 8 P           float32, and 4 P for the buckets that are reduced
        ZeRO-0   c P + c P + 4 P + 8 P     adapter, gradients, float32 master, AdamW
        ZeRO-1   c P + c P + (4 P + 8 P) / n
        ZeRO-2   c P + (c P + 4 P + 8 P) / n
        ZeRO-3   (W + c P + c P + 4 P + 8 P) / n with the base's W bytes
        FSDP2    (W + 4 P + 4 P + 8 P) / n

    The rollout holds no gradients. ZeRO-3 gathers all weights for it, FSDP2 and the update a part (`gathered`).
    """
    zero, n = job.parallel.startswith("zero"), job.processes
    stage = int(job.parallel[-1]) if zero else 0

    def share(split: bool) -> int:
        return n if split else 1

    all_split = job.parallel in ("zero3", "fsdp2")
    if job.full:
        yield from _full_states(shape, job, share(all_split), share(all_split or stage >= 2), share(stage >= 1))
        yield from _buffers(shape, job, stage)
        return
    base, adapter = shape.parameters * job.weight_bytes, shape.adapter * job.adapter_bytes
    yield Item("weights", base // share(all_split), "both")
    yield Item("adapter", adapter // share(all_split), "both")
    yield Item("gradients", adapter // share(all_split or stage >= 2), "update")
    if zero:
        yield Item("float32 copy of the adapter", 4 * shape.adapter // share(stage >= 1), "both")
    yield Item("optimizer (AdamW)", 8 * shape.adapter // share(all_split or stage >= 1), "both")
    yield from _buffers(shape, job, stage)


def _full_states(shape: Shape, job: Job, of_weights: int, of_gradients: int, of_master: int) -> Iterator[Item]:
    """All P weights are trained, each kept by one of so many processes; w bytes of a weight, float32 unless model.dtype
    says otherwise:

        single, DDP  w P + w P + 2 w P     and c P of copies that rollouts compute with, c P that autocast makes
        ZeRO, FSDP2  as with an adapter of P parameters, and no base

    The reference of beta > 0 is the same weights once more; DeepSpeed's is whole on each device below stage 3."""
    zero, parameters = job.parallel.startswith("zero"), shape.parameters
    weights = parameters * job.held_bytes
    yield Item("weights", weights // of_weights, "both")
    yield Item("gradients", weights // of_gradients, "update")
    if zero:
        yield Item("float32 copy of the weights", 4 * parameters // max(of_master, of_weights), "both")
    states = 8 if zero else 2 * job.held_bytes
    yield Item("optimizer (AdamW)", states * parameters // max(of_master, of_weights), "both")
    if job.reference:
        yield Item("reference model", weights // of_weights, "both")
    if job.casts:
        if job.engine != "vllm":
            yield Item("copies of the weights for rollouts", parameters * job.compute_bytes, "both")
        yield Item("weights, cast by autocast", parameters * job.compute_bytes, "update")


def _buffers(shape: Shape, job: Job, stage: int) -> Iterator[Item]:
    """Buffers of the ways to share work: DDP's buckets hold a copy of all gradients; DeepSpeed takes a bucket of
    REDUCE_BUCKET numbers at the first backward of an update (float32 for stage 1), stage 3 for good."""
    if job.parallel == "ddp":
        yield Item("DDP's buckets", (job.held_bytes if job.full else 4) * shape.adapter, "both")
    if stage:
        size = REDUCE_BUCKET * (4 if stage == 1 else job.compute_bytes)
        yield Item("DeepSpeed's bucket", size, "both" if stage == 3 else "update")
    base = shape.parameters * job.held_bytes
    if job.parallel == "zero3":
        if "rollout" in job.phases:
            yield Item("weights, gathered", base - base // job.processes, "rollout")
        yield Item("weights, gathered", min(base, LIVE_PARAMETERS * job.held_bytes), "update")
    if job.parallel == "fsdp2":  # a layer and the next one
        ends = 2 * shape.vocabulary * shape.hidden
        layer = (shape.parameters - min(ends, shape.parameters)) // shape.layers
        yield Item("weights, gathered", max(2 * layer, ends) * job.sampled_bytes, "both")


# The rollout

KV_CACHE = "KV cache"


def _rollout(shape: Shape, job: Job, device: Device, capacity: int, stays: int) -> Iterator[Item]:
    """Items of the rollout, by the engine that samples."""
    if job.engine is None:
        return
    if job.engine == "vllm":
        if job.vllm_share:  # its own weights and cache, of all there is (vLLM: gpu_memory_utilization)
            yield Item("vLLM's share", int(job.vllm_share * capacity), "rollout" if job.vllm_sleeps else "both")
        return
    yield from merge_copies(shape, job, device, capacity - stays)
    rows = min(job.rows, MAX_NUM_SEQS["cpu" if device.cpu else "accelerator"])
    if job.engine != "fast":
        rows = job.rows
    prompts = prefill(shape, job, rows)
    cache = kv_cache(shape, job, device, rows, capacity - stays - prompts.bytes)
    yield Item(KV_CACHE, cache, "rollout")
    yield prompts
    yield decoding(shape, job, device, rows, min(rows * job.length, cache // a_token(shape, job)))
    if job.capture and job.engine == "fast":
        yield Item("graphs", captured_graphs(shape, job, rows), "both")


def merge_copies(shape: Shape, job: Job, device: Device, free: int) -> Iterator[Item]:
    """What merging the adapter costs (perl.adapters.rollout_merge): a layer's weights in float32, B A and its scaled
    product for a moment; the clean weights of the adapted layers in the host's memory, or, on a CPU in float32, all
    linear layers once more in oneDNN's layout, merged or not, as far as that is a small part of the `free` memory."""
    packed = device.cpu and job.sampled_bytes == 4 and 4 * shape.linear <= SHARE_OF_FREE_MEMORY * free
    if packed:
        yield Item("weights in oneDNN's layout", 4 * shape.linear, "rollout")
    if job.full:
        return
    if not job.merge:
        yield Item("adapter, put together for decoding", 2 * job.adapter_bytes * shape.adapter, "rollout")
        return
    yield Item("merge of one layer", 3 * 4 * shape.largest_adapted, "rollout", moment=True)
    if not packed:
        clean = shape.adapted_weights * job.weight_bytes
        yield Item("clean weights", clean, "rollout" if device.cpu else "host")


def a_token(shape: Shape, job: Job) -> int:
    """Bytes of keys and values of one token: 2 x layers x key heads x head size x bytes of a number of the sampling
    model's."""
    return 2 * shape.layers * shape.key * job.sampled_bytes


def kv_cache(shape: Shape, job: Job, device: Device, rows: int, free: int) -> int:
    """Keys and values of `rows` sequences: the blocks that perl's cache allocates, bounded by max_batch_tokens or by
    the decoder's share of the `free` memory; on a CPU the places that are written to, its pages being taken then;
    transformers' own caches hold what the sequences are."""
    if device.cpu or job.engine != "fast":
        tokens = rows * job.length
        return (tokens if job.max_batch_tokens is None else min(tokens, job.max_batch_tokens)) * a_token(shape, job)
    bound = job.max_batch_tokens or max(0, int(free * CACHE_SHARE)) // a_token(shape, job)
    meta = torch.empty(shape.key_heads, 1, shape.head_dim, device="meta", dtype=_dtype(job.sampled_bytes))
    longest = -(-job.length // BLOCK_SIZE) * BLOCK_SIZE
    return BlockCache([(meta, meta)] * shape.layers, rows, longest, bound, job.block_size).bytes


def _dtype(size: int) -> torch.dtype:
    return torch.float32 if size == 4 else torch.bfloat16


def prefill(shape: Shape, job: Job, rows: int) -> Item:
    """The prompts of `rows` sequences at once, up to PREFILL_TOKENS: their keys and values before they are in the
    cache, one layer's activations without gradients (three of the MLP's, the residual, the norm's float32 copy), and
    the last token's logits."""
    prompts = max(1, min(-(-rows // job.group), PREFILL_TOKENS // job.prompt))
    tokens, c = prompts * job.prompt, job.sampled_bytes
    layer = tokens * (3 * shape.intermediate * c + 2 * shape.hidden * c + 4 * shape.hidden)
    return Item("prefill", tokens * a_token(shape, job) + layer + 4 * prompts * shape.vocabulary, "rollout", True)


def decoding(shape: Shape, job: Job, device: Device, rows: int, cached: int) -> Item:
    """A decode step: float32 logits [rows, V], divided by the temperature, their softmax and its cumulative sum
    (perl.engines.sampling); sorted with places (12 bytes) and three more where top_p truncates; and, without a kernel
    that reads blocks, one layer's keys and values of the `cached` tokens, read out of them."""
    copies = 4 * 4 + (12 + 3 * 4 if job.truncates else 0)
    read = 0 if device.cpu else 2 * cached * shape.key * job.sampled_bytes
    return Item("decode step (logits)", rows * shape.vocabulary * copies + read, "rollout", True)


def captured_graphs(shape: Shape, job: Job, rows: int) -> int:
    """Each captured shape keeps its float32 logits [rows, V]; beyond these all share one pool (perl.engines.graphs)."""
    longest = -(-job.length // BLOCK_SIZE) * BLOCK_SIZE
    widths = range(min(job.prompt, longest), longest + 1)
    shapes = {graphs.rounded(1, width, rows, longest)[1] for width in widths}
    kept = {graphs.rounded(count, 1, rows, longest)[0] for count in range(1, rows + 1)}
    return 4 * shape.vocabulary * (len(shapes) * sum(kept) + 4 * rows)


# The update


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch as it is computed."""

    tokens: int
    """That go through the layers."""
    scored: int
    """Hidden states that the output head gets."""
    keys: int
    """Sum over its sequences of the keys that each attends to."""


def micro_batch(job: Job) -> Micro:
    """The largest micro-batch. Packed (perl.training.packing), p tokens of a prompt are computed once for its rows:
    T = prompts (p - 1) + rows (1 + c), N = rows c; padded, T = rows (p + c)."""
    shared, own = prompt_work(job.prompt).tokens, row_work(job.prompt, job.completion).tokens
    rows, prompts = job.micro_batch, _prompts(job)
    if job.max_tokens is not None and job.packed and job.regrouped:
        per_prompt = max(1, min(job.group, (job.max_tokens - shared) // own))
        prompts = max(1, job.max_tokens // (shared + per_prompt * own))
        rows = min(prompts * per_prompt, job.update_rows)
        prompts = -(-rows // per_prompt)
    padded = Micro(rows * job.length, rows * job.length, rows * job.length)
    tokens = prompts * shared + rows * own
    if not job.critic and (not job.packed or tokens >= padded.tokens):
        return padded
    copies = 2 if job.critic else 1
    return Micro(copies * tokens, rows * job.completion, copies * (prompts * shared + rows * job.length))


def _prompts(job: Job) -> int:
    """Prompts whose rows meet in a micro-batch at most. Rows are put together within those micro-batches that surely
    belong to one update: where these are not the whole generation batch, TRL has shuffled the rows among several."""
    rows = job.micro_batch
    window = math.gcd(job.steps_per_generation, job.accumulation)
    if window < job.steps_per_generation or not job.regrouped:
        return min(rows, -(-job.rows // job.group))
    if rows % job.group == 0 or job.group % rows == 0:
        return -(-rows // job.group)
    return min(rows, (rows - 2) // job.group + 2)


def update(shape: Shape, job: Job, device: Device) -> list[Item]:
    """Activations and logits of the largest micro-batch.

    Selective counting as in "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198,
    section 4.1: 34 s b h + 5 a s^2 b for GPT with two-byte numbers); its full recomputation keeps each layer's input
    (2 s b h) and one layer's activations.
    """
    micro, c = micro_batch(job), job.compute_bytes
    layer = saved_by_layer(shape, job, device, micro)
    end = micro.tokens * shape.hidden * 4 + micro.scored * shape.hidden * c
    inputs = micro.tokens * shape.hidden * c
    activations = [Item("activations", shape.layers * layer + end, "update")]
    if job.checkpointing:
        activations = [
            Item("inputs of the layers", shape.layers * inputs + end, "update"),
            Item("backward of a layer", layer + layer_backward(shape, job, micro), "update", moment=True),
        ]
    else:
        activations.append(Item("backward of a layer", layer_backward(shape, job, micro), "update", moment=True))
    return [*activations, Item("logits and their backward", logits(shape, job, device, micro), "update", moment=True)]


def saved_by_layer(shape: Shape, job: Job, device: Device, micro: Micro) -> int:
    """What autograd keeps of one layer with LoRA and frozen weights, which need no input of theirs; trained themselves
    they need what A of an adapter on each would.

    Of each token: both norms' inputs in float32 (8 h, and 8 of the roots); the inputs of the adapters' A, shared where
    the adapter computes in the dtype of the layer, else a cast copy for each; A's outputs (r c each); the MLP's gate,
    its activation and up (3 i c). Attention: queries and its output (2 q c), the log-sum-exp (4 heads), and keys and
    values, of T tokens on a CPU, of all keys of all rows with a kernel (k), or repeated for each query head (q) row by
    row, where each row's output is kept too.
    """
    c, names = job.compute_bytes, shape.adapted
    token = 8 * shape.hidden + 8
    token += _adapter_inputs(shape, job, device)
    token += len(names) * shape.rank * c
    token += 3 * shape.intermediate * c
    token += 2 * shape.query * c + 4 * shape.heads
    if shape.head_norms:
        token += 4 * (shape.query + shape.key + shape.heads + shape.key_heads)
    if device.attention == "cpu":
        keys = 2 * micro.tokens * shape.key * c
    elif device.attention == "kernel":
        keys = 2 * micro.keys * shape.key * c
    else:
        keys = 2 * micro.keys * shape.query * c + micro.tokens * shape.query * c
    return micro.tokens * token + keys


def _adapter_inputs(shape: Shape, job: Job, device: Device) -> int:
    """Bytes of a token's inputs to A in one layer, beyond what attention keeps anyway."""
    c, names = job.compute_bytes, shape.adapted
    if job.dropout:  # a copy for each, and a mask, which on a CPU holds numbers
        mask = job.adapter_computes if device.cpu else 1
        return sum(width * (c + mask) for width, _ in names.values())
    if job.adapter_computes != c:
        return sum(width * c for width, _ in names.values())
    shared = sum(shape.hidden for group in (ATTENTION_INPUTS, MLP_INPUTS) if any(name in names for name in group))
    return c * (shared + (shape.intermediate if "down_proj" in names else 0))


def layer_backward(shape: Shape, job: Job, micro: Micro) -> int:
    """Gradients in the backward of a layer at their most, which is in its MLP: those of the product from the base and
    from the adapter (i each, and a cast one where the adapter computes in float32), of the residual and of the
    layer's output."""
    c = job.compute_bytes
    cast = 4 * shape.intermediate if job.adapter_computes != c else 0
    return micro.tokens * (2 * shape.intermediate * c + 2 * shape.hidden * c + cast)


def logits(shape: Shape, job: Job, device: Device, micro: Micro) -> int:
    """The backward of TRL's fused head: no [N, V], but a tile of TOKEN_CHUNK_SIZE x VOCABULARY_CHUNK at a time, which
    torch turns into gradients by way of seven float32 copies and a mask (chunked_logprob.py, _backward_tile), Triton
    in place; and the gradient of the hidden states, summed in float32 and cast."""
    tile = min(micro.scored, TOKEN_CHUNK_SIZE) * min(shape.vocabulary, VOCABULARY_CHUNK)
    copies = 0 if device.fused_tiles else 7 * 4 + 1
    return tile * (job.compute_bytes + copies) + micro.scored * shape.hidden * 4


def with_batch(job: Job, rows: int) -> Job:
    """The same completions per rollout and per update with `rows` in a forward, which divides both."""
    return dataclasses.replace(
        job,
        micro_batch=rows,
        accumulation=job.update_rows // rows,
        steps_per_generation=job.rows // rows,
    )
