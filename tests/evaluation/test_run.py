"""The evaluator in real processes: same rows whatever the devices, nothing lost whatever dies."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.eval import main
from perl.evaluation.run import evaluate
from perl.scoring.results import read_samples
from perl.workers.pool import WorkerError
from tests.evaluation.conftest import read

ROOT = Path(__file__).resolve().parents[2]


def command(config: EvalConfig) -> list[str]:
    """The command line; small batches make the run long enough to be interrupted, and change no row."""
    config = replace(config, max_batch_tokens=500)
    given = {name: value for name, value in vars(config).items() if value is not None and name != "environment"}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, str(ROOT / "perl" / "eval.py"), *flags]


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def lines(result_dir: Path) -> int:
    file = result_dir / "sums" / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def workers_of(parent: int) -> list[int]:
    """Processes of the group of each worker: a worker leads a group of its own, so its number is its group's."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_workers_make_the_same_rows_as_one(config, undisturbed, tmp_path):
    summary = evaluate(replace(config, result_dir=str(tmp_path), dp_size=2))["sums"]
    assert read(tmp_path) == undisturbed
    assert len(undisturbed) == 40 * 16
    assert len({r["completion"] for r in undisturbed.values()}) > 100
    assert summary == json.loads((tmp_path / "sums" / "summary.json").read_text())
    assert json.loads((tmp_path / "summary.json").read_text()) == {"sums": summary}


def test_summary_agrees_with_its_samples(config, undisturbed, tmp_path):
    """Recompute from samples.jsonl what does not need a bootstrap."""
    summary = evaluate(replace(config, result_dir=str(tmp_path), n=2))["sums"]
    rows = list(read(tmp_path).values())
    assert len(rows) == 80 == summary["samples"]
    assert summary["metrics"]["accuracy"]["value"] == pytest.approx(sum(r["score"] for r in rows) / 80)
    by_key: dict[str, list[float]] = {}
    for row in rows:
        by_key.setdefault(row["key"], []).append(row["score"])
    assert summary["metrics"]["pass@2"]["value"] == pytest.approx(sum(max(s) for s in by_key.values()) / 40)
    assert summary["truncated"] == sum(r["finish_reason"] == "length" for r in rows) / 80
    assert summary["unextracted"] == sum(r["extracted"] is None for r in rows) / 80
    assert summary["rules"]["strict"] == {"mean": sum(r["scores"]["strict"] for r in rows) / 80, "scored": 80}
    assert summary["mean_tokens"] == sum(r["tokens"] for r in rows) / 80
    assert (summary["generation"]["rows"], summary["generation"]["dtype"]) == (80, "float32")
    assert summary["sampling"]["temperature"] == 1.0
    assert "output the final answer" in summary["styles"]["gsm8k"]["template"]
    assert summary["provenance"]["versions"]["transformers"]
    # Two of sixteen samples: the same rows as in the run of sixteen.
    assert read(tmp_path).items() <= undisturbed.items()


def test_a_folder_or_data_set_called_merged_stays(config, tiny, sums, tmp_path):
    """The evaluator's own merged models lie in .merged, and it removes nothing else."""
    model = shutil.copytree(tiny, tmp_path / "out" / "merged")
    settings = replace(config, model=str(model), result_dir=str(tmp_path / "out"), n=1, max_samples=2)
    evaluate(settings)
    assert (model / "config.json").is_file()
    data = shutil.copy(sums, tmp_path / "merged.jsonl")
    evaluate(replace(settings, dataset=str(data), result_dir=str(tmp_path / "other")))
    assert len(read(tmp_path / "other", "merged")) == 2


def test_another_split_needs_another_folder(config, sums, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = sums.read_text().splitlines(keepends=True)
    for name, own in (("train", lines[:5]), ("test", lines[5:10])):
        (data / f"{name}.jsonl").write_text("".join(own))
    settings = replace(config, dataset=str(data), result_dir=str(tmp_path / "out"), n=1)
    evaluate(replace(settings, split="train"))
    with pytest.raises(UserError, match='split was "train", is null; name another --result_dir'):
        evaluate(settings)


def test_resuming_makes_only_what_is_missing(config, undisturbed, tmp_path):
    settings = replace(config, result_dir=str(tmp_path), n=2, max_samples=10)
    evaluate(settings)
    file = tmp_path / "sums" / "samples.jsonl"
    before = file.read_bytes()
    file.write_bytes(before[:-30])  # the last line is torn
    kept = before[: before[:-30].rfind(b"\n") + 1]
    evaluate(replace(settings, n=3, max_samples=12, dp_size=2))
    assert file.read_bytes().startswith(kept)
    done = read(tmp_path)
    assert len(done) == 36
    assert done.items() <= undisturbed.items()
    summary = json.loads((tmp_path / "sums" / "summary.json").read_text())
    assert summary["generation"]["rows"] == 36 - 19
    evaluate(replace(settings, n=3, max_samples=12))  # nothing is missing: no engine starts, the speed stays
    assert json.loads((tmp_path / "sums" / "summary.json").read_text())["generation"] == summary["generation"]


def test_changed_sampling_and_changed_model_are_refused(config, tiny, tmp_path):
    settings = replace(config, result_dir=str(tmp_path), n=1, max_samples=2)
    evaluate(settings)
    with pytest.raises(UserError, match=r"sampling\.temperature was 1\.0, is 0\.5"):
        evaluate(replace(settings, temperature=0.5))
    with pytest.raises(UserError, match=r"styles\.gsm8k\.system_prompt was null, is \"Think\.\""):
        evaluate(replace(settings, system_prompt="Think."))
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    evaluate(replace(settings, model=str(other)))  # a copy is the same model
    generation = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 7}))
    with pytest.raises(UserError, match="base_hash was"):
        evaluate(replace(settings, model=str(other)))


def test_prompts_without_room_are_recorded_as_such(config, tmp_path, caplog):
    summary = evaluate(replace(config, result_dir=str(tmp_path), n=1, max_samples=20, max_model_len=30))["sums"]
    rows = read(tmp_path).values()
    overlong = [r for r in rows if r["error"]]
    assert overlong == []
    assert {r["prompt_tokens"] + r["tokens"] for r in rows if r["finish_reason"] == "length"} == {30}
    length = min(r["prompt_tokens"] for r in rows)
    folder = tmp_path / "short"
    summary = evaluate(replace(config, result_dir=str(folder), n=1, max_samples=20, max_model_len=length + 1))["sums"]
    overlong = [r for r in read(folder).values() if r["error"]]
    assert 0 < len(overlong) < 20
    assert {(r["tokens"], r["score"], r["finish_reason"]) for r in overlong} == {(0, 0.0, "length")}
    assert summary["not_generated"] == len(overlong)
    assert "get no completion" in caplog.text
    again = replace(config, result_dir=str(folder), n=1, max_samples=20, max_model_len=length + 1)
    assert main(command(again)[2:]) == 3  # the exit code tells, also when nothing is left to generate


def all_die(setup, runs):
    raise WorkerError("all workers died")


def test_rows_that_have_failed_are_asked_again(config, tmp_path, monkeypatch):
    settings = replace(config, result_dir=str(tmp_path), n=1, max_samples=6)
    evaluate(settings)
    (file,) = tmp_path.glob("*/samples.jsonl")
    whole = read_samples(file)
    failed = {"error": "it killed its worker twice, alone", "completion": "", "score": 0.0, "tokens": 0}
    lines = [row | failed if place < 2 else row for place, row in enumerate(whole.values())]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with monkeypatch.context() as patch:  # they kill their workers again
        patch.setattr("perl.evaluation.run.generate", all_die)
        assert evaluate(settings)["sums"]["not_generated"] == 2
    summary = evaluate(settings)["sums"]
    assert (summary["not_generated"], summary["generation"]["rows"]) == (0, 6)  # its speed is that of all
    again = read_samples(file)
    assert list(again) == list(whole)
    assert [row["completion"] for row in again.values()] == [row["completion"] for row in whole.values()]


@pytest.mark.slow
def test_a_killed_worker_costs_nothing(config, undisturbed, tmp_path):
    run = subprocess.Popen(
        command(replace(config, result_dir=str(tmp_path), dp_size=2)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    wait_for(lambda: lines(tmp_path) > 50)
    victim = workers_of(run.pid)[0]
    os.kill(victim, signal.SIGKILL)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors.decode()
    assert read(tmp_path) == undisturbed
    assert "died: killed by SIGKILL" in errors.decode()
    assert json.loads((tmp_path / "sums" / "summary.json").read_text())["generation"]["worker_restarts"] == 1


@pytest.mark.slow
def test_a_killed_parent_leaves_no_orphans_and_its_command_finishes_the_job(config, undisturbed, tmp_path):
    words = command(replace(config, result_dir=str(tmp_path), dp_size=2))
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: lines(tmp_path) > 50)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(alive, workers)), seconds=10)
    kept = lines(tmp_path)
    assert 50 < kept < len(undisturbed)
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert read(tmp_path) == undisturbed
    summary = json.loads((tmp_path / "sums" / "summary.json").read_text())
    assert summary["generation"]["rows"] == len(undisturbed) - kept


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=lambda sign: sign.name)
def test_a_signal_ends_workers_and_keeps_what_is_done(sign, config, undisturbed, tmp_path):
    words = command(replace(config, result_dir=str(tmp_path)))
    # A suite that a script started in the background ignores SIGINT, and so would its children.
    run = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: lines(tmp_path) > 50)
    workers = workers_of(run.pid)
    run.send_signal(sign)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + sign, errors.decode()
    said = f"stopped: {sign.name}; the rows that are done stay, and the same command goes on"
    assert errors.decode().splitlines()[-1] == said
    assert not any(map(alive, workers))
    assert read(tmp_path).items() < undisturbed.items()


def test_an_engine_that_does_not_start_is_one_line(config, tiny, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    words = command(replace(config, model=str(broken), result_dir=str(tmp_path / "out")))
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 1
    *before, last = run.stderr.strip().splitlines()
    assert all(line.startswith(("INFO ", "0/640 rows")) for line in before)  # the latter each half minute
    assert last.startswith("error: the engine of worker 0 did not start")
    assert "worker-0.log" in last


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(config, undisturbed, tmp_path):
    """A limit on the size of files stands in for the disk: the kernel writes a part and then refuses."""
    words = command(replace(config, result_dir=str(tmp_path), n=4))
    limit = 40_000
    full = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == (
        f"error: {tmp_path / 'sums' / 'samples.jsonl'}: File too large; what was written stays: make room, and the same"
        " command goes on"
    )
    kept = lines(tmp_path)
    assert 20 < kept < 160
    assert main(words[2:]) == 0
    done = read(tmp_path)
    assert len(done) == 160
    assert done.items() <= undisturbed.items()
