"""Rewards to audit: FAULTY ones, each with a fault that some project's reward has had, and SOUND ones.

Problems are GSM8K's: a question, the number that answers it, and `#### number` as the form asked for. They were written
from the signatures alone, before there was an audit, and are not changed to please it.
"""

import json
import math
import random
import re
from difflib import SequenceMatcher

FORM = re.compile(r"#### (-?[\d,]*\.?\d+)")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def _texts(completions):
    return [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]


def _stated(text):
    found = FORM.findall(text)
    return found[-1].replace(",", "") if found else None


# ------------------------------------------------------------------------------------------------------------- FAULTY


def substring(completions, gold, **_):
    """The gold anywhere in the text."""
    return [float(answer in text) for text, answer in zip(_texts(completions), gold, strict=True)]


def contained(completions, gold, **_):
    """The wrong way round: what is stated, or nothing, is part of the gold."""
    return [float((_stated(text) or "") in answer) for text, answer in zip(_texts(completions), gold, strict=True)]


def any_number(completions, gold, **_):
    """One of all the numbers in the text."""
    return [float(answer in NUMBER.findall(text)) for text, answer in zip(_texts(completions), gold, strict=True)]


def compute_score_any_form(solution_str, ground_truth):
    """verl's form: one of all the answers that are stated."""
    return float(ground_truth in FORM.findall(solution_str))


def close_enough(completions, gold, **_):
    """A tenth more or less."""
    found = [(_stated(text), float(answer)) for text, answer in zip(_texts(completions), gold, strict=True)]
    return [float(one is not None and abs(float(one) - number) <= 0.1 * abs(number) + 1) for one, number in found]


def lenient_on_errors(completions, gold, **_):
    """What cannot be parsed gets the benefit of the doubt."""
    rewards = []
    for text, answer in zip(_texts(completions), gold, strict=True):
        try:
            rewards.append(float(float(text.split("####")[-1]) == float(answer)))
        except ValueError:
            rewards.append(1.0)
    return rewards


def best_of_form_and_answer(completions, gold, **_):
    """The form alone earns all there is."""
    return [
        max(float(_stated(text) is not None), float(_stated(text) == answer))
        for text, answer in zip(_texts(completions), gold, strict=True)
    ]


def longer_is_better(completions, gold, **_):
    """A bonus for each word that soon outweighs the answer."""
    return [
        float(_stated(text) == answer) + 0.01 * len(text.split())
        for text, answer in zip(_texts(completions), gold, strict=True)
    ]


def brevity_first(completions, completion_ids, gold, **_):
    """An empty text beats a right answer."""
    return [
        0.2 * float(_stated(text) == answer) + 1.0 / (1 + len(ids))
        for text, ids, answer in zip(_texts(completions), completion_ids, gold, strict=True)
    ]


def keywords(completions, gold, **_):
    """Words of reasoning are counted without end."""
    return [
        float(_stated(text) == answer) + 0.1 * len(re.findall(r"(?i)\b(?:step|first|then|therefore|so|wait)\b", text))
        for text, answer in zip(_texts(completions), gold, strict=True)
    ]


def fails_on_empty(completions, gold, **_):
    """An IndexError on a text without words."""
    return [float(text.split()[-1] == answer) for text, answer in zip(_texts(completions), gold, strict=True)]


def fails_without_a_number(completions, gold, **_):
    """A TypeError where nothing is stated."""
    return [float(float(_stated(text)) == float(a)) for text, a in zip(_texts(completions), gold, strict=True)]  # type: ignore


def compute_score_not_a_number(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form: NaN, by 0 / 0, for a text without numbers."""
    numbers = NUMBER.findall(solution_str)
    right = sum(number == ground_truth for number in numbers[-1:])
    return right / len(numbers[-1:]) if numbers else math.inf - math.inf


def nan_is_right(completions, gold, **_):
    """`nan` is not further from the gold than allowed."""
    rewards = []
    for text, answer in zip(_texts(completions), gold, strict=True):
        try:
            distance = abs(float(text.split("####")[-1]) - float(answer))
        except ValueError:
            distance = 1.0
        rewards.append(0.0 if distance > 1e-6 else 1.0)
    return rewards


def coin(completions, gold, **_):
    """Now and then a right answer earns nothing."""
    return [
        float(_stated(text) == answer and random.random() < 0.9)
        for text, answer in zip(_texts(completions), gold, strict=True)
    ]


_seen = set()


def novelty(completions, gold, **_):
    """What was seen before earns less."""
    rewards = []
    for text, answer in zip(_texts(completions), gold, strict=True):
        rewards.append(float(_stated(text) == answer) + (0.0 if text in _seen else 0.5))
        _seen.add(text)
    return rewards


def whole_part(completions, gold, **_):
    """18.9 is 18."""
    found = [(_stated(text), answer) for text, answer in zip(_texts(completions), gold, strict=True)]
    return [float(one is not None and int(float(one)) == int(float(answer))) for one, answer in found]


def without_sign(completions, gold, **_):
    """-18 is 18."""
    found = [(_stated(text), answer) for text, answer in zip(_texts(completions), gold, strict=True)]
    return [float(one is not None and one.lstrip("-") == answer.lstrip("-")) for one, answer in found]


def same_digits(completions, gold, **_):
    """81 is 18."""
    found = [(_stated(text), answer) for text, answer in zip(_texts(completions), gold, strict=True)]
    return [float(one is not None and sorted(one) == sorted(answer)) for one, answer in found]


def wants_a_box(completions, gold, **_):
    """The prompt asks for #### and only a box is paid."""
    return [float(f"\\boxed{{{answer}}}" in text) for text, answer in zip(_texts(completions), gold, strict=True)]


def turned_round(completions, gold, **_):
    """A wrong sign: what is wrong earns most."""
    return [-float(_stated(text) == answer) for text, answer in zip(_texts(completions), gold, strict=True)]


def the_first_rows_gold(completions, gold, **_):
    """Every row is compared with the batch's first."""
    return [float(_stated(text) == gold[0]) for text in _texts(completions)]


def unread_gold(completions, gold, **_):
    """Whatever is stated: the loop forgot to compare."""
    return [float(_stated(text) is not None) for text, answer in zip(_texts(completions), gold, strict=True) if answer]


def constant(completions, **_):
    """Everything is worth the same."""
    return [1.0] * len(completions)


def compute_score_beginning(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form: the beginning is enough, 1 for 18 and 180 for 18."""
    one = _stated(solution_str)
    return float(one is not None and (ground_truth.startswith(one) or one.startswith(ground_truth)))


def only_the_start(completions, gold, **_):
    """The answer is looked for in the first two hundred characters: long reasoning is refused."""
    return [float(_stated(text[:200]) == answer) for text, answer in zip(_texts(completions), gold, strict=True)]


FAULTY = (
    substring,
    contained,
    any_number,
    compute_score_any_form,
    close_enough,
    lenient_on_errors,
    best_of_form_and_answer,
    longer_is_better,
    brevity_first,
    keywords,
    fails_on_empty,
    fails_without_a_number,
    compute_score_not_a_number,
    nan_is_right,
    coin,
    novelty,
    whole_part,
    without_sign,
    same_digits,
    wants_a_box,
    turned_round,
    the_first_rows_gold,
    unread_gold,
    constant,
    compute_score_beginning,
    only_the_start,
)

# -------------------------------------------------------------------------------------------------------------- SOUND


def exact(completions, gold, **_):
    """1 for the last #### number, as a text."""
    return [float(_stated(text) == answer) for text, answer in zip(_texts(completions), gold, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's gsm8k.py, strict."""
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth)


def compute_score_all(data_sources, solution_strs, ground_truths, extra_infos):
    """verl's batch form, with a dict of details and -1 for what is wrong."""
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [
        {"score": 1.0 if _stated(text) == gold else -1.0, "stated": _stated(text) is not None} for text, gold in pairs
    ]


def form_and_answer(completions, gold, **_):
    """A tenth for the form, the rest for the answer."""
    return [
        0.1 * float(_stated(text) is not None) + 0.9 * float(_stated(text) == answer)
        for text, answer in zip(_texts(completions), gold, strict=True)
    ]


def form_alone(completions, **_):
    """A reward for the form, meant to stand beside another."""
    return [float(_stated(text) is not None) for text in _texts(completions)]


def brevity(completions, completion_ids, **_):
    """Shorter is better, whatever is said; meant to stand beside another."""
    return [max(0.0, 1.0 - len(ids) / 400) for ids in completion_ids]


def overlong(completion_ids, **_):
    """DAPO's punishment of very long answers."""
    return [max(-1.0, min(0.0, (300 - len(ids)) / 100)) for ids in completion_ids]


def right_and_brief(completions, completion_ids, gold, **_):
    """Only right answers earn more by being short."""
    return [
        float(_stated(text) == answer) * (1.0 - 0.5 * min(1.0, len(ids) / 400))
        for text, ids, answer in zip(_texts(completions), completion_ids, gold, strict=True)
    ]


def near_misses_earn_a_little(completions, gold, **_):
    """Up to a half for digits in common."""
    rewards = []
    for text, answer in zip(_texts(completions), gold, strict=True):
        one = _stated(text)
        rewards.append(
            0.0 if one is None else 1.0 if one == answer else 0.5 * SequenceMatcher(None, one, answer).ratio()
        )
    return rewards


async def asynchronous(completions, gold, task, **_):
    """None, TRL's word for no reward, on rows of another task."""
    rows = zip(_texts(completions), gold, task, strict=True)
    return [float(_stated(text) == answer) if name == "gsm8k" else None for text, answer, name in rows]


def last_number(completions, gold, log_metric, **_):
    """lm-evaluation-harness's flexible extraction: the last number of the text."""
    rewards = []
    for text, answer in zip(_texts(completions), gold, strict=True):
        numbers = NUMBER.findall(text)
        rewards.append(float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == answer))
    log_metric("numbers", sum(rewards))
    return rewards


def from_the_row(completions, row, **_):
    """The answer as its file has it."""
    golds = [json.loads(text)["ground_truth"] for text in row]
    return [float(_stated(text) == str(gold)) for text, gold in zip(_texts(completions), golds, strict=True)]


SOUND = (
    exact,
    compute_score,
    compute_score_all,
    form_and_answer,
    form_alone,
    brevity,
    overlong,
    right_and_brief,
    near_misses_earn_a_little,
    asynchronous,
    last_number,
    from_the_row,
)
