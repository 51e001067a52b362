"""Comparisons whose outcome is known by hand, from folders as the evaluator leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.base.provenance import provenance
from perl.evaluation.compare import compare, verdict
from perl.scoring.comparison import Difference
from perl.scoring.statistics import paired_difference
from tests.results import record, summary, sweep


def write_results(folder: Path, scores: dict[str, list[float]], dataset: str = "gsm8k", **changes) -> Path:
    """A dataset's folder with these scores by key."""
    target = folder / dataset
    target.mkdir(parents=True)
    lines = [
        record(key, i, score=score, extracted=str(score)) for key, own in scores.items() for i, score in enumerate(own)
    ]
    (target / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {"n": max(map(len, scores.values())), "model": folder.name, "base_hash": folder.name, **changes}
    (target / "summary.json").write_text(json.dumps(summary(lines, 1) | made))
    return folder


def test_the_standard_error_is_that_of_clusters():
    """Differences 1, 1, 0, -1 in clusters a, a, b, c: mean 1/4, sums of deviations 3/2, -1/4, -5/4, so the standard
    error is sqrt(3/2 (9/4 + 1/16 + 25/16)) / 4 = 0.6027."""
    found = paired_difference([1.0, 1.0, 0.0, -1.0], ["a", "a", "b", "c"])
    assert found.value == 0.25
    assert found.detectable == 1.0  # 2.8 standard errors are more than there is
    wide = paired_difference([1.0, 1.0, 0.0, -1.0] * 400, [f"{i}{c}" for i in range(400) for c in "aabc"])
    deviations = 400 * (1.5**2 + 0.25**2 + 1.25**2)
    assert wide.detectable == pytest.approx(2.801585 * (1200 / 1199 * deviations) ** 0.5 / 1600, rel=1e-6)
    assert wide.verdict == "better"
    assert wide.low < 0.25 < wide.high


def test_six_problems_have_to_differ():
    keys = [f"k{i}" for i in range(20)]
    for turned, verdict_ in ((5, "none"), (6, "worse")):
        found = paired_difference([-1.0] * turned + [0.0] * (20 - turned), keys)
        assert found.value == pytest.approx(-turned / 20)
        assert found.high < 0
        assert found.verdict == verdict_
    all_turned = paired_difference([-1.0] * 20, keys)  # others may have turned the other way
    assert all_turned[:3] == pytest.approx((-1.0, -1.0, 1 - 2 * 0.025 ** (1 / 20)))
    assert paired_difference([0.5] * 6, keys[:6]).low == pytest.approx(0.5 - 1.5 * (1 - 0.025 ** (1 / 6)))


def test_equal_answers_still_leave_room_for_a_difference():
    found = paired_difference([0.0] * 100, range(100))
    assert found.value == 0
    assert -found.low == found.high == pytest.approx(1 - 0.025**0.01)
    assert (found.detectable, found.verdict) == (0.06, "none")
    words = verdict(Difference(other=0.5, this=0.5, **found._asdict()), 100)
    assert words == "no difference that 100 problems could show: they would show 6.0 points"


def test_only_what_both_have_is_compared(tmp_path):
    """Eight common problems, of which the second run solves seven at both of its samples; a ninth only the first has,
    a tenth lacks a sample in the second."""
    keys = [f"{i:016x}-0" for i in range(10)]
    before = write_results(tmp_path / "a", {key: [0.0, 1.0, 1.0, 1.0] for key in keys})
    solved = {key: [1.0, 1.0] for key in keys[:7]}
    after = write_results(tmp_path / "b", {**solved, keys[7]: [0.0, 1.0], keys[9]: [1.0]})
    paired = compare(before, after).datasets["gsm8k"]
    assert (paired.problems, paired.n, paired.left_out) == (8, 2, 2)
    accuracy, passed = paired.metrics["avg@2"], paired.metrics["pass@2"]
    assert (accuracy.other, accuracy.this, accuracy.value, accuracy.verdict) == (0.5, 0.9375, 0.4375, "better")
    assert (passed.value, passed.verdict) == (0, "none")
    assert list(paired.metrics) == ["avg@2", "pass@2"]
    assert paired.changed == dict.fromkeys(keys[:7], (0.5, 1.0))
    reverse = compare(after, before).datasets["gsm8k"].metrics["avg@2"]
    assert (reverse.value, reverse.verdict) == (-0.4375, "worse")


def test_problems_that_got_more_samples_since_are_compared_by_those_of_the_summary(tmp_path):
    """The first has a summary of one sample each; going on to two was interrupted after one problem."""
    before = write_results(tmp_path / "a", {"a": [0.0, 0.0], "b": [0.0], "c": [0.0]}, n=1)
    after = write_results(tmp_path / "b", {key: [1.0, 1.0] for key in "abc"}, n=2)
    paired = compare(before, after).datasets["gsm8k"]
    assert (paired.problems, paired.n, paired.left_out) == (3, 1, 0)


def test_a_base_serves_no_adapter_and_so_does_not_differ_in_how(tmp_path):
    base = write_results(tmp_path / "base", {"a": [1.0]}, adapter_mode=None)
    merged = write_results(tmp_path / "run", {"a": [1.0]}, adapter_mode="merge")
    unmerged = write_results(tmp_path / "lora", {"a": [1.0]}, adapter_mode="lora")
    assert compare(base, merged).differs == []
    assert [d["name"] for d in compare(merged, unmerged).differs] == ["adapter_mode"]


def test_what_differs_besides_the_model_is_named(tmp_path, capsys):
    scores = {f"{i:016x}-0": [1.0] for i in range(3)}
    style = {"template": "{question}", "system_prompt": None, "few_shot": []}
    made = provenance()
    before = write_results(
        tmp_path / "a",
        scores,
        styles={"gsm8k": style},
        sampling={"temperature": 1.0},
        grading_hash="1",
        provenance={**made, "versions": {"vllm": "1"}},
    )
    after = write_results(
        tmp_path / "b",
        scores,
        styles={"gsm8k": {**style, "template": "{question} Think."}},
        sampling={"temperature": 0.6},
        grading_hash="2",
        provenance={**made, "versions": {"vllm": "2"}},
    )
    assert main(["compare", str(before), str(after)]) == 0
    shown = " ".join((printed := capsys.readouterr().out).split())
    assert "│ gsm8k   │ avg@1  │ 100.00 │ 100.00 │  +0.00 │" in printed  # whole in the 80 columns of a file
    assert "(avg@1; 3 problems × 1 in both, 0 better, 0 worse)" in shown
    assert "besides the model these differ" in shown
    written = json.loads((after / "compare.json").read_text())
    assert written["other"]["folder"] == str(before)
    assert {d["name"]: (d["other"], d["this"]) for d in written["differs"]} == {
        "styles.gsm8k.template": ("{question}", "{question} Think."),
        "sampling.temperature": (1.0, 0.6),
        "grading_hash": ("1", "2"),
        "versions.vllm": ("1", "2"),
    }
    assert "no difference that 3 problems could show" in shown


def test_what_differs_on_one_dataset_alone_is_named_with_it(tmp_path, capsys):
    """The folder of the second holds another adapter's scores on math500."""
    folders = [
        write_results(tmp_path / name, {"a": [1.0]}, dataset=dataset, adapter=f"/runs/{adapter}", model="m", **changes)
        for name, dataset, adapter, changes in (
            ("a", "gsm8k", "one", {"base_hash": "1", "max_model_len": 512}),
            ("a", "math500", "one", {"base_hash": "1", "max_model_len": 512}),
            ("b", "gsm8k", "one", {"base_hash": "1", "max_model_len": 256, "dtype": "bfloat16"}),
            ("b", "math500", "two", {"base_hash": "1", "max_model_len": 256}),
        )
    ]
    assert main(["compare", str(folders[0]), str(folders[2])]) == 0
    written = json.loads((tmp_path / "b" / "compare.json").read_text())
    differing = {each["name"]: (each["other"], each["this"]) for each in written["differs"]}
    assert differing.pop("max_model_len") == (512, 256)
    assert differing.pop("dtype (gsm8k)")[1] == "bfloat16"
    assert differing == {"adapter (math500)": ("/runs/one", "/runs/two")}
    assert "both are the same model" not in capsys.readouterr().out


def test_a_comparison_that_can_not_be_written_is_shown_with_a_warning(tmp_path, capsys, caplog):
    for name, score in (("a", 0.0), ("b", 1.0)):
        write_results(tmp_path / name, {"0-0": [score]})
    (tmp_path / "b" / "compare.json").mkdir()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "+100.00" in capsys.readouterr().out
    (line,) = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert line.startswith(f"not written: {tmp_path}/b/compare.json: Is a directory")


def test_nothing_in_common_is_refused(tmp_path):
    a = write_results(tmp_path / "a", {"0-0": [1.0]})
    b = write_results(tmp_path / "b", {"0-0": [1.0]}, dataset="math500")
    c = write_results(tmp_path / "c", {"1-0": [1.0]})
    with pytest.raises(UserError, match=r"no problem is in both: .*a has gsm8k \(1 problems\); .*b has math500"):
        compare(a, b)
    with pytest.raises(UserError, match="no problem is in both"):
        compare(a, c)
    with pytest.raises(UserError, match=r"holds no results .*did you mean .*/a\?"):
        compare(a / "gsm8k", a)
    with pytest.raises(UserError, match="no such folder"):
        main(["compare", str(a), str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"A .*a: is the folder of B itself"):
        main(["compare", str(a), f"{a}/../a"])
    (b / "sweep.json").write_text(json.dumps(sweep("checkpoint-4")))
    with pytest.raises(UserError, match="holds a sweep; write the folder of one of checkpoint-4"):
        compare(a, b)
    (a / "gsm8k" / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"--compare: .*summary\.json is not readable"):
        compare(a, c)


def test_prompts_that_a_template_words_by_the_day_are_named(tmp_path):
    for name, day in (("other", "23"), ("this", "24")):
        lines = [record(key, 0, prompt=f"<|system|> Today is November {day}.", score=1.0) for key in "abcdefg"]
        (tmp_path / name / "gsm8k").mkdir(parents=True)
        (tmp_path / name / "gsm8k" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / name / "gsm8k" / "summary.json").write_text(json.dumps(summary(lines, 1)))
    (named,) = compare(tmp_path / "other", tmp_path / "this").differs
    assert named["name"] == "prompts of 7 problems"
    assert (named["other"], named["this"]) == (" Today is November 23.", " Today is November 24.")


GENERATION = {"engine": "hf", "executor": "local", "rows": 1, "tokens": 1, "wall_s": 1.0, "tokens_per_s": 1.0}
GENERATION |= {"dp_size": 1, "tp_size": 1, "start_s": 0.0, "worker_restarts": 0}


@pytest.mark.parametrize(("dtype", "named"), [("bfloat16", []), ("float32", ["dtype"]), (None, [])])
def test_a_young_adapter_that_is_computed_in_float32_is_named(tmp_path, dtype, named):
    """Both were asked for auto, and the merge chose; a result of before 0.14 does not tell."""
    scores, generation = {f"k{i}": [1.0] for i in range(7)}, GENERATION | {"device": "cuda", "dtype": "bfloat16"}
    write_results(tmp_path / "other", scores, dtype="auto", generation=generation)
    generation = {name: value for name, value in (generation | {"dtype": dtype}).items() if value is not None}
    write_results(tmp_path / "this", scores, dtype="auto", generation=generation, model="other", base_hash="other")
    assert [each["name"] for each in compare(tmp_path / "other", tmp_path / "this").differs] == named
