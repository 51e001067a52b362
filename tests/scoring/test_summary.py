"""Numbers of a summary, from records whose metrics are known by hand."""

import pytest
from rich.console import Console

from perl.evaluation.tables import print_table
from perl.evaluation.tracking import values
from perl.reports.figures import of_samples
from perl.runs.model_card import eval_results, results_text
from perl.scoring.results import ScoredSet
from perl.scoring.summary import shown, summarize
from perl.training.validation import metrics_of
from tests.results import record, summary


def test_where_an_environment_alone_scores_no_answer_is_told_of(capsys):
    free = {"task": "", "gold": "", "extracted": None, "scores": {"environment": 1.0}}
    records = [record("a-0", 0, **free), record("a-0", 1, **free, score=0.5)]
    made = summarize(records, 2)
    assert list(made["metrics"]) == ["accuracy", "avg@2", "pass@1", "pass@2"]
    assert (made["metrics"]["avg@2"]["value"], made["unextracted"]) == (0.75, None)
    whole = summary(records, 2) | made
    print_table({"asked": whole}, Console(width=200))
    shown_there = capsys.readouterr().out + results_text([whole], "")
    assert "truncated 0.0%" in shown_there
    assert not any(word in shown_there for word in ("no answer found", "maj@"))
    drawn = of_samples(ScoredSet(dataset="asked", summary=whole, records=records))
    assert drawn.legend == [("s0", "pass@k")]
    assert {name.split("/")[2] for name in values({"asked": whole})} == {"accuracy", "pass@2"}
    assert [result.metric_type for result in eval_results(whole)] == ["accuracy", "pass@2"]
    assert not [name for name in metrics_of("asked", records, 2) if "maj" in name]
    graded = summarize([*records, record("b-0", 0), record("b-0", 1, extracted=None, score=0.0)], 2)
    assert (graded["unextracted"], graded["metrics"]["maj@2"]["value"]) == (0.75, 0.5)


def test_maj_2_is_shown_where_it_is_not_the_mean():
    """(right, none): the only vote is right, and the mean 1/2. (right, wrong): a tie is its mean."""
    missing = [record("a-0", 0), record("a-0", 1, extracted=None, score=0.0)]
    tied = [record("a-0", 0), record("a-0", 1, extracted="17", score=0.0)]
    found = summarize(missing, 2)["metrics"]
    assert (found["avg@2"]["value"], found["maj@2"]["value"]) == (0.5, 1.0)
    assert shown(found) == ["avg@2", "pass@2", "maj@2"]
    assert shown(summarize(tied, 2)["metrics"]) == ["avg@2", "pass@2"]
    assert [r.metric_type for r in eval_results(summary(missing, 2) | summarize(missing, 2))][-1] == "maj@2"
    for records, majority in ((missing, 1.0), (tied, 0.5)):  # a curve has it at each step
        assert metrics_of("gsm", records, 2)["val-core/gsm/acc/maj@2"] == majority


@pytest.mark.parametrize(
    ("right", "wrong", "majority"),
    [
        (["204 [min]", "m+n = 204", "204"], ["205", "205", "x = 1, y = 2", "26 = 25", "206"], 1.0),
        (["2x-y+3z+8 = 0"] * 3, ["x+y+z = 0", "x-y = 0", "x+2z = 0", "z = x", "y+3 = 0"], 1.0),
        (["18 [cm]"] * 3, ["18 [m]", "18 [m]", "5:30 [am]", "5:30 [pm]", "4210 [base 5]"], 1.0),
        (["C"] * 3, ["x = 25", "25", "y = 25", "25.0", "2"], 0.5),
    ],
)
def test_a_number_with_its_name_is_the_same_vote_and_with_a_unit_where_it_stands_without(right, wrong, majority):
    samples = [(text, 1.0) for text in right] + [(text, 0.0) for text in wrong]
    rows = [record("a-0", place, extracted=text, score=score) for place, (text, score) in enumerate(samples)]
    assert summarize(rows, 8)["metrics"]["maj@8"]["value"] == majority
