"""A worker: one process with its own devices and its own engine, fed through a pipe (perl.workers.executors)

torch and vLLM are imported after the worker's environment is set, so that they see its devices only: the job, which
may need them to be unpickled, comes as bytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import pickle
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from perl import device
from perl.base.errors import UserError
from perl.base.redact import hide, hide_secrets_in_logs
from perl.device import Kind
from perl.records import Completion, Prompt, Trajectory

if TYPE_CHECKING:
    from perl.engines import LoadedEngine
    from perl.environments.conversation import Conversations
    from perl.workers.conversations import Talks


@dataclass(frozen=True, slots=True)
class WeightsSpec:
    """The weights that an engine holds."""

    model: str
    """Folder of a whole model."""
    dtype: str
    """As --dtype."""
    adapter: str | None = None
    """Folder of the adapter that the engine serves alongside it, to all requests under way."""


WORKING_S = 1.0
"""So often a worker tells at most that it is at work."""
FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a scheduler sends to all processes. The parent ends its workers, by their pipes."""
RequestId = tuple[str | int, ...]
"""The prompt, and last which of its completions."""


@dataclass(frozen=True, slots=True)
class Request:
    """A completion to make, or a conversation to have."""

    id: RequestId
    prompt: Prompt
    row: dict[str, Any] | None = None
    """What the environment's reset gets; the id then ends with the problem's key and which of its conversations it is.
    None: no environment."""

    @property
    def prompt_id(self) -> RequestId:
        """What all requests of one prompt have in common."""
        return self.id[:-1]


class Job(Protocol):
    """What workers do. It crosses the pipe; weights, requests and results are of its own kinds."""

    unit: ClassVar[str]
    """What its requests are called in messages, of several."""

    def paths(self, weights: Any) -> list[str]:
        """What has to be there where the worker runs."""
        ...

    def serve(self, weights: Any, inbox: Inbox) -> Iterator[WorkerEvent]:
        """Ready when the engine is loaded, then what becomes of the requests in `inbox`, until no more will come.

        Args:
            weights: of the first request.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineJob:
    """An engine of ENGINES completes each request by itself, or draws the turns of its conversation. Between requests
    of different weights it runs empty and gets the others; where it can't take them, a Restart is the last event."""

    unit: ClassVar[str] = "rows"

    engine: str
    """Key of ENGINES."""
    options: dict[str, Any]
    """Keyword arguments of the engine's builder, but for the dtype."""
    talks: Talks | None = None
    """With an environment."""
    context: int | None = None
    """Most tokens of a conversation; None: any number."""

    def paths(self, weights: WeightsSpec) -> list[str]:
        return [weights.model, *self.options.get("adapters", ()), *(self.talks.paths if self.talks else ())]

    def serve(self, weights: WeightsSpec, inbox: Inbox) -> Iterator[WorkerEvent]:
        from perl.engines import ENGINES

        with contextlib.nullcontext() if self.talks is None else self.talks.opened() as conversations:
            engine = ENGINES[self.engine](weights.model, dtype=weights.dtype, **self.options)
            yield Ready(engine.max_num_seqs)
            computed_in(weights)
            while (needed := inbox.next_weights(wait=True)) is not None:
                if needed != weights and (reason := replace_weights(engine, weights, needed)):
                    yield Restart(needed, reason)
                    break
                weights = needed
                feed = InboxFeed(inbox, weights)
                for position, completion in self._stream(engine, conversations, feed):
                    yield feed.result(position, completion, engine.max_num_seqs)
            engine.close()

    def _stream(
        self, engine: LoadedEngine, conversations: Conversations | None, feed: InboxFeed
    ) -> Iterator[tuple[int, Completion]]:
        """As `Engine.stream` has it."""
        if conversations is None:
            return engine.stream(None if each is None else each.prompt for each in feed)
        from perl.environments.scored import converse, trajectory_of

        def row(request: Request) -> Trajectory:
            key, sample = request.id[-2:]
            assert request.row is not None
            return trajectory_of(request.prompt, str(key), int(sample), request.row, self.context)

        return converse(conversations, engine, (None if each is None else row(each) for each in feed))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker is started with."""

    index: int
    device: Kind
    """What it is to compute on."""
    job: bytes
    """A Job, pickled."""
    paths: Sequence[str] = ()
    """`Job.paths` of `weights`."""
    weights: Any
    """What its engine starts with."""
    environment: dict[str, str]
    """Set before anything heavy is imported."""
    cores: tuple[int, int] | None = None
    """(which share of this machine's cores it keeps to on a CPU, of how many); None: all that it may use."""
    log: Path
    """Gets what the worker and the libraries in it print."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests that the same weights complete. Their images cross the pipe once where they are one object."""

    weights: Any
    requests: Sequence[Any]
    payload: Any = None
    """What the weights are made of, where that crosses the pipe: with the first of the batches in a row that need them
    alone."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded."""

    max_num_seqs: int
    """Requests that the engine works on at once."""


@dataclass(frozen=True, slots=True)
class Result:
    """A request is completed."""

    id: RequestId
    completion: Any
    """A Completion, of an EngineJob."""
    max_num_seqs: int
    """As in Ready, now."""


@dataclass(frozen=True, slots=True)
class Working:
    """It gets on with requests that are not completed yet."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The next request needs another engine than this worker has: it is to be started again with `weights`."""

    weights: WeightsSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends for this error, or has ended by itself: nothing from outside has ended it."""

    message: str


WorkerEvent = Ready | Result | Working | Restart | Failed
"""What a worker tells its parent."""
Deliver = Callable[[WorkerEvent | None], None]
"""Takes a worker's events, in their order, from any thread; None when it is gone."""
OF_A_RANK = re.compile(r"(TORCHELASTIC|GROUP|ROLE)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
"""Variables by which torchrun tells a process its place among others. A worker has none of these places: with
TORCHELASTIC_USE_AGENT_STORE an engine's own process group would wait for a server that nobody starts."""


def run_worker(spec: WorkerSpec, connection: Connection) -> None:
    """Body of the worker's process."""
    os.setpgid(0, 0)
    for number in FOR_THE_PARENT:  # a handler, as what a worker starts would inherit that they are ignored
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_PARENT)
    os.register_at_fork(after_in_child=connection.close)  # the parent sees the end of this process, not of its children
    for name in list(filter(OF_A_RANK.fullmatch, os.environ)):
        del os.environ[name]
    os.environ.update(spec.environment)
    inbox = Inbox(connection)
    try:
        _log_to(spec.log)
    except OSError as error:
        inbox.send(Failed(f"{error.filename or spec.log}: {error.strerror}"))
        sys.exit(1)
    faulthandler.enable(2)  # the log
    try:
        require_device(spec.device, device.detect().kind)
        if spec.cores is not None:
            device.pin_cpu(*spec.cores)
        job: Job = pickle.loads(spec.job)
        for event in job.serve(spec.weights, inbox):
            inbox.send(event)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        inbox.send(Failed(hide(said_by(error))))
        with contextlib.suppress(OSError):  # of a disk that is full
            sys.stderr.write(hide(traceback.format_exc()))
        sys.exit(1)


def said_by(error: Exception) -> str:
    """One line; a UserError says all by itself."""
    said, kind = str(error).strip().partition("\n")[0], type(error).__name__
    return said if isinstance(error, UserError) else f"{kind}: {said}" if said else kind


def require_device(wanted: Kind, detected: Kind) -> None:
    """Raise a UserError when a scheduler counts another kind of device than there is."""
    if detected != wanted:
        raise UserError(
            f"node {socket.gethostname()} was to give this worker a device of kind {wanted}, but has kind {detected}:"
            " what was registered there is wrong; ray stop --force, then ray start with"
            f" {device.RAY_RESOURCE[detected]} in --resources"
        )


def replace_weights(engine: LoadedEngine, held: WeightsSpec, needed: WeightsSpec) -> str | None:
    """Put the weights `needed` into the engine, but for adapters, which it serves alongside them. Returns why that
    can't be, or None when it is done."""
    if (needed.model, needed.dtype) == (held.model, held.dtype):
        return None
    then, now = computed_in(needed), computed_in(held)
    if now != then:
        return f"{needed.model} is computed in another dtype ({then}) than {held.model} ({now})"
    return engine.replace_weights(needed.model)


@functools.cache
def computed_in(weights: WeightsSpec) -> str:
    """The dtype. Asked while the weights are there: a merged model is removed when its last row is done."""
    from perl.engines.base import resolve_dtype
    from perl.models.folders import load_config

    try:
        return resolve_dtype(weights.dtype, load_config(weights.model))
    except UserError:
        return weights.dtype


class Inbox:
    """The requests that the parent has sent. When the pipe closes the parent is gone, and this whole process group with
    it: the engine's own processes too."""

    def __init__(self, connection: Connection):
        self.ended = False
        """No more will come than `next_weights` tells of."""
        self.payload: Any = None
        """Of the weights that `next_weights` has told of last."""
        self._connection = connection
        self._received: queue.SimpleQueue[RequestBatch | None] = queue.SimpleQueue()
        self._weights: Any = None
        self._requests: deque[Any] = deque()
        """The rest of a batch, completed by `_weights`."""
        self._sent = 0.0
        """When something was sent last."""
        threading.Thread(target=self._receive, daemon=True).start()

    def next_weights(self, *, wait: bool) -> Any:
        """What completes the next request. None: there is none, with `wait` because all have been taken and no more
        will come."""
        while not self._requests and not self.ended:
            try:
                batch = self._received.get(block=wait)
            except queue.Empty:
                return None
            if batch is None:
                self.ended = True
            else:
                self._weights, self._requests = batch.weights, deque(batch.requests)
                if batch.payload is not None:
                    self.payload = batch.payload
        return self._weights if self._requests else None

    def take(self) -> Any:
        """The next request, where `next_weights` has found one."""
        return self._requests.popleft()

    def send(self, event: WorkerEvent) -> None:
        self._connection.send(event)
        self._sent = time.monotonic()

    def working(self) -> None:
        """Have the parent hear of this worker now and then, in the midst of its work."""
        if time.monotonic() >= self._sent + WORKING_S:
            self.send(Working())

    def _receive(self) -> None:
        try:
            while True:
                self._received.put(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001  # what was sent can't be read: the parent hears of the end
            sys.stderr.write(hide(traceback.format_exc()))
        os.killpg(0, signal.SIGKILL)


class InboxFeed:
    """The inbox's requests as an engine's feed has prompts (see Engine.stream): None when there is nothing now, but
    requests under way. It ends before the first that needs other weights."""

    def __init__(self, inbox: Inbox, weights: WeightsSpec):
        self._inbox = inbox
        self._weights = weights
        self._under_way: dict[int, tuple[Request, float]] = {}
        self._taken = 0

    def __iter__(self) -> InboxFeed:
        return self

    def __next__(self) -> Request | None:
        needed = self._inbox.next_weights(wait=not self._under_way)
        if needed is None and not self._inbox.ended:
            return None
        if needed != self._weights:
            raise StopIteration
        request = self._inbox.take()
        self._under_way[self._taken] = (request, time.monotonic())
        self._taken += 1
        return request

    def result(self, position: int, completion: Completion, max_num_seqs: int) -> Result:
        request, started = self._under_way.pop(position)
        completion = replace(completion, seconds=time.monotonic() - started, logprobs=())  # which nobody reads
        return Result(request.id, completion, max_num_seqs)


def _log_to(path: Path) -> None:
    """Send file descriptors 1 and 2 to `path`: native libraries print there too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    hide_secrets_in_logs()
