"""The page of two trainings that were compared, in a real browser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from perl.__main__ import main
from tests.reports.test_agreement import write_run
from tests.reports.test_browser import HOSTILE
from tests.reports.test_browser_training import OVERLAPS, PHONE, POINT, readouts

pytestmark = pytest.mark.browser


def log_of_verl(rewards: list[float]) -> str:
    return "".join(
        f"step:{i} - actor/pg_loss:0.001 - actor/entropy:0.41 - critic/score/mean:{reward} - perf/throughput:800.0\n"
        for i, reward in enumerate(rewards, start=1)
    )


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """60 rollouts of verl against 58 of two runs of ours."""
    folder = tmp_path_factory.mktemp("compared")
    curve = [0.2 + 0.5 * i / 60 + 0.03 * math.sin(i) for i in range(60)]
    (folder / "verl.log").write_text(log_of_verl(curve))
    for name, shift in (("one", 0.01), ("two", -0.02)):
        write_run(folder / name, [value + shift for value in curve[:58]], k=2)
    arguments = [str(folder / "verl.log"), f"{folder}/one,{folder}/two", "--output", str(folder / "page.html")]
    assert main(["compare", *arguments]) == 0
    return folder / "page.html"


def test_both_curves_are_shown_rollout_by_rollout(page_file, visit):
    page = visit(page_file)
    assert page.text("h1") == "one and 1 more against verl.log"
    assert page.text("h2") == "Within the limits: reward and loss"
    rows = page.run("return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText.split('\\t'))")
    assert rows[0][:3] == ["reward", "within", "4.00 %"]
    assert rows[0][7:] == ["58"]
    titles = page.run("return [...document.querySelectorAll('figcaption strong')].map((e) => e.textContent)")
    assert titles == ["reward", "loss", "entropy", "perf/throughput"]
    units = page.run("return [...document.querySelectorAll('.unit')].map((e) => e.textContent)")
    assert units == titles
    page.run(POINT, 0, 1, "pointermove")
    assert readouts(page)[0] == "step 1"
    legend = page.run("return [...document.querySelectorAll('.legend')].map((e) => e.innerText)")[0].split()
    assert legend == ["A", "0.2", "B,", "mean", "of", "2", "0.195"]
    assert [row[0] for row in rows[-3:]] == ["A", "B", "B"]  # what was read
    assert page.requests() == {page_file.as_uri(): ""}
    assert page.console() == []


def test_the_page_of_a_comparison_fits_any_screen(page_file, visit, chrome):
    page = visit(page_file)
    page.run(POINT, 0, 58, "pointermove")
    assert page.run(OVERLAPS) == []
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        assert page.run("return document.documentElement.scrollWidth") == 380
        assert page.run(OVERLAPS) == []
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_text_in_a_log_stays_text(tmp_path, visit):
    """In the names of files, and in a log of verl, of whose secrets nothing reaches the page."""
    name = HOSTILE[0].replace("/", "")[:80]
    hostile = "".join(f"step:2 - {text}:1\n" for text in HOSTILE).replace("\0", "")
    secret = "{'api_key': 'hf_0123456789abcdef'}\n"
    for side in ("a", "b"):
        log = tmp_path / f"{side}{name}.log"
        log.write_text(secret + log_of_verl([0.5, 0.5]) + hostile)
    a, b = (str(tmp_path / f"{side}{name}.log") for side in ("a", "b"))
    assert main(["compare", a, b, "--output", str(tmp_path / "page.html")]) == 0
    page = visit(tmp_path / "page.html")
    assert f"a{name}.log" in page.run("return document.body.textContent")
    assert page.run("return document.querySelectorAll('img, iframe, link, a, main script:not([type])').length") == 0
    assert page.chrome.title == f"b{name}.log against a{name}.log · comparison"
    content = (tmp_path / "page.html").read_text()
    assert "hf_0123456789abcdef" not in content
    assert page.console() == []
