"""Requests that a dead worker held are tried again, with deaths played by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

from perl.records import Prompt
from perl.workers.retries import SIBLINGS, TWICE_ALONE, Retries
from perl.workers.worker import Request

ALONE = f"{TWICE_ALONE}; the last time: a signal"


def request(number: int, prompt: int) -> Request:
    return Request((prompt, number), Prompt(token_ids=(1,), seed=number))


def requests(prompts: Sequence[int]) -> list[Request]:
    """One a prompt, numbered in their order."""
    return [request(number, prompt) for number, prompt in enumerate(prompts)]


def failed(retries: Retries) -> dict[str | int, str]:
    return {index: why for (_, index), why in retries.failed.items()}


def numbers(group: list[Request]) -> list[str | int]:
    return [each.id[1] for each in group]


def search(retries: Retries, held: list[Request], poison: set[int]) -> tuple[set[str | int], int]:
    """Play worker 0, which dies of each request in `poison`: (those that it completed, deaths after the first)."""
    retries.bisect(0, held, "a signal")
    done, deaths = set[str | int](), 0
    while group := retries.take(0, only=True):
        bad = [place for place, each in enumerate(group) if each.id[1] in poison]
        done |= set(numbers(group[: bad[0]] if bad else group))
        if bad:
            deaths += 1
            retries.bisect(0, group[bad[0] :], "a signal")
    return done, deaths


def test_an_innocent_group_is_tried_once_in_two_halves():
    retries, some = Retries(), requests(range(8))
    retries.bisect(0, [some[1], some[3], some[5]], "a signal")
    assert numbers(retries.take(0, True)) == [1]
    assert numbers(retries.take(0, True)) == [3, 5]
    assert retries.take(0, True) == []
    assert retries.failed == {}


def test_one_poisonous_request_among_320_is_found_in_the_logarithm_of_their_number():
    for poison in (0, 160, 319):
        retries = Retries()
        done, deaths = search(retries, requests(range(320)), {poison})
        assert done == set(range(320)) - {poison}
        assert failed(retries) == {poison: ALONE}
        assert deaths <= 11  # 320 halved nine times is one request, which may kill twice


def test_many_poisonous_requests_are_all_found_and_no_other():
    for seed in range(20):
        poison = set(random.Random(seed).sample(range(100), 7))
        retries = Retries()
        done, _ = search(retries, requests(range(100)), poison)
        assert failed(retries).keys() == poison == set(range(100)) - done


def test_requests_of_a_poisonous_prompt_cost_five_deaths_more():
    retries = Retries()
    done, deaths = search(retries, requests([number // 16 for number in range(320)]), set(range(32, 48)))
    assert done == set(range(320)) - set(range(32, 48))
    assert failed(retries).keys() == set(range(32, 48))
    assert [failed(retries)[number] for number in (32, 33, 34, 47)] == [ALONE, ALONE, SIBLINGS, SIBLINGS]
    assert deaths <= 5 + 5


def test_one_poisonous_request_leaves_the_others_of_its_prompt_innocent():
    retries = Retries()
    done, _ = search(retries, requests([0] * 16), {9})
    assert failed(retries) == {9: ALONE}
    assert done == set(range(16)) - {9}


def test_a_request_that_killed_a_worker_alone_waits_for_another_worker():
    retries, (_, _, one, _) = Retries(), requests(range(4))
    retries.bisect(0, [one], "a signal")  # alone already
    assert retries.take(0, only=False) == []
    again = retries.take(1, only=False)
    assert again == [one]
    retries.bisect(1, again, "a signal")
    assert failed(retries) == {2: ALONE}


def test_pending_requests_of_a_failed_prompt_are_not_tried():
    retries = Retries()
    for index in range(2):
        retries.bisect(0, [request(index, 0)], "a signal")
        retries.bisect(1, [request(index, 0)], "a signal")
    assert retries.without_failed([request(2, 0), request(3, 1)]) == [request(3, 1)]
    assert failed(retries) == {0: ALONE, 1: ALONE, 2: SIBLINGS}
