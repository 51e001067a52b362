"""The pool with real workers: requests that kill their worker, and workers that nothing can help."""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from perl.engines.hf import HFEngine
from perl.records import Completion, Prompt, Sampling
from perl.workers import pool as module
from perl.workers.local import LocalExecutor
from perl.workers.pool import WorkerError, WorkerPool
from perl.workers.retries import TWICE_ALONE
from perl.workers.worker import EngineJob, Inbox, Ready, Request, RequestId, Result, WeightsSpec, WorkerEvent
from tests.workers.poison import POISON, Hook, Late

CONTEXT = 48
OPTIONS = {"max_model_len": CONTEXT, "max_batch_tokens": 4 * CONTEXT}


def make_requests(count: int, poisonous: set[int]) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for index in range(count):
        ids = tuple(rng.randrange(10, 20) for _ in range(rng.randint(3, 12)))
        ids += (POISON,) if index in poisonous else ()
        prompt = Prompt(token_ids=ids, seed=index, sampling=Sampling(max_new_tokens=20))
        requests.append(Request((index, 0), prompt))
    return requests


def poison_pool(folder: Path, engine_works: bool = False) -> WorkerPool:
    return WorkerPool(LocalExecutor(1, 1), EngineJob("poison", {**OPTIONS, "hook": Hook(POISON)}), folder, engine_works)


def polled(pool: WorkerPool) -> Iterator[tuple[RequestId, Completion]]:
    while pool.unfinished:
        yield from pool.poll(timeout=0.5)


@pytest.mark.slow
def test_requests_that_kill_their_worker_fail_and_all_others_complete(tiny, tmp_path):
    requests = make_requests(14, poisonous={2, 9})
    with poison_pool(tmp_path) as pool:
        pool.submit(WeightsSpec(str(tiny), "auto"), requests)
        finished = list(polled(pool))
    made = dict(finished)
    assert len(finished) == len(made) == 14
    errors = {id_: each.error for id_, each in made.items() if each.error}
    alone = f"{TWICE_ALONE}; the last time: killed by SIGKILL (log: {tmp_path}/worker-0.log)"
    assert errors == {(2, 0): alone, (9, 0): alone}
    kept = [request for request in requests if request.id[0] not in (2, 9)]
    for position, completion in HFEngine(str(tiny), **OPTIONS).stream([request.prompt for request in kept]):
        assert made[kept[position].id] == completion
    assert pool.restarts > 4


@pytest.mark.slow
def test_where_every_row_kills_nothing_is_recorded_unless_the_engine_has_worked(tiny, tmp_path):
    """So few that each is found to have killed twice, alone, before the worker is given up."""
    requests = make_requests(2, poisonous={0, 1})
    finished = []
    with poison_pool(tmp_path) as pool:
        pool.submit(WeightsSpec(str(tiny), "auto"), requests)
        with pytest.raises(WorkerError, match="each of the 2 rows killed its worker and none was completed"):
            finished.extend(polled(pool))
    assert finished == []
    with poison_pool(tmp_path, engine_works=True) as pool:
        pool.submit(WeightsSpec(str(tiny), "auto"), requests[:1])
        (failed,) = polled(pool)
    assert failed[1].error.startswith(TWICE_ALONE)


@pytest.mark.slow
def test_a_worker_whose_first_weights_are_done_with_goes_on_with_the_next(tiny, tmp_path):
    """In a sweep the first merged model is removed when its last row is done, which another worker may still load."""
    first, second = (shutil.copytree(tiny, tmp_path / name) for name in ("first", "second"))

    class OneLate(LocalExecutor):
        def environment(self, index: int) -> dict[str, str]:
            return super().environment(index) | ({Late().variable: str(first)} if index else {})

    requests = make_requests(41, poisonous=set())
    finished = []
    with WorkerPool(OneLate(2, 1), EngineJob("late", {**OPTIONS, "late": Late()}), tmp_path) as pool:
        pool.submit(WeightsSpec(str(first), "auto"), requests[:1])
        while not pool.restarts:
            finished += pool.poll(timeout=0.5)
            if finished:
                shutil.rmtree(first, ignore_errors=True)
        pool.submit(WeightsSpec(str(second), "auto"), requests[1:])
        finished += polled(pool)
    assert [completion.error for _, completion in finished] == [None] * 41


@pytest.mark.slow
def test_an_engine_that_dies_of_every_row_ends_the_run_and_records_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEATHS_WITHOUT_PROGRESS", 2)
    finished = []
    with poison_pool(tmp_path) as pool:
        pool.submit(WeightsSpec(str(tiny), "auto"), make_requests(6, poisonous=set(range(6))))
        with pytest.raises(WorkerError, match="all workers died, the last one: killed by SIGKILL"):
            finished.extend(polled(pool))
    assert finished == []


class Patient:
    """A job that is ready, and answers, only while the file is there that a variable names."""

    unit: ClassVar[str] = "pieces"

    def paths(self, weights: Any) -> list[str]:
        return []

    def serve(self, weights: Any, inbox: Inbox) -> Iterator[WorkerEvent]:
        self.wait()
        yield Ready(1)
        while inbox.next_weights(wait=True) is not None:
            self.wait()
            yield Result(inbox.take().id, Completion.failed("none"), 1)

    def wait(self) -> None:
        while not Path(os.environ["PERL_TEST_FILE"]).exists():
            time.sleep(0.05)


class WaitsForFiles(LocalExecutor):
    """A job is Patient with a file for each worker."""

    def __init__(self, *files: Path):
        super().__init__(len(files), 1, taken=1)
        self._files = files

    def environment(self, index: int) -> dict[str, str]:
        return super().environment(index) | {"PERL_TEST_FILE": str(self._files[index])}


WEIGHTS = WeightsSpec("none", "auto")


def test_a_worker_that_is_too_late_at_its_first_start_names_the_flag_that_says_so(tmp_path):
    with WorkerPool(WaitsForFiles(tmp_path / "never"), Patient(), tmp_path, deadline_s=0.5) as pool:
        pool.submit(WEIGHTS, make_requests(1, poisonous=set()))
        why = r"^the engine of worker 0 did not start: it said nothing for --config\.rollout\.deadline_s 0\.5 s \(log: "
        with pytest.raises(WorkerError, match=why):
            list(polled(pool))


def test_more_workers_than_cores_have_a_thread_each(monkeypatch):
    """OMP_NUM_THREADS was 0, which libgomp refuses in each worker's log."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    executor = LocalExecutor(len(os.sched_getaffinity(0)) + 1, 1, taken=1)
    assert executor.environment(0)["OMP_NUM_THREADS"] == "1"


def test_one_worker_that_hangs_in_its_first_start_is_started_again_where_another_has_begun(tmp_path):
    """It ended the run, with those that drew."""
    files, requests = (tmp_path / "0", tmp_path / "1"), make_requests(2, poisonous=set())
    with WorkerPool(WaitsForFiles(*files), Patient(), tmp_path, deadline_s=3600.0, all_needed=True) as pool:
        files[0].touch()
        pool.submit(WEIGHTS, requests[:1])
        assert len(list(polled(pool))) == 1
        files[0].unlink()
        pool.submit(WEIGHTS, requests[1:])
        pool.workers[1].heard = -math.inf
        pool.poll(timeout=0.1)
        assert pool.restarts == 1
        for file in files:
            file.touch()
        assert len(list(polled(pool))) == 1
        while pool.workers[1].max_num_seqs is None:
            pool.poll(timeout=0.5)


def test_a_stop_of_this_process_counts_for_no_worker(tmp_path):
    """As by Ctrl-Z: all workers that had work were ended when it went on."""
    with WorkerPool(WaitsForFiles(tmp_path / "late"), Patient(), tmp_path, deadline_s=3600.0) as pool:
        pool.submit(WEIGHTS, make_requests(1, poisonous=set()))
        pool.poll(timeout=0.1)
        for clock in (pool, pool.workers[0]):  # as two hours later
            name = "_looked" if clock is pool else "heard"
            setattr(clock, name, getattr(clock, name) - 7200.0)
        pool.poll(timeout=0.1)
        (tmp_path / "late").touch()
        assert len(list(polled(pool))) == 1
        assert pool.restarts == 0


def test_a_worker_for_which_there_is_no_file_left_is_one_that_died(tmp_path):
    """A traceback, and the end of the run."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with WorkerPool(WaitsForFiles(tmp_path), Patient(), tmp_path, all_needed=True) as pool:
        pool.submit(WEIGHTS, make_requests(1, poisonous=set()))
        os.close(lowest := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
        try:
            with pytest.raises(WorkerError, match=r"^all workers died, the last one: OSError: \[Errno 24\] Too many"):
                list(polled(pool))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert pool.restarts == 3
