"""What every engine is, and the dtype that it computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from perl import device
from perl.records import Completion, Prompt, Sampling, Trajectory, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")

Feed = Iterable[Prompt | None]
"""What `Engine.stream` reads: prompts as they come, each with its own sampling; None for "nothing at the moment"."""


class Engine(Protocol):
    """Completes prompts with a model. What a prompt gets depends on its tokens, its seed and `sampling`
    alone: not on its neighbours, their order, or the number of devices (up to floating-point ties)."""

    max_num_seqs: int
    """Rows worked on at once, as far as is known now; a caller keeps the engine full by having more under way."""

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """Complete prompts as `feed` brings them: (position in the feed, completion) as each finishes.

        More are taken while others are under way, so that a short row never waits for a long one. The feed gives None
        when it has nothing now though rows are under way; when all that it has given is finished it waits itself, and
        its end is the end. A position counts the Nones out. Raises a UserError for a prompt that leaves no room for a
        completion in the model's context.
        """
        ...

    def close(self) -> None:
        """Free its memory. The engine can't be used afterwards; a second call does nothing."""
        ...


class LoadedEngine(Engine, Protocol):
    """An engine on a model that it has loaded itself."""

    def replace_weights(self, model_path: str) -> str | None:
        """Put the weights of another model of the same shape, stored in `model_path`, in the place of those held: bit
        for bit what an engine holds that is built on that folder. Called while nothing is being generated.

        Returns:
            None when it is done, else why it can't be (the engine is then of no further use).
        """
        ...


class PolicyEngine(Engine, Protocol):
    """A training's engine: completes prompts with the policy that was published last. Every process calls `publish`,
    and iterates over `stream` to its end."""

    itemsize: float
    """Bytes of a number that it computes in, at most."""
    merging: bool
    """Whether the last rollout's adapter was merged by choice, the same on every process: a resumed run takes it up."""
    remote: bool
    """Copies of the policy draw, in other processes: `stream` has them begin when it is called, and what each has drawn
    is compared with the trainer's own policy."""
    piece_size: int | None
    """Sequences that are decoded together and with no others; None: any."""

    def publish(self, weights: Weights) -> None:
        """From now on `stream` draws with the policy as it is now, with this noise."""
        ...

    def converse(self, conversations: Any, rows: list[Trajectory]) -> Iterator[Trajectory]:
        """Each of the rows when its conversation has ended. Of a `remote` engine it is another object, which has taken
        the row's place in `rows`, and they begin when this is called.

        Args:
            conversations: perl.environments' Conversations.
        """
        ...

    def published(self, weights: Weights) -> contextlib.AbstractContextManager[None]:
        """Inside, the trained model has the weights that were published as `weights`, without noise. Every process must
        come here, where weights that are split are gathered."""
        ...

    def state(self, version: int, own: bool) -> dict[str, Any]:
        """What `publish_again` needs in another process for the weights of `version`: tensors and plain values.

        Args:
            own: the trained model has these weights, and that process has them by then.
        """
        ...

    def publish_again(self, weights: Weights, state: dict[str, Any]) -> bool:
        """From now on `stream` draws with the policy of that state; False where it can't. Every process must come
        here."""
        ...

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None, *, quantised: bool = False) -> Engine:
        """The same policy under the evaluator's rules, with the noise as published: prompts are completed by their
        sampling and seeds, these tokens and this context alone. Nothing of TRL's generation config or of the run's
        generation_kwargs is heeded, and what the engine keeps for rollouts stays as it is. Close it afterwards.

        Args:
            quantised: above the quantised base, where the run has one; else above the base as it is. An engine that
                holds one of the two alone must be asked for that.
        """
        ...

    def not_comparable(self, sampling: Sampling) -> str | None:
        """What its log-probabilities are, where they are not log_softmax(logits / temperature) of all tokens."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call, by the name that is logged."""
        ...


class InProcess:
    """Of a PolicyEngine that draws in the trainer's process: it has no policy but the one that was published last."""

    remote = False
    piece_size: int | None = None

    def converse(self: Any, conversations: Any, rows: list[Trajectory]) -> Iterator[Trajectory]:
        return conversations.run(rows, self)

    def published(self, weights: Weights) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def state(self, version: int, own: bool) -> dict[str, Any]:
        return {}

    def publish_again(self, weights: Weights, state: dict[str, Any]) -> bool:
        return False


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off, and put each module's training flag back afterwards. TRL samples
    in training mode, with lora_dropout at work, while the loss's ratio takes sampler and learner for one policy."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def resolve_dtype(dtype: str, config: PreTrainedConfig) -> str:
    """The name of `dtype`; "auto" is what the checkpoint is stored in, and float32 where the device computes in that.
    (vLLM's own "auto" would halve a float32 checkpoint.)"""
    if dtype != "auto":
        return dtype
    best = str(device.default_dtype()).removeprefix("torch.")
    stored = str(getattr(config, "dtype", None) or best).removeprefix("torch.")
    return best if best == "float32" else stored
