"""An engine on a transformers model in this process's memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from perl import device
from perl.base.errors import UserError
from perl.device.sharding import any_rank, is_sharded
from perl.engines.base import Feed
from perl.engines.decoder import Decoder
from perl.engines.sampling import validate
from perl.engines.scheduler import Sequence
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
        stretches, first = _stretches(feed), 0
        with self.applied():
            sharded = is_sharded(self.model)
            while True:
                stretch = next(stretches, None)
                if not (any_rank(stretch is not None, self.model.device) if sharded else stretch):
                    break
                sampling, prompts = stretch or (Sampling(), ())
                completed = 0
                for sequence in self._complete(self._sequences(prompts, first), sampling):
                    yield first + sequence.index, sequence.completion()
                    completed += 1
                first += completed
        self.decoder.release_if_short()

    def _complete(self, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
        return self.decoder.run(source, sampling)

    def _sequences(self, prompts: Feed, first: int) -> Iterator[Sequence | None]:
        """
        Args:
            first: position of the first of `prompts` in the feed.
        """
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            validate(prompt.sampling)
            if prompt.adapter is not None:
                raise UserError(f"{prompt.adapter}: transformers serves no adapter alongside a model; merge it")
            max_new_tokens = prompt.room(self.context)
            images = make_images(self.processing, prompt.images)
            follows = None if prompt.follows is None else prompt.follows - first
            yield Sequence(
                prompt.token_ids, prompt.seed, max_new_tokens, images=images, follows=follows, followed=prompt.followed
            )

    def close(self) -> None:
        self.decoder.release()
        device.empty_cache()


def _stretches(feed: Feed) -> Iterator[tuple[Sampling, Feed]]:
    """`feed` cut where the distribution that is sampled from changes."""
    current: Sampling | None = None

    def distribution(prompt: Prompt | None) -> Sampling | None:
        nonlocal current
        current = current if prompt is None else prompt.sampling.distribution
        return current

    for sampling, prompts in itertools.groupby(feed, distribution):
        if sampling is not None:
            yield sampling, prompts
