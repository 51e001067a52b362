"""The quickstart's command: `make quickstart` without the set-up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.scoring.statistics import Estimate
from perl.tools.quickstart import comparison
from perl.tools.stages import Scores, StageError, read_score, run, start
from tests.results import record, summary

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "quickstart.sh"


def quickstart(cwd: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", SCRIPT, *flags], cwd=cwd, env=variables, capture_output=True, text=True, timeout=1500
    )


def table_text(before: Scores, after: Scores) -> str:
    from rich.console import Console

    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(comparison(before, after))
    return console.export_text()


def test_a_failed_stage_is_one_error_that_names_its_log(tmp_path):
    log = tmp_path / "stage.log"
    with pytest.raises(StageError, match=rf"^training ended with exit code 3; read {log}$"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log, "training")
    assert log.read_text() == "why\n"


def test_stages_run_in_the_repository_without_network(tmp_path):
    code = "import os, perl; print(os.getcwd(), os.environ['HF_HUB_OFFLINE'], perl.__file__)"
    run([sys.executable, "-c", code], tmp_path / "stage.log", "evaluation")
    assert (tmp_path / "stage.log").read_text().split() == [str(ROOT), "1", str(ROOT / "perl" / "__init__.py")]


SAVES_WHEN_TOLD_TO_END = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("on", flush=True)
time.sleep(600)
"""


def test_an_interrupted_stage_is_told_to_end_and_waited_for_with_what_it_started(tmp_path):
    child, saved = tmp_path / "child.py", tmp_path / "saved"
    child.write_text(SAVES_WHEN_TOLD_TO_END)
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}, {str(saved)!r}])"

    def interrupted_stage() -> None:
        with start([sys.executable, "-c", launcher], tmp_path / "stage.log", pipe=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "on\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_stage()
    assert saved.exists()


def test_the_score_is_the_evaluators_accuracy(tmp_path):
    (tmp_path / "test").mkdir()
    rows = [record("a"), record("b", score=0.0)]
    (tmp_path / "test" / "summary.json").write_text(json.dumps(summary(rows, 1)))
    assert read_score(tmp_path, "test") == Estimate(0.5, 0.0, 1.0)


def test_the_table_shows_both_scores_with_intervals_and_the_gain():
    before = Scores(sampled=Estimate(0.467, 0.432, 0.501), greedy=Estimate(0.492, 0.430, 0.551))
    after = Scores(sampled=Estimate(0.938, 0.922, 0.952), greedy=Estimate(1.0, 0.986, 1.0))
    text = table_text(before, after)
    for cell in ("46.7 [43.2, 50.1]", "93.8 [92.2, 95.2]", "+47.1", "100.0 [98.6, 100.0]", "+50.8"):
        assert cell in text


@pytest.mark.parametrize(
    ("environment", "flag"), [({"QUICKSTART_SEED": "one"}, "--seed"), ({"QUICKSTART_ENGINE": "sglang"}, "--engine")]
)
def test_a_wrong_setting_is_one_line(tmp_path, environment, flag):
    done = quickstart(tmp_path, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert flag in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_training_raises_the_accuracy(tmp_path, engine):
    if engine == "vllm":
        pytest.importorskip("vllm")
    done = quickstart(tmp_path, "--output_dir", "run", QUICKSTART_SEED="1", QUICKSTART_ENGINE=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"before", "after", "greedy_before", "greedy_after", "seed", "wall_s"}
    assert 0.30 <= result["before"] <= 0.60
    assert result["greedy_before"] <= 0.70
    assert result["after"] >= result["before"] + 0.25
    assert result["greedy_after"] > result["greedy_before"]
    assert result["seed"] == 1
    for stage in ("before", "after"):
        summary = json.loads((tmp_path / "run" / stage / "sampled" / "test" / "summary.json").read_text())
        assert summary["engines"] == [engine]
        assert summary["problems"] == 256
        assert (summary["adapter_hash"] is None) == (stage == "before")
    page = tmp_path / "run" / "report.html"
    assert done.stdout.splitlines()[-2] == f"report: {page}"
    text = page.read_text(encoding="utf-8")
    assert [
        name for name in ("Result", "Training", "Compared with quickstart-base") if f">{name}</h2>" not in text
    ] == []
    assert done.stdout.count("  reward ") == 6  # every tenth step
    metrics = [json.loads(line) for line in (tmp_path / "run" / "train" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "reward" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert steps[0]["aqn/sigma"] > steps[-1]["aqn/sigma"] == 0.0005
