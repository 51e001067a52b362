"""The quickstart's word problems, checked by arithmetic of the test's own."""

import json
import random
import re
from itertools import islice

import pytest

from benchmarks.quickstart_problems import LARGEST, draw, endless, number_pairs, problem_set, write_sets
from perl.tools.quickstart import DATA_FOLDER

LOSING_WORDS = ("gave", "How many more", "not red", "still missing", "fewer", "sold")


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA_FOLDER / f"{split}.jsonl").read_text("utf-8").splitlines()]


def numbers(question: str) -> tuple[int, int]:
    first, second = re.findall(r"\d+", question)
    return int(first), int(second)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_is_what_the_question_asks_for(split: str):
    for row in rows(split):
        first, second = numbers(row["question"])
        losing = any(word in row["question"] for word in LOSING_WORDS)
        expected = first - second if losing else first + second
        steps, answer = row["answer"].split("\n#### ")
        assert steps == f"{first} {'-' if losing else '+'} {second} = {expected}"
        assert answer == str(expected)
        assert 0 < expected <= 24


def test_the_two_sets_share_no_question_and_no_pair_of_numbers():
    train, test = rows("train"), rows("test")
    assert len({row["question"] for row in train}) == len(train) == 1024
    assert len({row["question"] for row in test}) == len(test) == 256
    train_pairs = {frozenset(numbers(row["question"])) for row in train}
    test_pairs = {frozenset(numbers(row["question"])) for row in test}
    assert not train_pairs & test_pairs
    assert len(test_pairs) > 40


def test_number_pairs_of_train_and_test_make_up_all_of_them():
    assert len(number_pairs("all")) == LARGEST * (LARGEST + 1) // 2
    assert sorted(number_pairs("train") + number_pairs("test")) == sorted(number_pairs("all"))


def test_pretraining_problems_are_in_neither_set():
    fixed = {problem.question for split in ("train", "test") for problem in problem_set(split)}
    drawn = [problem.question for problem in islice(endless(1, without=fixed), 2000)]
    assert not fixed & set(drawn)


def test_pretraining_leaves_out_what_it_is_told_to():
    first = [problem.question for problem in islice(endless(1, without=()), 20)]
    without = [problem.question for problem in islice(endless(1, without={first[3]}), 19)]
    assert without == first[:3] + first[4:]


def test_the_committed_files_are_what_the_generator_writes(tmp_path):
    write_sets(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA_FOLDER / name).read_bytes()


def test_draw_is_decided_by_its_generator():
    pairs = number_pairs("train")
    one, other = random.Random(3), random.Random(3)
    assert [draw(one, pairs) for _ in range(5)] == [draw(other, pairs) for _ in range(5)]
