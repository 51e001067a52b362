"""Rewards by name: their values by hand, and TRL's own calling convention."""

import inspect

import pytest

from perl.errors import UserError
from perl.grading import Grader
from perl.rewards import RewardContext, build_rewards, check_rewards


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
        gold=["18", "18", "0.5", "18", "18"],
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


def test_format_is_the_form_the_prompt_asks_for(context):
    (form,) = build_rewards(["format"], context)
    texts = ["#### 17", "17", "Answer: 17", "\\boxed{17}", "\\boxed{17}", "Answer: 17"]
    tasks = ["gsm8k", "gsm8k", "dapo-math", "dapo-math", "math500", "math500"]
    assert call(form, texts, gold=["18"] * 6, task=tasks) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


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


def test_a_users_own_function(context, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **_):\n    return [-float(len(c)) for c in completions]\nLIMIT = 3\n")
    (short,) = build_rewards([f"{file}:short"], context)
    assert short.__name__ == "short"
    assert call(short, ["ab", ""], gold=["", ""], task=["gsm8k"] * 2) == [-2.0, 0.0]
    with pytest.raises(UserError, match="'long' is not defined there; functions there: short"):
        check_rewards([f"{file}:long"])
    with pytest.raises(UserError, match="'LIMIT' is no function; functions there: short"):
        check_rewards([f"{file}:LIMIT"])


def test_a_users_broken_file(tmp_path):
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=r"syntax\.py, line 2 cannot be imported: SyntaxError"):
        check_rewards([f"{tmp_path}/syntax.py:f"])
    (tmp_path / "missing.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(UserError, match=r"missing\.py cannot be imported: ModuleNotFoundError"):
        check_rewards([f"{tmp_path}/missing.py:f"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["accuraci"], "--config.reward.functions: unknown reward 'accuraci'; did you mean 'accuracy'"),
        (["accuracy", "accuracy"], "'accuracy' stands there 2 times"),
        (["nowhere.py:f"], "no such file nowhere.py"),
        (["nowhere.py"], "write path/to/file.py:function"),
        ([], "no reward; known: accuracy, format, overlong"),
    ],
)
def test_wrong_names(names, message):
    with pytest.raises(UserError) as caught:
        check_rewards(names)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0",
            "of verl's form, .*def reward.completions, gold, task, .*others.: return .compute_score.t, c",
        ),
        ("def f(completions): return [0.0]", "must take .*others"),
        ("def f(answers, **others): return [0.0]", "nothing is given to f as answers"),
        ("def f(completions, gold, weight=1.0, **others): return [0.0]", None),
    ],
)
def test_a_signature_that_can_not_be_called_is_found_before_loading(tmp_path, code, said):
    file = tmp_path / "mine.py"
    file.write_text(code)
    name = f"{file}:{code.partition('(')[0].removeprefix('def ')}"
    if said is None:
        check_rewards([name])
        return
    with pytest.raises(UserError, match=said):
        check_rewards([name])
