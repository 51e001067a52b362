"""How far a pool of workers carries a training: up to 512 of them, in virtual time.

    python -m benchmarks.pool_simulation [--workers 8 64 512] [--lags 0 1 4] [--newest 1 4] [--steps 20]

The order of the batches and the lag are the Collector's, the queue and its dispatch the WorkerPool's: their code runs.
Workers are links that answer by a virtual clock, a piece of n completions taking the tokens of its longest one at the
published speed of a sequence (SERVICE), and the trainer is a sum of its tokens. Lengths are log-normal. As many devices
train as sample; a batch has the same size whatever their number (strong scaling). Sending a policy takes the parent's
one link in turn. The lag "all" hands out every batch at the start: workers that never wait, and unbounded staleness.
A row "newest" is rollout.max_staleness: a worker has AT_ONCE sequences, in groups, each of which ends alone, takes the
newest policy, and ends what it has before it takes another.

Steps an hour and idle times are those of the virtual clock, without the steps in which the pipeline fills or drains.
Real is what the parent's dispatch costs: CPU time in WorkerPool.submit
and poll, and to pickle what is sent and unpickle what comes back, for each piece. Ends in a Markdown table and a line
of JSON; about four minutes of one core.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import pickle
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._learning import markdown
from perl.device import Devices
from perl.records import Completion, Prompt, Sampling, Weights, row_seed
from perl.training.collect import Collector, ReadPrompt
from perl.training.stream import PromptStream
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import Drawn, Piece, Version
from perl.workers.worker import Ready, Result

SERVICE = {"H100": (66.1, 4140.0), "910B": (26.5, 1333.0)}
"""Tokens a second of a sequence while many are decoded, and of a device that trains. H100: 15.1 ms a token, Qwen3.5-9B
in vLLM on ShareGPT (docs.gpustack.ai, performance lab); LoRA updates of Qwen3-30B-A3B, 33.1k on eight (prime-rl's
BENCHMARKS.md). 910B: 529 of 20 sequences, Qwen2.5-Omni-7B (vllm-ascend 11750); what verl 6747's step of 0.5B leaves for
the update, 16,384 tokens in 12.3 s, which is little for 0.5B and about what an A2 should reach at 7B."""
BATCH, GROUP, MEAN, SPREAD, LONGEST, PROMPT = 256, 8, 2048, 0.7, 16_384, 256
"""Prompts of a batch, completions of each; tokens of a completion (sigma of its logarithm), the most, of a prompt."""
EDGE = 5
"""Steps in which the pipeline fills, and in which it drains, that a run of more steps than these does not count."""
AT_ONCE = 64
"""Sequences of a device at the speed of SERVICE. perl's workers take up to 256, for whose speed there is no source."""
ADAPTER = 80e6
"""Bytes of an adapter of rank 16 on all linears of 7B in bfloat16."""
LINK = 12.5e9
"""Bytes a second that leave the trainer: 100 Gb/s."""
SWITCH = 0.5e9
"""Bytes a second at which a worker reads, writes and hashes a policy."""


@dataclass
class Clock:
    now: float = 0.0


class VirtualLink:
    """A worker: pieces one after the other, or as many at once as it has room for. What it is sent comes through the
    parent's link."""

    def __init__(self, executor: VirtualExecutor, deliver: Any):
        self.executor, self.deliver = executor, deliver
        self.free, self.held = [0.0] * executor.room, None
        """When each place for a piece has done all it has; the version that it has."""
        deliver(Ready(executor.room))

    def send(self, batch: Any) -> None:
        if batch is not None:
            self.executor.work(self, batch)

    def join(self, timeout: float) -> None: ...

    def kill(self) -> None: ...

    def exit_reason(self) -> str:
        return "never"


class VirtualExecutor:
    """Workers of a virtual clock; events are (time, number, link, result)."""

    devices = Devices("cpu", 1)

    def __init__(self, workers: int, clock: Clock, speed: float, room: int):
        self.workers, self.clock, self.speed, self.room = workers, clock, speed, room
        self.events: list[tuple[float, int, VirtualLink, Result]] = []
        self.busy = self.link_free = self.sent = self.pickling = self.outside = 0.0
        self._number = itertools.count()

    def environment(self, index: int) -> dict[str, str]:
        return {}

    def start(self, spec: Any, deliver: Any) -> VirtualLink:
        return VirtualLink(self, deliver)

    def shared(self, payload: Any) -> Any:
        return payload

    def close(self) -> None: ...

    def work(self, link: VirtualLink, batch: Any) -> None:
        entered = began = time.process_time()
        crossed = pickle.dumps(batch)
        self.pickling += time.process_time() - began
        self.sent += len(crossed)
        arrives = self.clock.now
        if batch.payload is not None:
            self.sent += ADAPTER
            self.link_free = max(self.link_free, self.clock.now) + ADAPTER / LINK
            arrives = self.link_free + ADAPTER / SWITCH
        if batch.weights != link.held:
            link.held, link.free = batch.weights, [max(link.free)] * self.room
        for piece in batch.requests:
            lengths = [length_of(prompt.seed) for prompt in piece.prompts]
            seconds = max(lengths) / self.speed
            free = max(heapq.heappop(link.free), arrives) + seconds
            heapq.heappush(link.free, free)
            made = tuple(Completion(token_ids=range(n), finish_reason="stop") for n in lengths)  # type: ignore[arg-type]
            result = Result(piece.id, Drawn(made, batch.weights, batch.weights.digest, seconds), self.room)
            heapq.heappush(self.events, (free, next(self._number), link, result))
        self.outside += time.process_time() - entered


class VirtualEngine:
    """What PoolEngine is to the Collector, on a virtual clock."""

    remote = True

    def __init__(self, pool: WorkerPool, executor: VirtualExecutor, piece_size: int):
        self.pool, self.executor, self.piece_size = pool, executor, piece_size
        self.version = Version("simulated", Weights(), "")
        self.calls = self.pieces = 0
        self.done: dict[Any, Drawn] = {}
        self.dispatch = 0.0
        """CPU seconds of the real code."""

    def publish(self, weights: Weights) -> None:
        self.version = Version("simulated", weights, "")
        self.payload = [b"an adapter"]  # another one with each version
        self.pool.submit(self.version, [], self.payload)

    def stream(self, feed: Sequence[Prompt]) -> Iterator[tuple[int, Completion]]:
        size, call = self.piece_size, self.calls
        self.calls += 1
        starts = range(0, len(feed), size)
        pieces = [Piece((call, start // size), tuple(feed[start : start + size])) for start in starts]
        self.pieces += len(pieces)
        self._timed(lambda: self.pool.submit(self.version, pieces, self.payload))
        self._timed(self._poll)
        return self._completions(pieces)

    def _completions(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Any]]:
        for number, piece in enumerate(pieces):
            while piece.id not in self.done:
                self._next_event()
            drawn = self.done.pop(piece.id)
            for place, completion in enumerate(drawn.completions, number * self.piece_size):
                yield place, replace(completion, weights=drawn.version.weights)

    def pass_time(self, seconds: float) -> None:
        """While the trainer trains."""
        until = self.executor.clock.now + seconds
        while self.executor.events and self.executor.events[0][0] <= until:
            self._next_event()
        self.executor.clock.now = until

    def _next_event(self) -> None:
        when, _, link, result = heapq.heappop(self.executor.events)
        self.executor.clock.now = max(self.executor.clock.now, when)
        self.executor.busy += result.completion.seconds / self.executor.room
        answer = pickle.dumps(whole(result))
        began = time.process_time()
        pickle.loads(answer)  # the worker pickles it
        self.executor.pickling += time.process_time() - began
        link.deliver(result)
        self._timed(self._poll)

    def _poll(self) -> None:
        while True:
            self.done |= dict(self.pool.poll(0.0))
            if self.pool._inbox.empty():
                break
        self.done |= dict(self.pool.poll(0.0))  # hands out what the last answers have made room for

    def _timed(self, work: Any) -> None:
        outside, began = self.executor.outside, time.process_time()
        work()
        self.dispatch += time.process_time() - began - (self.executor.outside - outside)


NUMBERS = tuple(random.Random(0).uniform(-9, 0) for _ in range(LONGEST))
TOKENS = tuple(random.Random(0).choices(range(150_000), k=LONGEST))


def whole(result: Result) -> Result:
    """With tokens and log-probabilities, as it crosses the pipe."""
    drawn = result.completion
    made = [(TOKENS[: len(each.token_ids)], NUMBERS[: len(each.token_ids)]) for each in drawn.completions]
    full = tuple(Completion(token_ids=tokens, logprobs=logps, finish_reason="stop") for tokens, logps in made)
    return replace(result, completion=replace(drawn, completions=full))


class NoRewards:
    def score(self, rows: Any, state: Any, log_metrics: bool = True) -> None:
        for row in rows:
            row.rewards = [0.0]

    def infinite(self, rows: Any) -> list[str]:
        return []


class Alone:
    rank, count = 0, 1


class NoClock:
    def __call__(self, name: str) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def count_forward(self, sequences: Any) -> None: ...


def length_of(seed: int) -> int:
    """Log-normal, of this completion."""
    mu = math.log(MEAN) - SPREAD**2 / 2
    return min(LONGEST, max(2, round(random.Random(seed).lognormvariate(mu, SPREAD))))


class NoJob:
    """Nobody serves it."""

    unit = "pieces"

    def paths(self, weights: Any) -> list[str]:
        return []


def simulate(device: str, workers: int, lag: int, steps: int, batch: int, newest: bool = False) -> dict[str, Any]:
    """A row of the table.

    Args:
        lag: `steps` and more is every batch at the start.
        newest: `lag` is the largest staleness.
    """
    speed, trained = SERVICE[device]
    clock = Clock()
    piece_size, room = max(1, min(AT_ONCE, batch * GROUP // workers)), 1
    if newest:
        piece_size, room = GROUP, AT_ONCE // GROUP
    counted = range(EDGE, steps - EDGE) or range(steps)
    executor = VirtualExecutor(workers, clock, speed, room)
    with tempfile.TemporaryDirectory() as folder:
        pool = WorkerPool(executor, NoJob(), Path(folder), newest=newest)  # type: ignore[arg-type]
        engine = VirtualEngine(pool, executor, piece_size)
        rows = [{"prompt": str(i)} for i in range(batch * steps)]
        parts: Any = {"engine": engine, "rewards": NoRewards(), "processes": Alone(), "clock": NoClock()}
        sampling = Sampling(seed=row_seed(1, "simulation", 0))
        collector = Collector(
            stream=PromptStream(len(rows), batch, seed=1), rows=rows, read=lambda row: ReadPrompt((5,) * PROMPT),
            text=lambda ids: "", grade_early=None, batch=batch, group_size=GROUP,
            sampling=sampling, state=lambda: None, batches_ahead=lag, **parts,
        )  # type: ignore[arg-type]  # fmt: skip
        ages: list[float] = []
        waited, kept, staleness, began = 0.0, 0, 0, time.process_time()
        start, busy, seconds = 0.0, 0.0, 0.0
        for step in range(steps):
            if step == counted.start:
                start, busy, waited = clock.now, executor.busy, 0.0
            engine.publish(weights := Weights(version=step))
            before = clock.now
            drawn, _ = collector.collect(weights, steps - step)
            waited += (clock.now - before) * (step in counted)
            drew = {row.weights for row in drawn}
            kept = max(kept, len({each.weights for each in collector.ahead} | {weights} | drew))
            staleness = max(staleness, step - min(drew).version)
            ages.append(sum(step - row.weights.version for row in drawn) / len(drawn))
            tokens = sum(len(row.token_ids) + len(row.prompt_ids) for row in drawn)
            engine.pass_time(tokens / (trained * workers))
            if step + 1 == counted.stop:
                seconds, busy = clock.now - start, executor.busy - busy
        pool.unfinished.clear()
    return {
        "device": device,
        "workers": workers,
        "lag": f"newest {lag}" if newest else "all" if lag >= steps else lag,
        "piece_size": piece_size,
        "steps_per_hour": round(len(counted) / seconds * 3600, 1),
        "trainer_idle": round(waited / seconds, 3),
        "workers_idle": round(max(0.0, 1 - busy / (seconds * workers)), 3),
        "gb_sent_per_step": round(executor.sent / steps / 1e9, 2),
        "kept_gb": round(kept * ADAPTER / 1e9, 2),
        "staleness": staleness,
        "mean_staleness": round(sum(ages) / steps, 2),
        "dispatch_ms": round(engine.dispatch / engine.pieces * 1e3, 3),
        "pickle_ms": round(executor.pickling / engine.pieces * 1e3, 3),
        "cpu_s": round(time.process_time() - began, 1),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="*", choices=SERVICE, default=list(SERVICE))
    parser.add_argument("--workers", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--newest", type=int, nargs="*", default=[1, 4], help="rollout.max_staleness")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=BATCH, help="prompts")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for device, workers in itertools.product(options.devices, options.workers):
        kinds = [(lag, False) for lag in [*options.lags, options.steps]] + [(lag, True) for lag in options.newest]
        for lag, newest in kinds:
            rows.append(simulate(device, workers, lag, options.steps, options.batch, newest))
            print(json.dumps(rows[-1]), flush=True)
    print(markdown(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    arguments_used = {name: value for name, value in vars(options).items() if name not in ("devices", "workers")}
    print(json.dumps({"benchmark": "pool_simulation", **arguments_used, "table": rows}))


if __name__ == "__main__":
    main()
