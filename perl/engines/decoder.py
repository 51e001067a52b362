"""The decode loop: completes sequences with a transformers model in memory, continuously batched.

    while there are sequences that wait, run, or have a token under way:
        1. poll      read the sequences that have come
        2. prefill   let waiting ones in: each prompt is computed once for all its sequences; draw first tokens
        3. step      one token for each running sequence, on the device, its random numbers made ahead
        4. collect   read the tokens of the step before; sequences that end leave, and the last ones take their rows

Against the model's own `generate`: a prompt is prefilled once, however many completions it gets; a sequence that ends
leaves the batch at once, and a waiting one takes its place; no key or value is copied for the attention of a new token
(perl.engines.attention); each sequence draws from its own random stream (perl.engines.sampling), so that what it gets
depends neither on its neighbours nor on the memory that there is. When that runs short the newest sequences are parked:
they wait and are computed again from their tokens. What was computed of a conversation's turn is kept for the next one,
while memory lasts, so that this prefills its new tokens alone.

An accelerator is never waited for: while it computes a step the host reads the tokens of the one before, so that a
sequence that ended is computed once more for nothing. On a CPU tokens are read at once.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from perl import device
from perl.base.errors import say_once
from perl.engines.linear import SHARE_OF_MEMORY
from perl.engines.runner import Rows, Runner
from perl.engines.sampling import validate
from perl.engines.scheduler import PromptGroup, Scheduler, Sequence
from perl.engines.stock import generate_stock
from perl.records import Sampling

if TYPE_CHECKING:
    from transformers import LogitsProcessor

    from perl.device import Kernel
    from perl.engines.cache import KVCache
    from perl.engines.graphs import StepGraphs

MAX_NUM_SEQS = {"accelerator": 256, "cpu": 64}
"""More sequences at once make a step slower by as much as they share it: on a CPU soon, elsewhere hardly."""
CACHE_SHARE = 0.5
"""Of the memory that is free, how much the KV cache may take where no bound is given."""
KEPT_SHARE = 0.25
"""Of an accelerator's memory, how much must be free after a rollout for the cache to stay."""

Result = tuple[device.Read, list[Sequence]]
"""float32 [2, rows], tokens and log-probabilities, on their way to the host, and the sequences that drew them."""


def unsupported_reason(model: Any) -> str | None:
    """Why a Decoder can't serve `model` (a transformers model or a PeftModel), or None where it can."""
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        return f"{peft_config.peft_type.value} puts virtual tokens before the prompt"
    inner = model.get_base_model() if peft_config is not None else model
    config = inner.config
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if text_config is not config or inner.main_input_name != "input_ids":
        return "it takes more than text"
    if getattr(inner, "_is_stateful", False):
        return "its cache is recurrent"
    if inner._auto_class is not None:  # transformers 5 has is_remote_code() for this, 4.57 has not
        return "its code is not part of transformers"
    kinds = {type(layer) for layer in DynamicCache(config=text_config).layers} - {DynamicLayer}
    if kinds:
        return f"its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return "it takes no position_ids"
    if config._attn_implementation == "flex_attention":
        return "flex_attention compiles again for each shape"
    return None


class Decoder:
    """Completes sequences with `model`; its cache and captured graphs live on from one run to the next.

    Args:
        model: a transformers model or a PeftModel, not wrapped by DDP, FSDP or DeepSpeed. Its weights may change
            between runs, in place.
        eos_token_ids: tokens that end a completion.
        pad_token_id: fills masked places; which token it is changes nothing.
        max_batch_tokens: most tokens of KV cache at once; None is what memory allows. A sequence that is longer than
            this alone is decoded alone.
        fixed: of that memory what the device has decides, not what is free: sequences that are decoded together, or
            apart, have other last bits.
        max_num_seqs: most sequences in flight; None is MAX_NUM_SEQS.
        capture: run decode steps as captured graphs where the accelerator and the model allow it (perl.engines.graphs).
        kernel: one that reads the blocks of the cache itself (perl.device.kernels.PAGED), where it takes the model's
            numbers.
        block_size: tokens of a block of the cache; None is the device's (perl.engines.cache).
        stock: draw by the model's own `generate` (perl.engines.stock).
        generation_kwargs: fields of a GenerationConfig that the loop does not serve; with any of them, and for a model
            that it can't serve, the model's own `generate` draws instead, which one line says.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Collection[int],
        pad_token_id: int,
        max_batch_tokens: int | None = None,
        fixed: bool = False,
        max_num_seqs: int | None = None,
        capture: bool = False,
        kernel: Kernel | None = None,
        block_size: int | None = None,
        stock: bool = False,
        generation_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.eos_token_ids, self.pad_token_id = frozenset(eos_token_ids), pad_token_id
        self.max_batch_tokens, self.fixed = max_batch_tokens, fixed
        self.max_num_seqs = max_num_seqs or MAX_NUM_SEQS["cpu" if model.device.type == "cpu" else "accelerator"]
        self.capture, self.kernel, self.block_size, self.stock = capture, kernel, block_size, stock
        self.kernel_fits = False
        """Known once a run has tried it."""
        self.generation_kwargs = generation_kwargs or {}
        self.reserved = 0
        """Bytes that are free now but needed by others later, so that the cache must leave them."""
        self.copied = 0
        """Bytes of weights that are held besides the model's own, a quantised copy, which is as large everywhere."""
        self.processors: list[LogitsProcessor] = []
        """Further logits processors, called with left-padded ids before a token is drawn."""
        self.cache: KVCache | None = None
        self.rows: Rows | None = None
        self.graphs: StepGraphs | None = None

    def run(self, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
        """Complete the sequences of `source`, yielding each one when it is finished.

        Args:
            source: read while others are decoded; None when there is nothing at the moment (perl.engines.base.Feed).
            sampling: the distribution; n, seed and max_new_tokens are the sequences' own.

        The model must be in evaluation mode, and its weights must stay as they are until the iterator is at its end.
        """
        validate(sampling)
        if not self.stock:
            reason = unsupported_reason(self.model)
            if reason is None and self.generation_kwargs:
                reason = f"generation_kwargs has {', '.join(sorted(self.generation_kwargs))}"
            if reason is None:
                return _Loop(self, source, sampling).finished()
            say_once(f"decoding with the model's own generate, as the decode loop can't serve it: {reason}")
        return generate_stock(self, source, sampling)

    def room(self) -> int:
        """Bytes that a new cache may have."""
        if not self.fixed:
            return int(max(0, device.available_memory() - self.reserved) * CACHE_SHARE)
        if self.model.device.type == "cpu":
            return int(device.total_memory() * SHARE_OF_MEMORY)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return int(max(0, device.total_memory() - weights - self.copied) * CACHE_SHARE)

    def release(self) -> None:
        """Give the cache's memory back, and the graphs that read it."""
        self.cache = self.rows = self.graphs = None

    def release_if_short(self) -> None:
        """Release the cache where an accelerator has little memory left for what comes next."""
        memory, free = device.peak_memory(), device.free_memory()
        if memory is None or free is None:
            self.release()  # on a CPU: it has no graphs, and costs nothing to make
        elif free < KEPT_SHARE * memory.total:
            self.release()
            device.empty_cache()


class _Loop:
    """One run of a Decoder. `finished` is the algorithm; the rest are its parts."""

    def __init__(self, decoder: Decoder, source: Iterable[Sequence | None], sampling: Sampling):
        self.source, self.eos_token_ids = iter(source), decoder.eos_token_ids
        self.scheduler = Scheduler(decoder.max_num_seqs)
        self.running = self.scheduler.running
        self.runner = Runner(decoder, sampling, self.running)
        self.results: deque[Result] = deque()
        self.done: deque[Sequence] = deque()

    @torch.no_grad()
    def finished(self) -> Iterator[Sequence]:
        scheduler, runner = self.scheduler, self.runner
        runner.clear()
        while scheduler.poll(self.source) or self.running or self.results:
            while scheduler.waiting and self._prefill():
                yield from self._flush()
            if self.running:
                self._step()
            self._collect(runner.reads_late if self.running else 0)
            yield from self._flush()
        runner.idle()

    def _flush(self) -> Iterator[Sequence]:
        while self.done:
            yield self.done.popleft()

    def _prefill(self) -> bool:
        """Compute the next prompts, and let in as many of their sequences as there is room for; whether any came."""
        scheduler, runner = self.scheduler, self.runner
        if not scheduler.refills():
            return False
        cache = runner.decoder.cache
        groups = scheduler.next_groups(cache if cache is not None and cache.run[0] else None)
        cache = runner.prefill([group for group in groups if group.logits is None], scheduler.size())
        joining = scheduler.admit(groups, cache)
        if joining:
            self._join(joining)
        scheduler.keep_waiting(groups, cache)
        return bool(joining)

    def _join(self, joining: list[tuple[PromptGroup, Sequence]]) -> None:
        """Draw the next token of sequences that were let in, and give each that goes on a row."""
        result, first = self.runner.first_tokens(joining)
        self._launched(result, [sequence for _, sequence in joining])
        self._collect(self.runner.reads_late)
        staying = [i for i, (_, sequence) in enumerate(joining) if sequence.goes_on]
        if staying:
            self.runner.place([joining[i][0].prefix for i in staying], first, staying)  # type: ignore[misc]
            self.running += [joining[i][1] for i in staying]

    def _step(self) -> None:
        """Draw one token for each running sequence."""
        while self.running and not self.runner.cache.grow():
            self._park()
        if not self.running:
            return
        self._launched(self.runner.step(), list(self.running))
        self._leave([row for row, sequence in enumerate(self.running) if sequence.launched == sequence.max_new_tokens])

    def _launched(self, result: torch.Tensor, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.launched += 1
        self.results.append((device.start_read(result), sequences))

    def _collect(self, late: int) -> None:
        """Read all results but the last `late`; sequences that ended leave."""
        ended: set[Sequence] = set()
        while len(self.results) > late:
            read, sequences = self.results.popleft()
            tokens, logprobs = read.wait().tolist()
            for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
                if sequence.finished:
                    continue  # computed for nothing, as its end was not known yet
                sequence.token_ids.append(int(token))
                sequence.logprobs.append(logprob)
                sequence.stopped = sequence.token_ids[-1] in self.eos_token_ids
                if sequence.finished:
                    ended.add(sequence)
                    self.done.append(sequence)
        if ended:
            leaving = [row for row, sequence in enumerate(self.running) if sequence in ended]
            self.scheduler.keep(self.runner.cache, leaving)
            self._leave(leaving)

    def _leave(self, leaving: list[int]) -> None:
        """Free these rows; the last rows move into their places."""
        if leaving:
            moves = self.scheduler.leave(leaving)
            self.runner.remove(len(self.running), moves)

    def _park(self) -> None:
        """Memory is short: forget the prompts that are kept for sequences that wait, then the newest sequence, which
        waits and is computed again from its tokens."""
        if self.scheduler.forget_prompts(self.runner.cache):
            return
        self._collect(0)
        if len(self.running) < 2:
            return
        sequence = self.running[-1]
        self._leave([len(self.running) - 1])
        self.scheduler.park(sequence)
