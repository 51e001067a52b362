"""The report in a real browser: what it counts, finds and shows, and what a hostile completion cannot do."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from perl.__main__ import main
from perl.base.provenance import provenance
from perl.prompts import PromptStyle
from perl.reports.page import write_report
from tests.reports.conftest import record, write_results
from tests.results import sweep as whole_sweep

pytestmark = pytest.mark.browser

OWNED = "document.title = 'owned'"
HOSTILE = [
    f"<script>{OWNED}</script>",
    f"</script><script>{OWNED}</script>",
    f'<img src=x onerror="{OWNED}">',
    f'<svg onload="{OWNED}"></svg><iframe src="javascript:{OWNED}"></iframe>',
    f"$\\href{{javascript:{OWNED}}}{{x}}$ and $\\includegraphics{{http://example.invalid/y.png}}$",
    "$\\color{url(http://example.invalid/z)}x$ <!-- <style>*{display:none}</style> --> &lt;b&gt; \u2028 \u2029 \x00",
    f'" onfocus="{OWNED}" autofocus tabindex="0" onmouseover=\'{OWNED}\' x="',
    f"[x](javascript:{OWNED}) <a href='javascript:{OWNED}'>x</a> <details open ontoggle=\"{OWNED}\">y</details>",
    f"<math><mtext><a xlink:href='javascript:{OWNED}'>z</a></mtext></math> {{{{ 7*7 }}}} {{% raw %}} ${{{OWNED}}}",
    "<link rel=stylesheet href=http://example.invalid/a.css><base href=http://example.invalid/>",
]


def said(text: str) -> dict:
    """A conversation whose every part is `text`."""
    call = {"type": "function", "function": {"name": text, "arguments": {text: text}}}
    messages = [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": text, "name": text, "content": text},
        {"role": "assistant", "content": text},
    ]
    return {"messages": messages, "turns": 2, "observed_tokens": 9, "reward": None}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """Two datasets: 60 problems of which some repeat as 4 samples, every kind of verdict."""
    folder, rng = tmp_path_factory.mktemp("mixed"), random.Random(0)
    kinds = {
        "right": {},
        "wrong": {"score": 0.0, "scores": {"flexible": 0.0, "strict": 0.0}, "extracted": "17", "reason": "wrong"},
        "cut": {"score": 0.0, "extracted": None, "reason": "unextracted", "finish_reason": "length", "tokens": 64},
        "cut but right": {"finish_reason": "length", "tokens": 64},
        "no answer": {"score": 0.0, "extracted": None, "reason": "unextracted", "scores": {}},
        "late": {"score": 0.0, "extracted": "x", "reason": "timeout"},
        "overlong": {"score": 0.0, "extracted": None, "reason": "unextracted", "finish_reason": "length",
                     "tokens": 0, "completion": "", "error": "the prompt has 600 tokens, the context 512"},
    }  # fmt: skip
    for dataset, count, n in (("first", 40, 1), ("second", 20, 4)):
        rows = []
        for i in range(count):
            for sample in range(n):
                kind = rng.choice(list(kinds))
                words = f"completion {i} {'Needle' if rng.random() < 0.2 else 'hay'} $x_{i}$ 中文"
                rows.append(record(f"{i}-0", sample, **({"completion": words, "tokens": i + 5} | kinds[kind])))
        write_results(folder / dataset, rows, n)
    write_report(folder)
    return folder


def rows_of(folder: Path, dataset: str = "*") -> list[dict]:
    return [json.loads(line) for file in folder.glob(f"{dataset}/samples.jsonl") for line in file.open()]


def test_filters_show_what_the_file_holds(mixed, visit):
    page, rows = visit(mixed / "report.html"), rows_of(mixed)
    assert page.shown() == len(rows) == 120
    holds = {
        "correct": lambda r: r["score"] == 1,
        "wrong": lambda r: r["score"] != 1,
        "truncated": lambda r: r["finish_reason"] == "length",
        "unextracted": lambda r: r["extracted"] is None,
        "failed": lambda r: r["reason"] in ("timeout", "error") or r["error"],
    }
    for value in ("correct", "wrong"):
        page.click(f"[name=verdict][value={value}]")
        assert page.shown() == sum(map(bool, map(holds[value], rows))) > 0
    for flag in ("truncated", "unextracted", "failed"):
        page.click(f"[name={flag}]")
        both = sum(1 for r in rows if holds["wrong"](r) and holds[flag](r))
        assert page.shown() == both > 0
        assert page.text(f"[name={flag}] + span b") == str(both)
        page.click(f"[name={flag}]")
    page.click("button[type=reset]")
    page.enter("#dataset", "second")
    assert page.shown() == 80
    assert page.text("[value=correct] + span b") == str(sum(r["score"] == 1 for r in rows_of(mixed, "second")))
    page.enter("#query", "nEEdle")
    assert page.shown() == sum("Needle" in r["completion"] for r in rows_of(mixed, "second")) > 0
    assert page.run("return document.querySelector('#sample mark').textContent") == "Needle"
    page.enter("#query", "context 512")
    assert page.shown() == sum(r["error"] is not None for r in rows_of(mixed, "second")) > 0
    page.enter("#query", "no such text")
    assert (page.shown(), page.text("#sample")) == (0, "No sample passes these filters.")
    assert page.console() == []


def test_order_and_keys(mixed, visit):
    page = visit(mixed / "report.html")
    tokens = sorted(r["tokens"] for r in rows_of(mixed))
    page.enter("#sort", "long")
    lengths = page.run("return [...document.querySelectorAll('.item')].sort((a, b) => a.offsetTop - b.offsetTop)"
                       ".map((row) => Number(/([\\d,]+) tokens/.exec(row.textContent)[1]))")  # fmt: skip
    assert lengths == tokens[::-1][: len(lengths)]
    listbox = page.chrome.find_element("id", "list")
    listbox.send_keys("\ue015\ue015")  # arrow down, twice
    assert listbox.get_attribute("aria-activedescendant") == "row-2"
    listbox.send_keys("\ue010")  # end: the shortest
    assert f"{tokens[0]} tokens" in page.text("#sample .facts")
    assert page.run("return location.hash") != ""
    page.chrome.find_element("tag name", "body").send_keys("/")
    assert page.run("return document.activeElement.id") == "query"


def test_what_an_environment_alone_has_scored_is_not_told_to_lack_an_answer(tmp_path, visit):
    rows = [record(f"{i}-0", gold="", task="", extracted=None, score=float(i), scores={}) for i in range(2)]
    write_results(tmp_path / "mine", rows, 1)
    page = visit(write_report(tmp_path))
    page.settle()
    assert page.text("[name=unextracted] + span b") == "0"
    said = page.text("#list") + page.text("#sample .facts")
    assert said.count("10 tokens") == 3  # two rows, and what is known of one
    for words in ("no answer", "nothing", "gold"):
        assert words not in said
    assert page.console() == []


def test_what_an_environment_alone_has_scored_shows_its_sample_before(tmp_path, visit):
    for name, score in (("base", 0.0), ("tuned", 1.0)):
        rows = [record(f"{i}-0", gold="", task="", extracted=None, score=score, scores={}) for i in range(2)]
        adapter = {"adapter": "runs/a/adapter", "adapter_hash": "ab"} if name == "tuned" else {}
        write_results(tmp_path / name / "mine", rows, 1, tasks=[""], styles={}, grading={}, **adapter)
    file = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "base"), str(tmp_path / "tuned"), "--output", str(file)]) == 0
    page = visit(file)
    page.click("[name=change][value=better]")
    page.click("[name=verdict][value=correct]")
    assert (
        page.run("return document.querySelector('#sample .before').previousSibling.textContent") == "✗ Before: base #0"
    )
    assert page.console() == []


def test_a_sample_shows_everything_it_was_graded_by(tmp_path, visit):
    words = "Thus $\\frac{7}{2}$ costs $5 and $10.\nBroken: $\\frac{1$ 答案是 \\boxed{\\sqrt{2}}。"
    scores = {"flexible": 1.0, "strict": 0.0}
    right = record("a-0", gold="\\frac{7}{2}", extracted="3.5", completion=words, scores=scores)
    wrong = record("a-0", 1, gold="\\frac{7}{2}", extracted=None, score=0.0, reason="unextracted")
    others = [record("b-0"), record("b-0", 1, score=0.0)]
    write_results(tmp_path / "gsm8k", [right, wrong, *others], 2)
    page = visit(write_report(tmp_path))
    page.settle()
    facts = page.text("#sample .facts")
    for words in ("3.5", "correct", "✓ flexible", "✗ strict", "10 tokens", "#0, seed 7"):
        assert words in facts
    assert page.run("return document.querySelectorAll('#sample .facts mfrac').length") == 1
    completion = "document.querySelector('#sample .completion')"
    assert page.run(f"return {completion}.querySelectorAll('mfrac').length") == 1
    assert page.run(f"return {completion}.querySelectorAll('msqrt').length") == 1
    assert "costs $5 and $10." in page.text("#sample .completion")
    assert page.run(f"return {completion}.querySelector('.broken').textContent") == "$\\frac{1$"
    assert "Question a-0?" in page.text("#sample .text.question")
    assert page.text("#sample .block h4") == "Answers to this problem: 1 of 2 correct"
    page.click("#source")
    assert page.run(f"return {completion}.textContent") == right["completion"]
    page.click(".sibling:not([aria-current])")
    assert "#1, seed 7" in page.text("#sample .facts")
    page.click("[name=verdict][value=wrong]")
    page.run("document.getElementById('row-1').click()")
    page.click(".sibling:not([aria-current])")  # one that the filter hides
    assert page.shown() == 4
    assert "Question b-0?" in page.text("#sample .text.question")
    assert "#0, seed 7" in page.text("#sample .facts")
    assert page.console() == []


@pytest.mark.parametrize("talked", [False, True])
def test_model_output_stays_text(tmp_path, visit, talked):
    rows = [
        record(f"{i}-0", prompt=f"<|user|>\n{i} {text}\n", completion=text, gold=text, extracted=text, source=text,
               error=text, scores={text: 1.0}, **({"conversation": said(text)} if talked else {}))
        for i, text in enumerate(HOSTILE)
    ]  # fmt: skip
    write_results(tmp_path / "hostile", rows, model=f"models/{HOSTILE[0]}", chat_template="".join(HOSTILE))
    file = write_report(tmp_path)
    page = visit(file)
    title = page.chrome.title
    assert title.startswith("script> · evaluation")  # the last part of the model's path
    for place, text in enumerate(HOSTILE):
        page.run("document.getElementById(arguments[0]).click()", f"row-{place}")
        page.settle()
        if page.text("#source") == "Show source":
            page.click("#source")
        for selector in (".completion", ".question"):
            assert text in page.run(f"return document.querySelector('#sample {selector}').textContent")
        if talked:
            parts = "[...document.querySelectorAll('#sample .said')].map((part) => part.textContent)"
            (first, call, seen, last) = page.run(f"return {parts}")
            assert (first, last) == (f"assistant{text}", f"assistant{text}")
            assert call == "call" + json.dumps({"name": text, "arguments": {text: text}}, ensure_ascii=False)
            assert seen == text + text
        page.click("#source")
    made = page.run(
        "return document.querySelectorAll('#sample :is(script, img, iframe, svg, link, a, style, base)').length"
    )
    assert made == 0
    assert page.chrome.title == title
    assert page.requests() == {file.as_uri(): ""}
    assert page.console() == []


def test_hostile_names_stay_text(tmp_path, visit):
    """Of data sets, rules, tasks, folders, engines and settings, in a sweep that is compared with another folder."""
    name = HOSTILE[2].replace("/", "")
    told = {"model": "models/" + name, "engines": [HOSTILE[0]], "tasks": HOSTILE[:2], "dataset": HOSTILE[3]}
    told["provenance"] = provenance() | {"command": HOSTILE}
    styles = {HOSTILE[1]: asdict(PromptStyle(template=HOSTILE[0], system_prompt=HOSTILE[2]))}
    for side, score in (("other", 0.0), ("this", 1.0)):
        rows = [record("a-0", score=score, engine=HOSTILE[1], task=HOSTILE[2], scores={HOSTILE[0]: score})]
        write_results(
            tmp_path / f"{side} {name}" / name,
            rows,
            **told,
            styles=styles,
        )
    write_report(tmp_path / f"this {name}")
    assert main(["compare", str(tmp_path / f"other {name}"), str(tmp_path / f"this {name}")]) == 0
    file = tmp_path / f"this {name}" / "report.html"
    page = visit(file)
    title = page.chrome.title
    assert name in page.run("return document.body.textContent")
    assert page.run("return document.querySelectorAll('img, iframe, link, a, main script:not([type])').length") == 0
    assert page.run("return [...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()"
                    ".filter((name) => name.startsWith('on'))).length") == 0  # fmt: skip
    page.run(
        "for (const e of document.querySelectorAll('main *')) { e.focus?.(); e.dispatchEvent(new Event('mouseover')) }"
    )
    assert page.chrome.title == title
    assert page.requests() == {file.as_uri(): ""}
    assert page.console() == []


def test_a_script_that_gets_in_all_the_same_does_not_run(mixed, visit, tmp_path):
    """The policy, apart from the escaping: a script, a handler and an image written into the page itself."""
    text = (mixed / "report.html").read_text()
    inside = f'<script>{OWNED}</script><img src="http://example.invalid/p.png" onerror="{OWNED}">'
    (tmp_path / "report.html").write_text(text.replace("<main", f"{inside}<main", 1))
    page = visit(tmp_path / "report.html")
    assert "owned" not in page.chrome.title
    assert sum("Content Security Policy" in line for line in page.console()) >= 2
    assert page.requests() == {(tmp_path / "report.html").as_uri(): "", "http://example.invalid/p.png": "csp"}


def test_a_sweep_by_checkpoint(tmp_path, visit, caplog):
    sweep = whole_sweep()
    for name, step, right in (
        ("checkpoint-10", 10, 7),
        ("base", 0, 2),
        ("checkpoint-5", 5, 4),
        ("checkpoint-7", 7, None),
    ):
        sweep["candidates"] += whole_sweep(name, step=step)["candidates"]
        if right is None:
            sweep["candidates"][-1] |= {"error": "does not fit the base", "metrics": None}
            continue
        wrong = {"score": 0.0, "reason": "wrong", "extracted": "1"}
        rows = [record(f"{i}-0", **({} if i < right else wrong)) for i in range(10)]
        write_results(tmp_path / name / "gsm8k", rows, step=step, adapter=f"runs/a/{name}" if step else None)
        (tmp_path / name / "summary.json").write_text("{}")
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    page = visit(write_report(tmp_path))
    assert "checkpoint-7 is left out: does not fit the base" in caplog.text
    assert page.shown() == 30
    assert page.run("return [...document.querySelectorAll('#run option')].map((o) => o.text)") == [
        "All checkpoints", "checkpoint-10", "base", "checkpoint-5",
    ]  # fmt: skip
    page.enter("#run", "0")
    page.click("[value=correct]")
    assert page.shown() == 7
    assert page.text("#sample .block h4") == "Answers to this problem: 3 of 3 correct"
    titles = page.run("return [...document.querySelectorAll('.chart circle title')].map((t) => t.textContent)")
    assert [title.split(" (")[0] for title in titles] == [
        "gsm8k, step 0: 20.0 %", "gsm8k, step 5: 40.0 %", "gsm8k, step 10: 70.0 %",
    ]  # fmt: skip
    assert page.run("return [...document.querySelectorAll('[data-run]')].map((e) => e.hidden)") == [True, True, False]
    page.enter("#run-figures", "0")
    page.run("document.getElementById('run-figures').dispatchEvent(new Event('change'))")
    assert page.run("return [...document.querySelectorAll('[data-run]')].map((e) => e.hidden)") == [False, True, True]
    assert "checkpoint-5: runs/a/checkpoint-5" in page.text(".settings")


def test_a_comparison_and_the_problems_that_changed(tmp_path, visit, chrome):
    """Of 12 problems with 2 samples each, the first 8 turn from wrong to right, the next one from right to half right,
    and the last three stay: 7.5 / 12 more are right. A path is a script, and a setting is one."""
    wrong = {"score": 0.0, "scores": {}, "extracted": "17", "reason": "wrong"}
    right = {"other": (range(8, 12), range(8, 12)), "this": (range(12), [i for i in range(12) if i != 8])}
    for name, samples in right.items():
        rows = [
            record(f"{i:016x}-0", s, **({} if i in samples[s] else wrong)) for i in range(12) for s in range(2)
        ]  # fmt: skip
        write_results(tmp_path / name / "gsm8k", rows, 2, model=HOSTILE[0] if name == "other" else "models/tiny",
                      dtype=HOSTILE[2] if name == "other" else "float32")  # fmt: skip
    file = write_report(tmp_path / "this")
    assert visit(file).run("return document.getElementById('compared').hidden")
    assert main(["compare", str(tmp_path / "other"), str(tmp_path / "this")]) == 0  # writes the report again
    page = visit(file)
    assert page.text(".compared h2") == "Compared with script>"
    assert page.run("return [...document.querySelectorAll('.compared tbody tr')].slice(0, 2).map((row) => "
                    "[...row.cells].map((cell) => cell.innerText).filter((_, i) => i !== 6 && i !== 7))") == [
        ["gsm8k", "avg@2", "better", "33.33", "95.83", "+62.50", "12 × 2", "8", "1", "3"],
        ["", "pass@2", "better", "33.33", "100.00", "+66.67", ""],
    ]  # fmt: skip
    assert page.run("return [...document.querySelectorAll('.compared .chart title')].map((t) => t.textContent)") == [
        "avg@2: +62.5 (+29.2 to +91.7)", "pass@2: +66.7 (+41.7 to +91.7)",
    ]  # fmt: skip
    page.click(".compared summary")
    assert page.run("return document.querySelector('.differs tbody').rows[0].cells[1].textContent") == json.dumps(
        HOSTILE[2]
    )
    counts = {"all": 24, "better": 16, "worse": 2}
    for value, count in counts.items():
        assert page.text(f"[name=change][value={value}] + span b") == str(count)
        page.click(f"[name=change][value={value}]")
        assert page.shown() == count
    assert "worse: 100 % → 50 %" in page.text("#sample .facts")
    page.click("[name=verdict][value=wrong]")
    assert (page.shown(), page.text("[name=change][value=all] + span b")) == (1, "1")
    assert page.text("[name=verdict][value=correct] + span b") == "1"
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        assert page.run("return document.documentElement.scrollWidth") == 380
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert "owned" not in page.chrome.title
    assert page.requests() == {file.as_uri(): ""}
    assert page.console() == []


def test_twenty_thousand_samples_stay_usable(tmp_path, visit):
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(2000)}" for _ in range(200)) for _ in range(500)]
    rows = [
        record(f"{i}-0", completion=f"{i} {texts[i % 500]}", tokens=rng.randrange(1, 900),
               **({} if i % 3 else {"score": 0.0, "reason": "wrong", "extracted": "1"}))
        for i in range(20_000)
    ]  # fmt: skip
    rows[12_345]["completion"] += " the only Needle"
    write_results(tmp_path / "many", rows)
    file = write_report(tmp_path)
    began = time.monotonic()
    page = visit(file)
    assert time.monotonic() - began < 8
    assert page.shown() == 20_000
    asked = "{query: 'needle', dataset: '', run: '', sort: 'long', verdict: 'wrong', change: 'all'}"
    took = page.run(f"const began = performance.now(); Samples.filter({asked}); return performance.now() - began")
    assert took < 1500
    page.enter("#query", "only needle")
    assert page.shown() == 1
    page.enter("#query", "")
    page.run("document.getElementById('list').scrollTop = 58 * 15000")
    page.settle()
    assert page.run("return document.querySelectorAll('.item').length") < 60
    assert page.run("return document.getElementById('row-15000') !== null")


def test_a_narrow_screen_and_the_dark(mixed, visit, chrome):
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        page = visit(mixed / "report.html")
        assert page.run("return document.documentElement.scrollWidth") == 380
        page.click(".item")
        assert page.run("return document.getElementById('sample').getBoundingClientRect().width") == 380
        page.click(".back")
        assert page.run("return getComputedStyle(document.getElementById('sample')).display") == "none"
        assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_sweep_over_two_trainings_has_a_line_for_each(tmp_path, visit):
    """Their checkpoints have the same steps."""
    sweep = whole_sweep("base", step=0)
    write_results(tmp_path / "base" / "gsm8k", [record(f"{i}-0") for i in range(10)], step=0, adapter=None)
    for run, step, right in (("a", 10, 3), ("a", 20, 4), ("b", 10, 6), ("b", 20, 7)):
        name = f"{run}-checkpoint-{step}"
        sweep["candidates"] += whole_sweep(name, step=step)["candidates"]
        wrong = {"score": 0.0, "reason": "wrong", "extracted": "1"}
        rows = [record(f"{i}-0", **({} if i < right else wrong)) for i in range(10)]
        write_results(tmp_path / name / "gsm8k", rows, step=step, adapter=f"runs/{run}/checkpoint-{step}")
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    page = visit(write_report(tmp_path))
    titles = page.run("return [...document.querySelectorAll('.chart circle title')].map((t) => t.textContent)")
    assert [title.split(" (")[0] for title in titles] == [
        "a, step 10: 30.0 %", "a, step 20: 40.0 %", "b, step 10: 60.0 %", "b, step 20: 70.0 %",
    ]  # fmt: skip
    legend = page.run("return [...document.querySelectorAll('.legend span, .legend li')].map((e) => e.textContent)")
    assert [text.strip() for text in legend if text.strip() in ("a", "b")] == ["a", "b"]
