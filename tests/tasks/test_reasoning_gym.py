"""reasoning_gym:NAME as a source of problems, and its own scoring."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from perl.base.errors import UserError
from perl.grading import Grader, entries
from perl.grading.entries import DEEPEST, answer_of, judge_entry
from perl.grading.rules import RULES
from perl.scoring.samples import folder_name
from perl.tasks import TASKS, data_name, failing_references, load_problems, training_split
from perl.tasks.reasoning_gym import AUDITED, SPAN

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needed = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed: pip install -e '.[reasoning_gym]'")
ENTRY = json.dumps({"answer": "7", "generator": "chain_sum", "settings": {}, "question": "3 + 4", "metadata": {}})
RUBRIC = TASKS["reasoning_gym"].rubric


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_without_the_package_one_line_names_the_extra():
    with pytest.raises(UserError) as error:
        load_problems("reasoning_gym:chain_sum")
    said = "reasoning_gym:chain_sum: reasoning-gym is not installed; pip install -e '.[reasoning_gym]'"
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("spec", "split", "task", "said"),
    [
        ("reasoning_gym:chain_sum", "validation", None, "no split 'validation'; splits: train, test"),
        ("reasoning_gym:chain_sum", None, "gsm8k", "graded by its own scoring, not as task gsm8k; leave the task out"),
        ("reasoning_gym:chain_sum?seed=200", None, None, "seed 200: write a number from 0 to 199"),
        ("reasoning_gym:chain_sum?size=0", None, None, "size 0: write a number from 1 to 5000000"),
        ("reasoning_gym:chain_sum?size", None, None, "write reasoning_gym:chain_sum?setting=value"),
        ("reasoning_gym", None, None, "names no generator; write reasoning_gym:countdown"),
    ],
)
def test_mistakes(spec, split, task, said):
    with pytest.raises(UserError) as error:
        load_problems(spec, split=split, task=task)
    assert said in str(error.value)


def test_what_names_it():
    spec = "reasoning_gym:countdown?max_numbers=3"
    assert (data_name(spec), training_split(spec)) == (spec, "train")
    assert folder_name(spec) == "reasoning_gym_countdown_max_numbers_3"


def test_the_audit_is_of_each_generator_once():
    audited = json.loads(AUDITED.read_text(encoding="utf-8"))
    names = [*audited["sound"], *audited["refused"]]
    assert len(names) == len(set(names)) == 106
    assert {"game_of_life_halting", "boxnet"} <= audited["refused"].keys()
    assert {"chain_sum", "countdown"} <= set(audited["sound"])


# Answers


def test_the_answer_stands_in_the_last_tag():
    rule = RULES["answer_tag"]
    assert rule.state(ENTRY) == "<answer>7</answer>"
    assert rule.extract("<answer>1</answer> no, <answer>\n 7 \n</answer> done") == "7"
    assert [rule.extract(text) for text in ("7", "<answer></answer>", "</answer>7<answer>", "<answer>7")] == [None] * 4
    assert [answer_of(text) for text in ('{"answer": 7}', '{"answer"', "{", "7")] == [
        '{"answer": 7}',
        '{"answer"',
        "{",
        "7",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch x')",
        "open(chr(120), chr(119))",
        "(open)(chr(120))",
        "S('1')",
        'sympify ( "1" )',
        "x.subs(1, 2)",
        r'[S(pi) for pi in ["\x6f\x70\x65\x6e\x28\x29"]]',
        r'"\x6f\x28\x29" in S.Reals',
        r'"\x6f\x28\x29" in S.Reals + 3!',
        "(lambda: 1)()",
        "[0 for sympy.x in [1]]",
        "(x := open)(1)",
        "exp(x.name)",
        'exp("1")',
        "exp(*[1])",
        "1\nS(1)",
        "(S)(1) + 3!",
        "str (1) + '2'!",
        "3! + test ()",
        "3! + doctest\t()",
        "3! + (lambdify #\n(x, x))",
        "3! + lambdify \\\n(x, x)",
        "-" * 5000 + "(1)",
        "+".join(["(1)"] * 5000),
    ],
)
def test_code_is_wrong_unseen(answer):
    """The generator is not asked: there is none of this name."""
    assert judge_entry(answer, ENTRY.replace("chain_sum", "no_such")) == (0.0, None, "wrong")


def test_how_deep_an_answer_may_be_does_not_depend_on_the_process(monkeypatch):
    """Libraries raise the limit of recursion, by which Python refuses to read what is deeper."""
    monkeypatch.setattr(entries, "_scorer", lambda *_: lambda text, entry: 1.0)
    limit = sys.getrecursionlimit()
    try:
        for each in (limit, 100_000):
            sys.setrecursionlimit(each)
            scores = [judge_entry("-" * deep + "(1)", ENTRY)[0] for deep in (DEEPEST // 2, 2 * DEEPEST)]
            assert scores == [1.0, 0.0]
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "answer",
    [
        "(6 - 1) * 2",
        "x**2*sqrt(x)/2 - log(Abs(x)) + C",
        "3! + (4)",
        '["a", "b"]',
        '[("a", -1), {"b": 2}]',
        "It's [1]",
        "two (2) apples",
        "3! + log (4)",
        "_ Q\n(1)",
        "((((",
        "\\frac{1}{2}",
    ],
)
def test_values_and_calculations_are_asked_about(answer, monkeypatch):
    monkeypatch.setattr(entries, "_scorer", lambda *_: lambda text, entry: float(text == answer))
    assert judge_entry(answer, ENTRY)[0] == 1.0


def test_a_plain_gold_is_a_text():
    with Grader() as grader:
        grades = grader.grade(RUBRIC, ["<answer>f(1)</answer>", "<answer>8</answer>"], ["f(1)", "7"])
    assert [grade.score for grade in grades] == [1.0, 0.0]


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_an_entry_is_not_graded_as_wrong_for_want_of_the_package():
    with Grader() as grader, pytest.raises(UserError, match="which grades these, is not installed"):
        grader.grade(RUBRIC, ["<answer>7</answer>"], [ENTRY])


@needed
def test_arithmetic_is_no_code():
    countdown = {
        "answer": "6 - 1",
        "generator": "countdown",
        "settings": {},
        "metadata": {"numbers": [1, 6, 2], "target": 10},
    }
    entry = json.dumps(countdown)
    assert [judge_entry(answer, entry)[0] for answer in ("(6 - 1) * 2", "6 - 1", "((((", "")] == [1.0, 0.0, 0.0, 0.0]


# Problems


@needed
def test_training_and_held_out_problems_are_not_the_same():
    train, test = (load_problems("reasoning_gym:chain_sum?size=30", split=split) for split in ("train", "test"))
    assert len(train) == len(test) == 30
    assert train[0].source == "reasoning_gym:chain_sum?size=30 train:1"
    assert train[0].data_source == "reasoning_gym/chain_sum"
    assert not {problem.question for problem in train} & {problem.question for problem in test}
    again = load_problems("reasoning_gym:chain_sum?size=30", split="train")
    assert again == train
    other = load_problems("reasoning_gym:chain_sum?size=30&seed=1", split="train")
    assert not {problem.question for problem in train} & {problem.question for problem in other}
    assert SPAN * 200 < 2**31


@needed
def test_difficulty_and_grades():
    problems = load_problems("reasoning_gym:countdown?min_numbers=3&max_numbers=3", limit=4)
    entries = [json.loads(problem.gold) for problem in problems]
    assert [len(entry["metadata"]["numbers"]) for entry in entries] == [3] * 4
    texts = [
        f"<answer>{entries[0]['answer']}</answer>",
        f"<answer>0 + {entries[1]['answer']}</answer>",  # a number that is not there
        f"<answer>{' + '.join(map(str, entries[2]['metadata']['numbers']))} + 0.5</answer>",
        entries[3]["answer"],
    ]
    with Grader() as grader:
        grades = grader.grade(RUBRIC, texts, [problem.gold for problem in problems])
        assert failing_references(problems, grader) == []
    assert [(grade.score, grade.scores["answer_tag"], grade.reason) for grade in grades] == [
        (1.0, 1.0, "correct"), (0.0, 0.0, "wrong"), (0.0, 0.0, "wrong"), (0.0, 0.0, "unextracted"),
    ]  # fmt: skip


@needed
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("reasoning_gym:countdwn", "unknown generator of reasoning-gym 'countdwn'; did you mean 'countdown'?"),
        ("reasoning_gym:game_of_life_halting", "its own scoring did not pass the audit ("),
        ("reasoning_gym:countdown?numbers=3", "its settings: min_numbers, max_numbers"),
        ("reasoning_gym:countdown?min_numbers=1", "its settings: min_numbers, max_numbers"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(UserError) as error:
        load_problems(spec)
    assert said in str(error.value)


def test_a_generator_that_refuses_late_is_one_line(monkeypatch):
    """As countdown does of a target that no numbers make."""

    class Late:
        def __getitem__(self, place):
            raise ValueError("Failed to\ngenerate")

    factory = SimpleNamespace(DATASETS={"chain_sum": (None, None)}, create_dataset=lambda *_, **__: Late())
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(factory=factory, __spec__=object()))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    said = (
        r"^reasoning_gym:chain_sum: the generator makes no problem 1 by these settings \(ValueError: Failed to generate"
    )
    with pytest.raises(UserError, match=said):
        load_problems("reasoning_gym:chain_sum")
