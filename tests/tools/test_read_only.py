"""Folders that cannot be written to: one line that names the place, and nothing is left behind.

Exit code 2; 1 where it is met in the middle of the work.
"""

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from perl.__main__ import main
from perl.base.errors import UserError, report_errors
from perl.evaluation.store import locked
from perl.models.folders import content_hash, written_whole
from perl.runs.rundir import check_folder, held
from perl.tools.stages import alone
from tests.results import record, summary

VERL = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"


@pytest.fixture
def place(tmp_path):
    """Rows in files, the evaluation a, and disk/, which binds root too: the evaluation b and their adapter."""
    (tmp_path / "rows.jsonl").write_text('{"gold": "3", "output": "#### 3"}\n')
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 2", "answer": "#### 3"}\n')
    adapter = tmp_path / "disk" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").touch()
    scored = summary([record("a")], 1, adapter_hash=content_hash(adapter))
    for name in ("a", "disk/b"):
        (tmp_path / name / "sums").mkdir(parents=True)
        (tmp_path / name / "sums" / "samples.jsonl").write_text(json.dumps(record("a")) + "\n")
        (tmp_path / name / "sums" / "summary.json").write_text(json.dumps(scored))
        (tmp_path / name / "sums" / "run.json").write_text("{}")
    disk = str(tmp_path / "disk")
    try:
        subprocess.run(["mount", "--bind", disk, disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no rights to mount a folder read-only: {error}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True, capture_output=True)
        yield tmp_path
    finally:
        subprocess.run(["umount", disk], check=True, capture_output=True)


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "named", "code"),
    [
        (["report", "disk/b"], "disk/b/report.html", 2),
        (["report", "a", "--output", "disk/page.html"], "disk/page.html", 2),
        (["grade", "--task", "gsm8k", "--input", "rows.jsonl", "--output", "disk/rows.jsonl"], "disk/rows.jsonl", 1),
        (["from-verl", "--output", "disk/recipe.yaml", VERL], "disk/recipe.yaml", 1),
        (["card", "disk/adapter", "--results", "a"], "disk/adapter/README.md", 1),
        (["prepare", "gsm8k", "--source", "train.jsonl", "--local_save_dir", "disk"], "disk/train.parquet", 1),
        (["prepare", "gsm8k", "--source", "train.jsonl", "--local_save_dir", "disk/x"], "--local_save_dir disk/x", 2),
    ],
)
def test_a_tool_that_cannot_write_its_output(place, monkeypatch, capsys, words, named, code):
    monkeypatch.chdir(place)
    before = files(place)
    with pytest.raises(SystemExit) as ended, report_errors():
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert named in said
    assert "Read-only file system; " in said
    assert "make room" not in said
    assert files(place) == before


@pytest.mark.parametrize(
    ("hold", "named"),
    [
        (locked, "--result_dir"),
        (lambda folder: alone(folder, "--output", Console(quiet=True)), "--output"),
        (lambda folder: held(folder, resuming=True), "--config.training.output_dir"),
        (lambda folder: written_whole(folder / "merged"), "--output"),
    ],
)
@pytest.mark.parametrize("below", ["b", "new"])
def test_a_folder_to_work_in(place, hold, named, below):
    before = files(place)
    with (
        pytest.raises(UserError, match=rf"^{named} .*disk.*Read-only file system") as error,
        hold(place / "disk" / below),
    ):
        pass
    assert error.value.exit_code == 2
    assert files(place) == before


def test_a_run_that_would_go_on_there(place):
    with pytest.raises(UserError, match=r"output_dir .*disk/b can't be written to; give another folder$"):
        check_folder(place / "disk" / "b", resuming=True)
