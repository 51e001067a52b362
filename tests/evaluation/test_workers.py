"""The queue with real workers: rows that kill their worker, and workers that nothing can help."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from perl.engines.hf import HFEngine
from perl.evaluation import workers as module
from perl.evaluation.local import LocalExecutor
from perl.evaluation.plan import Row
from perl.evaluation.suspects import ALONE
from perl.evaluation.worker import Load, WorkerSpec
from perl.evaluation.workers import Batch, WorkerError, Workers
from perl.records import Problem, Prompt, Sampling
from tests.evaluation.poison import POISON, Hook

CONTEXT = 48
OPTIONS = {"max_model_len": CONTEXT, "max_batch_tokens": 4 * CONTEXT}


def make_rows(count: int, poisonous: set[int]) -> list[Row]:
    rng = random.Random(0)
    rows = []
    for index in range(count):
        ids = tuple(rng.randrange(10, 20) for _ in range(rng.randint(3, 12)))
        ids += (POISON,) if index in poisonous else ()
        rows.append(
            Row(
                dataset="rows",
                key=str(index),
                sample=0,
                problem=Problem(task="gsm8k", question="?", gold="1", source=f"rows:{index}"),
                prompt=Prompt(token_ids=ids, seed=index),
                prompt_text="",
                sampling=Sampling(max_new_tokens=20),
            )
        )
    return rows


def spec(model: Path, folder: Path, index: int = 0, token: int = POISON) -> WorkerSpec:
    return WorkerSpec(
        index=index,
        device="cpu",
        engine="poison",
        load=Load(str(model), "auto"),
        options={**OPTIONS, "hook": Hook(token)},
        environment={},
        log=folder / f"{index}.log",
    )


@pytest.mark.slow
def test_rows_that_kill_their_worker_are_recorded_and_all_others_complete(tiny, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "RESTARTS_PER_WORKER", 1)  # fewer than the rows kill it
    rows = make_rows(14, poisonous={2, 9})
    with Workers([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as workers:
        finished = {item.row.key: item for item in workers.complete(iter([Batch(Load(str(tiny), "auto"), rows)]))}
    assert len(finished) == 14
    assert {key: item.error for key, item in finished.items() if item.error} == {"2": ALONE, "9": ALONE}
    expected = HFEngine(str(tiny), **OPTIONS).generate([row.prompt for row in rows], rows[0].sampling)
    for index, completion in expected:
        if index not in (2, 9):
            assert finished[str(index)].completion == completion
    assert workers.restarts > 4
    assert sum("it counts as wrong" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.slow
def test_an_engine_that_dies_of_every_row_ends_the_run_and_records_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BARREN_DEATHS", 2)
    rows = make_rows(6, poisonous=set(range(6)))
    finished = []
    with (
        pytest.raises(WorkerError, match="all workers died, the last one: killed by SIGKILL"),
        Workers([spec(tiny, tmp_path)], LocalExecutor(1, 1)) as workers,
    ):
        finished.extend(workers.complete(iter([Batch(Load(str(tiny), "auto"), rows)])))
    assert finished == []
