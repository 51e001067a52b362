"""An engine on a transformers model in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from perl import device
from perl.base.errors import UserError
from perl.device.sharding import any_rank, is_sharded
from perl.engines.base import Feed, room_of
from perl.engines.decoder import Decoder
from perl.engines.sampling import validate
from perl.engines.sequence import Sequence
from perl.models.pixels import make_images
from perl.records import Completion, Prompt, Sampling


class TorchEngine:
    """Completes prompts with `model` by the decode loop. See `perl.engines.Engine` for what it promises.

    Args:
        model: in evaluation mode inside `applied`, as perl.engines.decoder.Decoder takes it.
        processing: the tokenizer, or the processor, which makes pixels of the prompts' images.
        context: most tokens of prompt and completion together; None: no limit.
        applied: the context in which the model holds the weights that draw; entered for each stream.
        settings: Decoder's.
    """

    def __init__(
        self,
        model: Any,
        processing: Any,
        *,
        eos_token_ids: Collection[int],
        context: int | None,
        applied: Callable[[], AbstractContextManager[Any]],
        **settings: Any,
    ):
        self.model: Any = model
        self.processing = processing
        self.applied: Any = applied
        self.eos_token_ids, self.context = frozenset(eos_token_ids), context
        self.decoder: Any = Decoder(model, eos_token_ids=self.eos_token_ids, **settings)
        self.max_num_seqs = self.decoder.max_num_seqs

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """Rows drawn from one distribution are decoded together; where another one comes, those under way end first.
        See `Engine.stream`.

        Where each forward gathers weights from other processes (perl.device.sharding.is_sharded), every process must
        iterate to the end; they need not have equally many prompts.
        """
        stretches = Stretches(feed)
        with self.applied():
            sharded = is_sharded(self.model)
            while True:
                sampling, first = stretches.begin(), stretches.taken
                if not (any_rank(sampling is not None, self.model.device) if sharded else sampling):
                    break
                sequences = () if sampling is None else self._sequences(stretches)
                sampling = sampling or Sampling()
                validate(sampling)
                for sequence in self._complete(sequences, sampling):
                    yield first + sequence.index, sequence.completion()
        self.decoder.release_if_short()

    def _complete(self, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
        return self.decoder.run(source, sampling)

    def _sequences(self, stretch: Stretches) -> Iterator[Sequence | None]:
        """The sequences of one stretch."""
        for prompt in stretch:
            if prompt is None:
                yield None
                continue
            if prompt.adapter is not None:
                raise UserError(f"{prompt.adapter}: transformers serves no adapter alongside a model; merge it")
            max_new_tokens = room_of(prompt, self.context)
            images = make_images(self.processing, prompt.images)
            yield Sequence(prompt.token_ids, prompt.seed, max_new_tokens, images=images)

    def close(self) -> None:
        self.decoder.release()
        device.empty_cache()


class Stretches:
    """A feed cut where the distribution that is sampled from changes. `begin` a stretch, then iterate over it."""

    def __init__(self, feed: Feed):
        self._source = iter(feed)
        self._next: Prompt | None = None
        """Read, and not given yet."""
        self._current: Sampling | None = None
        self.taken = 0
        """Prompts given so far."""

    def begin(self) -> Sampling | None:
        """Sampling of the next stretch, waiting for it; None at the end of the feed."""
        while self._next is None:
            try:
                self._next = next(self._source)
            except StopIteration:
                return None
        self._current = self._next.sampling
        return self._current

    def __iter__(self) -> Stretches:
        return self

    def __next__(self) -> Prompt | None:
        """A prompt of this stretch, or None when there is nothing at the moment."""
        if self._next is None:
            self._next = next(self._source)
        if self._next is None:
            return None
        assert self._current is not None
        if self._next.sampling.distribution != self._current.distribution:
            raise StopIteration
        prompt, self._next = self._next, None
        self.taken += 1
        return prompt
