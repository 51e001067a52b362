"""Workers that keep dying, of jobs without a model: what ends the work and what does not."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from perl.records import Completion
from perl.workers.local import LocalExecutor
from perl.workers.pool import WorkerError, WorkerPool
from perl.workers.rollouts import Piece
from perl.workers.worker import Ready, Result


@dataclass
class Job:
    """Completes requests; those of calls from `good` on fail."""

    good: int = 0
    unit = "pieces"

    def paths(self, weights):
        return []

    def serve(self, weights, inbox):
        yield Ready(1)
        while inbox.next_weights(wait=True) is not None:
            request = inbox.take()
            if request.id[0] >= self.good:
                self.fail(request)
            yield Result(request.id, Completion(token_ids=(7,), finish_reason="stop"), 1)

    def fail(self, request):
        raise RuntimeError(f"CUDA out of memory. Tried to allocate {os.getpid()} MiB")


class Slow(Job):
    """Is killed at its work, twice."""

    def fail(self, request):
        killed = Path(request.prompts[0])
        if len(list(killed.iterdir())) < 2:
            (killed / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Exits(Job):
    def fail(self, request):
        os._exit(7)


class OutOfMemory(Job):
    """Is killed at one piece, whoever takes it."""

    def fail(self, request):
        if request.id[1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def pieces(call: int, count: int) -> list[Piece]:
    return [Piece((call, place), ()) for place in range(count)]


def polled(pool: WorkerPool) -> list:
    finished = []
    while pool.unfinished:
        finished += pool.poll(timeout=0.5)
    return finished


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_that_comes_back_ends_work_of_which_all_is_needed(tmp_path: Path, workers):
    """Each worker was started again until it had died 17 times."""
    with WorkerPool(LocalExecutor(workers, 1), Job(good=1), tmp_path, all_needed=True) as pool:
        pool.submit("weights", pieces(0, 2))
        assert len(polled(pool)) == 2
        pool.submit("weights", pieces(1, 4))
        back = r"an error came back .*: RuntimeError: CUDA out of memory. Tried to allocate \d+ MiB \(log: .*\.log\)$"
        with pytest.raises(WorkerError, match=back):
            polled(pool)
    assert sum(worker.starts for worker in pool.workers) <= workers + 2


def test_what_has_failed_says_of_what(tmp_path: Path):
    with WorkerPool(LocalExecutor(1, 1), Job(), tmp_path, engine_works=True) as pool:
        pool.submit("weights", pieces(0, 1))
        ((_, failed),) = polled(pool)
    assert failed.error.startswith("it killed its worker twice, alone; the last time: RuntimeError: CUDA out of memory")
    with WorkerPool(LocalExecutor(1, 1), Job(), tmp_path) as pool:
        pool.submit("weights", pieces(0, 1))
        each = "each of the 1 pieces killed its worker .*; the last one: RuntimeError: CUDA out of memory"
        with pytest.raises(WorkerError, match=each):
            polled(pool)


def test_what_ends_workers_from_outside_ends_no_work_of_which_all_is_needed(tmp_path: Path):
    """A piece whose worker was killed twice had failed."""
    (tmp_path / "killed").mkdir()
    with WorkerPool(LocalExecutor(1, 1), Slow(), tmp_path / "logs", all_needed=True) as pool:
        pool.submit("weights", [Piece((0, 0), (str(tmp_path / "killed"),))])
        ((_, drawn),) = polled(pool)
    assert drawn.error is None
    assert pool.restarts == 2


def test_a_piece_that_each_worker_is_killed_at_ends_the_work(tmp_path: Path):
    """It was tried until every worker had died 17 times."""
    with WorkerPool(LocalExecutor(2, 1), OutOfMemory(), tmp_path, all_needed=True) as pool:
        pool.submit("weights", pieces(0, 5))
        with pytest.raises(WorkerError, match=r"one of the pieces ended 4 workers, the last one: killed by SIGKILL \("):
            polled(pool)
    assert sum(worker.starts for worker in pool.workers) <= 4 + 2


def test_a_worker_that_ends_by_itself_has_failed(tmp_path: Path):
    with WorkerPool(LocalExecutor(1, 1), Exits(), tmp_path, all_needed=True) as pool:
        pool.submit("weights", pieces(0, 1))
        with pytest.raises(WorkerError, match=r"came back before anything else was completed: exit code 7 \(log: "):
            polled(pool)
    assert pool.restarts == 1


def test_a_log_that_cannot_be_written_ends_the_work_at_once_in_one_line(tmp_path: Path, capfd):
    """There were four starts, each with a traceback, and no reason."""
    (tmp_path / "logs").write_text("no folder")
    with WorkerPool(LocalExecutor(1, 1), Job(good=1), tmp_path / "logs") as pool:
        pool.submit("weights", pieces(0, 1))
        with pytest.raises(WorkerError, match=f"worker 0 did not start: {tmp_path}/logs: File exists"):
            polled(pool)
    assert "Traceback" not in capfd.readouterr().err
