"""Rewards in the user's own files: TRL's form and verl's two, found by signature; every mistake is one line."""

import asyncio
import json
import math
import re

import pytest
import torch

from perl.base.errors import RankError, UserError
from perl.grading import Grader
from perl.records import Problem, Trajectory
from perl.rewards.files import row_of
from perl.rewards.functions import RewardContext, build_rewards, check_rewards
from perl.rewards.score import Rewards

ONE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.fixture
def reward(grader, tmp_path):
    """`reward(code)`: what TRL calls for the last function that `code` defines in tmp_path/mine.py."""

    def build(code, name="mine.py", **kwargs):
        (tmp_path / name).write_text(code)
        function = code.rpartition("def ")[2].partition("(")[0]
        context = RewardContext(grader=grader, max_completion_length=9, overlong_cache_length=3, kwargs=kwargs)
        (found,) = build_rewards([f"{tmp_path / name}:{function}"], context)
        return found

    return build


def given(*texts, **fields):
    """What TRL gives for completions of rows of data.parquet."""
    rows = [
        Problem(task="gsm8k", question="?", gold=str(n), source=f"data.parquet:{n}", data_source="openai/gsm8k")
        for n in range(len(texts))
    ]
    return {
        "prompts": [[{"role": "user", "content": "?"}]] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [[1]] * len(texts),
        "gold": [row.gold for row in rows],
        "task": [row.task for row in rows],
        "row": [row_of(Problem(**(vars_of(row) | fields))) for row in rows],
        "trainer_state": None,
    }


def vars_of(problem):
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


# TRL's form


def test_trls_form(reward):
    short = reward("def short(completions, **_):\n    return [-float(len(c[0]['content'])) for c in completions]\n")
    assert short.__name__ == "short"
    assert short(**given("ab", "")) == [-2.0, 0.0]


def test_trls_form_may_leave_a_row_out_and_may_be_async(reward):
    some = reward("async def some(completions, task, **_):\n    return [None, 1]\n")
    assert asyncio.run(some(**given("a", "b"))) == [None, 1]


def test_a_function_that_is_not_there(tmp_path):
    (tmp_path / "mine.py").write_text("def short(completions, **_):\n    return []\nLIMIT = 3\n")
    with pytest.raises(UserError, match="'long' is not defined there; functions there: short"):
        check_rewards([f"{tmp_path}/mine.py:long"])
    with pytest.raises(UserError, match="'LIMIT' is no function; functions there: short"):
        check_rewards([f"{tmp_path}/mine.py:LIMIT"])


def test_a_file_may_hold_a_dataclass(reward):
    """dataclasses looks its module up by name, where annotations are texts."""
    score = reward(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Weights:\n    right: float = 2.0\n"
        "def score(completions, **_):\n    return [Weights().right for _ in completions]\n"
    )
    assert score(**given("a", "b")) == [2.0, 2.0]


def test_files_of_one_name_in_two_folders_are_two(reward, tmp_path):
    found = []
    for place in ("one", "three"):
        (tmp_path / place).mkdir()
        code = (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            f"@dataclass\nclass Name:\n    text: str = {place!r}\n"
            "def compute_score(data_source, solution_str, ground_truth):\n    return float(len(Name().text))\n"
        )
        found.append(reward(code, f"{place}/mine.py"))
    assert [function(**given("a")) for function in found] == [[3.0], [5.0]]


def test_a_broken_file(tmp_path):
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=r"syntax\.py, line 2 cannot be imported: SyntaxError"):
        check_rewards([f"{tmp_path}/syntax.py:f"])
    (tmp_path / "missing.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(UserError, match=r"missing\.py cannot be imported: ModuleNotFoundError"):
        check_rewards([f"{tmp_path}/missing.py:f"])
    (tmp_path / "script.py").write_text("def f(completions, **_): ...\nraise SystemExit(0)\n")
    with pytest.raises(UserError, match=r"script\.py cannot be imported: SystemExit: 0"):
        check_rewards([f"{tmp_path}/script.py:f"])


# verl's forms


@pytest.mark.parametrize(
    ("result", "values"),
    [
        ("len(solution_str)", [2.0, 0.0]),
        ("solution_str == 'ab'", [1.0, 0.0]),
        ("{'score': 0.5, 'acc': True}", [0.5, 0.5]),
        ("__import__('numpy').float32(0.25)", [0.25, 0.25]),
        ("__import__('torch').tensor(0.25)", [0.25, 0.25]),
    ],
)
def test_verls_form_for_one_completion(reward, result, values):
    assert reward(f"{ONE}    return {result}\n")(**given("ab", "")) == values


def test_verls_batch_form(reward):
    score = reward(f"{BATCH}    return [{{'score': len(s)}} if s else 2 for s in solution_strs]\n")
    assert score(**given("ab", "")) == [2.0, 2.0]


def test_verls_functions_are_given_the_row(reward):
    check = "    assert (data_source, extra_info) == ('my/own', {'index': 3, 'split': 'train'})\n"
    check += "    assert ground_truth == {'any': [1, None]}\n    return 1\n"
    fields = {"data_source": "my/own", "ground_truth": {"any": [1, None]}, "extra_info": {"index": 3, "split": "train"}}
    assert reward(ONE + check)(**given("x", **fields)) == [1.0]
    lists = "    data_source, extra_info, ground_truth = data_sources[1], extra_infos[1], ground_truths[1]\n"
    lists += "    assert len(data_sources) == len(extra_infos) == len(ground_truths) == 2\n"
    assert reward(BATCH + lists + check.replace("1\n", "[1, 1]\n"), "batch.py")(**given("x", "y", **fields)) == [
        1.0,
        1.0,
    ]


def test_verls_own_gsm8k_takes_less_than_verl_gives(reward):
    """As the guide's command names it: custom_reward_function.path=…/gsm8k.py."""
    code = "def compute_score(solution_str, ground_truth, method='strict', format_score=0.0, score=1.0):\n"
    code += "    return score if solution_str == ground_truth else format_score\n"
    gold = {"ground_truth": "18"}
    assert reward(code)(**given("18", "17", **gold)) == [1.0, 0.0]
    assert reward(code, "again.py", format_score=0.1, score=2.0)(**given("18", "17", **gold)) == [2.0, 0.1]


def test_a_dicts_other_numbers_are_logged(reward):
    logged = {}
    score = reward(f"{ONE}    return {{'score': 1, 'acc': solution_str == 'a', 'pred': solution_str}}\n")
    assert score(**given("a", "b", "a", "c"), log_metric=logged.__setitem__) == [1.0] * 4
    assert logged == {"rewards/compute_score/acc": 0.5}


def test_a_dicts_other_numbers_may_be_numpys_and_are_left_out_where_no_float_holds_them(reward):
    logged = {}
    code = "{'score': 1, 'f': np.float32(0.5), 'i': np.int64(3), 'b': np.bool_(True), 't': np.str_('3'), 'c': 1j}"
    code += " | {'huge': 10**400, 'nan': np.float64('nan')}"
    score = reward(f"import numpy as np\n{ONE}    return {code}\n")
    assert score(**given("a", "b"), log_metric=logged.__setitem__) == [1.0] * 2
    assert logged == {f"rewards/compute_score/{name}": mean for name, mean in (("f", 0.5), ("i", 3.0), ("b", 1.0))}


def test_a_class_is_no_reward_and_an_instance_is(tmp_path):
    file = tmp_path / "mine.py"
    called = "    def __call__(self, completions, **others):\n        return [0.0] * len(completions)\n"
    file.write_text(f"class Judge:\n{called}judge = Judge()\n")
    check_rewards([f"{file}:judge"], {})
    with pytest.raises(UserError, match=r"Judge: is a class, .* name an instance of it"):
        check_rewards([f"{file}:Judge"], {})


@pytest.mark.parametrize(
    ("code", "kwargs", "said"),
    [
        ("async " + ONE, {}, r"compute_score is async; supported is def compute_score\(data_source, solution_str, gr"),
        (
            "def f(solution_str, ground_truth, judge):",
            {},
            "nothing is given to f as judge; supported is def f.data_sou",
        ),
        (
            "def f(solution_str, ground_truths):",
            {},
            "nothing is given to f as ground_truths; supported is def f.data_s",
        ),
        ("def f(solution_strs, golds):", {}, "as golds; supported is def f.data_sources, solution_strs, ground_truths"),
        ("def f(solution_str, ground_truth, /):", {}, "nothing is given to f as solution_str, ground_truth"),
        ("def f(solution_str, *more):", {}, "nothing is given to f as more"),
        ("def f(solution_str):", {"mode": 1}, "kwargs: .*mine.py:f takes no mode; it takes solution_str"),
        ("def f(completions):", {}, "must take .*others"),
        ("def f(answers, **others):", {}, "nothing is given to f as answers; .* or in verl's form data_source, sol"),
        ("def f(solution_str, ground_truth, judge):", {"judge": 1}, None),
        ("def f(solution_str, **others):", {"mode": 1}, None),
        ("def f(completions, gold, weight=1.0, **others):", {}, None),
    ],
)
def test_a_signature_that_can_not_be_called_is_found_before_loading(tmp_path, code, kwargs, said):
    file = tmp_path / "mine.py"
    file.write_text(f"{code.rstrip()} return 0.0\n")
    name = f"{file}:{code.partition('(')[0].rpartition('def ')[2]}"
    if said is None:
        check_rewards([name], kwargs)
        return
    with pytest.raises(UserError, match=said):
        check_rewards([name], kwargs)


def test_kwargs_without_a_function_of_ones_own():
    with pytest.raises(UserError, match=r"--config\.reward\.kwargs: method is for a function of your own"):
        check_rewards(["strict"], {"method": "flexible"})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            f"{ONE}    a = 1\n    return {{}}['x']\n",
            r"mine\.py:3: compute_score raised KeyError on data\.parquet:0 .prompt '\?', completion 'a'.: 'x'",
        ),
        (
            f"{BATCH}    return [1 / (s != 'b') for s in solution_strs]\n",
            r"mine\.py:2: compute_score raised ZeroDivisionError on one of 2 completions: division by zero",
        ),
        (
            "def f(completions, gold, **_):\n    return [int(c[0]['content'] or gold) for c in completions]\n",
            r"mine\.py:2: f raised ValueError on one of 2 completions: invalid literal for int\(\) with base 10: 'a'",
        ),
        (
            "def f(completions, **_):\n    raise KeyError(len(completions))\n",
            r"mine\.py:2: f raised KeyError on one of 2 completions: 2",
        ),
        (
            "import sys\ndef f(completions, **_):\n    sys.exit(0)\n",
            r"mine\.py:3: f raised SystemExit on one of 2 completions: 0",
        ),
        (f"{ONE}    raise SystemExit\n", r"mine\.py:2: compute_score raised SystemExit on data\.parquet:0 "),
        (
            f"{ONE}    pass\n",
            r"mine.py:compute_score: on data.parquet:0 .*'a'. it gave None, which is no num",
        ),
        (f"{ONE}    return '1.0'\n", "it gave '1.0', which is no number"),
        (f"{ONE}    return {{'acc': 1}}\n", r"on data.parquet:0 .*'a'. it gave a dict without score, of acc"),
        (f"{BATCH}    return [1.0]\n", "mine.py:compute_score: it gave 1 rewards for 2 completions"),
        (f"{BATCH}    return 1.0\n", "it gave 1.0, not a list of 2 numbers"),
        (f"{BATCH}    return [0, None]\n", r"on data.parquet:1 .*completion 'b'. it gave None"),
        ("def f(completions, **_):\n    return None\n", "it gave None, not a list of 2 numbers"),
        ("def f(completions, **_):\n    return [1.0]\n", "it gave 1 rewards for 2 completions"),
        (
            "def f(completions, **_):\n    return (1 / (i - 1) for i, _ in enumerate(completions))\n",
            r"mine\.py:2: f raised ZeroDivisionError on one of 2 completions: .*division by zero",
        ),
        (
            f"{BATCH}    return map(int, solution_strs)\n",
            r"compute_score raised ValueError on one of 2 completions: invalid literal for int",
        ),
        ("def f(completions, **_):\n    return [1.0, 'good']\n", r"on data.parquet:1 .* it gave 'good', which is no"),
    ],
)
def test_what_goes_wrong_while_scoring_is_one_line(reward, code, said):
    facts = [{"ground_truth": "0"}, {"ground_truth": "1"}]
    rows = given("a", "b")
    rows["row"] = [json.dumps(json.loads(text) | fact) for text, fact in zip(rows["row"], facts, strict=True)]
    with pytest.raises(RankError, match=said) as caught:
        reward(code)(**rows)
    assert str(caught.value).startswith("--config.reward.functions: ")


@pytest.mark.parametrize(("logged", "said"), [("'x'", "could not convert string to float: 'x'"), ("None", "NoneType")])
def test_a_logged_metric_that_is_no_number_is_the_functions_mistake(reward, logged, said):
    """The mean over the processes raised later, and named no function."""
    found = reward(f"def f(completions, log_metric, **_):\n    log_metric('a', {logged})\n    return [1.0]\n")
    (row,) = given("a")["row"]
    columns = {"prompt": "?", "gold": "0", "task": "gsm8k", "row": row}
    drawn = Trajectory(row=columns, position=0, sample=0, prompt_ids=(1,), completion="b")
    with pytest.raises(RankError, match=rf"^--config.reward.functions: [^\n]*mine.py:2: f raised [^\n]*{said}"):
        Rewards([found], ["f"], torch.ones(1)).score([drawn], None)


@pytest.mark.parametrize("number", ["float('nan')", "float('-inf')", "10**400", "__import__('numpy').float32('inf')"])
def test_a_number_that_is_not_finite_is_the_trainers_to_judge(reward, number):
    """NaN would be TRL's for a row without a reward."""
    assert reward(f"def f(completions, **_):\n    return [{number}, None]\n")(**given("a", "b")) == [math.inf, None]
    assert reward(f"{ONE}    return {number}\n", "one.py")(**given("a", "b")) == [math.inf, math.inf]


def test_a_long_prompt_and_completion_are_shown_by_their_beginning(reward):
    rows = given("x" * 100)
    rows["prompts"] = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why \n\n " + "y " * 99}]
    ]
    said = "prompt 'Why " + "y " * 18 + "…', completion '" + "x" * 40 + "…'"
    with pytest.raises(RankError, match=re.escape(said)):
        reward("def f(completions, **_):\n    return 1 / 0\n")(**rows)


def test_memory_that_runs_out_in_a_reward_is_not_the_rewards_mistake(reward):
    """perl.runs.out_of_memory names the phase and what to change."""
    run = reward("import torch\ndef f(completions, **_):\n    raise torch.OutOfMemoryError('NPU out of memory')\n")
    with pytest.raises(torch.OutOfMemoryError):
        run(completions=["x"])
