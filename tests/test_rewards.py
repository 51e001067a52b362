"""Rewards by name: their values by hand, and TRL's own calling convention."""

import inspect

import pytest

from perl.base.errors import UserError
from perl.grading import Grader
from perl.rewards.functions import RewardContext, build_rewards, check_rewards, check_tasks, grades_rows


@pytest.fixture(scope="module")
def context():
    with Grader(deadline_s=3.0) as grader:
        yield RewardContext(grader=grader, max_completion_length=100, overlong_cache_length=20)


def call(function, completions, **columns):
    ids = [[0] * 7 for _ in completions]
    return function(prompts=["?"] * len(completions), completions=completions, completion_ids=ids, **columns)


def test_accuracy_grades_each_row_by_its_task(context):
    (accuracy,) = build_rewards(["accuracy"], context)
    logged = {}
    rewards = call(
        accuracy,
        ["#### 18", "Answer: 17", "\\boxed{\\frac12}", "\\boxed{9^{9^{9^{9}}}}", "no number"],
        gold=["18", "18", "0.5", "\\sqrt{2}", "18"],
        task=["gsm8k", "dapo-math", "math500", "math500", "gsm8k"],
        trainer_state=None,
        log_metric=logged.__setitem__,
    )
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert logged == {"grading/timeout": 0.2, "grading/unextracted": 0.2, "grading/error": 0.0}


def test_conversational_completions(context):
    (accuracy,) = build_rewards(["accuracy"], context)
    chat = [[{"role": "assistant", "content": "#### 18"}], [{"role": "assistant", "content": None}], []]
    assert call(accuracy, chat, gold=["18"] * 3, task=["gsm8k"] * 3) == [1.0, 0.0, 0.0]


STRICT = [
    ("so it is\n#### 18", "18", 1.0),
    ("#### 1,080", "1080", 1.0),
    ("#### -5", "-5", 1.0),
    ("#### $18", "18", 0.0),
    ("#### 17\nno:\n#### 18", "18", 1.0),
    ("#### 18\nno:\n#### 17", "18", 0.0),
    ("#### 18 then #### none", "18", 1.0),
    ("#### 18.", "18", 0.0),
    ("#### 18.0", "18", 0.0),
    ("####18", "18", 0.0),
    ("\\boxed{18}", "18", 0.0),
    ("18", "18", 0.0),
    ("#### ,", "18", 0.0),
    ("#### 18" + "." + "x" * 292, "18", 0.0),
    ("#### 18 " + "x" * 292, "18", 1.0),
    ("#### 18 " + "x" * 293, "18", 0.0),
    ("", "18", 0.0),
]
"""Completion, gold, and what verl 0.9.1's gsm8k.compute_score(completion, gold) gives, method strict. It looks at the
last 300 characters."""


def test_strict_is_verls_reward_for_gsm8k(context):
    (strict,) = build_rewards(["strict"], context)
    texts, golds, values = zip(*STRICT, strict=True)
    assert call(strict, texts, gold=golds, task=["gsm8k"] * len(STRICT)) == list(values)


def test_strict_is_refused_where_no_prompt_asks_for_it():
    check_tasks(["strict"], {"gsm8k"})
    check_tasks(["accuracy"], {"math500"})
    with pytest.raises(UserError, match="strict: only `#### n` counts, but the prompts of task dapo-math ask for Ans"):
        check_tasks(["accuracy", "strict"], {"gsm8k", "dapo-math"})


def test_which_rewards_need_a_task_and_an_answer():
    assert [grades_rows([name]) for name in ("accuracy", "strict", "format", "overlong", "a.py:f")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert grades_rows(["a.py:f", "accuracy"])


def test_format_is_the_form_the_prompt_asks_for(context):
    (form,) = build_rewards(["format"], context)
    texts = ["#### 17", "17", "Answer: 17", "\\boxed{17}", "\\boxed{17}", "Answer: 17"]
    tasks = ["gsm8k", "gsm8k", "dapo-math", "dapo-math", "math500", "math500"]
    assert call(form, texts, gold=["18"] * 6, task=tasks) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_think_is_verls_format_of_geometry3k(context):
    """A full match of <think>.*</think>.*\\boxed\\{.*\\}.*, a dot being any character."""
    (think,) = build_rewards(["think"], context)
    right = ["<think>a\nb</think> \\boxed{1}", "<think></think></think>\\boxed{}."]
    right.append("<think>\\boxed{1}</think>\\boxed{2}")
    wrong = [
        " <think>a</think>\\boxed{1}",
        "<think>a \\boxed{1}",
        "<think>\\boxed{1}</think> so 1",
        "<think>a</think>\\boxed{1",
        "</think>\\boxed{1}",
        "",
    ]
    assert call(think, right) == [1.0] * 3
    assert call(think, wrong) == [0.0] * 6
    assert not grades_rows(["think"])


def test_overlong_is_dapos_equation_13(context):
    (overlong,) = build_rewards(["overlong"], context)
    lengths = [0, 80, 81, 90, 100, 120]
    rewards = overlong(completion_ids=[[0] * n for n in lengths], completions=[""] * 6, prompts=[""] * 6)
    assert rewards == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]


def test_overlong_needs_a_cache_that_fits(context):
    for cache in (0, 101):
        wrong = RewardContext(grader=context.grader, max_completion_length=100, overlong_cache_length=cache)
        with pytest.raises(UserError, match=rf"overlong_cache_length {cache}: must be between 1 and"):
            build_rewards(["overlong"], wrong)
        build_rewards(["accuracy"], wrong)  # not asked for: no matter


def test_names_are_what_trl_logs(context):
    functions = build_rewards(["accuracy", "format", "overlong"], context)
    assert [function.__name__ for function in functions] == ["accuracy", "format", "overlong"]


def test_trl_calls_rewards_as_we_are_called():
    """The keywords that `_calculate_rewards` of the pinned TRL passes."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert "prompts=prompts, completions=completions, completion_ids=completion_ids_list, **reward_kwargs" in source
    assert 'reward_kwargs["log_metric"]' in source


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["accuraci"], "--config.reward.functions: unknown reward 'accuraci'; did you mean 'accuracy'"),
        (["accuracy", "accuracy"], "'accuracy' stands there 2 times"),
        (["nowhere.py:f"], "no such file nowhere.py"),
        (["nowhere.py"], "write path/to/file.py:function"),
        ([], "no reward; known: accuracy, strict, format, think, overlong"),
    ],
)
def test_wrong_names(names, message):
    with pytest.raises(UserError) as caught:
        check_rewards(names)
    assert message in str(caught.value)


def test_two_functions_of_one_name(tmp_path):
    """TRL would log both under one key, and dynamic sampling take the first for either."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "def accuracy(completions, **kwargs):\n    return [0.0] * len(completions)\n"
        )
    one, other = (f"{tmp_path / name}.py:accuracy" for name in ("a", "b"))
    for names in (["accuracy", one], [one, "format", other]):
        with pytest.raises(UserError, match=r"'.*accuracy' and '.*accuracy' would be logged as one, accuracy; "):
            check_rewards(names)
