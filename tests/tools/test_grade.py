"""python -m perl grade, as a user starts it."""

import datetime
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest


def perl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perl", *arguments], capture_output=True, text=True, check=False)


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_rows_come_back_with_their_grades(tmp_path):
    rows = [
        {"gold": "9*2 = 18\n#### 18", "output": "#### 18", "id": 7, "seconds": 0.25},
        {"gold": 1080, "output": "it is $1,080.00 a day"},
        {"gold": "\\sqrt{2}", "output": "\\boxed{9^{9^{9^{9}}}}"},
        {"gold": "18", "output": "no number \ud800 鸡蛋"},
    ]
    output = tmp_path / "out.jsonl"
    done = perl(
        *("grade", "--task", "gsm8k", "--input", write(tmp_path / "in.jsonl", rows), "--output", str(output)),
        *("--deadline_s", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert "4 rows graded as gsm8k, accuracy 0.5000 (2 correct, 1 timeout, 1 unextracted)" in done.stdout
    graded = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert graded[0] == rows[0] | {
        "score": 1.0,
        "scores": {"strict": 1.0, "flexible": 1.0},
        "extracted": "18",
        "reason": "correct",
    }
    assert [row["score"] for row in graded] == [1.0, 1.0, 0.0, 0.0]
    assert [row["reason"] for row in graded] == ["correct", "correct", "timeout", "unextracted"]
    assert graded[3]["output"] == rows[3]["output"]


def test_columns_of_parquet_that_json_has_no_form_for(tmp_path):
    columns = {
        "gold": ["18"],
        "output": ["#### 18"],
        "image": [{"bytes": b"\x89PNG", "path": None}],
        "time": [datetime.datetime(2026, 11, 23, 19, 30)],
        "share": [Decimal("0.25")],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    output = tmp_path / "out.jsonl"
    done = perl("grade", "--task", "gsm8k", "--input", str(tmp_path / "in.parquet"), "--output", str(output))
    assert done.returncode == 0, done.stderr
    row = json.loads(output.read_text())
    assert row["image"] == {"bytes": "iVBORw==", "path": None}
    assert (row["time"], row["share"], row["score"]) == ("2026-11-23 19:30:00", 0.25, 1.0)


@pytest.mark.parametrize(
    ("rows", "task", "message"),
    [
        ([{"gold": "18"}], "gsm8k", "in.jsonl:1: no 'output'; columns there: gold"),
        ([{"gold": "18", "output": 5}], "gsm8k", "in.jsonl:1: 'output' must be a text"),
        ([{"gold": "18", "output": "18"}, {"gold": [], "output": ""}], "gsm8k", "in.jsonl:2: the gold answer must be"),
        (['{"gold": "18", "outp'], "gsm8k", "in.jsonl:1: not valid json"),
        ([], "gsm8k", "holds no rows"),
        ([{"gold": "18", "output": "18"}], "gsm8", "--task: unknown task 'gsm8'; did you mean 'gsm8k'?"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(tmp_path, rows, task, message):
    source = write(tmp_path / "in.jsonl", rows)
    done = perl("grade", "--task", task, "--input", source, "--output", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_missing_files_are_named(tmp_path):
    done = perl("grade", "--task", "gsm8k", "--input", "absent.jsonl", "--output", str(tmp_path / "out.jsonl"))
    assert (done.returncode, done.stderr) == (2, "error: --input: no such file absent.jsonl\n")
    source = write(tmp_path / "in.jsonl", [])
    done = perl("grade", "--task", "gsm8k", "--input", source, "--output", str(tmp_path / "no" / "out.jsonl"))
    assert done.returncode == 2
    assert done.stderr == f"error: --output: no such folder {tmp_path / 'no'}\n"


@pytest.mark.parametrize(("name", "what"), [("in.txt", ".txt"), ("in", "no suffix")])
def test_an_unknown_suffix_is_one_line_with_those_there_are(tmp_path, name, what):
    source = write(tmp_path / name, [{"gold": "18", "output": "18"}])
    done = perl("grade", "--task", "gsm8k", "--input", source, "--output", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --input: {source}: {what} is no data format; known: .parquet, .jsonl, .json, .csv\n"
    )


def test_commands_are_listed_and_guessed():
    done = perl("--help")
    assert done.returncode == 0
    assert "  grade " in done.stdout
    assert "  prepare " in done.stdout
    done = perl("grad")
    assert done.returncode == 2
    assert "unknown command 'grad'; did you mean 'grade'?" in done.stderr


def test_every_listed_command_has_its_module():
    import importlib

    from perl.__main__ import COMMANDS

    for module_name, description in COMMANDS.values():
        module = importlib.import_module(module_name)
        assert callable(module.add_arguments)
        assert callable(module.run)
        assert description


def test_a_deadline_that_never_comes(tmp_path):
    """poll() takes no number of seconds that large."""
    source = write(tmp_path / "in.jsonl", [{"gold": "x+1", "output": "\\boxed{1+x}"}])
    words = "grade", "--task", "math", "--input", source, "--output", str(tmp_path / "out.jsonl"), "--deadline_s"
    done = perl(*words, "1e10")
    assert (done.returncode, "accuracy 1.0000" in done.stdout) == (0, True), done.stderr
    done = perl(*words, "0")
    assert (done.returncode, done.stderr) == (2, "error: --deadline_s 0: write a number of seconds above 0\n")
