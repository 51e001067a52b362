"""Word problems in GSM8K's format, of our own making: one addition or subtraction of numbers up to 24 each.

    {"question": "Ava had 17 apples and gave 5 to Ben. How many apples does Ava have left?",
     "answer": "17 - 5 = 12\\n#### 12"}

Two fixed sets lie in assets/quickstart-data: `train` for reinforcement learning and `test`, held out. No unordered
pair of numbers occurs in both, under either operation. `endless` draws the base model's pretraining problems, whose
questions are in neither set. `python -m benchmarks.quickstart_problems` writes the two files again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perl.tools.quickstart import DATA_FOLDER

Operation = Literal["+", "-"]
Pair = tuple[int, int]

DATA_SEED = 20
TRAIN_SIZE, TEST_SIZE = 1024, 256
TEST_SHARE = 0.2
"""Share of the number pairs that only the test set uses."""
LARGEST = 24
"""No sum, and no number that something is taken from, exceeds this."""

# fmt: off
NAMES = (
    "Ava", "Ben", "Cleo", "Dan", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack",
    "Kim", "Liam", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Wei",
)
THINGS = (
    "apples", "books", "cards", "coins", "eggs", "flowers", "keys", "marbles",
    "nuts", "pears", "pencils", "plums", "shells", "stamps", "stickers", "toys",
)
# fmt: on
TEMPLATES: dict[Operation, tuple[str, ...]] = {
    "+": (
        "{a} has {x} {things}. {b} gives {a} {y} more. How many {things} does {a} have now?",
        "{a} has {x} {things} and {b} has {y} {things}. How many {things} do they have together?",
        "There are {x} red {things} and {y} blue {things} in a box. How many {things} are in the box?",
        "{a} found {x} {things} in the morning and {y} in the evening. How many {things} did {a} find in all?",
        "{a} has {x} {things}. {b} has {y} more than {a}. How many {things} does {b} have?",
        "A shop had {x} {things} and bought {y}. How many {things} does the shop have now?",
    ),
    "-": (
        "{a} had {x} {things} and gave {y} to {b}. How many {things} does {a} have left?",
        "{a} has {x} {things} and {b} has {y} {things}. How many more {things} does {a} have than {b}?",
        "There are {x} {things} in a box and {y} are red. How many {things} are not red?",
        "{a} needs {x} {things} and has found {y}. How many {things} are still missing?",
        "{a} has {x} {things}. {b} has {y} fewer than {a}. How many {things} does {b} have?",
        "A shop had {x} {things} and sold {y}. How many {things} does the shop have now?",
    ),
}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """`x` and `y` in the order of the question; the answer to it is `x operation y`."""

    question: str
    operation: Operation
    x: int
    y: int

    @property
    def answer(self) -> str:
        """The derivation, ending in GSM8K's `#### N`."""
        return derivation(self.operation, self.x, self.y)


def derivation(operation: Operation, x: int, y: int, final: int | None = None) -> str:
    """`x operation y` worked out: "17 - 5 = 12\\n#### 12". `final` replaces the number on the last line."""
    result = x + y if operation == "+" else x - y
    return f"{x} {operation} {y} = {result}\n#### {result if final is None else final}"


def number_pairs(split: Literal["all", "train", "test"]) -> list[Pair]:
    """Unordered pairs (larger, smaller) that problems of `split` may use: every pair is of train or of test."""
    pairs = [(large, small) for large in range(1, LARGEST + 1) for small in range(1, large + 1)]
    if split == "all":
        return pairs
    random.Random(f"{DATA_SEED} pairs").shuffle(pairs)
    cut = round(TEST_SHARE * len(pairs))
    return sorted(pairs[:cut] if split == "test" else pairs[cut:])


def draw(rng: random.Random, pairs: list[Pair]) -> WordProblem:
    """One problem: either operation with equal chance, then a template, names, a thing and one of `pairs`."""
    operation: Operation = rng.choice(("+", "-"))
    template = rng.choice(TEMPLATES[operation])
    a, b = rng.sample(NAMES, 2)
    while True:
        x, y = rng.choice(pairs)
        if operation == "+" and x + y <= LARGEST:
            x, y = rng.sample((x, y), 2)
            break
        if operation == "-" and x > y:
            break
    question = template.format(a=a, b=b, x=x, y=y, things=rng.choice(THINGS))
    return WordProblem(question, operation, x, y)


def problem_set(split: Literal["train", "test"]) -> list[WordProblem]:
    """The fixed set of that name: TRAIN_SIZE or TEST_SIZE problems, no question twice."""
    rng, pairs = random.Random(f"{DATA_SEED} {split}"), number_pairs(split)
    size = TRAIN_SIZE if split == "train" else TEST_SIZE
    drawn: dict[str, WordProblem] = {}
    while len(drawn) < size:
        problem = draw(rng, pairs)
        drawn[problem.question] = problem
    return list(drawn.values())


def endless(seed: int, without: Collection[str]) -> Iterator[WordProblem]:
    """Problems over all number pairs, for ever, leaving out the questions in `without`."""
    rng, pairs = random.Random(f"{seed} endless"), number_pairs("all")
    while True:
        problem = draw(rng, pairs)
        if problem.question not in without:
            yield problem


def write_sets(folder: Path) -> None:
    """Write train.jsonl and test.jsonl, rows {"question", "answer"}, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [{"question": problem.question, "answer": problem.answer} for problem in problem_set(split)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_sets(DATA_FOLDER)
