"""python -m perl audit, and what a training says of its rewards: by rewards that were written before the audit."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from perl.__main__ import main
from perl.base.errors import UserError
from perl.grading import Grader
from perl.records import Problem
from perl.rewards.files import load_reward
from perl.rewards.functions import RewardContext, build_rewards
from perl.tools.audit.apart import call_apart
from perl.tools.audit.before_training import pays_for_nothing, warn_of_rewards
from perl.tools.audit.cli import made_problems
from perl.tools.audit.probes import PROBES
from perl.tools.audit.rows import Row, differ, make_rows
from perl.tools.audit.verdict import audit
from tests.tools import audit_rewards

FILE = Path(audit_rewards.__file__)
FAULTY = [reward.__name__ for reward in audit_rewards.FAULTY]
SOUND = [reward.__name__ for reward in audit_rewards.SOUND]
ROWS = make_rows(made_problems("gsm8k", 22), limit=20)
FORM_ALONE = ["form_alone", "brevity", "overlong"]
UNSEEN = {
    "fails_on_empty", "fails_without_a_number", "nan_is_right", "coin", "novelty", "whole_part",
    "without_sign", "same_digits", "wants_a_box", "turned_round", "the_first_rows_gold", "constant", "longer_is_better",
    "keywords", "compute_score_any_form", "any_number", "compute_score_not_a_number", "compute_score_beginning",
    "only_the_start", "substring",
}  # fmt: skip
"""Faults that nothing, `I do not know` and other answers do not show: a training says nothing of them."""


def of_builtin(name: str, rows=ROWS):
    with Grader() as grader:
        context = RewardContext(grader=grader, max_completion_length=4096, overlong_cache_length=1024)
        (function,) = build_rewards([name], context)
        return audit(name, function, rows)


def of_file(path: Path, code: str, rows=ROWS):
    path.write_text(code, encoding="utf-8")
    return audit("mine", load_reward(f"{path}:mine", {}), rows)


# Bars


@pytest.mark.parametrize("name", FAULTY)
def test_no_faulty_reward_is_missed(name):
    found = audit(name, load_reward(f"{FILE}:{name}", {}), ROWS)
    assert (found.verdict, bool(found.faults)) == ("faulty", True)


READERS = """
import functools

def paid(completions):
    return [float("####" in completion[-1]["content"]) for completion in completions]

class Mine:
    def __call__(self, completions, gold, **others):
        return paid([completion for completion, _ in zip(completions, gold)])

def scaled(completions, gold, factor=1.0, **others):
    return [factor * pay for pay, answer in zip(paid(completions), gold) if answer]

def over(function):
    def inner(completions, **columns):
        return function(completions, **columns)
    return inner

@over
def decorated(completions, gold, **others):
    return scaled(completions, gold)

def taken(columns):
    return list(columns["gold"])

def by_helper(completions, **columns):
    return paid(completions)[:len(taken(columns))]

def verls(solution_str, ground_truth, factor, **others):
    return factor * ("####" in solution_str) if ground_truth else 0.0

instance, part, verls_part = Mine(), functools.partial(scaled, factor=2.0), functools.partial(verls, factor=1.0)
"""


@pytest.mark.parametrize("name", ["instance", "part", "decorated", "by_helper", "verls_part"])
def test_what_reads_the_right_answer_is_not_of_form_alone(name, tmp_path):
    (tmp_path / "mine.py").write_text(READERS)
    found = audit(name, load_reward(f"{tmp_path}/mine.py:{name}", {}), ROWS[:3])
    assert (found.verdict, found.faults[0]) == ("faulty", "reads the right answer, and pays the same whatever that is")


@pytest.mark.parametrize("name", SOUND)
def test_no_sound_reward_is_called_faulty(name):
    found = audit(name, load_reward(f"{FILE}:{name}", {}), ROWS)
    assert (found.verdict, found.faults) == ("form alone" if name in FORM_ALONE else "sound", ())


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        *((name, "sound") for name in ("accuracy", "strict")),
        *((name, "form alone") for name in ("format", "overlong", "think")),
    ],
)
def test_our_own(name, verdict):
    found = of_builtin(name)
    assert (found.verdict, found.faults) == (verdict, ())


# What is counted


def test_a_share_is_counted_over_rows():
    found = audit("substring", load_reward(f"{FILE}:substring", {}), ROWS)
    share = found.probes["three answers"]
    assert (share.count, share.texts, share.rate.value, share.rate.high) == (20, 20, 1.0, 1.0)
    assert share.rate.low == pytest.approx(0.025 ** (1 / 20))  # Clopper-Pearson, 20 of 20
    assert share.example.startswith("sums:1, three answers ('#### ")
    assert found.probes["empty"].count == 0
    assert found.refusals.count == 0


def test_a_fault_is_told_with_its_texts():
    found = audit("nan_is_right", load_reward(f"{FILE}:nan_is_right", {}), ROWS)
    assert len(found.faults) == 1
    assert found.faults[0].endswith("wrong texts earn what the right answer does: nan; as on sums:1, nan ('#### nan')")


def test_a_form_that_is_paid_instead_is_named():
    found = audit("wants_a_box", load_reward(f"{FILE}:wants_a_box", {}), ROWS)
    assert found.faults[0].startswith("80 of 80 right texts earn no more than wrong ones; as on sums:1, right")
    assert found.notes == (
        "it pays '\\\\boxed{{answer}}': where the prompts ask for that, audit it with --form '\\\\boxed{{answer}}'",
    )
    boxed = make_rows(made_problems("gsm8k", 22), form="\\boxed{{answer}}", limit=20)
    with_form = audit("wants_a_box", load_reward(f"{FILE}:wants_a_box", {}), boxed)
    assert [fault for fault in with_form.faults if "right texts" in fault] == []


def test_a_percentage_is_another_number(tmp_path):
    """PRM800K's grader, and those that were made of it, take an answer for its hundredth and its hundredfold."""
    code = (
        "def mine(completions, gold, **_):\n"
        "    stated = [each[-1]['content'].rpartition('#### ')[2].strip() for each in completions]\n"
        "    numbers = [float(text) if text.replace('.', '', 1).isdecimal() else None for text in stated]\n"
        "    return [float(a is not None and any(abs(a * k - float(b)) < 1e-6 for k in (1, 100, 0.01)))\n"
        "            for a, b in zip(numbers, gold)]\n"
    )
    found = of_file(tmp_path / "mine.py", code)
    assert found.verdict == "faulty"
    assert "wrong texts earn what the right answer does: a hundred times as much, a hundredth of it" in found.faults[0]


def test_a_fault_that_one_row_in_twenty_shows(tmp_path):
    """It pays anything on the row whose answer is this one."""
    rare = ROWS[7].answer
    code = f"def mine(completions, gold, **_):\n    return [float(g == '{rare}' or c[-1]['content'] == '#### ' + g)"
    found = of_file(tmp_path / "rare.py", f"{code} for c, g in zip(completions, gold)]\n")
    assert found.verdict == "faulty"


def test_answers_that_only_algebra_tells_apart_are_not_taken_as_wrong():
    assert differ("18", "19")
    assert differ("\\text{red}", "\\text{blue}")
    assert not differ("18", "18.0")
    assert not differ("1,800", "1800")
    assert not differ("\\frac{1}{2}", "0.5")
    assert not differ("x+1", "1+x")


def test_wrong_texts_never_state_the_right_answer_last():
    """Of a reward that takes the last number: none of them is paid."""
    (row,) = make_rows([Problem(task="gsm8k", question=f"{n} or 5?", gold=str(n)) for n in (5, 6, 7)], limit=1)
    for name, probe in PROBES.items():
        text = probe.text(row, row.answer)
        if probe.expected == "less" and text is not None:
            assert not text.rstrip(" .}").endswith(" 5"), name


def test_rows_without_another_answer_are_none():
    same = [Problem(task="gsm8k", question="?", gold=gold) for gold in ("1", "1", "1.0")]
    assert make_rows(same) == []
    two, three = (Problem(task="gsm8k", question="?", gold=gold) for gold in "23")
    assert [row.others for row in make_rows([*same, two], limit=1)] == [("2", "2")]
    assert [row.others for row in make_rows([*same, two, three], limit=1)] == [("2", "3")]


def test_code_in_an_answer_is_not_run_unseen(tmp_path):
    code = "def mine(completions, gold, **_):\n    rewards = []\n    for c, g in zip(completions, gold):\n"
    code += "        try:\n            rewards.append(float(eval(c[-1]['content'][5:500]) == float(g)))\n"
    code += "        except Exception:\n            rewards.append(0.0)\n    return rewards\n"
    code = code.replace("eval(", "(lambda t: 0 if '**' in t else eval(t))(")  # towers of powers never end
    found = of_file(tmp_path / "evaluates.py", code)
    assert [fault for fault in found.faults if fault.startswith("runs code that stands in an answer")]


# The command


def test_exit_codes_and_json(capsys):
    assert main(["audit", f"{FILE}:exact", "--rows", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["rows"], found["probes"]["right"]["texts"]) == ("sound", 3, 3)
    assert found["ms_max"] >= found["ms_median"] > 0
    assert main(["audit", f"{FILE}:substring", "--rows", "3"]) == 1
    assert f"{FILE}:substring: faulty, by 3 rows" in capsys.readouterr().out


def test_a_function_in_verls_form_with_further_arguments_and_one_of_conversations(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, points):\n"
        "    words = solution_str.split()\n"
        "    return float(points) if words and words[-1] == f'#### {ground_truth}'.split()[-1] else 0.0\n"
        "def of_turns(completions, environments, **others):\n    return [0.0] * len(completions)\n"
    )
    with pytest.raises(UserError, match=r"nothing is given to compute_score as points; .* and --kwargs gives more"):
        main(["audit", f"{file}:compute_score"])
    main(["audit", f"{file}:compute_score", "--kwargs", '{"points": 2}', "--rows", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["probes"]["right"]["texts"] == 3
    with pytest.raises(UserError, match=r"as environments but of conversations, in a training with"):
        main(["audit", f"{file}:of_turns"])


def test_rows_of_a_file(tmp_path, capsys):
    rows = [{"question": f"{n} apples and {n} more?", "answer": f"#### {2 * n}"} for n in range(3, 9)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["audit", "gsm8k", "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 6
    assert main(["audit", f"{FILE}:from_the_row", "--data", str(data), "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["accurate"], "unknown reward or task 'accurate'; did you mean 'accuracy'?"),
        (["gsm8k", "--task", "math"], "--task math: gsm8k is a task itself; leave it out"),
        (["accuracy", "--rows", "0"], "--rows 0: write a number from 1"),
        (["accuracy", "--deadline_s", "0"], "--deadline_s 0: write a number above 0, at most 86400"),
        (["accuracy", "--deadline_s", "3e6"], "--deadline_s 3e+06: write a number above 0, at most 86400"),
        (["accuracy", "--deadline_s", "inf"], "--deadline_s: expected a number, not inf"),
        (["accuracy", "--deadline_s", "nan"], "--deadline_s: expected a number, not nan"),
        (["accuracy", "--form", "Answer"], "--form 'Answer': no place for the answer; write {answer} where it stands"),
        (["accuracy", "--split", "test"], "--split is of --data; name that too"),
        (["strict", "--task", "math"], "--config.reward.functions strict: only `#### n` counts"),
        (["missing.py:reward"], "no such file"),
        (["accuracy", "--kwargs", "[1]"], "--kwargs [1]: write a JSON object, such as"),
        (["accuracy", "--kwargs", '{"points": 2}'], "--kwargs: points is for a function of your own"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(UserError) as error:
        main(["audit", *arguments])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("time.sleep(600)", "has not returned for 1 s, on "),
        # Holds the interpreter's lock, so that no thread of its process could end it.
        ("re.match('(a+)+$', 'a' * 40 + 'b')", "has not returned for 1 s, on "),
        ("os._exit(0)", "ends its process, or uses up its memory, on "),
    ],
)
def test_a_reward_that_hangs_or_ends_its_process_is_faulty(code, fault, tmp_path):
    (tmp_path / "ends.py").write_text(
        "import os, re, time\n\n\ndef mine(completions, **_):\n"
        f"    if '' in [c[-1]['content'] for c in completions]:\n        {code}\n"
        "    return [0.0 for _ in completions]\n"
    )
    command = [sys.executable, "-m", "perl", "audit", "ends.py:mine", "--deadline_s", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path, check=False)
    found = json.loads(done.stdout, parse_constant=pytest.fail)  # of NaN, which is no JSON
    assert (done.returncode, done.stderr, found["verdict"]) == (1, "", "faulty")
    assert found["faults"] == [fault + found["faults"][0].removeprefix(fault)]
    assert ", empty (" in found["faults"][0]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert shown.stdout.splitlines()[-2:] == [*found["faults"], "ends.py:mine: faulty, by 20 rows"]


# A training's own rows


def told(name: str, rows: list[Row], seconds: float = 60.0) -> str | None:
    return pays_for_nothing(name, load_reward(f"{FILE}:{name}", {}), rows, seconds)


@pytest.mark.parametrize("name", FAULTY)
def test_a_training_is_told_of_rewards_that_pay_for_nothing(name):
    assert (told(name, ROWS[:3]) is None) == (name in UNSEEN)


@pytest.mark.parametrize("name", SOUND)
def test_a_training_is_not_told_of_sound_rewards(name):
    assert told(name, ROWS[:3]) is None


def test_a_form_of_ones_own_is_no_fault(tmp_path):
    """The answer as JSON, asked for by the data's own prompts, and a tenth for an attempt."""
    (tmp_path / "own.py").write_text(
        "def mine(completions, gold, **_):\n"
        "    texts = [c[-1]['content'] for c in completions]\n"
        "    return [0.1 * any(map(str.isdigit, t)) + ('{\"answer\": ' + g + '}' in t) for t, g in zip(texts, gold)]\n"
    )
    messages = ({"role": "user", "content": "What is 1 + 1? Answer as JSON."},)
    asked = [Problem(task="gsm8k", question="", messages=messages, gold=str(n)) for n in range(10, 14)]
    assert pays_for_nothing("mine", load_reward(f"{tmp_path / 'own.py'}:mine", {}), make_rows(asked), 60.0) is None


def test_the_warning(caplog):
    dataset = Dataset.from_list([dict(row.columns) for row in ROWS])
    names = [f"{FILE}:{name}" for name in ("unread_gold", "exact")]
    config = SimpleNamespace(reward=SimpleNamespace(functions=[*names, "accuracy"], kwargs={}))
    checked = SimpleNamespace(dataset=dataset, conversations=None)
    with caplog.at_level(logging.WARNING):
        warn_of_rewards(config, checked)
    assert [record.getMessage() for record in caplog.records] == [
        f"--config.reward.functions {names[0]}: a wrong text earns what the right answer does, as on sums:1, another"
        f" row's answer ('#### {ROWS[0].others[0]}'); python -m perl audit tells more"
    ]


def test_a_slow_reward_is_asked_once():
    calls = []

    def slow(completions, **_):
        calls.append(len(completions))
        time.sleep(0.2)
        return [1.0] * len(completions)

    assert pays_for_nothing("slow", slow, ROWS[:3], 0.1) is None
    assert calls == [6]


@pytest.mark.parametrize(
    "code",
    ["time.sleep(60)", "os.kill(os.getpid(), 9)", "os._exit(0)", "raise SystemExit", "1 / 0"],
)
def test_what_a_reward_does_before_the_training_is_not_felt(code, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def called():
        print("graded")
        calls.append(Path("kept").write_text("1"))
        exec(code)
        return "paid"

    began = time.monotonic()
    assert call_apart(called, 0.3) is None
    assert time.monotonic() - began < 20  # and not a minute
    assert (calls, list(tmp_path.iterdir()), capfd.readouterr().out) == ([], [], "")


def test_what_a_reward_has_started_ends_with_it():
    receive, send = os.pipe()
    os.set_inheritable(send, True)

    def called():
        subprocess.Popen(["sleep", "600"], pass_fds=[send])
        return "paid"

    assert call_apart(called, 20.0) == "paid"
    os.close(send)
    assert os.read(receive, 1) == b""  # the end: nobody holds the other side
    os.close(receive)
