"""benchmarks.accelerator: its plan, its refusals, what it keeps, and a whole run on the emulated NPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import accelerator
from benchmarks._workload import Policy, decode_bytes, decode_flops
from perl import device

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.accelerator"]
SMALL = ["--models", "tiny", "--rows", "8", "1", "--new_tokens", "8", "40"]


def planned(*arguments):
    return [
        (case.kind, case.model, case.shapes)
        for case in accelerator.plan(accelerator.make_parser().parse_args(arguments))
    ]


def test_the_plan_takes_what_matters_most_first():
    cases = planned()
    assert [kind for kind, _, _ in cases] == ["rollout"] * 3 + ["step"] * 3 + ["update"] * 3 + ["mixed"] * 3
    assert [model for _, model, _ in cases[:3]] == ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-1.5b"]
    assert cases[0][2] == ((64, 256), (64, 2048), (8, 256), (8, 2048), (1, 256))
    assert [cases[i][2] for i in (3, 6, 9)] == [((64, 256),), ((16, 2048),), ((64, 512),)]
    assert planned("--cases", "update", "step", "--models", "tiny", "--rows", "8", "--new_tokens", "32") == [
        ("update", "tiny", ((8, 32),)),
        ("step", "tiny", ((8, 32),)),
    ]


def test_tokens_are_drawn_as_far_as_the_budget_goes():
    def afford(step_s, wanted=2048):
        return accelerator.affordable(step_s, 1.0, wanted, 256, 12.0)

    assert afford(0.005) == 2048  # 11.2 s
    assert afford(0.006) == 256  # 13.3 s
    assert afford(0.08) == 256  # 21.5 s are less than twice the budget
    assert afford(0.1) == 64  # 110 would be eleven seconds
    assert afford(10.0) == 32
    assert afford(10.0, wanted=20) == 20


def test_bytes_and_operations_of_a_decode_step_by_hand():
    policy = Policy(model="qwen2.5-7b", dtype="bfloat16", merge_adapter=True, capture_graphs=True)
    weights = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944) + 152_064 * 3584  # 7.07e9 without the embedding table
    assert decode_bytes(policy, 0, 0) == 2 * weights
    assert decode_bytes(policy, 64, 1280) == 2 * (weights + 64 * 1280 * 2 * 512 * 28)
    assert decode_flops(policy) == 2 * weights


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no accelerator is seen here; write --models tiny"),
        (["--models", "tiny", "qwen2.5-7b"], "no accelerator is seen here"),
        (
            ["--models", "tiny", "--rows", "12"],
            "--rows 12: completions come in groups of 8; write 1 to 8, or a multiple",
        ),
        (["--models", "tiny", "--new_tokens", "4096"], "--new_tokens 4096: the models have 4,096 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cpu", 2))
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    assert accelerator.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"benchmarks.accelerator: {said}")


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--models", "gpt"], ["--rows", "0"], ["--x"]])
def test_wrong_flags_end_with_2(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments])
    with pytest.raises(SystemExit, match="2"):
        accelerator.main()


def row(side, kind="rollout", new_tokens=2048, **fields):
    found = {"kind": kind, "model": "qwen2.5-7b", "rows": 64, "new_tokens": new_tokens, "side": side}
    rollout = {"measured_new_tokens": new_tokens, "tokens_s": 1000.0, "step_ms": 60.0, "limit_tokens_s": 9000}
    rollout |= {"limit_share": 0.1, "peak_gib": 20.0, "captures": 0, "capture_s": 0.0, "merged": True}
    rollout |= {"earlier_captures": 0, "earlier_capture_s": 0.0}
    return found | (rollout if kind in ("rollout", "mixed") else {}) | fields


def cells(lines, start):
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_say_of_how_many_tokens_a_number_is_and_what_failed():
    graphs = {
        "tokens_s": 5500.0,
        "limit_share": 0.61,
        "step_ms": 11.0,
        "earlier_captures": 9,
        "earlier_capture_s": 4.21,
    }
    results = [
        row("perl_graphs", **graphs, captures=1, capture_s=0.3),
        row("trl", measured_new_tokens=256, merged=False),
        row("perl", tokens_s=2000.0, merged=False),
        row("trl", "step", 256, error="out of memory"),
        row("perl", "step", 256, wall_s=10.0, rollout_s=4.0, update_s=6.0, peak_gib=30.5),
        row("trl", "update", 512, old_logps_s=2.0, update_s=9.0, peak_gib=40.0),
        row("perl", "update", 512, old_logps_s=1.0, update_s=3.0, peak_gib=30.0),
    ]
    machine = {"device": "NVIDIA H200", "memory_gib": 139.8, "python": "3.12.3", "versions": {"torch": "2.10.0"}}
    lines = accelerator.tables(results, machine | {"bandwidth_gb_s": 4100.0})
    assert lines[0] == "NVIDIA H200 (139.8 GiB), Python 3.12.3, torch 2.10.0;"
    assert cells(lines, "| qwen2.5-7b | 64 | 2048") == [
        *("qwen2.5-7b", "64", "2048", "1000 (from 256 new tokens)", "2000, unmerged", "5500", "5.50", "9000", "0.61"),
        *("60", "60", "11", "9 (4.2) / 1 (0.3)", "20", "20", "20"),
    ]
    assert cells(lines, "| qwen2.5-7b | 64 | 256")[3:7] == ["out of memory", "10 / 4 / 6", "–", "–"]
    assert cells(lines, "| qwen2.5-7b | 64 | 512")[3:] == ["2 / 9", "1 / 3", "3.00", "40", "30"]
    for start in [i for i, line in enumerate(lines) if line.startswith("| model")]:
        assert len({line.count("|") for line in lines[start : start + 3]}) == 1


def test_the_tests_last_line_is_counted():
    count = accelerator.summary_of_tests
    assert count(["..F", "1 failed, 14 passed in 76.38s (0:01:16)"]) == {"passed": 14, "failed": 1, "skipped": 0}
    assert count(["15 skipped in 3.21s"]) == {"passed": 0, "failed": 0, "skipped": 15}
    assert count(["2 passed, 1 error in 3.21s"])["failed"] == 1
    assert count(["no tests ran"])["failed"] == 1


def test_a_case_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    late = str(tmp_path / "late")
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WRITES_LATER!r}, {late!r}])"
    program = f"{child}; print('begun', flush=True); import time; time.sleep(60)"
    lines = []
    end = accelerator.run([sys.executable, "-c", program], dict(os.environ), 2.0, lines.append)
    assert end.killed
    assert end.seconds < 30
    assert lines == ["begun"]
    time.sleep(4)
    assert not (tmp_path / "late").exists()


WRITES_LATER = "import sys, time; time.sleep(5); open(sys.argv[1], 'w')"


@pytest.mark.slow
def test_cases_that_do_not_fit_are_listed_and_an_interrupt_keeps_what_was_measured(tmp_path):
    output = tmp_path / "new" / "results.jsonl"
    arguments = [*SMALL, "--skip_tests", "--output", str(output)]
    done = subprocess.run(
        [*COMMAND, *arguments, "--minutes", "0.01"], cwd=ROOT, timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["case"].split()[0] for row in result["skipped"]] == ["rollout", "step", "update", "mixed"]
    assert result["skipped"][0]["reason"].endswith("s are left, it needs 5")
    assert [json.loads(line)["kind"] for line in output.read_text().splitlines()] == ["skipped"] * 4 + ["end"]

    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if '"tokens_s"' in line:
            process.send_signal(signal.SIGTERM)
            break
    last = process.communicate(timeout=60)[0].splitlines()[-1]
    result = json.loads(last)
    assert process.returncode == 0
    assert len(result["results"]) >= 1
    assert [row["reason"] for row in result["skipped"]] == ["interrupted"] * 4
    assert '"tokens_s"' in output.read_text()


@pytest.mark.slow
@pytest.mark.npu
def test_all_kinds_of_cases_on_an_npu(run_npu, tmp_path):
    output = tmp_path / "results.jsonl"
    command = [*COMMAND, *SMALL, "--skip_tests", "--output", str(output)]
    lines = run_npu(command, devices=2, timeout=500).stdout.splitlines()
    result = json.loads(lines[-1])
    assert result["failed"] == result["skipped"] == []
    assert result["machine"]["device"] == "Ascend-emulated"
    assert result["machine"]["versions"]["torch"] == torch.__version__
    assert result["machine"]["bandwidth_gb_s"] > 0
    found = {(row["kind"], row["rows"], row["new_tokens"], row["side"]): row for row in result["results"]}
    sides = ("trl", "perl", "perl_graphs")
    shapes = [("rollout", 8, 8), ("rollout", 8, 40), ("rollout", 1, 8), ("step", 8, 8), ("mixed", 8, 16)]
    expected = {(*shape, side) for shape in shapes for side in sides}
    assert found.keys() == expected | {("update", 8, 40, side) for side in sides[:2]}
    for (kind, rows, new_tokens, side), row in found.items():
        assert row["peak_gib"] > 0
        if kind == "rollout":
            assert row["tokens"] == rows * new_tokens  # nothing ended a row before
            assert row["measured_new_tokens"] == new_tokens
            assert row["tokens_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.02)
            assert 0 < row["limit_share"] < 1
            assert row["merged"] == (side != "trl")
            assert (row["captures"] + row["earlier_captures"] > 0) == (side == "perl_graphs")
        elif kind == "mixed":
            assert rows <= row["tokens"] < rows * new_tokens  # rows ended
        elif kind == "step":
            assert row["rollout_s"] + row["update_s"] == pytest.approx(row["wall_s"], abs=0.01)
            assert (row["captures"] > 0) == (side == "perl_graphs")
        else:
            assert 8 <= row["tokens"] < rows * new_tokens
            assert row["old_logps_s"] > 0
            assert row["update_s"] > 0
    assert [line for line in lines if line.startswith("| tiny | 8 | 40 |")]
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row for row in kept if "side" in row] == result["results"]


@pytest.mark.slow
@pytest.mark.npu
def test_the_tests_for_devices_pass_on_an_npu(run_npu):
    """But for those of a dtype that its kernels don't compute in."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = run_npu(command, devices=1, check=False, timeout=500)
    tests = accelerator.summary_of_tests(done.stdout.splitlines())
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert tests["failed"] == 0, done.stdout[-8000:]
    assert [reason for reason in reasons if not reason.endswith(" does not compute in float32")] == []
    assert tests["passed"] >= 15
