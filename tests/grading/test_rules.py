"""What the cheap rules read, case by case, and that no input makes them slow."""

import re
import signal

import pytest

from perl.grading.rules import RULES, is_number, normalize_answer, normalize_number


def read(rule: str, completion: str) -> str | None:
    written = RULES[rule].extract(completion)
    return None if written is None else RULES[rule].normalize(written)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("She has 9 * 2 = <<9*2=18>>18.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### -3", "-3"),
        ("#### 18.", "18"),
        ("#### 17\nWait.\n#### 18", "18"),
        ("#### 18 dollars", "18"),
        ("####18", None),  # verl and lm-evaluation-harness want the space
        ("#### $18", None),
        ("the answer is 18", None),
        ("", None),
    ],
)
def test_strict(completion, answer):
    assert read("strict", completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 18", "18"),
        ("The answer is 18.", "18"),
        ("The answer is 18.00", "18"),
        ("She makes $18 every day.", "18"),
        ("She makes \\$1,234.50", "1234.5"),
        ("It is 1,450,000 people", "1450000"),
        ("It is 1,00,000 rupees", "100000"),
        ("It is −5", "-5"),
        ("It is -$5.", "-5"),
        ("It is $-5.", "-5"),
        ("#### −$1,080 dollars", "-1080"),
        ("**18**", "18"),
        ("so $x = 18$ apples", "18"),
        ("The share is 50%.", "50"),
        ("The share is 50\\%.", "50"),
        ("It covers 18 m^2", "18"),
        ("It covers 18 m2", "18"),
        ("\\boxed{18}", "18"),
        ("\\boxed{x = 18}", "18"),
        ("\\boxed{1{,}234}", "1234"),
        ("\\boxed{10,\\!080 \\text{ eggs}}", "10080"),
        ("\\boxed{18} and that took 3 steps", "18"),
        ("#### 18\nThis took 3 steps.", "18"),
        ("#### 16 - 3 = 13", "13"),
        ("#### Step 2\nthe total is 18", "18"),
        ("Answer: $\\frac{3}{4}$.", "0.75"),
        ("Answer: \\frac{36}{ 2 }", "\\frac{36}{2}"),
        ("There are 18 left, \\frac{3}{4} of them blue.", "18"),
        ("so $18 = \\frac{36}{2}$", "18"),
        ("so $\\frac{36}{2} = 18$", "18"),
        ("#### Step 2: add\n\\boxed{18}", "18"),
        ("\\boxed{17}\n#### 18", "18"),
        ("#### 17\n\\boxed{18}", "18"),
        ("\\boxed{} so 18", "18"),
        ("the total...18", "18"),
        ("from 3 to 18", "18"),
        ("１８", "18"),  # full-width digits
        ("١٨", "18"),  # Arabic-Indic digits
        ("共 １，２３４ 元", "1234"),
        ("12\u202f345 francs", "12345"),
        ("007", "7"),
        (".5", "0.5"),
        ("-0", "0"),
        ("105263157894736848", "105263157894736848"),
        ("\\boxed{\\frac{36}{2}}", "\\frac{36}{2}"),
        ("\\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}"),
        ("\\boxed{20+5}", "20+5"),
        ("\\boxed{(20 + 5) * 2}", "(20+5)*2"),
        ("\\boxed{2(20+5)}", "2(20+5)"),
        ("\\boxed{20+5 = 25}", "25"),
        ("\\boxed{7e4}", "70000"),
        ("#### 20 + 5 dollars.", "20+5"),
        ("#### $20 - $5", "20-5"),
        ("#### 7e4", "70000"),
        ("#### 7 \\times 10^4", "70000"),
        ("12 of 20\n#### 3/4", "0.75"),
        ("20 eggs\n#### 25^{2}", "25^{2}"),
        ("#### 25 (20 + 5)", "25"),
        ("#### 25 - that is all of 30", "25"),
        ("#### 25 eggs", "25"),
        ("#### 2-year-olds", "2"),
        ("#### 18 m^2", "18"),
        ("#### **25**", "25"),
        ("eighteen", None),
        ("", None),
        ("\\boxed{}", None),
        ("²", None),
    ],
)
def test_flexible(completion, answer):
    assert read("flexible", completion) == answer


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("5%", "5"), ("5\\%", "5"), ("5.", "5"), (".5", "0.5"), ("$3.50", "3.5"), ("-3", "-3"),
        ("1,000,000", "1000000"),
        ("3 1/2", "3.5"), ("$3\\frac{1}{2}$", "3.5"), ("3½", "3.5"), ("1e5", "100000"), ("1.5e-3", "0.0015"),
        ("$7 \\times 10^4$", "70000"), ("10^5", "100000"), ("18 m²", "18"), ("18 -3", "-3"), ("**18** 3", "3"),
        ("18 - 3 = 15", "15"), ("18 / day", "18"), ("a 12-year-old", "12"), ("18\n- 3 of them", "3"),
        # None of these is a number: it is passed over, and comes whole where nothing else stands there.
        ("20-2", None), ("3-4", None), ("10-20", None), ("3–4", None), ("20 - $5", None), ("$18-$20", None),
        ("4 / 2", None), ("4/2", None), ("1/0", None), ("(20 + 5) * 2", None), ("2(3)", None), ("3 x 4", None),
        ("$2\\cdot 3$", None), ("$2 \\bmod 3$", None), ("20\\,+\\,5", None), ("$20$ + $5$", None), ("5% + 3%", None),
        ("2^3", None), ("$2^{3}$", None), ("2**3", None), ("5²", None), ("$\\sqrt{2}$", None), ("√2", None),
        ("7:30", None), ("3:4", None), ("2024-05-06", None), ("05/06/2024", None), ("3\\sqrt{2}", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text_is_no_operand(said, number):
    if number is not None:
        assert read("flexible", f"There are 77. So we get {said}") == number
        return
    assert read("flexible", f"There are 77. So we get {said}") == "77"
    whole = read("flexible", f"So we get {said}")
    assert whole is not None
    assert not re.fullmatch(r"-?[\d.]+", whole)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Answer: 34", "34"),
        ("so\nAnswer: $34$.", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer**: **34**", "34"),
        ("answer : 34", "34"),
        ("Answer：34", "34"),
        ("Answer: \\boxed{34}", "34"),
        ("Answer: \\(34\\)", "34"),
        ("Answer:\n34", "34"),
        ("Answer: 1,234 dollars", "1234"),
        ("Answer: x = 34", "34"),
        ("Answer: −366", "-366"),
        ("Answer: 12345678901234567890123", "12345678901234567890123"),
        ("Answer: 3\nAnswer: 34\nDone.", "34"),
        ("Answer: 2^5", "2^5"),
        ("Answer: 3 4", "3 4"),
        ("Answer: 2*3", "2*3"),
        ("Answer:", None),
        ("Answer: $$", None),
        ("34", None),
    ],
)
def test_answer_line(completion, answer):
    assert read("answer_line", completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{34}", "34"),
        ("\\boxed{3} and \\boxed{34}", "34"),
        ("\\boxed{\\boxed{34}}", "34"),
        ("\\fbox{34}", "34"),
        ("\\boxed {34}", "34"),
        ("\\boxed{\\{1,2\\}}", "1, 2"),
        ("\\boxed{34} then \\boxed{3", "34"),  # cut off inside the second
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("\\boxed{}", None),
        ("\\boxed{34", None),
        ("Answer: 34", None),
    ],
)
def test_boxed(completion, answer):
    assert read("boxed", completion) == answer


def test_answer_takes_the_box_only_where_no_line_states_one():
    assert read("answer", "\\boxed{3}\nAnswer: 34") == "34"
    assert read("answer", "Answer:\n\\boxed{34}") == "34"
    assert read("answer", "so \\boxed{34}") == "34"
    assert read("answer", "so 34") is None
    for colon in ":：":
        assert read("answer", f"**Answer{colon}** 最终答案如下\n\n\\boxed{{34}}") == "34"
    assert read("answer", "Answer: 34, that is\n\\boxed{35}") == "35"
    assert read("answer", "Answer: 34\n\\boxed{35}") == "34"
    assert read("answer", "Answer: let us count.\nSo \\boxed{34}.") == "34"
    assert read("answer", "First \\boxed{3}.\nAnswer: \\frac{1}{2}") == "0.5"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\dfrac{1}{2}", "\\frac12"),
        ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}"),
        ("\\frac 34", "\\frac{3}{4}"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("10,\\!080", "10080"),
        ("\\$32,\\!348", "32348"),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
        ("\\text{(C)}", "(C)"),
        ("90^\\circ", "90"),
        ("5.4 \\text{ cents}", "5.4"),
        ("864 \\mbox{ inches}^2", "864"),
        ("11\\sqrt2", "11\\sqrt{2}"),
        ("x=5", "5"),
        ("27.0", "27"),
        ("025", "25"),
        ("34 square feet", "34"),
    ],
)
def test_answers_written_differently_are_equal(one, other):
    assert normalize_answer(one) == normalize_answer(other)


@pytest.mark.parametrize(("one", "other"), [("3 4", "34"), ("2*3", "23"), ("2^3", "23"), ("2k", "2"), ("1,2", "12")])
def test_different_answers_stay_different(one, other):
    assert normalize_answer(one) != normalize_answer(other)


def test_numbers_are_exact():
    assert normalize_number("12345678901234567890123") != normalize_number("12345678901234567890124")
    assert normalize_number("0.1") == "0.1"
    assert normalize_number("-$018.00") == "-18"
    assert normalize_number("1/2") == "1/2"
    assert is_number("-18.5")
    assert is_number("14/3")
    assert not is_number("20+5")


@pytest.fixture
def alarm():
    """Fails the test instead of hanging for hours; linear reading takes milliseconds."""

    def handler(signum, frame):
        raise TimeoutError("a rule takes more than linear time")

    before = signal.signal(signal.SIGALRM, handler)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "completion",
    [
        "9" * 200_000,
        "1,23," * 40_000,
        "1," * 100_000,
        "1,234," * 40_000 + "x",
        "-" * 200_000,
        "$" * 200_000,
        " " * 200_000 + "x",
        "#### " * 40_000,
        "####" + " " * 200_000,
        "Answer" + " " * 200_000,
        "Answer:" * 40_000,
        "Answer:" + "\n" * 200_000,
        "Answer: " + "5 dollars " * 40_000 + "!",
        "Answer: " + "$" * 200_000,
        "\\boxed{" * 40_000,
        "\\boxed{" * 40_000 + "1" + "}" * 40_000,
        "\\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
        "\\boxed{" + "5 a " * 40_000 + "}",
        "\\boxed{" + "\\text{" * 40_000 + "}" * 40_000 + "}",
        "1 ^" * 60_000,
        "1 + " * 60_000,
        "1 1/" * 60_000,
        "1" + ")" * 200_000 + "(" * 200_000,
        "\\sqrt" + "{" * 200_000,
        "1 x" + "(" * 200_000,
        "1\\," * 60_000,
        "1/1" * 60_000,
        "1 /" + " " * 200_000,
        "\\frac{" * 40_000 + "1" + "}" * 40_000,
        "\\frac{" + "{1}" * 60_000 + "\\frac{1}{" * 20_000,
        "\\frac" + " " * 200_000,
        "{" * 200_000 + "\\over",
        "{1 " * 60_000 + "\\over" * 30_000,
        ("We add 3 + 4 = 7 apples, so $x = 7$. " * 6_000) + "#### 7",
    ],
    ids=lambda text: f"{text[:10]!r}...{len(text)}",
)
def test_no_input_is_slow(completion, alarm):
    for rule in RULES.values():
        written = rule.extract(completion)
        if written is not None:
            rule.normalize(written)
