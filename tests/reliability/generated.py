"""Properties that must hold for any input, and for longer: python -m tests.reliability.generated --minutes 60

test_generated.py tries a few inputs of each in the suite, always the same ones; this program goes on with new ones
until the time is over, and prints a line for each way in which a property breaks, with an input that does it, made as
small as can be. A property that broke is not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from perl.base.errors import UserError
from perl.config.load import GROUPS, parse
from perl.config.schema import NoiseConfig
from perl.evaluation.store import differences
from perl.grading import RULES, Grader
from perl.grading.stated import equal, parse_answer
from perl.noise.schedule import SCHEDULES, stage_at
from perl.records import Problem
from perl.scoring.samples import problem_keys
from perl.tasks import TASKS
from perl.tasks.files import read_rows

PIECES = [
    *(
        "\\boxed{",
        "\\fbox{",
        "\\frac{",
        "\\dfrac",
        "\\sqrt",
        "\\left(",
        "\\right]",
        "\\text{",
        "\\mathrm{",
        "\\{",
        "\\}",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\\\",
        "\\pm",
        "\\infty",
        "\\cup",
        "\\in",
        "\\le",
        "\\ne",
        "\\pi",
        "^{\\circ}",
    ),
    *("{", "}", "(", ")", "[", "]", "$", "$$", "\\[", "\\]", "&", "_", "^", "=", "<", ">", "|", "!", "%", "°", "/"),
    *("####", "#### ", "Answer:", "The answer is ", "so ", "\n", " ", ",", ".", ";", ":", "~", "**", "`", '"'),
    *("0", "1", "-2", "3.50", "1,234", "{,}", "\\!", "1e9", "9" * 40, "½", "−", "３", "²", "x", "y", "i", "and", "or"),
    *(" meters", "\\$", "cm", "apples", "noon", "3:45 pm", "\u2009", "\x00", "𝟘", "\u202e", "é"),
]
"""What answers are made of, and what breaks them."""
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=24).map("".join)
INTEGERS = st.integers(-(10**30), 10**30)
SLOW_S = 2.0
"""A cheap rule that takes longer is no cheap rule: a completion of 20,000 characters takes milliseconds."""


def quick(what: str, work: Callable[[], Any]) -> Any:
    began = time.process_time()
    result = work()
    took = time.process_time() - began
    assert took < SLOW_S, f"{what} took {took:.1f} s"
    return result


# --------------------------------------------------------------------------------------- grading and extraction


@given(TEXTS)
def extraction_never_raises(text: str) -> None:
    """Every rule reads an answer, or none, out of any text, and normalizing is done after one time."""
    for name, rule in RULES.items():
        written = quick(name, lambda rule=rule: rule.extract(text))
        if written is not None:
            quick(name, lambda rule=rule, written=written: rule.normalize(written))


@given(st.sampled_from(PIECES), st.integers(1, 20_000), TEXTS)
def repeats_are_read_in_linear_time(piece: str, times: int, end: str) -> None:
    """A completion that repeats itself until it is cut off."""
    text = (piece * times)[:20_000] + end
    for name, rule in RULES.items():
        quick(name, lambda rule=rule: (written := rule.extract(text)) is not None and rule.normalize(written))


@given(TEXTS)
def answers_are_parsed(text: str) -> None:
    """A stated answer has parts or is unreadable, and is equal to another one or not. Not always to itself: of an
    equation without two sides ("=\\boxed{") nothing is known. The grader does not ask, see below."""
    quick("parse_answer", lambda: parse_answer(text))
    assert quick("equal", lambda: equal(text, text, lambda one, other: one == other)) in (True, False)


def an_answer_is_its_own_gold(grader: Grader) -> Callable[..., None]:
    @given(TEXTS, st.sampled_from(sorted(TASKS)))
    def property_(text: str, task: str) -> None:
        """Whatever a completion states is right where the gold is the very same, malformed or not."""
        rubric = TASKS[task].rubric
        rule = RULES[rubric.primary]
        if (written := rule.extract(text)) is not None and rule.normalize(written):
            assert grader.grade(rubric, [text], [written])[0].score == 1.0

    return property_


@given(INTEGERS, INTEGERS, st.sampled_from(sorted(TASKS)))
def two_numbers_are_equal_where_they_are(one: int, other: int, task: str) -> None:
    rubric = TASKS[task].rubric
    rule = RULES[rubric.form]
    primary = RULES[rubric.primary]
    read = primary.extract(rule.state(str(other)))
    assert read is not None
    assert (primary.normalize(read) == primary.normalize(str(one))) == (one == other)


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=6),
    st.decimals(allow_nan=False, allow_infinity=False, places=6),
)
def decimals_are_exact(one: Decimal, other: Decimal) -> None:
    """No float on the way: 0.1 + 0.2 is 0.3, and 2^70 is not 2^70 + 1."""
    for rule in ("flexible", "boxed", "stated"):
        same = RULES[rule].normalize(format(one, "f")) == RULES[rule].normalize(format(other, "f"))
        assert same == (Fraction(one) == Fraction(other)), rule


def grader_never_raises(grader: Grader) -> Callable[..., None]:
    @given(
        TEXTS,
        st.one_of(INTEGERS.map(str), st.sampled_from(["\\frac{1}{2}", "(1, 2)", "x + 1"])),
        st.sampled_from(sorted(TASKS)),
    )
    def property_(text: str, gold: str, task: str) -> None:
        """Any completion has a grade of 0 or 1, math-verify included."""
        (grade,) = grader.grade(TASKS[task].rubric, [text], [gold])
        assert grade.score in (0.0, 1.0)

    return property_


# ---------------------------------------------------------------------------------------------------- schedules

SIGMAS = st.floats(1e-8, 10.0)


@given(st.sampled_from(sorted(SCHEDULES)), SIGMAS, SIGMAS, st.integers(1, 40), st.integers(1, 5000), st.booleans())
def noise_decays_within_its_bounds(
    schedule: Any, one: float, other: float, stages: int, steps: int, warmup: bool
) -> None:
    """sigma lies between both ends, never rises, and the stage goes from 0 to the last, one after the other."""
    config = NoiseConfig(
        sigma_start=max(one, other),
        sigma_end=min(one, other),
        num_stages=stages,
        schedule=schedule,
        warmup_stage=warmup,
    )
    found = [stage_at(step, steps, config) for step in range(0, steps, max(1, steps // 200))]
    noisy = [stage.sigma for stage in found if not (warmup and stage.index == 0)]
    assert all(config.sigma_end <= sigma <= config.sigma_start for sigma in noisy)
    assert all(before >= after for before, after in itertools.pairwise(noisy))
    indices = [stage.index for stage in found]
    assert indices == sorted(indices)
    assert indices[0] == 0
    assert indices[-1] < stages
    assert stage_at(steps - 1, steps, config).index == min((steps - 1) * stages // steps, stages - 1)


# ------------------------------------------------------------------------------------------------ configuration

FIELDS = [f"{group}.{field.name}" for group, kind in GROUPS.items() for field in dataclasses.fields(kind)] + [
    f"training.{name}"
    for name in (
        *(
            "max_steps",
            "learning_rate",
            "beta",
            "epsilon",
            "num_generations",
            "num_iterations",
            "loss_type",
            "scale_rewards",
        ),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "report_to", "warmup_steps", "save_strategy"),
        *(
            "max_grad_norm",
            "reward_weights",
            "temperature",
            "model_init_kwargs",
            "generation_kwargs",
            "lr_scheduler_type",
        ),
    )
]
ODD = [
    *("null", "true", "no", "-1", "0", "1", "2", "0.5", "-0.0", "1e400", "nan", ".nan", ".inf", "inf", "1e-9", "0x10"),
    *("[]", "{}", "[1", "{a: 1}", "[null]", '["a", 1]', "2024-13-45", "&a [*a]", "!!python/name:os.system", "[[[[[["),
    *("lora", "none", "auto", "vllm", "dapo", "ppo", "target_kl", "a,b", "1_000", "99999999999999999999", "", " "),
    *("~", "~nobody", "~nobody/a", "a" * 300, "a/" * 3000, "\x00", "/dev/null", "."),
]
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def any_flag_is_taken_or_told(values: dict[str, str]) -> None:
    """A command line parses or is one line, and what is parsed is the same again from its YAML."""
    try:
        parsed = parse([f"--config.{name}={value}" for name, value in values.items()])
    except UserError:
        return  # told in one line
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # report_errors tells it in one line
            return
        raise
    written = parsed.dump()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "config.yaml"
        recipe.write_text(written, encoding="utf-8")
        again = parse(["--recipe", str(recipe)])
    assert yaml.safe_load(again.dump()) == yaml.safe_load(written)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.one_of(st.sampled_from([*GROUPS, "training", "max_steps", "type"]), st.text(max_size=3)),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=8,
    )
)
def any_recipe_is_taken_or_told(content: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        with contextlib.suppress(UserError):  # told in one line
            parse(["--recipe", str(recipe)])


# ---------------------------------------------------------------------------------------- resume keys and files

PROBLEMS = st.lists(
    st.builds(Problem, task=st.sampled_from(sorted(TASKS)), question=st.text(max_size=5), gold=st.text(max_size=3)),
    max_size=6,
)


@given(PROBLEMS, st.randoms(use_true_random=False))
def keys_name_problems(problems: list[Problem], random: Any) -> None:
    """No two samples share a key, equal problems have equal keys in any order, different ones different keys."""
    keys = problem_keys(problems)
    assert len(set(keys)) == len(keys)
    for one, key in zip(problems, keys, strict=True):
        for two, other in zip(problems, keys, strict=True):
            same = (one.question, one.messages, one.gold) == (two.question, two.messages, two.gold)
            assert (key.partition("-")[0] == other.partition("-")[0]) == same
    shuffled = list(problems)
    random.shuffle(shuffled)
    assert sorted(problem_keys(shuffled)) == sorted(keys)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=2), JSON_VALUES), st.dictionaries(st.text(max_size=2), JSON_VALUES))
def another_identity_is_seen(one: dict, other: dict) -> None:
    """A result folder of one identity takes no other: nothing differs exactly where both are the same."""

    def without_nulls(value: Any) -> Any:  # a field that is null is a field that is not there
        if isinstance(value, dict):
            return {k: inner for k, v in value.items() if (inner := without_nulls(v)) not in (None, {})}
        return value

    if without_nulls(one) != without_nulls(other):
        assert differences(one, other)
    assert not differences(one, json.loads(json.dumps(one)))


@given(
    st.sampled_from(["data.jsonl", "data.json", "data.csv", "data.parquet"]),
    st.one_of(st.binary(max_size=60), TEXTS.map(str.encode), JSON_VALUES.map(lambda v: json.dumps([v, v]).encode())),
)
def any_file_is_read_or_told(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        with contextlib.suppress(UserError):  # told in one line
            for row, _ in read_rows(file):
                assert isinstance(row, dict)


def properties(grader: Grader) -> dict[str, Callable[..., None]]:
    """Every property, by name."""
    return {
        "extraction_never_raises": extraction_never_raises,
        "repeats_are_read_in_linear_time": repeats_are_read_in_linear_time,
        "answers_are_parsed": answers_are_parsed,
        "an_answer_is_its_own_gold": an_answer_is_its_own_gold(grader),
        "two_numbers_are_equal_where_they_are": two_numbers_are_equal_where_they_are,
        "decimals_are_exact": decimals_are_exact,
        "grader_never_raises": grader_never_raises(grader),
        "noise_decays_within_its_bounds": noise_decays_within_its_bounds,
        "any_flag_is_taken_or_told": any_flag_is_taken_or_told,
        "any_recipe_is_taken_or_told": any_recipe_is_taken_or_told,
        "keys_name_problems": keys_name_problems,
        "another_identity_is_seen": another_identity_is_seen,
        "any_file_is_read_or_told": any_file_is_read_or_told,
    }


def tried(property_: Callable[..., None], examples: int, again: bool) -> Callable[[], None]:
    """The property, to be called: with so many inputs, the same ones each time (`again`) or new ones."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    health = list(HealthCheck)
    return settings(
        max_examples=examples,
        derandomize=again,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=health,
    )(property_)


def told(error: Exception) -> list[str]:
    """A line for each way in which a property broke: the error, where it was raised, and the input, which Hypothesis
    adds as notes."""
    if isinstance(error, ExceptionGroup):
        return [line for each in error.exceptions for line in told(each)]
    raised = traceback.extract_tb(error.__traceback__)[-1]
    words = f"{error!r} ({Path(raised.filename).name}:{raised.lineno}) {' '.join(getattr(error, '__notes__', []))}"
    return [" ".join(words.split())]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.generated", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", choices=properties(Grader()), help="name of one property")
    return parser


def main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    end, failed, rounds = time.monotonic() + 60 * args.minutes, {}, 0
    with Grader() as grader:
        # Once: Hypothesis refuses a second settings object. Each call draws new inputs.
        chosen = {name: tried(property_, 200, again=False) for name, property_ in properties(grader).items()}
        if args.only:
            chosen = {args.only: chosen[args.only]}
        while time.monotonic() < end and chosen.keys() - failed:
            rounds += 1
            for name, property_ in chosen.items():
                if name in failed or time.monotonic() > end:
                    continue
                try:
                    property_()
                except Exception as error:  # noqa: BLE001  # whatever an input has brought out
                    failed[name] = error
                    print(*(f"{name}: {line}" for line in told(error)), sep="\n", flush=True)
    print(f"{rounds} rounds of 200 inputs of each property, {len(failed)} broken")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
