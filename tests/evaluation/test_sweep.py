"""A sweep over real adapters: each scored as alone, the base loaded once, what fails fails alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.eval import main
from perl.evaluation.candidate_run import CandidateRun
from perl.evaluation.candidates import find_candidates
from perl.evaluation.datasets import load_problem_sets
from perl.evaluation.run import SweepError, evaluate
from perl.evaluation.setup import Setup
from perl.evaluation.weights import MERGED, WeightsAhead, merged_model
from tests.evaluation.conftest import read
from tests.evaluation.test_run import alive, command, lines, wait_for, workers_of
from tests.tiny import save_tiny
from tests.workers.test_worker import make_adapter


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """A training run's folder: checkpoints 4 and 12, a half-written one, and the final adapter, which is the last."""
    folder = tmp_path_factory.mktemp("run")
    for step in (12, 4):
        make_adapter(tiny, folder / f"checkpoint-{step}", seed=step)
    (folder / "checkpoint-20").mkdir()
    shutil.copy(folder / "checkpoint-4" / "adapter_config.json", folder / "checkpoint-20")
    shutil.copytree(folder / "checkpoint-12", folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def settings(config) -> EvalConfig:
    return replace(config, n=2, max_samples=12)


@pytest.fixture(scope="module")
def swept(settings, run, tmp_path_factory) -> Path:
    """Base and both checkpoints, two workers, the second checkpoint's results interrupted and gone on with."""
    folder = tmp_path_factory.mktemp("swept")
    sweep = replace(settings, adapter=["base", str(run)], result_dir=str(folder), dp_size=2)
    evaluate(sweep)
    samples = folder / "checkpoint-12" / "sums" / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-900])
    evaluate(sweep)
    return folder


def test_a_run_folder_is_its_checkpoints_in_order(run, caplog):
    found = find_candidates(["base", str(run)])
    assert [(c.name, c.step) for c in found] == [("base", 0), ("checkpoint-4", 4), ("checkpoint-12", 12)]
    assert "checkpoint-20 holds no whole adapter" in caplog.text
    assert "adapter is the same adapter as" in caplog.text
    (one,) = find_candidates([str(run / "adapter")])
    assert (one.name, one.adapter) == ("", run / "adapter")
    assert [c.name for c in find_candidates(None)] == [""]


def test_names_that_clash_get_their_parents(run, tiny, tmp_path):
    make_adapter(tiny, tmp_path / "other" / "checkpoint-4", seed=9)
    names = [c.name for c in find_candidates([str(run / "checkpoint-4"), str(tmp_path / "other" / "checkpoint-4")])]
    assert names == [f"{run.name}-checkpoint-4", "other-checkpoint-4"]
    with pytest.raises(UserError, match="named twice"):
        find_candidates([str(run / "checkpoint-4"), str(run)])
    with pytest.raises(UserError, match="needs no --adapter"):
        find_candidates(["base"])
    with pytest.raises(UserError, match="no such folder"):
        find_candidates(["base", str(tmp_path / "nowhere")])


def test_each_candidate_gets_the_rows_of_an_evaluation_of_its_own(swept, settings, run, undisturbed, tmp_path):
    for name in ("checkpoint-4", "checkpoint-12"):
        alone = tmp_path / name
        summary = evaluate(replace(settings, adapter=[str(run / name)], result_dir=str(alone)))["sums"]
        assert read(alone) == read(swept / name)
        of_sweep = json.loads((swept / name / "sums" / "summary.json").read_text())
        assert of_sweep["metrics"] == summary["metrics"]
        assert of_sweep["adapter_hash"] == summary["adapter_hash"] == summary["merge"]["adapter_hash"]
        assert not (swept / name / MERGED).exists()
    assert read(swept / "base").items() <= undisturbed.items()
    rows = [tuple(r["completion"] for r in read(swept / name).values()) for name in ("base", "checkpoint-4")]
    assert rows[0] != rows[1]


def test_no_more_than_two_merged_models_lie_on_disk(settings, run, tiny, tmp_path):
    """The next but one waits for a candidate to be done."""
    adapters = [str(run / "checkpoint-4"), str(run / "checkpoint-12"), str(make_adapter(tiny, tmp_path / "third"))]
    sweep = replace(settings, adapter=adapters, result_dir=str(tmp_path / "out"))
    setup = Setup.of(sweep)
    runs = [
        CandidateRun.open(setup, candidate, load_problem_sets(sweep, setup.template)) for candidate in setup.candidates
    ]
    with WeightsAhead(setup, runs) as weights:
        taken = 0
        while taken < 2:
            taken += weights.take(under_way=taken) is not None
        assert weights.take(under_way=2) is None
    assert [(tmp_path / "out" / candidate.name / MERGED).exists() for candidate in setup.candidates] == [
        True, True, False,
    ]  # fmt: skip


def test_what_was_merged_for_another_dtype_is_merged_again(settings, run, tmp_path):
    """In float32 its update is whole; auto, of a float32 base, gives the same, and bfloat16 was asked for by name."""
    adapter = run / "checkpoint-4"
    reports = []
    for dtype in ("bfloat16", "auto", "auto"):
        setup = Setup.of(replace(settings, adapter=[str(adapter)], result_dir=str(tmp_path / "out"), dtype=dtype))
        reports.append(merged_model(setup, setup.candidates[0], adapter))
        made = (tmp_path / "out" / MERGED / "merge.json").stat().st_mtime_ns
        if len(reports) == 2:
            kept = made
    assert [report.dtype for report in reports] == ["bfloat16", "float32", "float32"]
    assert made == kept


@pytest.mark.slow
def test_a_signal_ends_a_sweep_whose_command_goes_on(config, undisturbed, run, tmp_path):
    words = [*command(replace(config, result_dir=str(tmp_path), dp_size=2)), "--adapter", "base", str(run)]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: lines(tmp_path / "base") > 50)
    workers = workers_of(running.pid)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 143, errors.decode()
    said = "stopped: SIGTERM; the rows that are done stay, and the same command goes on"
    assert errors.decode().splitlines()[-1] == said
    assert not any(map(alive, workers))
    kept = read(tmp_path / "base")
    assert kept.items() < undisturbed.items()
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "base") == undisturbed
    summary = json.loads((tmp_path / "base" / "sums" / "summary.json").read_text())
    assert summary["generation"]["rows"] == len(undisturbed) - len(kept)
    assert [len(read(tmp_path / name)) for name in ("checkpoint-4", "checkpoint-12")] == [len(undisturbed)] * 2
    assert not list(tmp_path.rglob(MERGED))


def test_a_sweep_that_is_interrupted_says_what_it_is(settings, run, tmp_path, monkeypatch):
    """So that no single evaluation is put beside it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("perl.evaluation.run.generate", interrupted)
    here = replace(settings, result_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        evaluate(replace(here, adapter=[str(run)]))
    entries = json.loads((tmp_path / "sweep.json").read_text())["candidates"]
    assert [(entry["name"], entry["metrics"]) for entry in entries] == [("checkpoint-4", None), ("checkpoint-12", None)]
    with pytest.raises(UserError, match="holds a sweep, and this is a single evaluation"):
        evaluate(here)


def test_sweep_json_holds_the_curve(swept, run):
    sweep = json.loads((swept / "sweep.json").read_text())
    assert [(e["name"], e["step"], e["error"]) for e in sweep["candidates"]] == [
        ("base", 0, None), ("checkpoint-4", 4, None), ("checkpoint-12", 12, None),
    ]  # fmt: skip
    for entry in sweep["candidates"]:
        summary = json.loads((swept / entry["name"] / "summary.json").read_text())
        assert entry["metrics"] == {"sums": summary["sums"]["metrics"]}
    logs = [file.read_text() for file in (swept / "logs").iterdir()]
    assert len(logs) == 2
    assert not (swept / "summary.json").exists()


def test_a_candidates_folder_is_a_result_folder_of_its_own(swept, settings, run, monkeypatch):
    """A single evaluation finds the sweep's rows there, and refuses another adapter."""
    monkeypatch.setattr("perl.evaluation.generate.WorkerPool", None)
    here = replace(settings, result_dir=str(swept / "checkpoint-4"))
    evaluate(replace(here, adapter=[str(run / "checkpoint-4")]))
    with pytest.raises(UserError, match="adapter_hash was"):
        evaluate(replace(here, adapter=[str(run / "checkpoint-12")]))


def test_what_cannot_be_scored_fails_alone(settings, run, tiny, tmp_path, capsys):
    untrained = make_adapter(tiny, tmp_path / "untrained", std=0.0)
    stranger = make_adapter(save_tiny(tmp_path / "deeper", layers=3), tmp_path / "stranger")
    adapters = [str(untrained), str(run / "checkpoint-4"), str(stranger), "base"]
    sweep = replace(settings, adapter=adapters, result_dir=str(tmp_path / "out"))
    with pytest.raises(
        SweepError, match=r"2 of 4 not scored: untrained: .*untrained or empty.*; stranger: .*other base"
    ):
        evaluate(sweep)
    entries = json.loads((tmp_path / "out" / "sweep.json").read_text())["candidates"]
    assert [entry["metrics"] is None for entry in entries] == [True, False, True, False]
    assert "untrained or empty" in entries[0]["error"]
    assert len(read(tmp_path / "out" / "checkpoint-4")) == len(read(tmp_path / "out" / "base")) == 24
    words = [
        "--model",
        str(tiny),
        "--dataset",
        settings.dataset,
        "--n",
        "2",
        "--temperature",
        "1",
        "--max_samples",
        "12",
    ]
    words += ["--max_new_tokens", "40", "--result_dir", str(tmp_path / "out"), "--adapter", *adapters]
    capsys.readouterr()
    assert main(words) == 1
    shown = capsys.readouterr()
    assert shown.err.strip().splitlines()[-1].startswith("error: 2 of 4 not scored: untrained")
    assert "untrained: not scored" in shown.out
