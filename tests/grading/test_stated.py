"""Which stated answers are found, and which are the gold: the labelled set, and statements meant to mislead."""

import json
import random
import time
from pathlib import Path

import pytest

from perl.grading import Grader
from perl.grading.stated import extract, normalize
from perl.tasks import TASKS
from tests.grading.make_statements import rows
from tests.grading.measure import accepted_by_perl, statements

MATH500 = Path(__file__).parents[3] / "shared" / "data" / "bench" / "math500.jsonl"
FILE = Path(__file__).with_name("statements.jsonl")


def B(answer: str) -> str:
    return f"so \\boxed{{{answer}}}."


WRONG = [
    ("x \\approx 15.7", B("x")),
    ("3.14", B("\\pi \\approx 3.14")),
    ("5", B("5 \\text{ million}")),
    ("5", B("5!")),
    ("5", B("2x=5y")),
    ("5", B("x<5")),
    ("5", B("-5")),
    ("5", B("\\text{not } 5")),
    ("5", B("5 \\text{ or } 6")),
    ("5", B("5\\text{ dozen}")),
    ("5", "I think 5 is close, but let me think about 5"),
    ("5", "Therefore, $x = 5$ or $x = 6$."),
    ("5", "Thus $x=5$ is impossible, so we"),
    ("5", "So $x = 5$, and then we add 3 to get $8$."),
    ("12", B("1, 2")),
    ("12", B("\\{1,2\\}")),
    ("12", B("1\\cdot 2")),
    ("(1,2)", B("[1,2]")),
    ("(1,2)", B("(2,1)")),
    ("(1,2)", B("\\{1,2\\}")),
    ("(1,2)", B("1,2")),
    ("[1,2]", B("\\{1,2\\}")),
    ("x^2+1", B("x^2+1=0")),
    ("x^2+1", B("y^2+1")),
    ("3R^2", B("3r^2")),
    ("R", B("r")),
    ("\\text{(C)}", B("c")),
    ("\\text{(C)}", B("\\text{(A) and (C)}")),
    ("\\text{(C)}", B("\\text{C or D}")),
    ("\\text{(C)}", "The answer is not (C)."),
    ("\\text{even}", B("\\text{neven}")),
    ("\\text{odd}", B("\\text{neither odd nor even}")),
    ("\\text{odd}", B("\\text{odd or even}")),
    ("\\text{east}", B("e a s t w")),
    ("\\text{Monday}", B("\\text{Sunday}")),
    ("0", B("5x-7y=0")),
    ("0", B("\\emptyset")),
    ("0", B("\\text{none}")),
    ("5x - 7y + 11z + 4 = 0", B("10x-7y+11z+4=0")),
    ("y = 2x+3", B("f(x)=2x+4")),
    ("x=5", B("y=5")),
    ("x=5", B("5x")),
    ("\\frac{1}{2}", B("\\frac{1}{2} \\text{ or } 2")),
    ("\\frac{1}{2}", B("1\\frac{1}{2}")),
    ("\\frac{1}{2}", B("12")),
    ("\\frac{1}{3}", B("0.3333333")),
    ("\\frac{1}{3}", B("0.33")),
    ("\\pi", B("3.14159265")),
    ("\\pi", B("3.14")),
    ("\\sqrt{2}", B("1.41421356")),
    ("2\\sqrt{3}", B("2^{\\sqrt{3}}")),
    ("2^3", B("23")),
    ("1 \\pm \\sqrt{19}", B("1+\\sqrt{19}, -1+\\sqrt{19}")),
    ("3, 5, 7", B("3, 5, 7, 9")),
    ("3, 5, 7", B("(3,5)")),
    ("3, 5, 7", B("3, 5, 7, 3, 4")),
    ("-2,1", B("(-2,1)")),
    ("10\\%", B("10^\\circ")),
    ("90^\\circ", B("90\\%")),
    ("90^\\circ", B("90\\text{ radians}")),
    ("864 \\mbox{ inches}^2", B("864\\text{ feet}^2")),
    ("\\$18.90", B("18.90\\text{ cents}")),
    ("\\$18.90", B("\\$1890")),
    ("52_8", B("52_{16}")),
    ("52_8", B("42_8")),
    ("100", B("100_2")),
    ("(2,\\infty)", B("x \\neq 2")),
    ("(2,\\infty)", B("[2,\\infty]")),
    ("(-\\infty, 2) \\cup (3, \\infty)", B("x<2 \\text{ and } x>3")),
    ("(-\\infty, 2) \\cup (3, \\infty)", B("x<2, x<3")),
    ("(3,4]", B("4\\ge x\\ge 3")),
    ("(3,4]", B("(3,4],(5,6]")),
    ("x \\in [-2,7]", B("x \\in (-2,7)")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", B("\\begin{pmatrix} 1 & 2 \\end{pmatrix}")),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", B("\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", B("\\mathbf{i}-2\\mathbf{j}")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", B("2\\mathbf{i}+\\mathbf{j}")),
    ("2:30 \\text{ p.m.}", B("2:30\\text{ am}")),
    ("3:4", B("0.75:4")),
    ("3:4", B("3.4")),
    ("1,000", B("1,00")),
    ("1000", B("1.000,5")),
    ("16", B("4^3")),
    ("6+9i", B("6+9")),
    ("6+9i", B("6-9i")),
    ("i", B("j")),
    ("f(x)=x^2", B("f(x)=x^2+1")),
    ("2k", B("2K^2")),
    ("p - q", B("P - 2Q")),
    ("8", B("8\\text{ is not the answer}")),
    ("8", B("\\text{approximately } 9")),
    ("8", B("")),
    ("8", B("?")),
    ("8", B("\\frac{8}{0}")),
    ("8", B("8\\ldots")),
    ("8", B("8, \\ldots")),
    ("8", B("8 \\pm 1")),
    ("8", "\\boxed{9} and also 8"),
    ("8", "\\boxed{8} and \\boxed{9}"),
    ("8", "\\boxed{8}. Wait, that is wrong. \\boxed{9}"),
    ("8", "\\boxed{8"),
    ("8", B("8k, k \\in \\mathbb{Z}")),
    ("8", B("8 \\pmod{9}")),
    ("8", B("\\text{at least } 8")),
    ("8", B("\\text{less than } 8")),
    ("8", B("\\text{more than }8")),
    ("8", B("8^\\circ\\text{C} + 1")),
    ("8", B("8\\sqrt{}")),
    ("10", B("10⁻³")),
    ("3", B("3⅛")),
    ("8", B("\\log 8")),
    ("8", B("|8-1|")),
    ("8", B("8\\text{ times } 2")),
    ("8", B("8e")),
    ("8", B("8 8")),
    ("34", B("3 4")),
    ("8", B("x\\le 8")),
    ("8", B("x=8 \\text{ or } x=-8")),
    ("8", B("\\overline{8}")),
    ("8", B("0.\\overline{8}")),
    ("2\\pi", B("2\\pi k")),
    ("(1,2)", B("(1,2),(2,1)")),
    ("(1,2)", B("(1,2) \\cup (3,4)")),
    ("(-1,6)", B("-1 < x \\le 6")),
]
RIGHT = [
    ("5", B("5\\text{ apples}")),
    ("5", B("x=5")),
    ("5", "5"),
    ("5", "$5$"),
    ("5", "Therefore, $x = 5$."),
    ("5", "Thus, we get\n$$x = 5.$$"),
    ("5", "Hence there are $5$ apples."),
    ("5", "So the final answer is\n\n$$\\boxed{5}$$"),
    ("5", "# Answer\n5"),
    ("5", "The correct answer is: 5"),
    ("x \\in [-2,7]", B("\\{x \\mid -2 \\le x \\le 7\\}")),
    ("(1,2)", B("x=1,\\ y=2")),
    ("(1,2)", B("x=1,y=2")),
    ("(1,2)", B("(x, y) = (1, 2)")),
    ("\\text{Monday}", "**Answer:** Monday"),
    ("\\text{even}", B("\\text{even}")),
    ("\\text{even}", "The function is **even**.\n\nAnswer: The function is even."),
    ("\\text{(C)}", "The answer is $\\boxed{\\textbf{(C)}\\ 12}$."),
    ("\\text{(C)}", B("\\textbf{(C) } 12")),
    ("\\text{(C)}", "Answer: C"),
    ("\\text{(C)}", "The correct option is C."),
    ("\\frac{1}{2}", B("\\frac{1}{2} = 50\\%")),
    ("90^\\circ", B("\\angle ABC = 90^{\\circ}")),
    ("12", "The answer is 12 inches."),
    ("1000", B("1\\,000")),
    ("1000", B("1,000 \\text{ ways}")),
    ("2:30 \\text{ p.m.}", "The answer is 2:30 PM."),
    ("-\\frac{1}{2}", B("-0.5")),
    ("1\\frac{4}{5}", B("\\dfrac{9}{5}")),
    ("y = 2x + 3", B("y = 2x+3")),
    ("2k+2", B("2(k+1)")),
    ("\\sqrt{2}", B("2^{1/2}")),
    ("\\sqrt{2}", B("\\sqrt 2 \\approx 1.414")),
    ("x^2+1", B("f(x) = x^2 + 1")),
    ("\\frac{\\pi}{3}", B("\\pi/3")),
    ("\\frac{\\pi}{3}", B("\\frac{\\pi}{3}\\text{ radians}")),
    ("(3,4]", B("\\lambda\\in(3,4]")),
    ("11\\sqrt2", B("11\\sqrt{2}")),
    *(("\\sqrt{13}", B(written)) for written in ("√13", "√(13)", "√{13}", "\\sqrt(13)", "sqrt(13)")),
    ("\\frac{\\sqrt{3}}{2}", B("√(3)/2")),
    ("\\sqrt{a^2+b^2}", B("√(a² + b²)")),
    ("\\sqrt{2(a+b)}", B("√(2(a+b))")),
    ("\\sqrt{2+\\sqrt{3}}", B("√(2+√(3))")),
    ("50000", B("5 × 10⁴")),
    ("x^4", B("x⁴")),
    ("x^{-1}", B("x⁻¹")),
    ("\\frac{1}{8}", B("⅛")),
    ("10101_2", B("10101₂")),
    ("5", B("\\textbf{5}")),
    ("5", B("5.")),
    ("3, 5, 7", B("x=3,5,7")),
    ("3, 5, 7", B("x\\in\\{3,5,7\\}")),
    ("10080", B("10{,}080")),
    ("5", "**Final Answer**\n\n$$\n\\boxed{5}\n$$"),
    ("5", "Final answer: $\\boxed{5}$"),
    ("5", "#### 5"),
    ("-\\frac{3}{8}", B("\\frac{-3}{8}")),
    ("-\\frac{3}{8}", B("\\frac{3}{-8}")),
    ("6+9i", B("9i+6")),
    ("2^{10}", B("1024")),
    ("8 \\pi", B("8\\pi\\text{ square units}")),
    ("5r^5", B("5r^{5}")),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", B("[[1,2],[3,4]]")),
    ("\\emptyset", B("\\varnothing")),
    ("5", B("\\$5")),
    ("120", B("5! = 120")),
    ("\\binom{5}{2}", B("10")),
    ("x=5", B("x = 5")),
    ("x=2,3", B("x = 2, x = 3")),
    ("x=2,3", B("2, 3")),
    ("x = 2 \\text{ or } x = 3", B("2, 3")),
    ("-2 \\le x \\le 7", B("[-2,7]")),
    ("x > 2", B("(2,\\infty)")),
    ("\\mathbb{R}", B("\\mathbb{R}")),
    ("(-\\infty,\\infty)", B("\\mathbb{R}")),
]
WRONG += [
    ("\\frac{1}{2}", B("50\\%")),  # a percent sign is a unit
    ("\\frac{3}{4}", B("75\\%")),
    ("120", B("5!")),
    ("7", B("7 \\text{ or fewer}")),
    ("7", B("\\text{at most } 7")),
    ("7", B("7+\\sqrt{2}")),
    ("7", B("7\\%\\text{ of } 50")),
    ("7", B("\\frac{7}{1} + 1")),
    ("7", B("07.1")),
    ("7", B("7^{\\circ} 30'")),
    ("7", B("7:00")),
    ("7", B("7\\text{ to }9")),
    ("7", B("\\{7, -7\\}")),
    ("7", B("\\pm 7")),
    ("7", B("|7|x")),
    ("7", B("7, 7, 8")),
    ("7", B("a = 7, b = 8")),
    ("7", B("a=8, b=7")),
    ("7", B("(7)(2)")),
    ("7", B("\\binom{7}{2}")),
    ("7", B("7 \\times 10^2")),
    ("7", B("7\\cdot 10^{-1}")),
    ("7", B("7 \\mod 3")),
    ("7", B("f(7)")),
    ("7", B("x_7")),
    ("7", B("7_{8}")),
    ("7", "We have 7 apples, so 7. Then"),
    ("7", "Let's see, the answer might be 7, but we need to check"),
    ("7", "The answer is either 7 or 8."),
    ("7", "The answer is more than 7."),
    ("7", "The answer is 7 less than 10."),
    ("7", "The answer is 7 times larger than 3"),
    ("7", "The answer is between 7 and 9."),
    ("7", "The answer is unknown. 7"),
    ("7", "Answer: 8\n\nCheck: 7"),
    ("7", "Answer: I don't know, maybe 7?"),
    ("7", "The final answer is $6 + 2 = 8$, not $7$."),
    ("7", "Therefore, $x \\neq 7$."),
    ("7", "Therefore, $x > 7$."),
    ("7", "Therefore, $2x = 7$, so $x = 3.5$."),
    ("\\frac{3}{4}", B("3 \\frac{1}{4}")),
    ("\\frac{3}{4}", B("\\frac{3}{4}x")),
    ("\\frac{3}{4}", B("-\\frac{-3}{-4}")),
    ("\\frac{3}{4}", B("\\frac{3}{4}, \\frac{4}{3}")),
    ("\\frac{3}{4}", B("3:4")),
    ("\\frac{3}{4}", B("0.7")),
    ("\\frac{3}{4}", B("75")),
    ("\\text{(B)}", B("\\text{(A) or (B)}")),
    ("\\text{(B)}", B("B, C")),
    ("\\text{(B)}", B("AB")),
    ("\\text{(B)}", B("\\text{not (B)}")),
    ("\\text{(B)}", "The answer is not B."),
    ("\\text{Friday}", B("\\text{the day after Friday}")),
    ("\\text{Friday}", B("\\text{Friday or Saturday}")),
    ("\\text{Friday}", B("\\text{Fri-yay}")),
    ("\\text{ellipse}", B("\\text{The curve is not an ellipse}")),
    ("\\text{ellipse}", B("\\text{half of an ellipse}")),
    ("(1,2)", B("(1,2]")),
    ("(1,2)", B("(1,2,2)")),
    ("(1,2)", B("x=2, y=1")),
    ("(1,2)", B("(1,-2)")),
    ("(1,2)", B("b=1, a=2")),
    ("(0,1) \\cup (2,3)", B("(0,1), (2,4)")),
    ("(0,1) \\cup (2,3)", B("(0,3)")),
    ("(-\\infty,5]", B("x<5")),
    ("(-\\infty,5]", B("[5,\\infty)")),
    ("[0,1]", B("0 \\le x < 1")),
    ("2x+1", B("2x+1=y+1")),
    ("2x+1", B("2(x+1)")),
    ("2x+1", B("2X+1")),
    ("x^2-1", B("(x-1)^2")),
    ("\\sin x", B("\\sin y")),
    ("\\sin x", B("\\cos x")),
    ("\\sqrt{3}", B("3^{1/3}")),
    ("\\log 2", B("\\ln 3")),
    ("2i", B("2")),
    ("3+4i", B("4+3i")),
    ("3+4i", B("5")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("\\begin{pmatrix} 1 \\\\ 2 \\\\ 4 \\end{pmatrix}")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("(1,2,3,0)")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("\\{1,2,3\\}")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("1,2,3")),
    ("\\$5", B("5\\text{ cents}")),
    ("12\\text{ cm}", B("12\\text{ m}")),
    ("12\\text{ cm}", B("12\\text{ cm}^2")),
    ("12\\text{ cm}", B("1.2\\text{ cm}")),
    ("30^\\circ", B("30\\pi")),
    ("1{,}234", B("1.234")),
    ("1{,}234", B("1,234,000")),
    ("1011_2", B("1101_2")),
    ("1011_2", B("1011_{10}")),
    ("x=3 \\text{ or } x=4", B("x=3")),
    ("\\{1,2\\}", B("\\{1,2,3\\}")),
    ("\\{1,2\\}", B("\\{(1,2)\\}")),
    ("4", B("2^3")),
    ("4", B("4\\text{ is too small, so } 5")),
    ("4", "\\boxed{4} or \\boxed{5}"),
    ("4", B("\\text{four or five}")),
    ("4", B("\\boxed{5}")),
]
RIGHT += [
    ("15.7", B("x \\approx 15.7")),
    ("15.7", B("V \\approx 15.7\\text{ cm}^3")),
    ("x \\approx 15.7", B("15.7")),
    ("15.7", "The answer is approximately 15.7."),
    ("15.7", B("\\text{about } 15.7")),
    ("\\pi", B("\\pi \\approx 3.14")),
    ("7", B("\\text{7 apples}")),
    ("7", B("n=7\\text{ apples}")),
    ("7", B("7\\ \\text{units}")),
    ("7", "The answer is $\\mathbf{7}$."),
    ("7", "**The answer is 7.**"),
    ("7", "The final answer is:\n\n**7**"),
    ("7", "So, the number of apples is $\\boxed{7}$ apples."),
    ("7", "Therefore, the value of $x$ is $\\boxed{x=7}$"),
    ("7", B("7\\,\\text{cm}^3")),
    ("7", B("\\frac{21}{3}=7")),
    ("7", B("7.0")),
    ("7", B("\\sqrt{49}=7")),
    ("7", B("{7}")),
    ("7", B("+7")),
    ("7", B("7!/6! = 7")),
    ("7", "Answer: $x=7$"),
    ("7", "The answer is therefore 7."),
    ("7", "Thus the answer is 7, as claimed."),
    ("7", "Final answer: 7"),
    ("7", "\\[\n\\boxed{\n7\n}\n\\]"),
    ("7", "\\boxed{7}$ and we are done"),
    ("7", "<think>maybe \\boxed{8}</think> \\boxed{7}"),
    ("7", B("f(2)=7")),
    ("7", B("\\lfloor x\\rfloor = 7")),
    ("7", B("N = 7")),
    ("7", B("a_5 = 7")),
    ("7", B("\\text{Total} = 7")),
    ("7", B("\\text{Area} = 7\\text{ square units}")),
    ("\\frac{3}{4}", B("{3 \\over 4}")),
    ("\\frac{3}{4}", B("\\cfrac{3}{4}")),
    ("\\frac{3}{4}", B("P = \\frac{3}{4} = 0.75")),
    ("\\frac{3}{4}", B("\\displaystyle\\frac{3}{4}")),
    ("\\text{(B)}", B("\\mathbf{B}")),
    ("\\text{(B)}", B("\\text{B) 12}")),
    ("\\text{(B)}", "The answer is **(B)**."),
    ("\\text{Friday}", B("\\textit{Friday}")),
    ("(1,2)", B("(1;2)")),
    ("(1,2)", B("\\left(1,\\,2\\right)")),
    ("(1,2)", B("\\text{The point } (1,2)")),
    ("(0,1) \\cup (2,3)", B("0<x<1 \\text{ or } 2<x<3")),
    ("(-\\infty,5]", B("x\\leqslant 5")),
    ("[0,1]", B("0\\le x\\le 1")),
    ("2x+1", B("y=2x+1")),
    ("2x+1", B("f(x)=1+2x")),
    ("x^2-1", B("(x-1)(x+1)")),
    ("2i", B("2i")),
    ("3+4i", B("z=3+4i")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("\\left[\\begin{array}{c}1\\\\2\\\\3\\end{array}\\right]")),
    ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", B("\\hat{i}+2\\hat{j}+3\\hat{k}")),
    ("\\$5", B("\\$5.00")),
    ("12\\text{ cm}", B("12\\text{ centimeters}")),
    ("30^\\circ", B("\\angle A = 30^\\circ")),
    ("1{,}234", B("1234")),
    ("1{,}234", B("1\\,234")),
    ("1011_2", B("1011_{\\text{two}}")),
    ("x=3 \\text{ or } x=4", B("3, 4")),
    ("x=3 \\text{ or } x=4", B("x\\in\\{3,4\\}")),
    ("\\{1,2\\}", B("1, 2")),
    ("\\frac{\\pi}{4}", B("\\tfrac{\\pi}{4}")),
    ("e^2", B("e^{2}")),
    ("2\\sqrt{3}", B("\\sqrt{12}")),
    ("\\frac{1+\\sqrt{5}}{2}", B("\\frac{\\sqrt{5}+1}{2}")),
    ("\\infty", B("\\infty")),
    ("\\text{no solution}", B("\\text{No solution}")),
    ("\\text{Yes}", "The answer is: Yes."),
]


def judged(rows):
    with Grader(deadline_s=30.0) as grader:
        golds, texts = zip(*rows, strict=True)
        return [grade.score for grade in grader.grade(TASKS["math"].rubric, texts, golds)]


def test_near_misses_are_wrong():
    assert [row for row, score in zip(WRONG, judged(WRONG), strict=True) if score] == []


def test_plain_statements_are_right():
    assert [row for row, score in zip(RIGHT, judged(RIGHT), strict=True) if not score] == []


def test_of_the_labelled_set_the_right_are_accepted_and_none_of_the_wrong():
    labelled = statements()
    accepted = accepted_by_perl(labelled)
    right = [said for row, said in zip(labelled, accepted, strict=True) if row.right]
    assert len(right) >= 1500
    assert len(labelled) - len(right) >= 1500
    assert sum(right) >= 0.995 * len(right)
    assert [row for row, said in zip(labelled, accepted, strict=True) if said and not row.right] == []


@pytest.mark.skipif(not MATH500.exists(), reason=f"{MATH500} is not there")
def test_the_labelled_set_is_what_its_generator_writes():
    golds = [json.loads(line)["answer"] for line in MATH500.read_text(encoding="utf-8").splitlines()]
    assert list(rows(golds)) == [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{3}. But \\boxed{34}.", "34"),
        ("so $\\boxed{3}$ and $\\boxed{4}$", "3, 4"),
        ("\\boxed{\\boxed{34}}", "34"),
        ("The answer is 34. I hope it is correct.", "34"),
        ("The answer is 3.4", "3.4"),
        ("### Final Answer\n\n$$34$$", "$$34$$"),
        ("Therefore, $x = 34$.", "x = 34"),
        ("34", "34"),
        ("The answer is not 34.", None),
        ("Therefore, $x = 34$ or $y = 35$.", None),
        ("Thus we get $x = 34$, and then", None),
        ("First we add.\nThat gives 34", None),
        ("\\boxed{34", None),
        ("", None),
    ],
)
def test_what_a_completion_states(completion, answer):
    assert extract(completion) == answer


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("\\dfrac{28}{6}", "14/3"),
        ("1\\frac{4}{5}", "1.8"),
        ("10{,}080 \\text{ ways}", "10080"),
        ("90^\\circ", "90 [degrees]"),
        ("x \\in (3, 4]", "(3, 4]"),
        ("3 < x \\le 4", "(3, 4]"),
        ("\\text{The function is even}", "even"),
        ("4210_{\\text{five}}", "4210 [base 5]"),
        ("6.72 \\times 10^{-5}", "0.0000672"),
        ("9" * 40, "9" * 40),
        ("8/0", "8/0"),
    ],
)
def test_one_notation(answer, same):
    assert normalize(answer) == same


NESTS = ["({0}) or {1}", "({0},{1}) or 2", "({0},{1}]", "[{0};{1})", "\\{{{0},{1}\\}}", "{0} \\cup {1}", "{0} = {1}",
         "{0}, {1}", "{0} and {1}", "x < {0}", "|x| < {0}", "{0} \\le {1}", "{0} \\pm {1}", "x \\in {0}", "(A) {0}",
         "\\begin{{pmatrix}}{0} & {1}\\end{{pmatrix}}", "\\frac{{{0}}}{{{1}}}", "({0})", "-{0}", "{0} \\approx {1}",
         "\\text{{{0}}}", "{0} (or {1})", "\\{{x | {0}\\}}", "{0}\\%", "\\boxed{{{0}}}", "\\\\{0}"]  # fmt: skip


def nested(rng: random.Random) -> str:
    """Up to thirty forms in one another: one form over and over, or several."""
    forms = rng.sample(NESTS, rng.choice([1, 1, 2, 3]))
    text = "1"
    for depth in range(rng.randint(3, 30)):
        text = rng.choice(forms).format(*rng.choice([(text, depth % 7), (depth % 7, text), (text, text[:40])]))
    return text[:1000]


def test_no_nesting_of_forms_is_slow():
    rng = random.Random(27)
    bomb = "1"
    for depth in range(19):
        bomb = f"({bomb},{depth % 7}) or 2"
    texts = [bomb, *(nested(rng) for _ in range(10_000))]
    began = time.perf_counter()
    for text in texts:
        normalize(text)
    assert time.perf_counter() - began < 60
