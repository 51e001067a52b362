"""A tiny model, forty sums, and the results of scoring it undisturbed with one worker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perl.config.evaluation import EvalConfig
from perl.evaluation.run import evaluate
from tests.tiny import save_tiny

Records = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), scale=8.0)


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """Forty rows in GSM8K's schema, of which the last repeats the first."""
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"What is {i} + {i % 7} ?", "answer": f"so #### {i + i % 7}"} for i in range(39)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return file


@pytest.fixture(scope="session")
def config(tiny, sums) -> EvalConfig:
    """Sixteen samples a problem: enough work to be interrupted. `result_dir` is for the test to choose."""
    return EvalConfig(model=str(tiny), dataset=str(sums), n=16, temperature=1.0, max_new_tokens=40)


@pytest.fixture(scope="session")
def undisturbed(config, tmp_path_factory) -> Records:
    folder = tmp_path_factory.mktemp("undisturbed")
    evaluate(replace(config, result_dir=str(folder)))
    return read(folder)


def read(result_dir: Path, dataset: str = "sums") -> Records:
    """What each row got, by key and sample; a row that stands there twice fails the test."""
    lines = (result_dir / dataset / "samples.jsonl").read_text().splitlines()
    records = {(r["key"], r["sample"]): r for r in map(json.loads, lines)}
    assert len(records) == len(lines), "a row was written twice"
    return {row: {k: v for k, v in record.items() if k != "time"} for row, record in records.items()}
