"""The page of a sweep in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perl.reports.methods import Run, compare
from perl.reports.methods_page import write_comparison
from tests.reports.test_browser import HOSTILE
from tests.reports.test_browser_training import OVERLAPS, PHONE, POINT, readouts
from tests.reports.test_methods import finished, made

pytestmark = pytest.mark.browser


def page_of(runs: list[Run], folder: Path) -> Path:
    found = compare(runs, {"models/tiny": folder / "base"}, ["test"], "mine.yaml", ["peft.type"], 2)
    return write_comparison(found, folder / "comparison.html")


def test_scores_curves_and_runs_are_shown(tmp_path, visit, chrome):
    page = visit(page_of(made(tmp_path), tmp_path))
    assert page.text("h1") == "tiny: lora, miss"
    rows = page.run("return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText.split('\\t'))")
    assert rows[0][:2] == ["base", ""]
    assert rows[1][:2] == ["lora", "3"]
    assert rows[1][2].startswith("37.5 (")
    assert rows[2][:2] == ["miss", "2 of 3"]
    assert rows[2][4].startswith("+68.75 (")
    assert rows[2][5] == "no difference"
    assert [row[2] for row in rows[3:]] == ["finished"] * 5 + ["failed training ended with exit code 1"]
    titles = page.run("return [...document.querySelectorAll('figcaption strong')].map((e) => e.textContent)")
    assert titles == [
        "Accuracy, avg@2, temperature 1", "Change from lora, avg@2, temperature 1",
        "Accuracy, greedy", "Change from lora, greedy", "Reward",
    ]  # fmt: skip
    assert page.run("return document.querySelectorAll('.trend .band').length") == 2
    page.run(POINT, 0, 2, "pointermove")
    assert readouts(page) == ["step 2"]
    legend = page.run("return document.querySelector('.trend + .legend').innerText").split()
    assert legend == ["lora,", "mean", "of", "3", "0.2", "miss,", "mean", "of", "2", "0.4"]
    assert page.requests() == {(tmp_path / "comparison.html").as_uri(): ""}
    assert page.console() == []
    assert page.run(OVERLAPS) == []
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        assert page.run("return document.documentElement.scrollWidth") == 380
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_ten_methods_have_a_line_each_and_hostile_values_stay_text(tmp_path, visit):
    """A value of --vary may be anything, such as the name of a file with rewards."""
    runs = [finished(tmp_path, f"method_{i}", 1, i % 8, [0.1 * i, 0.05 * i]) for i in range(9)]
    runs.append(replace(finished(tmp_path, "last", 1, 3, [0.5, 0.5]), values={"peft.type": HOSTILE[0]}))
    page = visit(page_of(runs, tmp_path))
    drawn = page.run("return [...document.querySelectorAll('.trend .line')].map((e) => e.getAttribute('class'))")
    assert drawn == [f"line s{i % 8}" for i in range(10)]
    strokes = page.run(
        "return [...document.querySelectorAll('.trend .line')].slice(0, 8).map((e) => getComputedStyle(e).stroke"
        " + getComputedStyle(e).strokeDasharray)"
    )
    assert len(set(strokes)) == 8
    assert HOSTILE[0] in page.run("return document.querySelector('tbody').textContent")
    assert page.run("return document.querySelectorAll('img, iframe, main script:not([type])').length") == 0
    assert "owned" not in page.chrome.title.split("·")[-1]
    assert page.console() == []
