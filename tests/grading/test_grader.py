"""The grader with its real math-verify worker: verdicts, deadlines, and what happens when processes die."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.grading import Grader, Rubric, verifier
from perl.grading.verifier import CHUNK
from perl.grading.worker import judge
from perl.tasks import TASKS

GSM8K = Rubric(rules=("strict", "flexible"), primary="flexible", math_verify="fallback", form="strict")
DAPO = Rubric(rules=("answer", "boxed"), primary="answer", math_verify="fallback", form="answer_line")
MATH = Rubric(rules=("stated", "boxed"), primary="stated", math_verify="parts", form="boxed")
TOWER = "\\boxed{9^{9^{9^{9}}}}"  # 9^9^9 has 370 million digits
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def grader():
    with Grader(deadline_s=3.0) as grader:
        yield grader


def test_rules_stand_side_by_side_and_the_primary_decides(grader):
    (grade,) = grader.grade(GSM8K, ["so she makes $18 a day."], ["18"])
    assert grade.as_dict() == {
        "score": 1.0,
        "scores": {"strict": 0.0, "flexible": 1.0},
        "extracted": "18",
        "reason": "correct",
    }
    (grade,) = grader.grade(GSM8K, ["#### 17"], ["18"])
    assert grade.as_dict() == {
        "score": 0.0,
        "scores": {"strict": 0.0, "flexible": 0.0},
        "extracted": "17",
        "reason": "wrong",
    }


def test_big_integers_are_compared_exactly(grader):
    gold = "12345678901234567890123"
    grades = grader.grade(DAPO, [f"Answer: {gold}", "Answer: 12345678901234567890124"], [gold, gold])
    assert [grade.score for grade in grades] == [1.0, 0.0]


def test_algebra_decides_where_the_cheap_rule_reads_no_number(grader):
    grades = grader.grade(
        DAPO, ["Answer: \\sqrt{8}", "it is $2\\sqrt{2}$", "no idea", "Answer: 35"], ["2\\sqrt{2}"] * 4
    )
    assert [grade.score for grade in grades] == [1.0, 1.0, 0.0, 0.0]
    assert [grade.reason for grade in grades] == ["correct", "correct", "unextracted", "wrong"]
    assert grades[0].scores == {"answer": 0.0, "boxed": 0.0, "math_verify": 1.0}
    grades = grader.grade(DAPO, ["Answer: 2 \\cdot 17", "it is $34$", "it is $2 \\cdot 17$", "Answer: 35"], ["34"] * 4)
    assert [grade.reason for grade in grades] == ["wrong", "correct", "wrong", "wrong"]
    assert "math_verify" not in grades[3].scores


def test_a_number_elsewhere_does_not_replace_a_stated_answer(grader):
    (grade,) = grader.grade(DAPO, ["Let $x = 34$.\nAnswer: unknown"], ["34"])
    assert (grade.score, grade.reason) == (0.0, "wrong")


def test_math_verify_sees_through_notation(grader):
    completions = ["\\boxed{0.5}", "\\boxed{\\frac{2}{4}}", "\\boxed{(-2, 1)}", "\\boxed{C}", "\\boxed{\\sqrt{50}}"]
    golds = ["\\frac{1}{2}", "\\frac{1}{2}", "(-2,1)", "\\text{(C)}", "5\\sqrt{2}"]
    assert [grade.score for grade in grader.grade(MATH, completions, golds)] == [1.0] * 5


def test_what_is_extracted_is_one_notation(grader):
    """maj@k counts extracted answers: those that differ in notation only are one, right or wrong, settled or judged."""
    completions = ["\\boxed{\\frac{28}{6}}", "\\boxed{14/3}", "The answer is $4\\frac23$."]
    assert {
        grade.extracted for gold in ("\\frac{14}{3}", "7") for grade in grader.grade(MATH, completions, [gold] * 3)
    } == {"14/3"}


def test_never_means_never():
    rubric = Rubric(rules=("flexible",), primary="flexible", math_verify="never", form="strict")
    with Grader() as grader:
        (grade,) = grader.grade(rubric, [TOWER], ["18"])
        assert grade.reason == "wrong"
        assert grader._verifier._worker is None


@pytest.mark.parametrize(
    ("completion", "value", "other"),
    [
        ("\\boxed{7e4}", "70000", "7"),
        ("#### 7e4", "70000", "7"),
        ("#### 7 \\times 10^4", "70000", "7"),
        ("There are 3 of 4.\n#### 3/4", "0.75", "4"),
        ("#### \\frac{37}{2} \\text{ eggs}", "18.5", "37"),
    ],
)
def test_an_expression_counts_as_its_value_and_not_as_one_of_its_numbers(completion, value, other, grader):
    right, wrong = grader.grade(GSM8K, [completion] * 2, [value, other])
    assert (right.score, wrong.score) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "value", "operand"),
    [
        ("\\boxed{20+5}", "25", "20"),
        ("\\boxed{20 * 5}", "100", "20"),
        ("\\boxed{20 \\times 5}", "100", "20"),
        ("\\boxed{(20+5)*2}", "50", "20"),
        ("#### 63 - 28", "35", "63"),
        ("63 - 28 is it.\n#### $20 + $5 dollars.", "25", "20"),
    ],
)
def test_arithmetic_that_is_left_standing_is_no_answer(completion, value, operand, grader):
    """Else a policy would be rewarded for leaving it out."""
    grades = grader.grade(GSM8K, [completion] * 2, [value, operand])
    assert [(grade.score, grade.reason) for grade in grades] == [(0.0, "wrong")] * 2
    assert "20" in (grades[0].extracted or "") or "63-28" in (grades[0].extracted or "")


@pytest.mark.parametrize("rubric", [GSM8K, DAPO, MATH], ids=["gsm8k", "dapo", "math"])
def test_a_tower_of_powers_is_a_timeout_and_costs_its_neighbours_nothing(rubric):
    good = [f"\\boxed{{\\frac{{{n}\\sqrt{{8}}}}{{{2 * n}}}}}" for n in range(1, CHUNK + 3)]
    completions = [*good, TOWER, *good]
    with Grader(deadline_s=2.0) as grader:
        grades = grader.grade(rubric, completions, ["\\sqrt{2}"] * len(completions))
    late = grades.pop(len(good))
    assert (late.score, late.reason) == (0.0, "timeout")
    assert all(grade.score == 1.0 for grade in grades)


def test_extremes_are_graded_without_harm(grader):
    completions = [
        "",
        "\\boxed{}",
        "9" * 100_000,
        "\\boxed{" + "9" * 100_000 + "}",
        "\\boxed{" * 3_000 + "18" + "}" * 3_000,
        "\\boxed{１８}",
        "We go on and on. " * 20_000 + "\\boxed{18}",
        "\x00\ud800 \\boxed{18}",
    ]
    for rubric in (GSM8K, DAPO, MATH):
        grades = grader.grade(rubric, completions, ["18"] * len(completions))
        assert [grade.score for grade in grades[:4]] == [0.0] * 4
        assert grades[6].score == grades[7].score == 1.0
        assert all(grade.extracted is None or len(grade.extracted) < 300 for grade in grades)


def test_nothing_to_grade(grader):
    assert grader.grade(MATH, [], []) == []
    with pytest.raises(ValueError, match="zip"):
        grader.grade(MATH, ["\\boxed{1}"], [])


def test_a_killed_worker_is_replaced(grader):
    assert grader.grade(MATH, ["\\boxed{\\sqrt{2} \\cdot 9}"], ["9\\sqrt{2}"])[0].score == 1.0
    worker = grader._verifier._worker
    worker.kill()
    worker.wait()
    grades = grader.grade(MATH, ["\\boxed{3\\pi \\cdot 6}", "\\boxed{3 \\cdot 7}"], ["18\\pi"] * 2)
    assert [grade.reason for grade in grades] == ["correct", "wrong"]


def test_threads_share_a_grader(grader):
    results = {}

    def work(name: int):
        results[name] = [
            g.score for g in grader.grade(MATH, [f"\\boxed{{\\pi + {name}}}"] * 20, [f"{name} + \\pi", "99\\pi"] * 10)
        ]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [1.0, 0.0] * 10 for name in range(4)}


def test_a_fork_gets_a_worker_of_its_own(grader):
    grader.grade(MATH, ["\\boxed{1 + \\pi}"], ["\\pi+1"])
    child = os.fork()
    if child == 0:
        grade = grader.grade(MATH, ["\\boxed{2 + \\pi}"], ["\\pi+2"])[0]
        grader.close()
        os._exit(0 if grade.score == 1.0 else 1)
    assert grader.grade(MATH, ["\\boxed{3 + \\pi}"], ["\\pi+3"])[0].score == 1.0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_close_ends_the_worker_and_the_next_call_starts_another():
    grader = Grader()
    grader.grade(MATH, ["\\boxed{1 + \\pi}"], ["\\pi+1"])
    worker = grader._verifier._worker
    grader.close()
    assert worker.poll() is not None
    assert grader.grade(MATH, ["\\boxed{1 + \\pi}"], ["\\pi+1"])[0].score == 1.0
    grader.close()


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_the_worker_dies_with_a_killed_parent(busy):
    """kill -9 of a rank in the middle of a verification must leave no process behind."""
    program = (
        "from perl.grading.verifier import MathVerifier, Question\n"
        "verifier = MathVerifier(600.0)\n"
        "verifier.verify([Question('1', '1', 'text')])\n"
        "print(verifier._worker.pid, flush=True)\n"
        + (f"verifier.verify([Question({TOWER!r}, '1', 'text')])" if busy else "input()")
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    if busy:
        time.sleep(1.0)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 30
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_rubric_names_rules_that_exist():
    with pytest.raises(UserError, match="did you mean 'strict'"):
        Rubric(rules=("stric",), primary="stric", math_verify="never", form="boxed")
    with pytest.raises(UserError, match="is not scored"):
        Rubric(rules=("strict",), primary="flexible", math_verify="fallback", form="strict")


INTEGERS = ["5", "-5", "0", "-0", "025", "12345678901234567890123", "1.5", "x", "1,2"]


def test_integers_read_directly_are_what_the_grammar_makes_of_them():
    """The worker replaces a function of math-verify's: it must exist, and do the same."""
    program = (
        "import json, sys, sympy\n"
        "from math_verify import parser\n"
        "from perl.grading.worker import read_integers_directly\n"
        "grammar = parser.parse_latex_cached.__wrapped__\n"
        "read_integers_directly()\n"
        "rows = json.loads(sys.argv[1])\n"
        "print(json.dumps([[sympy.srepr(f(row)) for row in rows] for f in (grammar, parser.parse_latex_cached)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(INTEGERS)], capture_output=True, text=True, check=True
    )
    by_grammar, directly = json.loads(done.stdout)
    assert by_grammar == directly


@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there")
def test_what_math_verify_accepts_of_worked_solutions_is_accepted(grader):
    from math_verify import parse, verify

    rows = [json.loads(line) for line in (SHARED / "bench" / "math500.jsonl").read_text().splitlines()][:120]
    completions = [row["solution"] for row in rows] + [row["solution"] for row in rows[1:] + rows[:1]]
    golds = [row["answer"] for row in rows] * 2
    alone = [verify(parse(f"\\boxed{{{g}}}"), parse(c)) for c, g in zip(completions, golds, strict=True)]
    grades = grader.grade(TASKS["math500"].rubric, completions, golds)
    refused = [
        (gold, grade.extracted)
        for gold, grade, yes in zip(golds, grades, alone, strict=True)
        if yes and not grade.score
    ]
    assert refused == []
    assert 0.4 < sum(alone) / len(alone) < 0.6  # right ones and wrong ones


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("\\frac{1}{2^{98}}", "\\frac{1}{2^{99}}", False),
        ("\\frac{1}{2^{98}}", "2^{-97}", False),
        ("\\frac{1}{2^{98}}", "-\\frac{1}{2^{98}}", False),
        ("\\frac{1}{2^{98}}", "\\frac{1}{3^{77}}", False),
        ("\\frac{1}{2^{98}}", "2^{-98}", True),
        ("\\frac{1}{100!}", "\\frac{1}{99!}", False),
        ("1-2^{-60}", "1-2^{-61}", False),
        ("\\sqrt{10^{40}+1}", "10^{20}+0\\pi", False),
        ("\\frac{\\pi}{10^{40}}", "\\frac{\\pi}{10^{41}}", False),
        ("\\frac{\\pi}{10}", "0.1\\pi", True),
        ("5+2\\sqrt{6}", "(\\sqrt{2}+\\sqrt{3})^2", True),
        ("e^{-20}", "e^{-21}", False),
    ],
)
def test_numbers_are_equal_to_fifty_digits_of_their_size(gold, answer, same, grader):
    (grade,) = grader.grade(MATH, [f"\\boxed{{{answer}}}"], [gold])
    assert grade.score == float(same)


def test_a_bomb_is_judged_once_and_a_batch_of_bombs_has_a_bound(caplog):
    with Grader(deadline_s=1.0) as grader:
        grader.grade(MATH, ["\\boxed{\\sqrt{4}}"], ["\\sqrt{5}"])
        began = time.monotonic()
        for _ in range(2):
            grades = grader.grade(MATH, [TOWER] * 8, ["\\sqrt{5}"] * 8)
            assert [grade.reason for grade in grades] == ["timeout"] * 8
        assert time.monotonic() - began < 10
        assert "deadline" not in caplog.text
        towers = [f"\\boxed{{{n}^{{9^{{9^{{9^{{9}}}}}}}}}}" for n in range(2, 202)]
        began = time.monotonic()
        grades = grader.grade(MATH, towers, ["\\sqrt{5}"] * 200)
        assert time.monotonic() - began < 50
        assert [grade.score for grade in grades] == [0.0] * 200
        assert "others of its batch got less" in caplog.text
        assert grader.grade(MATH, ["\\boxed{\\sqrt{20}/2}"], ["\\sqrt{5}"])[0].score == 1.0


def test_an_honest_row_behind_bombs_is_graded_right(monkeypatch):
    """However many: each row has LEAST_S, which is long here, as another machine may be slow."""
    monkeypatch.setattr(verifier, "LEAST_S", 2.0)
    towers = [f"\\boxed{{{n}^{{9^{{9^{{9^{{9}}}}}}}}}}" for n in range(2, 10)]
    with Grader(deadline_s=3.0) as grader:
        grades = grader.grade(MATH, [*towers, "\\boxed{\\sqrt{20}/2}"], ["\\sqrt{5}"] * 9)
    assert [grade.reason for grade in grades] == ["timeout"] * 8 + ["correct"]


def test_judge_in_this_process():
    assert judge("so \\boxed{\\frac{1}{2}}", "0.5") == (1.0, "\\frac{1}{2}", "correct")
    assert judge("nothing here", "1") == (0.0, None, "unextracted")


def test_what_was_started_early_is_not_judged_again():
    """The verdict is the same, a timeout too, and `grade` waits for what is still being judged."""
    with Grader(deadline_s=3.0) as grader:
        asked = []
        ask = grader._verifier._ask
        grader._verifier._ask = lambda rows: asked.append(list(rows)) or ask(rows)
        texts = ["\\boxed{\\frac{\\sqrt{8}}{2}}", TOWER, "\\boxed{2^{1/2}}"]
        for text in texts[:2]:
            grader.start(MATH, text, "\\sqrt{2}")
            grader.start(MATH, text, "\\sqrt{2}")
        grader.start(GSM8K, "#### 17", "18")  # a number: settled without math-verify
        grades = grader.grade(MATH, [*texts, texts[0]], ["\\sqrt{2}"] * 4)
        assert [grade.reason for grade in grades] == ["correct", "timeout", "correct", "correct"]
        assert sorted(map(len, asked)) == [1, 1, 1]
        assert [grade.reason for grade in grader.grade(MATH, texts[:1], ["\\sqrt{2}"])] == ["correct"]
        assert len(asked) == 4  # what was started once is given once
