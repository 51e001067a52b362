"""Completions of a training, drawn by workers while the trainer does other things.

    engine.publish(weights)            the policy as it is now
    completions = engine.stream(…)     sends it, with the prompts cut into pieces; the workers begin at once
    …                                  the trainer trains
    for place, completion in completions: …

What a token is depends on its prompt, its seed, its policy and its piece alone, so that neither the number of workers
nor their speed, nor one that dies, changes a run. (With `newest` the policy is the last one when a worker is given a
piece, and a run depends on its workers' speed.) The main process owns the workers; the others ask it. Every answer says
what policy its engine held (perl.adapters.delivery.digest), and one that was not sent ends the run.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast_object_list

from perl.adapters.delivery import base_digest, delivered, digest, from_bytes, put_into, to_bytes
from perl.base.errors import RunError, UserError
from perl.device.sharding import Gather, local, resharded
from perl.engines.base import Engine, Feed
from perl.engines.quantised import SCHEMES, Quantisation
from perl.engines.torch_policy import TorchPolicyEngine
from perl.environments.conversation import Conversations
from perl.noise.injector import NoiseInjector
from perl.records import Completion, Sampling, Trajectory, Weights
from perl.training.processes import Processes
from perl.workers.pool import WorkerError, WorkerPool
from perl.workers.rollouts import Drawn, Piece, Version

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How long the thread of the pool waits for an event; a new piece wakes it."""
WAIT_S = 5.0
"""So often the main process tells the others that a piece is still under way."""


class PoolLost(RunError):
    """No worker is left, or one has drawn with another policy than it was sent: one line."""


Payload = tuple[bytes, list[float]]
"""What a policy is made of (perl.adapters.delivery.to_bytes), and the mean squares that relative noise is scaled by."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A policy that is sent."""

    version: Version
    payload: Payload | None
    """One object for all noise on the same weights; None on a rank that reads it for nothing."""


class PoolEngine:
    """Draws by workers. See `perl.engines.PolicyEngine` for what it promises; `stream` begins when it is called.

    Args:
        local: the trained model itself, which validates.
        open_pool: called once, on the main process.
        gathered: inside it some parameters are whole that ZeRO-3 has spread.
        piece_size: sequences of a piece.
        ahead: batches that are drawn ahead; so many policies are kept besides the one that was sent last.
        newest: a piece is drawn by the policy that is the last one when a worker is given it.
        quantization: of the workers' base.
        held: digest of what an engine holds that has the policy as it is now. By default of one that loads the policy
            as the trainer does.
        incomparable: as `not_comparable`; None: the engine's log-probabilities are those of all tokens.
    """

    remote = True
    piece_size: int | None

    def __init__(
        self,
        local: TorchPolicyEngine,
        open_pool: Callable[[], WorkerPool],
        processes: Processes,
        gathered: Gather,
        piece_size: int,
        ahead: int,
        newest: bool = False,
        quantization: Quantisation = "none",
        held: Held | None = None,
        incomparable: Callable[[Sampling], str | None] = lambda sampling: None,
    ):
        self.local, self.processes, self.gathered = local, processes, gathered
        self.itemsize: float = 4 if quantization == "none" else SCHEMES[quantization].bits / 8
        self._size, self.piece_size = piece_size, None if newest else piece_size
        self.max_num_seqs, self.merging = local.max_num_seqs, False
        self.run: str = processes.gathered([uuid.uuid4().hex[:12]])[0]  # of all processes: the main one's
        self._most, self.newest = ahead + 1, newest
        self.sent: dict[Weights, Sent] = {}
        """The policies that a batch may refer to, the last one last."""
        self._realized: dict[str, float] = {}
        """What the noise has changed in the policy that was sent last."""
        self._held, self._incomparable = held or HeldByTorch(), incomparable
        self._calls = 0
        self._open_pool = open_pool
        self._background: _Background | None = None
        self._refused: UserError | None = None
        """Why there are no workers."""
        self._waited, self._since = 0.0, time.perf_counter()
        self._worked, self._tokens = 0.0, 0
        """Seconds of this thread's processor for what workers draw, and tokens that it was given."""
        self._queued = 0
        """Pieces without a worker when the last batch was whole."""

    def publish(self, weights: Weights) -> None:
        self.local.publish(weights)

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None, *, quantised: bool = False) -> Engine:
        """The trainer's own model scores."""
        return self.local.evaluating(eos_token_ids, context, quantised=quantised)

    def not_comparable(self, sampling: Sampling) -> str | None:
        return self._incomparable(sampling)

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """The workers have the prompts when this returns. Every process must come here."""
        return self._handed_out([prompt for prompt in feed if prompt is not None])

    def converse(self, conversations: Conversations, rows: list[Trajectory]) -> Iterator[Trajectory]:
        """The workers, which have environments of their own, have the rows when this returns. Every process must come
        here."""

        def taking_their_places(drawn: Iterator[tuple[int, Trajectory]]) -> Iterator[Trajectory]:
            for place, row in drawn:
                rows[place] = row
                yield row

        return taking_their_places(self._handed_out(rows))

    def _handed_out(self, own: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        began = time.thread_time()
        drawn = self._begun(own)
        self._worked += time.thread_time() - began
        return drawn

    def _begun(self, own: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        counts = self.processes.gathered([len(own)])
        first = sum(counts[: self.processes.rank])
        prompts: list[Any] = self.processes.gathered(list(own))
        if not prompts and not self.newest:
            return iter(())
        sent = self._send()
        size = self._size
        starts = range(0, len(prompts), size)
        pieces = [Piece((self._calls, start // size), tuple(prompts[start : start + size])) for start in starts]
        self._calls += 1
        if self.processes.rank == 0 and self._refused is None:
            try:
                self._workers().submit(sent, pieces)
            except UserError as error:  # which the other processes hear of where they ask for the first piece
                self._refused = error
        return self._completions(sent.version, pieces, range(first, first + len(own)))

    def _completions(self, version: Version, pieces: Sequence[Piece], own: range) -> Iterator[tuple[int, Any]]:
        """Of this process's prompts, piece by piece in their order. Every process must iterate to the end."""
        first = 0
        for piece in pieces:
            began, worked = time.perf_counter(), time.thread_time()
            drawn = self._answer(piece)
            self._waited += time.perf_counter() - began
            if not isinstance(drawn, Drawn):
                raise drawn
            if self.newest and drawn.version.weights in self.sent:  # another one is refused as any that was not asked
                version = self.sent[drawn.version.weights].version
            require_sent(drawn, version)
            completed = [
                (place - own.start, replace(completion, weights=drawn.version.weights))
                for place, completion in enumerate(drawn.completions, first)
                if place in own
            ]
            first += len(piece.prompts)
            self._tokens += drawn.tokens
            self._worked += time.thread_time() - worked
            yield from completed
        if self._background is not None:
            self._queued = self._background.queued

    def _answer(self, piece: Piece) -> Drawn | UserError:
        """What became of a piece, or what ends the run, on every process. However long that takes, none of them waits
        for another one for longer than WAIT_S, as training.ddp_timeout would end it."""
        answer: list[Drawn | UserError | None] = [None]
        while answer[0] is None:
            if self.processes.rank == 0:
                answer = [self._refused or self._workers().take(piece.id, WAIT_S)]
            if self.processes.count > 1:
                broadcast_object_list(answer)
        return answer[0]

    def take_metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        waited, elapsed = self._waited, now - self._since
        metrics = {"pool/trainer_waited": waited / elapsed}
        if self._tokens:
            metrics["pool/trainer_ms_per_1024_tokens"] = 1024e3 * self._worked / self._tokens
        self._waited, self._since, self._worked, self._tokens = 0.0, now, 0.0, 0
        if self._background is not None:
            metrics |= self._background.take_metrics(elapsed) | {"pool/queue": float(self._queued)}
        return self.local.take_metrics() | self._realized | metrics

    # The policy

    def _send(self) -> Sent:
        """The policy as it is now; what it is made of is packed once, however often noise is drawn on it. Every process
        must come here."""
        weights = self.local.weights
        if weights not in self.sent:
            with self._changing():
                packed = weights.version in self._payloads  # the same on every rank
                self._keep(weights, self._payloads[weights.version] if packed else self._packed())
        return self.sent[weights]

    @property
    def _payloads(self) -> dict[int, Payload | None]:
        """By optimizer steps: noise is drawn on the same weights again and again."""
        return {weights.version: sent.payload for weights, sent in self.sent.items()}

    @property
    def _reads(self) -> bool:
        """Whether this rank needs what is sent: the main process sends it, and the others read it where the trainer
        computes what an older policy has drawn (`published`)."""
        return self.processes.rank == 0 or self._most > 1

    def _packed(self) -> Payload:
        """Inside of `_changing`. Every process must come here."""
        noise = self.local.noise
        return to_bytes(delivered(self.local.model), self._reads), [] if noise is None else list(noise.rms)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside, what training and noise change is whole. The base is not: it may have room on all ranks alone."""
        policy, noise = self.local.model, self.local.noise
        self._held.begin(policy, self.gathered)
        tensors = [*delivered(policy).values(), *(() if noise is None else (weight for _, weight in noise.held()))]
        with self.gathered(list({id(each): each for each in tensors if isinstance(each, torch.nn.Parameter)}.values())):
            yield

    def _keep(self, weights: Weights, payload: Payload | None) -> None:
        """Inside of `_changing`. The trained model has the weights that `payload` was made of."""
        noise = self.local.noise
        held = self._held(self.local.model, noise, weights)
        if noise is not None:
            self._realized = {"aqn/sigma_realized": noise.realized_sigma}
        self.sent[weights] = Sent(Version(self.run, weights, held), payload if self._reads else None)
        while len(self.sent) > self._most:
            self.sent.pop(next(iter(self.sent)))

    @contextlib.contextmanager
    def published(self, weights: Weights) -> Iterator[None]:
        if weights.version == self.local.weights.version:
            yield
            return
        payload = self._payloads[weights.version]
        assert payload is not None
        with self._holding(payload):
            yield

    @contextlib.contextmanager
    def _holding(self, payload: Payload) -> Iterator[None]:
        policy = self.local.model
        with resharded(policy):
            held = delivered(policy)  # the shards: a forward inside may leave whole parameters in their places
            kept = {name: local(tensor).clone() for name, tensor in held.items()}
            try:
                put_into(policy, from_bytes(payload[0]))
                yield
            finally:
                with torch.no_grad():
                    for name, tensor in held.items():
                        local(tensor).copy_(kept[name])

    def state(self, version: int, own: bool) -> dict[str, Any]:
        if self.newest or self.processes.rank:  # the main process's checkpoint has it for all
            return {}
        held = self._payloads[version]
        assert held is not None
        payload, rms = held
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is read alone
            policy = None if own else torch.frombuffer(payload, dtype=torch.uint8)
        return {"policy": policy, "rms": rms}

    def publish_again(self, weights: Weights, state: dict[str, Any]) -> bool:
        answer = [state]
        if self.processes.count > 1:
            broadcast_object_list(answer)
        (state,) = answer
        if self.newest or "policy" not in state:
            return False
        self.local.weights = weights
        if weights in self.sent:
            return True
        if self.local.noise is not None:
            self.local.noise.rms[:] = state["rms"]
        with self._changing():
            payload, policy = self._payloads.get(weights.version), state["policy"]
            if payload is None:
                payload = self._packed() if policy is None else (policy.numpy().tobytes(), state["rms"])
            with contextlib.nullcontext() if policy is None else self._holding(payload):
                self._keep(weights, payload)
        return True

    # The workers

    def _workers(self) -> _Background:
        if self._background is None:
            self._background = _Background(self._open_pool())
            atexit.register(self.close)  # before multiprocessing waits for its processes
        return self._background

    def close(self) -> None:
        if self._background is not None:
            atexit.unregister(self.close)
            self._background.close()
            self._background = None
        self.local.close()


class Held(Protocol):
    """The digest of what an engine holds that was sent the policy as it is now. Every process must call it."""

    def begin(self, policy: Any, gathered: Gather) -> None:
        """Before each call, while ZeRO-3's parameters are spread."""

    def __call__(self, policy: Any, noise: NoiseInjector | None, weights: Weights) -> str:
        """While those that training and noise change are whole."""
        ...


class HeldByTorch:
    """Of an engine that loads the policy as the trainer does (perl.adapters.delivery)."""

    def __init__(self) -> None:
        self._base: str | None = None

    def begin(self, policy: Any, gathered: Gather) -> None:
        if self._base is None:
            self._base = base_digest(policy, gathered)

    def __call__(self, policy: Any, noise: NoiseInjector | None, weights: Weights) -> str:
        assert self._base is not None
        if noise is None:
            return digest(policy, self._base, ())
        with noise.applied(weights.sigma, (weights.version, weights.draw)):
            return digest(policy, self._base, noise.held())


def require_sent(drawn: Drawn, version: Version) -> None:
    """A PoolLost where a worker has drawn with something else than it was sent."""
    if drawn.version != version:
        raise PoolLost(
            f"rollout: a worker answers for version {drawn.version.weights.version} of run {drawn.version.run}, asked"
            f" for version {version.weights.version} of run {version.run}: workers of another run are alive; end them"
        )
    if drawn.digest != version.digest:
        raise PoolLost(
            f"rollout: a worker holds another policy than version {version.weights.version} that it was sent (digest"
            f" {drawn.digest[:12]}, not {version.digest[:12]}): its base, its adapter, its scale or its noise differs"
        )


class _Background:
    """A thread that hands pieces to the workers and takes their answers."""

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self._changed = threading.Condition()
        self._submitted: list[tuple[Sent, Sequence[Piece]]] = []
        self._done: dict[tuple[int, int], Any] = {}
        self._error: str | None = None
        self._closing = False
        self._busy, self._drained = 0.0, 0.0
        """Seconds that workers drew and drained, since they were taken."""
        self._drawn: dict[str, tuple[int, float]] = {}
        """By worker, tokens and the seconds that it drew them in, since they were taken."""
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def submit(self, sent: Sent, pieces: Sequence[Piece]) -> None:
        with self._changed:
            self._submitted.append((sent, pieces))
        self.pool.wake()

    def take(self, piece: tuple[int, int], seconds: float) -> Drawn | PoolLost | None:
        """What became of a piece; None where it is under way after so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: piece in self._done or self._error is not None, seconds):
                return None
            if piece not in self._done:
                return PoolLost(f"rollout: {self._error}")
            drawn = self._done.pop(piece)
        if isinstance(drawn, Drawn):
            return drawn
        return PoolLost(f"rollout: a piece can't be drawn: {drawn.error}")

    def take_metrics(self, elapsed: float) -> dict[str, float]:
        had = elapsed * len(self.pool.workers)
        with self._changed:
            busy, drained, drawn = self._busy, self._drained, self._drawn
            # What is above all that they had is of a piece that began before, and that interval lacks.
            self._busy, self._drained, self._drawn = max(0.0, busy - had), 0.0, {}
        # Of pieces that are drawn at once, how long each has taken says nothing of a worker's speed.
        rates = [] if self.pool.newest else [tokens / seconds for tokens, seconds in drawn.values() if seconds]
        speeds = {"pool/tokens_per_s_min": min(rates), "pool/tokens_per_s_max": max(rates)} if rates else {}
        return speeds | {
            "pool/workers_idle": max(0.0, 1.0 - busy / had),
            "pool/workers_draining": drained / had,
            "pool/tokens_per_s": sum(tokens for tokens, _ in drawn.values()) / elapsed,
            "pool/restarts": float(self.pool.restarts),
        }

    @property
    def queued(self) -> int:
        """Pieces without a worker."""
        with self._changed:
            return sum(len(pieces) for _, pieces in self._submitted) + self.pool.queued

    def close(self) -> None:
        """No process of the workers is left afterwards."""
        with self._changed:
            self._closing = True
        self.pool.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self.pool:
                while not self._closing:
                    with self._changed:
                        submitted, self._submitted = self._submitted, []
                    for sent, pieces in submitted:
                        self.pool.submit(sent.version, pieces, sent.payload)
                    finished = self.pool.poll(POLL_S)
                    with self._changed:
                        for piece, drawn in finished:
                            self._done[piece] = drawn  # type: ignore[index]
                            self._count(drawn)
                        self._changed.notify_all()
        except WorkerError as error:
            self._fail(str(error))
        except Exception as error:  # the training must hear of it
            log.exception("the thread of the pool")
            self._fail(f"{type(error).__name__}: {error}")

    def _count(self, drawn: Any) -> None:
        if isinstance(drawn, Drawn):
            self._busy += drawn.seconds
            self._drained += drawn.drained_s
            tokens, seconds = self._drawn.get(drawn.worker, (0, 0.0))
            self._drawn[drawn.worker] = tokens + drawn.tokens, seconds + drawn.seconds

    def _fail(self, why: str) -> None:
        with self._changed:
            self._error = why
            self._changed.notify_all()
