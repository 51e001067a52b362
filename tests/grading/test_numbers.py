"""Where the gold is a number only a form of that number is right: under every rubric, and whatever else equals it."""

import pytest

from perl.grading import Grader
from perl.tasks import TASKS

TASK_NAMES = ("gsm8k", "dapo-math", "math")

# Work that is left standing, for the gold 25 where no other is named.
LEFT_STANDING = [
    "\\frac{20}{1}\\,+\\,5", "\\frac{20}{1}\\,+5", "\\frac{20}{1}+{}5", "\\frac{20}{1}\\quad+\\quad5",
    "\\sqrt{400}\\;+\\;5", "\\frac{1}{1}(20\\,+\\,5)", "\\frac{20\\,+\\,5}{1}", "\\frac{20~+~5}{1}", "\\frac{5(5)}{1}",
    "5\\sqrt{25}", "\\frac{5}{1}(5)", "\\frac{1}{4}(100)", "\\frac14 100", "\\frac{1}{4}\\text{ of }100",
    "\\frac{100}{4}", "100/4", "(100)/4", "\\frac{20}{1}\\ast 5", "\\frac{20}{1} ⋅ 1.25", "\\frac{20}{1}·1.25",
    "\\frac{\\sum_{i=1}^{5} 5}{1}", "\\frac{\\gcd(25,50)}{1}", "\\dfrac{20-(-5)}{1}", "\\frac{20\\mathbin{+}5}{1}",
    "\\frac{20}{1}\\left(1.25\\right)", "20\\times\\left(1.25\\right)", "20\\cdot\\frac{5}{4}", "5^2", "5^{2}",
    "5^2\\,+\\,0", "\\pi\\cdot\\frac{25}{\\pi}", "20 \\, + 5", "20+5", "20 plus 5", "\\sqrt{625}", "\\binom{25}{1}",
    "\\left|-25\\right|", "\\max(3,25)", "\\int_0^5 5 dx", "\\lfloor 25.9\\rfloor", "\\log_2 2^{25}",
    "\\operatorname{lcm}(5,25)", "\\begin{vmatrix}5&0\\\\0&5\\end{vmatrix}", "-5\\times-5", "\\lim_{x\\to25}x",
]  # fmt: skip
OTHER_GOLDS = [
    ("2", "2^{2023} \\mod 7"), ("376", "2^{100} \\bmod 1000"), ("376", "2^{100} \\pmod{1000}"),
    ("376", "2^{100} - 1000\\lfloor 2^{100}/1000\\rfloor"), ("5050", "\\sum_{k=1}^{100} k"),
    ("184756", "\\binom{20}{10}"), ("3628800", "10!"), ("3628800", "\\prod_{k=1}^{10}k"), ("12", "\\text{lcm}(4,6)"),
    ("12", "\\mathrm{lcm}(4,6)"), ("2", "\\gcd(4,6)"), ("1024", "2^{10}"), ("33", "100 - 67"), ("9", "\\max\\{3,9\\}"),
    ("-2", "\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"), ("6", "\\frac{d}{dx}x^2 \\bigg|_{x=3}"),
    ("8", "\\left|\\{1,2,3,4,5,6,7,8\\}\\right|"), ("100", "1/2+99.5"), ("0.75", "\\frac{1}{2}+\\frac{1}{4}"),
    ("0", "0 \\cdot 7"),
]  # fmt: skip
# More than the number 5, or not it.
HEDGES = [
    "5 or 6", "6 or 5", "5, 6", "5; 6", "5, 6, 7", "5 to 6", "5 and 6", "x=5 or 6", "6 or x=5", "x=6 or x=5", "6 = 5",
    "5 (or 6)", "5 \\text{ or } 6", "5\\text{ or 6}", "5\\text{6}", "5\\mbox{, 6, 7}", "5 \\mathrm{or 6}",
    "5\\text{, or maybe 6, 7, 8, 9}", "5 \\text{ (or possibly 6)}", "not 5", "\\text{not }5", "\\neq 5", "\\ne 5", "<5",
    "> 5", "\\le 5", "≥5", "5 or more", "at least 5", "5 at most", "more than 5", "5!", "5x", "x+5", "5+x", "5+", "--5",
    "5 million", "5 dozen", "5 hundred", "5²", "5½", "5 1/2", "5 \\frac{1}{2}", "5:30", "5 over 4", "5_6", "5_000",
    "5 5", "5^{\\circ} 30'", "101_2", "5\\ldots", "\\{5,6\\}", "[0,5]", "(5,6)", "5\\pm 1", "5 / 6", "all of 1, 2, 5",
    "5 \\text{ less than } 7", "5 \\text{ tenths}", "20 \\to 5", "20 \\Rightarrow 5", "5 \\text{ or so}", "any x = 5",
    "all of 1..1000 = 5",
    "5 dollars or 6 dollars", "either 5", "5 \\text{ choose } 3", "5,000", "50\\%", "0.5", "-5", "5k", "5 thousand",
]  # fmt: skip
# What states 5.
FIVE = [
    "5", "5.", "5.0", "05", "+5", "(5)", "{5}", "5\\;", "$5$", "\\$5", "$5", "\\(5\\)", "**5**", "`5`",
    "\\text{5}", "\\textbf{5}", "2+3=5", "n=5", "m+n = 2+3 = 5", "5 cm", "5°", "5\\%", "5%", "5 ways", "5 dollars",
    "5 (five)", "5e0", "0.5e1", "5 \\times 10^0", "50 \\cdot 10^{-1}", "5_{10}", "5\\text{ apples}", "٥", "５",
    "5 \\text{ per hour}", "5 times", "5 times as many", "\\textbf{5 times}",
]  # fmt: skip
# (gold, text) of other numbers.
FORMS = [
    ("1000", "1 000"), ("1000", "1{,}000"), ("1000", "1\\,000"), ("10080", "10 080"), ("70000", "70 thousand"),
    ("70000", "7e4"), ("70000", "7 \\times 10^4"), ("70000", "7 \\cdot 10^{4}"), ("1500000", "1.5 million"),
    ("1000000", "10^6"), ("36", "3 dozen"), ("5000000", "\\$5 million"), ("-5", "- 5"), ("-5", "negative 5"),
    ("-5", "minus 5"), ("3.5", "3½"), ("3.5", "3 1/2"), ("0.75", "\\frac{3}{4}"), ("0.75", "3/4"),
    ("0.75", "{3 \\over 4}"),
    ("0.00012", "1.2 \\times 10^{-4}"), ("0.25", "\\\\frac{1}{4}"), ("0.75", "\\textbf{\\frac{3}{4}}"),
]  # fmt: skip


def stated(task: str, answer: str) -> str:
    return f"So we are done.\n\nAnswer: {answer}" if task == "dapo-math" else f"So \\boxed{{{answer}}}"


@pytest.fixture(scope="module")
def accepted():
    """Those of (gold, completion) that a task's rubric accepts."""
    with Grader() as grader:

        def of(task: str, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
            grades = grader.grade(TASKS[task].rubric, [text for _, text in rows], [gold for gold, _ in rows])
            return [row for row, grade in zip(rows, grades, strict=True) if grade.score]

        yield of


@pytest.mark.parametrize("task", TASK_NAMES)
def test_work_that_is_left_standing_earns_nothing(task, accepted):
    rows = [("25", stated(task, text)) for text in LEFT_STANDING]
    rows += [(gold, stated(task, text)) for gold, text in OTHER_GOLDS]
    if task == "gsm8k":
        rows += [("25", f"#### {text}") for text in LEFT_STANDING]
    if task == "dapo-math":  # no `Answer:` line and no box: math-verify looks for one
        rows += [("25", f"I conclude that the final answer is ${text}$.") for text in LEFT_STANDING]
    assert accepted(task, rows) == []


@pytest.mark.parametrize("task", TASK_NAMES)
def test_hedges_and_other_numbers_are_wrong(task, accepted):
    rows = [("5", stated(task, text)) for text in HEDGES]
    if task == "gsm8k":
        rows += [("5", f"#### {text}") for text in HEDGES]
    else:
        rows += [("5", "Answer: \\boxed{5} or \\boxed{6}"), ("5", "Answer: \\boxed{6} or \\boxed{5}")]
    assert accepted(task, rows) == []


@pytest.mark.parametrize("task", TASK_NAMES)
def test_every_form_of_the_number_is_right(task, accepted):
    rows = [("5", stated(task, text)) for text in FIVE] + [(gold, stated(task, text)) for gold, text in FORMS]
    assert accepted(task, rows) == rows


def test_a_marker_of_gsm8k_is_read_with_the_words_around_its_number(accepted):
    right = [
        ("18", "#### \\(18\\) dollars for 3 days"),
        ("18", "#### Janet makes 18 dollars in 1 day"),
        ("18", "#### 18\n\n#### Step 2"),
        ("18", "#### 18\n\n#### Explanation: it takes 3 steps"),
        ("18", "#### **Answer: 18 eggs in 2 days**"),
        ("18", "#### 18 dollars for 3 days"),
        ("18", "#### $18 (that is 3 + 15)"),
        ("18", "So \\boxed 18."),
        ("18", "So \\boxed{18}, not \\boxed{}."),
        ("18", "So \\boxed{\\text{Total: } 18}."),
        ("70000", "#### 70k"),
        ("70000", "#### $70k"),
        ("1000", "#### 1 000"),
        ("-5", "#### - 5"),
        ("50", "#### 50%"),
        ("3", "#### 3 more apples"),
        ("3", "#### 3 more than Tom"),
        ("18", "#### $18/day"),
        ("18", "#### Rs. 18"),
        ("18", "#### 18 times as many"),
        ("18", "#### She makes $18 every day at the market."),
        ("18", "#### 18 ✓"),
        ("18", "#### 18元。"),
        ("18", "#### __18__"),
        ("18", "#### [18]"),
        ("18", "#### 18<|im_end|>"),
        ("18", "<answer>\n#### 18</answer>"),
        ("18", "#### <answer>18</answer>"),
        ("18", "#### 18 #### 18"),
        ("18", "#### 18 ####"),
        ("18", "#### 18 m² of 20 m²"),
        ("18", "The answer is 18 grams of CO₂."),
        ("18", "The density is 18 g·cm⁻³."),
        ("18", "She ran 18 m·s⁻¹."),
        ("18", "The total is 18. We used formula a₁ + d."),
        ("45", "#### 45 points over 3 games"),
        ("5", "#### 5 days using 2 teams"),
        ("5", "#### 5 gallons into 3 tanks"),
        ("5", "#### 5 marbles. Answer: 5"),
        ("21", "#### 21 days until 2021"),
        ("10", "\\boxed{10 \\text{ more 5-dollar bills}}"),
        ("18", "#### 18 dollars. 9 eggs"),
        ("9", "#### 9 students among 3 classes"),
        ("18", "#### $18 profit: $200 - $182"),
        ("230", "#### 230 dollars total, 100 + 130"),
        ("18", "#### 18 m^2"),
        ("50000", "#### 5 × 10⁴"),
        ("3.125", "So each gets 3⅛."),
    ]
    assert accepted("gsm8k", right) == right
    wrong = [("1", "#### 1 million"), ("3", "#### 3 dozen"), ("1", "#### 18 dollars for 1 day"), ("0.5", "#### 50%")]
    wrong += [("3", "#### 3 more than 4"), ("3", "#### 3 times 4"), ("3", "#### any 3"), ("3", "#### 4 #### 3 or 4")]
    wrong += [("3", "#### 3/x"), ("3", "#### 3万"), ("3", "#### [3, 4]"), ("3", "#### either 3")]
    wrong += [("2", "#### 2 hours 30 minutes"), ("5", "\\boxed{5 \\text{ feet } 6 \\text{ inches}}")]
    wrong += [
        ("18", "#### 18 eggs, 20 eggs"),
        ("12", "#### 12 apples, no wait, 15 apples"),
        ("12", "#### 12 apples plus 3"),
    ]
    wrong += [("12", "#### 12 dollars 50 cents"), ("3", "So each gets 3⅛."), ("10", "So the answer is 10⁻³.")]
    assert accepted("gsm8k", wrong) == []


def test_no_operand_of_the_last_expression_is_the_answer(accepted):
    """Neither its operands nor its value: math-verify is not asked either."""
    texts = [
        "4 / 2",
        "\\sqrt{2}",
        "2^3",
        "1/0",
        "7:30",
        "3-4",
        "10-20",
        "2 + 3",
        "2 \\times 3",
        "20 - $5",
        "2(3)",
        "20-2",
        "\\log 0",
        "\\ln{0}",
        "\\log_2 8",
        "\\sin(0)",
        "\\binom{5}{2}",
        "\\lfloor 5 \\rfloor",
    ]
    golds = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "10", "15", "18", "20", "30", "-1", "-4", "-10", "-20"]
    assert accepted("gsm8k", [(gold, f"So it is {text}.") for text in texts for gold in golds]) == []
    forms = [
        ("3.5", "3 1/2"),
        ("5", "5%"),
        ("100000", "1e5"),
        ("1000000", "1,000,000"),
        ("3.5", "$3.50"),
        ("0.5", ".5"),
    ]
    right = [(gold, f"So it is {text}.") for gold, text in [*forms, ("-3", "-3"), ("5", "5."), ("0.75", "3/4")]]
    assert accepted("gsm8k", right) == right


def test_a_fraction_is_not_read_by_its_denominator(accepted):
    fractions = [
        "\\frac{4}{2}", "\\frac{36}{2}", "\\frac{4}{ 2 }", "\\frac{4}{2.0}", "\\frac 4 2", "\\frac42", "\\dfrac{4}{2}",
        "{4 \\over 2}", "\\frac{\\frac{8}{2}}{2}", "\\frac{8}{\\frac{8}{2}}", "\\frac{1+3}{2}", "\\frac{x}{2}",
        "\\frac{4 \\text{ eggs}}{2}", "\\frac{\\$4}{2}", "\\\\frac{4}{2}", "-\\frac{4}{-2}", "4/2", "2\\frac{1}{2}",
    ]  # fmt: skip
    rows = [("2", form.replace("{}", text)) for form in ("Answer: {}", "So it is ${}$.") for text in fractions]
    assert accepted("gsm8k", rows) == []
    right = [("0.75", "The answer is $\\frac{3}{4}$."), ("18", "There are 18 left, $\\frac{3}{4}$ of them blue.")]
    assert accepted("gsm8k", right) == right


@pytest.mark.parametrize("task", TASK_NAMES)
def test_no_text_is_right_for_two_numbers(task, accepted):
    """A percent sign has one reading: it is a unit, 17% states 17."""
    golds = ["17", "23", "42", "-17", "1700", "0.17", "1723"]
    golds += ["17/100"] if task == "math" else []
    forms = [
        "{a} or {b}", "{a}, {b}, {c}", "\\{{{a}, {b}\\}}", "({a},{b},{c})", "[{a},{c}]", "{a}={b}={c}", "{a} = {b}",
        "x={a}, x={b}", "{a}\\pm{b}", "\\pm {a}", "{a}; {b}", "{a}/{b}", "\\text{{{a}}} {b}", "{a}\\text{{{b}}}",
        "{a}_{{{b}}}", "{a}^{{{b}}}", "{a} ({b})", "(A) {a} (B) {b}", "{a}:{b}", "{a} to {b}", "{a}-{b}",
        "{a} \\approx {b}", "{a} \\to {b}", "{a} \\equiv {b} \\pmod{{{c}}}", "{a} \\mid {b}", "{a} \\vee {b}",
        "{a} \\cup {b}", "(x-{a})(x-{b})=0", "\\begin{{cases}} {a} \\\\ {b} \\end{{cases}}", "{a} \\quad {b}",
        "{a} & {b}", "{a}\\%", "{a}00\\%", "0.{a}", "\\frac{{{a}}}{{100}}", "{a} \\text{{ percent}}", "\\${a}",
        "{a} \\text{{ cents}}", "{a}00 \\text{{ cents}}", "\\max({a},{b})", "{a} \\le x \\le {b}", "{a}, -{a}", "|{a}|",
        "{a}+0i", "{a}.{b}", "{a},{b}", "{a} {b}", "{a}{{,}}{b}", "{a} hours and {b} minutes",
    ]  # fmt: skip
    texts = [stated(task, form.format(a="17", b="23", c="42")) for form in forms]
    found = [text for _, text in accepted(task, [(gold, text) for text in texts for gold in golds])]
    number = stated(task, "\\frac{17}{100}")  # 0.17 and 17/100 are one number
    assert {text for text in found if found.count(text) > 1} <= {number, stated(task, "0.17")}


@pytest.mark.parametrize("task", TASK_NAMES)
def test_reasoning_is_not_the_answer(task, accepted):
    rows = [("18", "<think>so \\boxed{18}</think>"), ("18", "<think>\nAnswer: 18\n</think>")]
    rows += [
        ("18", f"<think>{thought}</think>\n{stated(task, '18')}") for thought in ("\\boxed{3}", "Answer: 3", "#### 3")
    ]
    rows += [("18", "<think>Answer: 3</think> So \\boxed{18}"), ("18", "<think>Answer: 3</think> Answer: 18")]
    rows += [] if task == "dapo-math" else [("18", "<think>\\boxed{3}</think> The answer is 18")]
    assert accepted(task, rows) == rows
    assert accepted(task, [("3", text) for _, text in rows]) == []


MORE_RIGHT = [
    ("\\frac{1}{3}", "0.\\overline{3}"), ("10080", "10 080"), ("3, 5, 7", "(3,5,7)"), ("y = 2x+3", "2x - y + 3 = 0"),
    ("3\\sqrt{13}", "3\\\\sqrt{13}"), ("\\frac{1}{4}", "\\\\frac{1}{4}"), ("\\frac{1}{2}", "\\frac{1}{2} = 50\\%"),
    ("-\\frac{24}{25}", "\\textbf{-\\frac{24}{25}}"), ("2\\sqrt{3}", "\\boldsymbol{2\\sqrt{3}}"),
    ("10\\%", "0.1"), ("10\\%", "10"), ("10", "10 \\text{ percent}"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\\\begin{pmatrix} 1 \\\\\\\\ 2 \\\\end{pmatrix}"),
]  # fmt: skip
MORE_WRONG = [
    ("\\frac{1}{2}", "50\\%"), ("0.1", "10\\%"), ("10", "1000\\%"), ("1", "|\\pm 1|"), ("3, 5, 7", "(3,5,9)"),
    ("y = 2x+3", "2x - y + 4 = 0"), ("\\frac{1}{3}", "0.\\overline{4}"), ("(1,2,3)", "1,2,3"),
]  # fmt: skip


def test_other_answers_of_the_math_rubric(accepted):
    rows = [(gold, stated("math", text)) for gold, text in MORE_RIGHT]
    assert accepted("math", rows) == rows
    assert accepted("math", [(gold, stated("math", text)) for gold, text in MORE_WRONG]) == []
    assert accepted("math", [("3\\sqrt{13}", "So \\\\boxed{3\\\\sqrt{13}}, $3\\\\sqrt{13}$.")]) != []
