"""bad_input.md, row by row: each mistake is one line and the exit code that the table says; no secret of the
environment is printed, and no file is written but where the command asked for it."""

import pytest

from tests.reliability.cases import CASES, SECRET, SLOW
from tests.reliability.runs import meet, unmounted
from tests.reliability.table import rows

ROWS = {row.case: row for row in rows()}
ASKED_FOR = ("run/", "disk/run/", "results/", "merged/", "out/", "out.jsonl", "adapter/README.md")
"""What the commands of the cases name to be written."""


def slow(case):
    return [pytest.mark.slow] if case.name in SLOW else []


@pytest.mark.parametrize("case", [pytest.param(case, marks=slow(case), id=case.name) for case in CASES])
def test_bad_input(case, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "case"
    folder.mkdir()
    for name in ("PGPASSWORD", "GITHUB_PAT", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    with unmounted(folder):
        met = meet(case, folder, monkeypatch, capfd)
    row = ROWS[case.name]
    errors = [line for line in met.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in met.stderr
    assert len(errors) == 1, met.stderr
    assert met.stderr.endswith(f"{errors[0]}\n")
    assert row.fits(errors[0].removeprefix("error: ")), errors[0]
    assert met.code == row.code
    assert row.command == case.command
    assert SECRET not in met.stdout + met.stderr
    assert [name for name in met.written if not name.startswith(ASKED_FOR)] == []
    assert list(tmp_path.iterdir()) == [folder]


def test_the_table_holds_every_case_once():
    named = [row.case for row in rows()]
    assert len(named) == len(set(named)) >= 200
    assert set(named) == {case.name for case in CASES}
