"""The page of a training in a real browser: its charts, the values under the pointer, the answers that changed, and
what hostile text in a run's folder cannot do."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from perl.__main__ import main
from tests.reports.conftest import CONFIG, logged, record, write_results, write_training
from tests.reports.test_browser import HOSTILE, OWNED

pytestmark = pytest.mark.browser

WRONG = {"score": 0.0, "scores": {"flexible": 0.0}, "extracted": "17", "reason": "wrong"}
PHONE = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
POINT = """const svg = document.querySelectorAll('svg[data-metrics]')[arguments[0]], box = svg.getBoundingClientRect();
    const [low, high, start, end] = JSON.parse(svg.dataset.plot);
    const x = start + (arguments[1] - low) / (high - low) * (end - start);
    const place = {clientX: box.left + x / 420 * box.width, clientY: box.top + 60};
    svg.dispatchEvent(new PointerEvent(arguments[2], place));"""
OVERLAPS = """return [...document.querySelectorAll('svg.trend, svg.scores')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll('text')].filter((e) => e.textContent);
        const all = texts.map((e) => ({text: e.textContent, ...e.getBoundingClientRect().toJSON()}));
        const common = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]);
        const over = (a, b) => common(a, b, 'left', 'right') > 1 && common(a, b, 'top', 'bottom') > 2;
        const outside = (a) => a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1;
        return [...all.filter(outside).map((a) => a.text),
            ...all.flatMap((a, i) => all.slice(i + 1).filter((b) => over(a, b)).map((b) => `${a.text} | ${b.text}`))];
    })"""
"""Labels of charts that lie over another one, or outside their chart."""


def readouts(page) -> list[str]:
    return page.run("return [...document.querySelectorAll('[data-metrics] .readout')].map((e) => e.textContent)")


def legends(page) -> list[str]:
    """Of the training's charts with several lines."""
    return page.run("return [...document.querySelectorAll('[data-metrics] + .legend')].map((e) => e.innerText)")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """2,000 steps, of which step 700 logged no entropy; 6 problems turned from wrong to right, 1 back, 3 stayed."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        logged(step, reward=step / 2000, entropy=None if step == 700 else 1 / step, **{"timing/step": step / 1000})
        for step in range(1, 2001)
    ]
    write_training(folder / "train", rows)
    for stage, right, adapter in (("before", (6, 7, 8), None), ("after", (0, 1, 2, 3, 4, 5, 7, 8), "train/adapter")):
        outcomes = [
            record(f"{i:016x}-0", completion=f"{stage}: {i}", **({} if i in right else WRONG)) for i in range(10)
        ]
        write_results(folder / stage / "gsm8k", outcomes, adapter=adapter)
    assert main(["report", str(folder)]) == 0
    return folder


def test_a_training_is_shown_step_by_step(run_folder, visit):
    page = visit(run_folder / "report.html")
    titles = page.run("return [...document.querySelectorAll('figcaption strong')].map((e) => e.textContent)")
    assert titles[:8] == [
        "Reward", "Before and after training", "Completion length", "Entropy", "Noise of the rollouts (AQN)",
        "Step time", "Sampler and trainer", "Gradient norm",
    ]  # fmt: skip
    tiles = page.run("return [...document.querySelectorAll('.tiles div')].map((e) => e.innerText.replace('\\n', ': '))")
    assert tiles == [
        "steps: 2,000 of 4", "reward, first and last tenth: 0.050 → 0.950", "truncated, last tenth: 25.0 %",
        "time in steps: 0:33:21", "tokens/s a device: 900",
    ]  # fmt: skip
    assert readouts(page) == [""] * 7
    page.run(POINT, 0, 700, "pointermove")
    assert readouts(page) == [
        "step 700: 0.35", "step 700: 100", "step 700: –", "step 700", "step 700", "step 700: 0.001", "step 700: 0.1",
    ]  # fmt: skip
    assert [words.split() for words in legends(page)] == [
        ["σ", "0.05", "realized", "0.049"], ["step", "0.7", "rollout", "1.25", "update", "0.5"],
    ]  # fmt: skip
    assert set(
        page.run("return [...document.querySelectorAll('.cursor')].map((e) => e.getAttribute('visibility'))")
    ) == {"visible"}
    page.run(POINT, 2, 1999, "pointerdown")  # a finger
    assert readouts(page)[1] == "step 1,999: 100"
    page.run(POINT, 2, 1, "pointerleave")
    assert readouts(page) == [""] * 7
    scores = page.run(
        "return [...document.querySelector('svg.scores').querySelectorAll('text')].map((e) => e.textContent)"
    )
    assert scores == [
        "gsm8k, 10 problems, greedy", "before", "30.0 % (0.0 to 100.0)", "after", "80.0 % (0.0 to 100.0)",
        "0 %", "50 %", "100 %",
    ]  # fmt: skip
    assert "models/tiny" in page.text(".settings")
    assert page.requests() == {(run_folder / "report.html").as_uri(): ""}
    assert page.console() == []


def test_answers_that_changed_are_shown_with_the_one_before(run_folder, visit):
    page = visit(run_folder / "report.html")
    assert page.run("return [...document.querySelectorAll('.jump')].map((e) => e.textContent)") == ["6", "1"]
    page.click(".jump[data-change=better]")
    assert page.shown() == 6
    page.click(".jump[data-change=worse]")
    assert page.shown() == 1
    assert page.text("#sample .completion") == "after: 6"
    assert page.text("#sample .completion.before") == "before: 6"
    assert page.text("#sample .block:last-child h4") == "✓ Before: before #0, read 18"
    assert "worse: 100 % → 0 %" in page.text("#sample .facts")
    page.click("button[type=reset]")
    page.enter("#run", "0")
    assert page.shown() == 10
    assert page.run("return document.querySelector('#sample .before')") is None
    options = page.run("return [...document.querySelectorAll('#run option')].map((o) => o.text)")
    assert options == ["All evaluations", "before", "after"]


def test_text_lies_in_its_place_on_any_screen(run_folder, visit, chrome):
    """No label of a chart over another one or outside the chart, and no page wider than a phone, in light and dark."""
    page = visit(run_folder / "report.html")
    page.run(POINT, 0, 2000, "pointermove")
    assert page.run(OVERLAPS) == []
    colours = []
    for scheme in ("light", "dark"):
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        try:
            assert page.run("return document.documentElement.scrollWidth") == 380
            assert page.run(OVERLAPS) == []
            colours.append(page.run("return getComputedStyle(document.querySelector('.trend .line')).stroke"))
        finally:
            chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colours == ["rgb(36, 89, 201)", "rgb(125, 165, 255)"]


def test_hostile_text_in_a_run_stays_text(tmp_path, visit):
    """In names of reward functions, in the configuration, in the command, in both answers to a problem that changed."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    rewards = {f"rewards/{text}/mean": 0.5 for text in HOSTILE}
    config = CONFIG | {"model": {"model_name_or_path": HOSTILE[0]}, "reward": {"functions": HOSTILE}}
    config["peft"] = {"type": HOSTILE[2]}
    write_training(
        folder, [logged(1, **rewards), logged(2, **rewards)], config, command=HOSTILE, packages={HOSTILE[3]: "1"}
    )
    rows = [
        record(f"{i:016x}-0", prompt=text, completion=text, gold=text, extracted=text) for i, text in enumerate(HOSTILE)
    ]
    write_results(tmp_path / f"base {HOSTILE[2].replace('/', '')}" / "d", [row | {"score": 0.0} for row in rows])
    write_results(tmp_path / "tuned" / "d", rows, adapter=f"runs/{HOSTILE[2]}")
    (base,) = tmp_path.glob("base*")
    assert main(["report", str(folder), str(base), str(tmp_path / "tuned")]) == 0
    file = folder / "report.html"
    page = visit(file)
    title = page.chrome.title
    assert title.startswith("script>: GRPO with <img src=x")
    shown = page.run("return document.querySelector('.inner pre').textContent")
    assert yaml.safe_load(shown)["reward"]["functions"] == HOSTILE
    made = page.run("return document.querySelector('.settings').textContent").replace("\x00", "")
    for text in (HOSTILE[0], HOSTILE[3], shlex.join(HOSTILE)):
        assert text.replace("\x00", "") in made
    page.run(POINT, 0, 2, "pointermove")
    assert f"{HOSTILE[0]} 0.5" in legends(page)[0]
    assert page.run(OVERLAPS) == []
    page.click(".jump[data-change=better]")
    assert page.shown() == len(HOSTILE)
    for place, text in enumerate(HOSTILE):
        page.run("document.getElementById(arguments[0]).click()", f"row-{place}")
        page.settle()
        if page.text("#source") == "Show source":
            page.click("#source")
        assert page.run("return document.querySelector('#sample .completion.before').textContent") == text
        page.click("#source")
    assert (
        page.run("return document.querySelectorAll('img, iframe, link, a, base, main script:not([type])').length") == 0
    )
    assert OWNED not in page.run("return [...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()"
                                 ".filter((name) => name.startsWith('on'))).join()")  # fmt: skip
    assert page.chrome.title == title
    assert page.requests() == {file.as_uri(): ""}
    assert page.console() == []
