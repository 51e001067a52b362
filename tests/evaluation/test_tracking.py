"""Which W&B run the scores go to, and what is logged; tests/tools/test_card.py reads a real sweep's back."""

import importlib.util
import json

import pytest

from perl.base.errors import UserError
from perl.base.tracking import WandbRun
from perl.config.evaluation import EvalConfig
from perl.evaluation.candidates import Candidate
from perl.evaluation.run import evaluate
from perl.evaluation.tracking import log_results, training_run

ESTIMATE = {"value": 0.5, "low": 0.25, "high": 0.75}
METRICS = {"accuracy": ESTIMATE, "avg@1": ESTIMATE, "pass@1": ESTIMATE}
SUMMARY = {"metrics": METRICS, "problems": 8, "n": 1, "engines": ["hf"]}


def config(tmp_path, **changes):
    return EvalConfig(**{"model": "m", "dataset": "sums", "result_dir": str(tmp_path), "report_to": "wandb"} | changes)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DISABLED", "WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)


def test_wandb_that_is_not_installed_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "wandb" else find(name, *args))
    advice = "pip install wandb, or write --report_to none"
    with pytest.raises(UserError, match=f"^--report_to wandb: wandb is not installed; {advice}$"):
        evaluate(config(tmp_path, model="./nowhere"))


def test_the_run_is_named_in_the_adapters_folder_or_above(tmp_path):
    run = WandbRun(id="abc12345", project="p", entity="me")
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "copy").mkdir()
    run.write(tmp_path / "run")
    assert training_run(tmp_path / "run" / "adapter") == run
    assert training_run(tmp_path / "run") == run
    assert training_run(tmp_path / "copy") is None


def test_without_a_trainings_run_a_new_one_is_started_and_a_line_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    log_results(config(tmp_path), [Candidate()], {"": {"sums": SUMMARY}})
    assert "W&B is offline: results go to a new run, since no training's run is known" in caplog.text
    assert "perl-eval/" in caplog.text
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/**/*.table.json")
    assert json.loads(table.read_text())["data"] == [
        ["base", None, "sums", "accuracy", 0.5, 0.25, 0.75, 8, 1, "hf"],
    ]


def test_adapters_of_two_trainings_go_to_their_own_runs_and_the_base_to_neither(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in ("one", "two"):
        (tmp_path / name / "adapter").mkdir(parents=True)
        WandbRun(id=f"id-{name}", project="p").write(tmp_path / name)
    candidates = [Candidate(name="base", step=0)]
    candidates += [Candidate(name=name, adapter=tmp_path / name / "adapter", step=5) for name in ("one", "two")]
    found = {candidate.name: {"sums": SUMMARY} for candidate in candidates}
    log_results(config(tmp_path / "results"), candidates, found)
    assert caplog.text.count("a new run") == 1
    assert "the training's run, p/id-one" in caplog.text
    assert "the training's run, p/id-two" in caplog.text


def test_wandb_that_is_disabled_gets_nothing_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_DISABLED", "true")
    log_results(config(tmp_path), [Candidate()], {"": {"sums": SUMMARY}})
    assert "WANDB_DISABLED is set: nothing is sent to W&B" in caplog.text
    assert not (tmp_path / "wandb").exists()
