"""What a run of GRPO, or a fine-tuning, holds in memory: arithmetic alone, all in bytes.

    items(shape, job, device) -> the table     each item belongs to a phase (both, rollout, update)
    peak(items, phase)        -> its peak      what stays, and the largest of the moments, which never meet

Lengths are the longest that the configuration allows, so these are upper bounds of a real run. h is the hidden size,
q = heads x head size, k = key heads x head size, i the intermediate size, V the vocabulary, r the adapter's rank, c the
bytes of a number that is computed with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perl.device import Kind
from perl.device import products as npu
from perl.engines.cache import BLOCK_SIZE
from perl.engines.decoder import CACHE_SHARE, KEPT_SHARE, MAX_NUM_SEQS
from perl.engines.quantised import SCHEMES, quantising_bytes
from perl.engines.scheduler import PREFILL_TOKENS

GB = 2**30
"""As nvidia-smi and npu-smi mean it."""
LOGIT_TILE = (4096, 32_768)
"""Rows and columns of the logits that TRL's fused head computes at once."""
REDUCE_BUCKET = 500_000_000
"""Numbers in DeepSpeed's buffer of gradients (reduce_bucket_size): scripts/accelerate leaves its default."""
LIVE_PARAMETERS = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered at most (stage3_max_live_parameters), its default too."""
LOADED = {"8bit": (1.0, 4), "4bit": (4 / 8 + 4 / 64, 0), "4bit, nested": (4 / 8 + 1 / 64 + 4 / (64 * 256), 0)}
"""How bitsandbytes holds a base: bytes of a weight, and of an output. In 4 bits 64 weights share a float32 scale;
nested (bnb_4bit_use_double_quant, and model.quantization nf4), 256 of these, of 8 bits each, share one."""
NF4 = "4bit, nested"
"""Key of LOADED: model.quantization nf4."""
COPY = " copy for rollouts"
QUANTISED = {name: (each.bytes_a_weight, each.bytes_an_output) for name, each in SCHEMES.items()} | LOADED
"""All of them, and the sampler's (rollout.quantization)."""

Phase = Literal["both", "rollout", "update"]
Parallel = Literal["single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder of Llama's family (RMSNorm, rotary positions, grouped heads, gated MLP) with LoRA, or with all weights
    trained."""

    parameters: int
    """Of the base; tied weights count once."""
    linear: int
    """Weights of the base's linear layers, the output head with them even where it is tied."""
    outputs: int
    """Of all these layers."""
    adapter: int
    """Trained parameters, those of a critic too."""
    adapted: dict[str, tuple[int, int]]
    """In one layer, the linears that are trained, by their adapter or themselves: name -> (in, out)."""
    rank: int
    layers: int
    hidden: int
    query: int
    key: int
    intermediate: int
    vocabulary: int
    head_norms: bool = False
    """Queries and keys are normalised (Qwen3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What it holds."""

    name: str
    kind: Kind
    memory: int
    runtime: int
    """Taken before a tensor is made: context, kernels. Assumed, not measured here."""
    communicator: int = 0
    """Buffers of each group of processes, where they are not within `runtime`."""
    fused_tiles: bool = False
    """TRL computes a tile of logits in one Triton kernel, elsewhere by torch, which takes several copies of it."""
    packs: bool = False
    """`training.attention_kernels auto` takes a kernel for packed rows there, which computes in 16 bits."""
    by_row: bool = True
    """Attention of a packed micro-batch has no kernel for rows of different lengths: one row after the other."""

    @property
    def cpu(self) -> bool:
        return self.kind == "cpu"


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
    rows_stand: bool = False
    """Rows stay in the micro-batches that TRL deals them to, whatever their prompts and `max_tokens`."""
    max_batch_tokens: int | None = None
    """rollout.max_batch_tokens."""
    engine: str | None = "fast"
    """None: a fine-tuning, which samples nothing; `completion` is its longest row then, and `prompt` 0."""
    dropout: bool = False
    truncates: bool = False
    """top_p below 1: the vocabulary is sorted."""
    packed: bool = True
    """Micro-batches are packed, not padded, and the rows of a prompt are put together."""
    vllm_share: float = 0.0
    """gpu_memory_utilization."""
    vllm_sleeps: bool = False
    vllm_devices: int = 1
    """vllm_tensor_parallel_size."""
    greedy: bool = False
    """A greedy completion of each prompt is drawn too, and not trained on (ReMax)."""
    by_batch_size: bool = False
    """generation_batch_size is given: steps_per_generation follows from it."""
    critic: bool = False
    """The rows are computed twice, by the policy and by a critic on its base."""
    full: bool = False
    """All weights are trained (peft.type none)."""
    workers: int = 0
    """That sample in the processes' place."""
    piece: int = 0
    """Completions that a worker samples at once, or with `alike` a process."""
    alike: bool = False
    """Pieces are drawn alike wherever they are (perl.config.derived.draws_alike): each by itself."""
    reference: bool = False
    """A reference model is held besides (beta > 0, without an adapter that could be switched off)."""
    loaded: str | None = None
    """Key of LOADED: how the base is held that the adapter is trained above; None: in weight_bytes."""
    quantization: str = "none"
    """rollout.quantization: of the copy that engine fast makes, or that vLLM holds in the place of the base."""
    scores_quantised: bool = False
    """validation.quantized: with workers the trainer makes a copy too, at the first validation, and keeps it."""

    @property
    def phases(self) -> tuple[Literal["rollout", "update"], ...]:
        return ("update",) if self.engine is None else ("rollout", "update")

    @property
    def rows(self) -> int:
        """Completions of a rollout, on a process, that are trained on."""
        return self.micro_batch * self.steps_per_generation

    @property
    def prompts(self) -> int:
        """Of these rows at most: a group that is not whole may lie on two processes."""
        return self.rows // self.group if self.rows % self.group == 0 else (self.rows - 2) // self.group + 2

    def sampled(self, device: Device) -> int:
        """Completions that a process samples at once."""
        most = MAX_NUM_SEQS["cpu" if device.cpu else "accelerator"]
        return min(self.rows + (self.prompts if self.greedy else 0), most)

    @property
    def update_rows(self) -> int:
        """Completions of a process in an optimizer update."""
        return self.micro_batch * self.accumulation

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def trained_bytes(self) -> int:
        """Of a trained number: DeepSpeed casts all to the compute dtype, others train float32, and TRL bfloat16 above a
        base of 8 bits."""
        if self.parallel.startswith("zero"):
            return self.compute_bytes
        if self.loaded == "8bit":
            return 2
        return self.weight_bytes if self.full and self.parallel != "fsdp2" else 4

    @property
    def adapter_casts(self) -> bool:
        """Whether an adapter computes in another dtype than its layer; FSDP2 casts weights, not inputs."""
        return not self.full and self.parallel != "fsdp2" and self.trained_bytes != self.compute_bytes

    @property
    def sampled_bytes(self) -> int:
        """Of a number of the weights, and of keys and values, while completions are drawn."""
        return self.compute_bytes if self.full else self.weight_bytes

    @property
    def sampler(self) -> str | None:
        """Key of QUANTISED: how the weights are held that vLLM draws with."""
        return self.loaded if self.quantization == "none" else self.quantization


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
    table = [_runtime(device, job), *states(shape, job)]
    if job.engine == "vllm" and not job.workers:  # its own weights and cache, of all there is
        table.append(Item("vLLM's share", int(job.vllm_share * capacity), "rollout" if job.vllm_sleeps else "both"))
    elif job.engine is not None and not job.workers:
        drawn, free = job, capacity - peak(table, "rollout")
        if job.alike:
            piece = min(job.piece, job.rows + (job.prompts if job.greedy else 0))
            drawn = dataclasses.replace(job, micro_batch=piece, steps_per_generation=1, greedy=False)
            free = pieces_room(shape, job, capacity)
        elif not job.parallel.startswith("zero"):  # perl's leaves room for gradients too, which DeepSpeed has by then
            free -= sum(item.bytes for item in table if item.name == "gradients")
        table += _rollout(shape, drawn, device, free)
        left = capacity - sum(item.bytes for item in table if item.phase != "update" and not item.moment)
        if job.engine == "fast" and not device.cpu and left >= KEPT_SHARE * capacity:
            cache = next(item.bytes for item in table if item.name == "KV cache")
            table.append(Item("KV cache, kept", cache, "update"))
    elif job.scores_quantised and job.quantization != "none":
        table += quantised_copy(shape, job, device)
    return [item for item in [*table, *update(shape, job, device)] if item.bytes]


def worker_items(shape: Shape, job: Job, device: Device, capacity: int | None = None) -> list[Item]:
    """All that a worker holds on a device of `capacity` bytes (None: its own memory): of vLLM its share, of engine fast
    the policy, whole, its base as the trainer's, and a rollout of what it draws at once."""
    capacity = capacity or device.memory
    runtime = _runtime(device, dataclasses.replace(job, parallel="single"))
    if job.engine == "vllm":
        return [runtime, Item("vLLM's share", int(job.vllm_share * capacity), "both")]
    trained = 0 if job.full else 4 * shape.adapter
    table = [
        runtime,
        Item("weights", base_bytes(shape, job.weight_bytes, job.loaded), "both"),
        Item("a layer's weights, dequantised", dequantised(shape, job), "both"),
        Item("adapter", trained, "both"),
    ]
    if job.full and job.compute_bytes < job.weight_bytes:
        table.append(Item("copies of the weights for rollouts", shape.parameters * job.compute_bytes, "both"))
    greedy = job.greedy and not job.alike
    own = dataclasses.replace(
        job, micro_batch=job.piece, steps_per_generation=1, processes=1, parallel="single", greedy=greedy
    )
    free = pieces_room(shape, own, capacity) if job.alike else capacity - peak(table, "rollout")
    return [item for item in [*table, *_rollout(shape, own, device, free)] if item.bytes]


def pieces_room(shape: Shape, job: Job, capacity: int) -> int:
    """What pieces' cache has its share of, less a quantised copy: a whole device less the model's parameters, whatever
    is free (perl.engines.decoder.Decoder.room)."""
    adapter = 0 if job.full else shape.adapter * job.trained_bytes
    return capacity - base_bytes(shape, job.sampled_bytes, job.loaded) - adapter


def _runtime(device: Device, job: Job) -> Item:
    """DeepSpeed makes a group of all processes of its own beside torch's."""
    groups = {"single": 0, "ddp": 1, "fsdp2": 1}.get(job.parallel, 2)
    return Item("runtime (context, collectives)", device.runtime + groups * device.communicator, "both")


def peak(table: Sequence[Item], phase: Literal["rollout", "update"]) -> int:
    """The most that is held at once in a phase."""
    here = [item for item in table if item.phase in ("both", phase)]
    moments = (item.bytes for item in here if item.moment)
    return sum(item.bytes for item in here if not item.moment) + max(moments, default=0)


def states(shape: Shape, job: Job) -> Iterator[Item]:
    """Weights, adapter, its gradients and its optimizer.

    ZeRO (arXiv 1910.02054, section 3) with W bytes of a frozen base and P trained parameters, float32 or c bytes each:

        DDP      W + 4 P + 4 P + 8 P       and 4 P for the buckets that are reduced
        ZeRO-0   W + c P + c P + 4 P + 8 P     trained, gradients, float32 master, AdamW
        ZeRO-1   W + c P + c P + (4 P + 8 P) / n
        ZeRO-2   W + c P + (c P + 4 P + 8 P) / n
        ZeRO-3   (W + c P + c P + 4 P + 8 P) / n
        FSDP2    (W + 4 P + 4 P + 8 P) / n

    With all weights trained W is 0 and P is all of them; a reference is these weights once more, and a single process
    or DDP holds copies in the compute dtype. ZeRO-3 gathers all weights for the rollout, FSDP2 and the update a part.
    """
    zero, size = job.parallel.startswith("zero"), job.trained_bytes
    stage = int(job.parallel[-1]) if zero else 3 if job.parallel == "fsdp2" else 0
    weight_shards, gradient_shards, optimizer_shards = (job.processes if stage >= least else 1 for least in (3, 2, 1))
    trained, what = (shape.parameters, "weights") if job.full else (shape.adapter, "adapter")
    base = base_bytes(shape, size if job.full else job.weight_bytes, job.loaded)
    yield Item("weights", base // weight_shards, "both")
    yield Item("a layer's weights, dequantised", dequantised(shape, job), "both")
    if not job.full:
        yield Item("adapter", trained * size // weight_shards, "both")
    yield Item("gradients", trained * size // gradient_shards, "update")
    if zero:
        yield Item(f"float32 copy of the {what}", 4 * trained // optimizer_shards, "both")
    yield Item("optimizer (AdamW)", (8 if zero else 2 * size) * trained // optimizer_shards, "both")
    if job.reference:
        yield Item("reference model", base // weight_shards, "both")
    if job.full and job.parallel in ("single", "ddp") and job.compute_bytes < job.weight_bytes:
        copies = shape.parameters * job.compute_bytes
        yield Item("copies of the weights for rollouts", 0 if job.engine in ("vllm", None) else copies, "both")
        yield Item("weights, cast by autocast", copies, "update")
    if job.parallel == "ddp":
        yield Item("DDP's buckets", size * trained, "both")
    if zero and stage:
        yield Item("DeepSpeed's bucket", REDUCE_BUCKET * (4 if stage == 1 else job.compute_bytes), "update")
    if job.parallel == "zero3":
        yield Item("weights, gathered", base - base // job.processes, "rollout")
        yield Item("weights, gathered", min(base, LIVE_PARAMETERS * base // shape.parameters), "update")
    if job.parallel == "fsdp2":  # a layer and the next one, or the embedding and the head
        ends = 2 * shape.vocabulary * shape.hidden
        layer = max(shape.parameters - ends, 0) // shape.layers
        yield Item("weights, gathered", max(2 * layer, ends) * job.sampled_bytes, "both")


def base_bytes(shape: Shape, size: int, quantised: str | None = None) -> int:
    """Of the base, in `size` bytes a number; with a key of QUANTISED its linear layers so, but for the head. Embedding,
    norms and biases keep `size`."""
    if quantised is None:
        return shape.parameters * size
    head = shape.vocabulary * shape.hidden
    linear = shape.linear - head
    return quantised_bytes(linear, shape.outputs - shape.vocabulary, quantised) + (shape.parameters - linear) * size


def dequantised(shape: Shape, job: Job) -> int:
    """Of the largest linear layer but for the head, as it is computed with where the base is held in fewer bits."""
    return shape.hidden * shape.intermediate * job.compute_bytes if job.loaded else 0


def quantised_bytes(linear: int, outputs: int, quantised: str) -> int:
    """Of linear layers of so many weights and outputs."""
    a_weight, an_output = QUANTISED[quantised]
    return round(linear * a_weight) + outputs * an_output


# The rollout


def vllm_weights(shape: Shape, job: Job) -> int:
    """Of the base that vLLM holds, on one of its devices."""
    return base_bytes(shape, job.sampled_bytes, job.sampler) // job.vllm_devices


def vllm_least(shape: Shape, job: Job) -> int:
    """What vLLM does not start without: its weights, and keys and values of one completion."""
    return vllm_weights(shape, job) + job.length * a_token(shape, job) // job.vllm_devices


def _rollout(shape: Shape, job: Job, device: Device, free: int) -> Iterator[Item]:
    """KV cache; for a moment the prompts at once (one layer's activations without gradients and the last token's
    logits) or a decode step: float32 logits [rows, V], divided by the temperature, their softmax and its cumulative
    sum, sorted with places (12 bytes) and three more where top_p truncates. Without a kernel that reads blocks one
    layer's keys and values are read out of the cache. On a CPU float32 weights are laid out again for oneDNN. Or they
    are quantised once for the whole run, on a CPU the head too."""
    if job.quantization != "none":
        made = list(quantised_copy(shape, job, device))
        yield from made
        free -= made[0].bytes
    elif device.cpu and job.sampled_bytes == 4:  # of a base in fewer bits the head
        copy = 4 * (shape.vocabulary * shape.hidden if job.loaded else shape.linear)
        yield Item("weights in oneDNN's layout", copy, "rollout")
        free -= copy
    size = job.sampled_bytes
    prompts = max(1, min(job.prompts, PREFILL_TOKENS // job.prompt))
    layer = (3 * shape.intermediate + 2 * shape.hidden) * size + 4 * shape.hidden + a_token(shape, job)
    prefill = prompts * (job.prompt * layer + 4 * shape.vocabulary)
    cache = kv_cache(shape, job, device, free)
    yield Item("KV cache", cache, "rollout")
    yield Item("prefill", prefill, "rollout", True)
    logits = job.sampled(device) * shape.vocabulary * (4 * 4 + (12 + 3 * 4 if job.truncates else 0))
    yield Item("decode step (logits)", logits + (0 if device.cpu else cache // shape.layers), "rollout", True)


def quantised_copy(shape: Shape, job: Job, device: Device) -> Iterator[Item]:
    """What engine fast quantises for rollouts, and while it does so a layer of it."""
    head, layers = shape.vocabulary * shape.hidden, shape.outputs - shape.vocabulary
    scheme, largest = SCHEMES[job.quantization], shape.hidden * shape.intermediate
    if npu.multiply_on(device.kind):
        copy = scheme.npu_bytes(shape.linear - head, layers)
    else:
        copy, largest = scheme.copied_bytes(shape.linear - head, layers, head, shape.vocabulary), max(head, largest)
    yield Item(job.quantization + COPY, copy, "both")
    yield Item("quantising a layer", quantising_bytes(largest, scheme), "rollout", True)


def a_token(shape: Shape, job: Job) -> int:
    """Bytes of keys and values of one token: 2 x layers x k x bytes of a number of the sampling model's."""
    return 2 * shape.layers * shape.key * job.sampled_bytes


def kv_cache(shape: Shape, job: Job, device: Device, free: int) -> int:
    """Keys and values of a rollout's rows, in blocks on accelerators, bounded by max_batch_tokens or by a share of the
    `free` memory."""
    block = 1 if device.cpu or job.engine != "fast" else BLOCK_SIZE
    bound = job.max_batch_tokens
    if bound is None and block > 1:
        bound = max(0, int(free * CACHE_SHARE)) // a_token(shape, job)
    tokens = job.sampled(device) * -(-job.length // block) * block
    return (tokens if bound is None else min(tokens, bound)) * a_token(shape, job)


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
    """The largest micro-batch. Padded it has rows (p + c) tokens; packed, all of a prompt but its last token are
    computed once for its rows: prompts (p - 1) + rows (1 + c), of which rows c are scored."""
    rows = job.micro_batch
    shared, unshared, group = job.prompt - 1, 1 + job.completion, job.group
    if job.max_tokens is not None and job.packed and not job.rows_stand:
        rows = min(job.update_rows, max(1, job.max_tokens * group // (shared + group * unshared)))
    prompts = -(-rows // group)
    if job.rows_stand or math.gcd(job.steps_per_generation, job.accumulation) < job.steps_per_generation:
        prompts = min(rows, job.prompts)  # all rows of a rollout are shuffled, over its updates and within them
    if not job.critic and (not job.packed or prompts == rows):
        return Micro(rows * job.length, rows * job.length, rows * job.length)
    copies = 2 if job.critic else 1
    tokens, keys = prompts * shared + rows * unshared, prompts * shared + rows * job.length
    return Micro(copies * tokens, rows * job.completion, copies * keys)


def update(shape: Shape, job: Job, device: Device) -> Iterator[Item]:
    """Activations and logits of the largest micro-batch. Full recomputation keeps each layer's input and one layer's
    activations (arXiv 2205.05198, section 4.1). The backward of a layer is at its most in its MLP. The head makes no
    [N, V], but a tile at a time, which torch turns into gradients by way of seven float32 copies and a mask, Triton in
    place; and the gradient of the hidden states, in float32."""
    micro, c = micro_batch(job), job.compute_bytes
    layer = activations(shape, job, device, micro)
    stored = shape.layers * (micro.tokens * shape.hidden * c if job.checkpointing else layer)
    end = micro.tokens * shape.hidden * 4 + micro.scored * shape.hidden * c
    cast = 4 * shape.intermediate if job.adapter_casts else 0
    backward = micro.tokens * (2 * (shape.intermediate + shape.hidden) * c + cast)
    tile = math.prod(map(min, LOGIT_TILE, (micro.scored, shape.vocabulary)))
    logits = tile * (c + (0 if device.fused_tiles else 7 * 4 + 1)) + micro.scored * shape.hidden * 4
    yield Item("inputs of the layers" if job.checkpointing else "activations", stored + end, "update")
    yield Item("backward of a layer", backward + (layer if job.checkpointing else 0), "update", moment=True)
    yield Item("logits and their backward", logits, "update", moment=True)


def activations(shape: Shape, job: Job, device: Device, micro: Micro) -> int:
    """What autograd keeps of one layer. Of each token: both norms' inputs in float32 (8 h), the adapters' inputs and
    outputs (r c each), the MLP's gate, its activation and up (3 i c), queries and attention's output (2 q c), and keys
    and values: of each row its prompt's too, and repeated for each query head, where it is computed row by row."""
    c, inputs = job.compute_bytes, [width for width, _ in shape.adapted.values()]
    if job.dropout:  # a copy for each adapter, and a mask, which on a CPU holds numbers
        adapters = sum(inputs) * (c + (job.trained_bytes if device.cpu else 1))
    elif job.adapter_casts:
        adapters = sum(inputs) * c
    else:  # shared by q, k and v, and by gate and up; o's is attention's output
        adapters = c * (2 * shape.hidden + (shape.intermediate if "down_proj" in shape.adapted else 0))
    token = 8 * shape.hidden + adapters + (len(inputs) * shape.rank + 3 * shape.intermediate + 2 * shape.query) * c
    token += 4 * (shape.query + shape.key) if shape.head_norms else 0
    keys = micro.tokens * shape.key if device.cpu else micro.keys * (shape.query if device.by_row else shape.key)
    return micro.tokens * token + 2 * keys * c


def with_batch(job: Job, rows: int) -> Job:
    """The same completions per rollout and per update with `rows` in a forward, which divides both."""
    return dataclasses.replace(
        job, micro_batch=rows, accumulation=job.update_rows // rows, steps_per_generation=job.rows // rows
    )
