"""The search for rows that kill their worker, with deaths played by hand."""

from __future__ import annotations

import random

from perl.evaluation.suspects import ALONE, SIBLING, Suspects


def search(suspects: Suspects, held: list[int], poison: set[int]) -> tuple[set[int], int]:
    """Play worker 0, which dies of each row in `poison`: (rows that it completed, deaths after the first)."""
    suspects.accuse(0, held)
    done, deaths = set(), 0
    while (trial := suspects.next_trial(0, alone=True)) is not None:
        bad = [i for i, tag in enumerate(trial.tags) if tag in poison]
        done |= set(trial.tags[: bad[0]] if bad else trial.tags)
        if bad:
            deaths += 1
            suspects.convict(trial, 0, trial.tags[bad[0] :])
    return done, deaths


def test_an_innocent_group_is_tried_once_in_two_halves():
    suspects = Suspects(range(8))
    suspects.accuse(0, [5, 1, 3])
    first, second = suspects.next_trial(0, True), suspects.next_trial(0, True)
    assert first
    assert second
    assert (first.tags, second.tags) == ([1], [3, 5])
    assert suspects.next_trial(0, True) is None
    assert suspects.guilty == {}


def test_one_poisonous_row_among_320_is_found_in_the_logarithm_of_their_number():
    for poison in (0, 160, 319):
        suspects = Suspects(range(320))
        done, deaths = search(suspects, list(range(320)), {poison})
        assert done == set(range(320)) - {poison}
        assert suspects.guilty == {poison: ALONE}
        assert deaths <= 11  # 320 halved nine times is one row, which may die twice


def test_many_poisonous_rows_are_all_found_and_no_other():
    for seed in range(20):
        poison = set(random.Random(seed).sample(range(100), 7))
        suspects = Suspects(range(100))
        done, _ = search(suspects, list(range(100)), poison)
        assert suspects.guilty.keys() == poison == set(range(100)) - done


def test_samples_of_a_poisonous_prompt_cost_five_deaths_more():
    prompts = [tag // 16 for tag in range(320)]
    suspects = Suspects(prompts)
    done, deaths = search(suspects, list(range(320)), set(range(32, 48)))
    assert done == set(range(320)) - set(range(32, 48))
    assert suspects.guilty.keys() == set(range(32, 48))
    assert [suspects.guilty[tag] for tag in (32, 33, 34, 47)] == [ALONE, ALONE, SIBLING, SIBLING]
    assert deaths <= 5 + 5


def test_one_poisonous_sample_leaves_the_others_of_its_prompt_innocent():
    suspects = Suspects([0] * 16)
    done, _ = search(suspects, list(range(16)), {9})
    assert suspects.guilty == {9: ALONE}
    assert done == set(range(16)) - {9}


def test_a_row_that_killed_a_worker_alone_waits_for_another_worker():
    suspects = Suspects(range(4))
    suspects.accuse(0, [2])
    trial = suspects.next_trial(0, alone=False)
    assert trial
    assert suspects.convict(trial, 0, [2]) is None
    assert suspects.next_trial(0, alone=False) is None
    again = suspects.next_trial(1, alone=False)
    assert again
    case = suspects.convict(again, 1, [2])
    assert case
    assert case.worker == 0  # whose death counts no longer
    assert suspects.guilty == {2: ALONE}
