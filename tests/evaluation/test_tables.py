"""The tables on a screen of 80 columns."""

from rich.console import Console

from perl.evaluation.tables import print_sweep
from tests.results import sweep


def test_a_sweeps_numbers_stay_whole_on_80_columns(capsys):
    """Two datasets, sampled eight times: nine metrics of each candidate."""
    estimate = {"value": 0.98765, "low": 0.97654, "high": 1.0}
    names = ["accuracy", "avg@8", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4, 8))]
    metrics = dict.fromkeys(("gsm8k", "open-r1_DAPO-Math-17k-Processed"), dict.fromkeys(names, estimate))
    entries = sweep("checkpoint-1000", "checkpoint-2000", metrics=metrics)["candidates"]
    failed = sweep("base", metrics=None, error="too large")["candidates"]
    print_sweep([*entries, *failed], Console(width=80))
    lines = [line for line in capsys.readouterr().out.splitlines() if "@" in line]
    assert len(lines) == 2 * 2 * 6  # without accuracy, pass@1, maj@1, and maj@2, which is avg@8 here
    assert all("98.77 │ 97.65 – 100.00 │" in line for line in lines)
    assert [line.split()[1] for line in lines if "checkpoint" in line] == ["checkpoint-1000", "checkpoint-2000"]
