"""The report apart from the browser: what is embedded, what is drawn, what is refused."""

from __future__ import annotations

import base64
import json
import re
import tomllib
import xml.etree.ElementTree as ET
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.reports import charts, embed, figures
from perl.reports.charts import Bars, Line
from perl.reports.page import SAMPLES_SCRIPTS, STEPS_SCRIPTS, adapter_name, asset, document, write_report
from perl.reports.results import read_runs
from perl.reports.svg import Scale, ticks
from perl.scoring.comparison import read_comparison
from tests.reports.conftest import record, write_results
from tests.results import sweep

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "perl" / "reports" / "static"


def unpacked(piece: str) -> dict:
    return json.loads(zlib.decompress(base64.b64decode(piece)).decode("utf-8", "replace"))  # as a browser decodes


def test_pieces_hold_every_row_and_each_prompt_once(tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "PIECE_CHARACTERS", 700)
    rows = [record(f"{i}-0", sample, completion=f"{i} {sample} \ud800") for i in range(5) for sample in range(2)]
    write_results(tmp_path / "gsm8k", rows[::-1], 2)
    (run,) = read_runs(tmp_path)
    found = [unpacked(piece) for piece in embed.pieces([run, replace(run, label="again", step=1)])]
    problems = [piece["problems"] for piece in found if "problems" in piece]
    samples = [piece["samples"] for piece in found if "samples" in piece]
    assert len(samples) > 4
    assert [key for piece in problems for key in piece["key"]] == [f"{i}-0" for i in (4, 3, 2, 1, 0)]
    again = [
        (piece["run"], piece["problem"][i], piece["sample"][i], piece["completion"][i])
        for piece in samples
        for i in range(len(piece["problem"]))
    ]
    assert again == [(r, p, s, f"{4 - p} {s} \ufffd\ufffd\ufffd") for r in (0, 1) for p in range(5) for s in (0, 1)]


def test_what_is_the_same_in_all_prompts(tmp_path):
    prompts = ["<|user|>\nIs 1 + 2 even?\nSay so.<|end|>", "<|user|>\nIs 1 + 3 even?\nSay so.<|end|>"]
    write_results(tmp_path / "d", [record(f"{i}-0", prompt=prompt) for i, prompt in enumerate(prompts)])
    (scored,) = read_runs(tmp_path)[0].scored
    head, tail = embed.shared_ends(scored)
    assert prompts[0][head : len(prompts[0]) - tail] == "Is 1 + 2 even?"
    emoji = [f"<|user|>🤖🧮\n{question}\nSay 🙂.<|end|>" for question in ("Is 1 🍎 even?", "Is 2 🍎 even?")]
    write_results(tmp_path / "u" / "d", [record(f"{i}-0", prompt=prompt) for i, prompt in enumerate(emoji)])
    head, tail = embed.shared_ends(read_runs(tmp_path / "u")[0].scored[0])
    assert emoji[0].encode("utf-16-le")[2 * head : -2 * tail].decode("utf-16-le") == "Is 1 🍎 even?"  # as JavaScript
    write_results(tmp_path / "e" / "one", [record("0-0")])
    assert embed.shared_ends(read_runs(tmp_path / "e")[0].scored[0]) == (0, 0)


def test_what_is_too_much_is_shortened_evenly(caplog, monkeypatch):
    monkeypatch.setattr(embed, "MOST_CHARACTERS", 60)
    assert embed.longest_that_fits([10, 100, 20]) == 30
    assert "longer than 30 characters" in caplog.text
    monkeypatch.setattr(embed, "MOST_CHARACTERS", 130)
    assert embed.longest_that_fits([10, 100, 20]) == 100
    assert embed.shortened("abcdefgh", 4) == (
        "ab\n\n[… 4 characters are left out here; samples.jsonl has them …]\n\ngh"
    )
    assert embed.shortened("abcd", 4) == "abcd"


def test_nothing_closes_a_script():
    hostile = "</script><!-- & \u2028\u2029"
    page = document("a title", "a kind", [], [], meta=[hostile], pieces=[])
    (escaped,) = re.findall('id="meta">(.*?)</script>', page, re.DOTALL)
    assert not re.search("[<>&\u2028\u2029]", escaped)
    assert json.loads(escaped) == [hostile]
    assert [
        name for name in (*SAMPLES_SCRIPTS, *STEPS_SCRIPTS) if re.search("</script|<!--", asset(name), re.IGNORECASE)
    ] == []


def test_marks_are_round_numbers_around_the_values():
    assert ticks(0, 97, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(43.5, 61, 5) == [40, 45, 50, 55, 60, 65]
    assert ticks(3, 3, 5) == [3, 3.2, 3.4, 3.6, 3.8, 4]
    assert ticks(1e17, 1e17)[0] == 1e17 < ticks(1e17, 1e17)[-1]
    assert Scale(1, 16, 0, 150)(4) == 30


def test_a_data_set_without_a_step_has_no_chart_over_steps(tmp_path):
    """A page of several candidates, of which the one that no step is known of has a data set of its own."""
    runs = []
    for name, step in (("a", 1), ("b", 2), ("final", None)):
        write_results(tmp_path / name / f"on {step}", [record("a-0")], adapter=f"run/{name}")
        (run,) = read_runs(tmp_path / name)
        runs.append(replace(run, label=name, step=step))
    assert [figure.title for figure in figures.overview(runs)] == ["on 1", "on 2", "Accuracy"]


def drawn(chart: str, kind: str, name: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(chart).iter(kind) if name in e.get("class", "").split()]


def score(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def whiskers(chart: str) -> tuple[float, float]:
    """Both ends of the first interval."""
    first = drawn(chart, "line", "interval")[0]
    return float(first.get("x1", 0)), float(first.get("x2", 0))


def test_accuracy_and_its_interval_stand_where_they_should():
    """Five characters: bars begin at 14 + 6.6 · 5 = 47 and reach 270 at 100 %."""
    chart = charts.bars([Bars("", [charts.estimate("a <b>", score(0.5, 0.25, 1.0))])], "Accuracy")
    (bar,) = drawn(chart, "rect", "bar")
    assert (float(bar.get("x", 0)), float(bar.get("width", 0))) == (47, 111.5)
    assert whiskers(chart) == (102.75, 270)
    assert bar[0].text == "a <b>: 50.0 % (25.0 to 100.0)"


def test_differences_stand_on_both_sides_of_zero():
    """The farthest end, 0.2, is a mark, so that the axis, from 47 to 420 - 150, spans −20 to +20 points."""
    chart = charts.differences("Differences", [charts.estimate("avg@1", score(0.05, -0.1, 0.2), difference=True)])
    (bar,) = drawn(chart, "rect", "bar")
    assert (float(bar.get("x", 0)), float(bar.get("width", 0))) == pytest.approx((158.5, 27.88), abs=0.01)
    assert whiskers(chart) == pytest.approx((102.75, 270))
    labels = [e.text for e in ET.fromstring(chart).iter("text")]
    assert labels == ["avg@1", "+5.0 (−10.0 to +20.0)", "−20", "0", "+20"]
    worse = charts.differences("Differences", [charts.estimate("avg@1", score(-0.1, -0.2, 0.0), difference=True)])
    (bar,) = drawn(worse, "rect", "bar")
    assert (float(bar.get("x", 0)), float(bar.get("width", 0))) == (102.75, 55.75)


def test_no_difference_at_all_has_an_axis_of_two_sides():
    chart = charts.differences("Differences", [charts.estimate("avg@1", score(0.0, 0.0, 0.0), difference=True)])
    labels = [e.text for e in ET.fromstring(chart).iter("text")]
    assert labels == ["avg@1", "+0.0 (+0.0 to +0.0)", "−1", "0", "+1"]


def test_lengths_are_counted_by_bin_and_the_truncated_stand_behind_the_others(tmp_path):
    """The longest has 56 tokens: bins of 6."""
    rows = [record(f"{i}-0", tokens=tokens) for i, tokens in enumerate((0, 1, 1, 2))]
    rows += [record(f"{i}-1", tokens=tokens, finish_reason="length") for i, tokens in enumerate((2, 56))]
    write_results(tmp_path / "gsm8k", rows)
    figure = figures.of_lengths(read_runs(tmp_path)[0].scored[0])
    bars = drawn(figure.chart, "rect", "bar")
    assert [bar[0].text for bar in bars] == [
        "0 to 5 tokens: 4 finished", "0 to 5 tokens: 1 truncated", "54 to 59 tokens: 1 truncated",
    ]  # fmt: skip
    assert float(bars[0].get("x", 0)) + float(bars[0].get("width", 0)) == pytest.approx(
        float(bars[1].get("x", 0)), abs=0.02
    )
    assert figure.note == "Tokens. Mean 10, longest 56; 2 truncated."


def test_lines_cross_the_points_and_span_the_intervals():
    line = Line("pass@k", "pass@k", [(1, 40.0), (2, 50.0), (3, 60.0)], [(1, 30.0, 50.0), (2, 40, 60), (3, 50, 70.0)])
    chart = charts.trend([line], "pass@k", unit="%", x_name="k", level=20.0, smooth=False, pointer=False)
    x = [float(dot.get("cx", 0)) for dot in drawn(chart, "circle", "dot")]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1])
    labels = [e.text for e in ET.fromstring(chart).iter("text")]
    assert labels[2:8] == ["20", "30", "40", "50", "60", "70"]
    assert "base" in labels
    assert drawn(chart, "circle", "dot")[1][0].text == "pass@k, k 2: 50.0 % (40.0 to 60.0)"
    assert drawn(chart, "path", "band")
    assert "data-metrics" not in chart


def test_adapters_by_the_name_that_tells_them_apart():
    names = {"outputs/run/adapter": "run", "outputs/run/checkpoint-10": "run/checkpoint-10", "a/mine": "mine",
             "adapter": "adapter", "mine": "mine"}  # fmt: skip
    assert {path: adapter_name(path) for path in names} == names


def test_a_torn_line_and_rows_of_another_n_are_told(tmp_path, caplog):
    write_results(tmp_path / "gsm8k", [record("a-0"), record("b-0")])
    with (tmp_path / "gsm8k" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(record("c-0")) + "\n" + '{"key": "d-0", "sam')
    (scored,) = read_runs(tmp_path)[0].scored
    assert [r["key"] for r in scored.records] == ["a-0", "b-0", "c-0"]
    assert "1 broken lines left out" in caplog.text
    assert "samples.jsonl has 3 rows, the summary was made from 2" in caplog.text


def compared_folders(folder: Path, **changes: Any) -> Path:
    """Ten problems, of which the other evaluation solved the first two and this one all but the first: 8 better, 1
    worse, 1 equal. Written by the command, `changes` being the other's."""
    wrong = {"score": 0.0, "scores": {"flexible": 0.0}, "extracted": "17", "reason": "wrong"}
    for name, right, own in (("other", range(2), changes), ("this", range(1, 10), {"base_hash": "89ab"})):
        rows = [record(f"{i:016x}-0", **({} if i in right else wrong)) for i in range(10)]
        write_results(folder / name / "gsm8k", rows, **own)
    assert main(["compare", str(folder / "other"), str(folder / "this")]) == 0
    return folder / "this"


def test_a_comparison_is_shown_with_what_it_counted(tmp_path):
    """Deviations from the mean 0.7: -1.7, -0.7 and eight of 0.3, so the standard error is sqrt(10/9 · 4.1) / 10 =
    0.2134, and 2.8016 of them are 59.80 points."""
    hostile = {"model": "models/<script>x", "adapter": "runs/<b>/adapter", "dtype": "<i>half</i>"}
    folder = compared_folders(tmp_path, **hostile)
    (run,) = read_runs(folder)
    assert run.comparison is not None
    paired = run.comparison.datasets["gsm8k"]
    assert (paired.problems, paired.better, paired.worse, paired.equal) == (10, 8, 1, 1)
    ((metric, found),) = paired.metrics.items()  # n is 1: all metrics say the same
    assert (metric, found.other, found.this, found.value, found.verdict) == ("avg@1", 0.2, 0.9, 0.7, "better")
    text = write_report(folder).read_text()
    section = text[text.index('<section class="compared"') : text.index('<section aria-labelledby="samples-title"')]
    assert "Compared with &lt;script&gt;x with &lt;b&gt;" in section
    assert "&lt;i&gt;half&lt;/i&gt;" in section
    assert not re.search("<script|<b>|<i>", section)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section, re.DOTALL)
    cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in cells]
    assert [cell for cell in cells if re.fullmatch(r"[−+]?[\d.]+|10 × 1", cell)] == [
        "20.00", "90.00", "+70.00", "59.80", "10 × 1", "8", "1", "1",
    ]  # fmt: skip
    samples = next(p["samples"] for p in map(unpacked, embed.pieces([run])) if "samples" in p)
    assert samples["changed"] == [[1.0, 0.0], None, *[[0.0, 1.0]] * 8]
    assert "changed" not in next(
        p["samples"] for p in map(unpacked, embed.pieces([replace(run, comparison=None)])) if "samples" in p
    )


def test_checkpoints_compared_with_the_same_run_share_a_section(tmp_path):
    names, wrong = ("checkpoint-5", "checkpoint-10"), {"score": 0.0, "reason": "wrong"}
    rows = [record(f"{i:016x}-0", **wrong) for i in range(8)]
    write_results(tmp_path / "base" / "gsm8k", rows)
    for name, right in zip(names, (2, 8), strict=True):
        own = [record(row["key"]) if i < right else row for i, row in enumerate(rows)]
        write_results(tmp_path / "sweep" / name / "gsm8k", own)
        assert main(["compare", str(tmp_path / "base"), str(tmp_path / "sweep" / name)]) == 0
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(sweep(*names)))
    text = write_report(tmp_path / "sweep").read_text()
    assert text.count('<section class="compared"') == 1
    (figure,) = figures.of_comparisons(read_runs(tmp_path / "sweep"))
    bars = [bar[0].text for bar in drawn(figure.chart, "rect", "bar")]
    assert [bar.split(" (")[0] for bar in bars if bar] == ["checkpoint-5: +25.0", "checkpoint-10: +100.0"]


def test_a_comparison_of_other_samples_is_left_out_with_one_line(tmp_path, caplog):
    folder = compared_folders(tmp_path)
    records = {"gsm8k": read_runs(folder)[0].scored[0].records}
    assert read_comparison(folder, records) is not None
    assert caplog.messages == []
    rescored = [{**records["gsm8k"][0], "score": 1.0}, *records["gsm8k"][1:]]
    more = [*records["gsm8k"], record("b-0")]
    for rows in (rescored, more, records["gsm8k"][1:], []):
        caplog.clear()
        assert read_comparison(folder, {"gsm8k": rows}) is None
        assert len(caplog.messages) == 1
        assert "compare.json is left out for gsm8k: made from other samples" in caplog.text
    whole = json.loads((folder / "compare.json").read_text())
    metrics = whole["datasets"]["gsm8k"]["metrics"]["avg@1"]
    for broken in ("{", "[]", "{}", json.dumps(whole | {"datasets": {"gsm8k": {"metrics": metrics}}}),
                   json.dumps(whole).replace('"value": 0.7', '"value": 1e999')):  # fmt: skip
        caplog.clear()
        (folder / "compare.json").write_text(broken)
        assert 'class="compared"' not in write_report(folder).read_text()
        assert len(caplog.messages) == 1
        assert "compare.json is left out: not readable" in caplog.text


def test_the_command_writes_where_it_is_told(tmp_path, capsys):
    write_results(tmp_path / "results" / "gsm8k", [record("a-0")], model="models/<b>tiny")
    assert main(["report", str(tmp_path / "results")]) == 0
    assert main(["report", str(tmp_path / "results" / "gsm8k"), "--output", str(tmp_path / "own.html")]) == 0
    page = tmp_path / "results" / "report.html"
    assert f"{page}: {page.stat().st_size / 1e3:.0f} kB, needs no network" in capsys.readouterr().out
    text = (tmp_path / "own.html").read_text()
    assert "<title>&lt;b&gt;tiny · evaluation</title>" in text
    assert not re.search(r"(?:src|href)=", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))
    assert list(tmp_path.glob("**/*.partial")) == []


def test_mistakes_are_one_line(tmp_path):
    for folder, message in (("none", "no such folder"), (".", "no results in")):
        with pytest.raises(UserError, match=message):
            main(["report", str(tmp_path / folder)])
    write_results(tmp_path / "gsm8k", [record("a-0")])
    with pytest.raises(UserError, match="--output"):
        main(["report", str(tmp_path), "--output", str(tmp_path / "no" / "such" / "folder.html")])
    (tmp_path / "gsm8k" / "summary.json").unlink()
    with pytest.raises(UserError, match="its evaluation has not ended"):
        main(["report", str(tmp_path)])


def test_an_installed_package_carries_the_pages_files():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["perl"]
    carried = {file for pattern in patterns for file in (ROOT / "perl").glob(pattern)}
    assert set(STATIC.iterdir()) <= carried
    assert "MIT License" in (STATIC / "temml.LICENSE.txt").read_text()
