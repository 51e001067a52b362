"""The pool with real workers: samples that kill their worker, and workers that nothing can help."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perl.engines.hf import HFEngine
from perl.records import Problem, Sample, Sampling
from perl.workers import pool as module
from perl.workers.local import LocalExecutor
from perl.workers.pool import WorkerError, WorkerPool
from perl.workers.retries import TWICE_ALONE
from perl.workers.worker import Batch, WeightsSpec, WorkerSpec
from tests.engines.models import completions
from tests.evaluation.poison import POISON, Hook, Late

CONTEXT = 48
OPTIONS = {"max_model_len": CONTEXT, "max_batch_tokens": 4 * CONTEXT}


def make_samples(count: int, poisonous: set[int]) -> list[Sample]:
    rng = random.Random(0)
    samples = []
    for index in range(count):
        ids = tuple(rng.randrange(10, 20) for _ in range(rng.randint(3, 12)))
        ids += (POISON,) if index in poisonous else ()
        samples.append(
            Sample(
                token_ids=ids,
                seed=index,
                sampling=Sampling(max_new_tokens=20),
                dataset="rows",
                key=str(index),
                index=0,
                problem=Problem(task="gsm8k", question="?", gold="1", source=f"rows:{index}"),
                prompt_text="",
            )
        )
    return samples


def spec(model: Path, folder: Path, index: int = 0, token: int = POISON) -> WorkerSpec:
    return WorkerSpec(
        index=index,
        device="cpu",
        engine="poison",
        weights=WeightsSpec(str(model), "auto"),
        options={**OPTIONS, "hook": Hook(token)},
        environment={},
        log=folder / f"{index}.log",
    )


def batch_of(model: Path, samples: list[Sample]) -> Iterator[Batch]:
    yield Batch(WeightsSpec(str(model), "auto"), samples)


@pytest.mark.slow
def test_rows_that_kill_their_worker_are_recorded_and_all_others_complete(tiny, tmp_path, caplog):
    samples = make_samples(14, poisonous={2, 9})
    with WorkerPool([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as pool:
        finished = {sample.key: made for sample, made in pool.complete(batch_of(tiny, samples))}
    assert len(finished) == 14
    assert {key: made.error for key, made in finished.items() if made.error} == {"2": TWICE_ALONE, "9": TWICE_ALONE}
    expected = completions(HFEngine(str(tiny), **OPTIONS), samples, samples[0].sampling)
    for index, completion in expected.items():
        if index not in (2, 9):
            assert finished[str(index)] == completion
    assert pool.restarts > 4
    assert sum("it counts as wrong" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.slow
def test_where_every_row_kills_nothing_is_recorded_unless_the_engine_has_worked(tiny, tmp_path):
    """So few that each is found to have killed twice, alone, before the worker is given up."""
    samples = make_samples(2, poisonous={0, 1})
    finished = []
    with (
        pytest.raises(WorkerError, match="each of the 2 rows killed its worker and none was completed"),
        WorkerPool([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as pool,
    ):
        finished.extend(pool.complete(batch_of(tiny, samples)))
    assert finished == []
    with WorkerPool([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as pool:
        (failed,) = pool.complete(batch_of(tiny, samples[:1]), engine_works=True)
    assert failed[1].error == TWICE_ALONE


@pytest.mark.slow
def test_a_worker_whose_first_weights_are_done_with_goes_on_with_the_next(tiny, tmp_path):
    """In a sweep the first merged model is removed when its last row is done, which another worker may still load."""
    first, second = (shutil.copytree(tiny, tmp_path / name) for name in ("first", "second"))
    specs = [
        replace(spec(first, tmp_path, index), engine="late", options={**OPTIONS, "late": Late(of)})
        for index, of in enumerate(("", str(first)))
    ]
    samples = make_samples(41, poisonous=set())
    samples = [replace(sample, dataset="second" if int(sample.key) else "first") for sample in samples]

    def batches() -> Iterator[Batch | None]:
        yield Batch(WeightsSpec(str(first), "auto"), samples[:1])
        while not pool.restarts:
            yield None
        yield Batch(WeightsSpec(str(second), "auto"), samples[1:])

    finished = []
    with WorkerPool(specs, LocalExecutor(2, 1)) as pool:
        for sample, completion in pool.complete(batches()):
            finished.append(completion.error)
            if sample.dataset == "first":
                shutil.rmtree(first)
    assert finished == [None] * 41


@pytest.mark.slow
def test_an_engine_that_dies_of_every_row_ends_the_run_and_records_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEATHS_WITHOUT_PROGRESS", 2)
    samples = make_samples(6, poisonous=set(range(6)))
    finished = []
    with (
        pytest.raises(WorkerError, match="all workers died, the last one: killed by SIGKILL"),
        WorkerPool([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as pool,
    ):
        finished.extend(pool.complete(batch_of(tiny, samples)))
    assert finished == []
