"""What is said, before a training's processes start, of rewards that pay for nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from perl.config.load import Config
from perl.rewards.files import FLAG, ROW, RewardFunction, is_file, load_reward
from perl.tools.audit.apart import call_apart
from perl.tools.audit.payer import Payer, cases_of, other_gold
from perl.tools.audit.probes import OTHER, RIGHT
from perl.tools.audit.rows import ANSWER, FORMS, Row, rows_of_columns
from perl.tools.audit.verdict import EQUAL, judge, same_pay
from perl.training.preflight import Checked

log = logging.getLogger(__name__)

FEW = (RIGHT, "empty", "I do not know", OTHER, "a further row's answer")
"""Probes that are enough to find a reward that pays for nothing."""
LOOKED_AT = 32
"""Rows among which those for the rewards are, and the wrong answers."""
AUDITED = 3
AUDIT_S = 0.4


def warn_of_rewards(config: Config, checked: Checked) -> None:
    """Once a run, before its processes start: one line for a reward of the user's own that pays an empty or a wrong
    answer to the first rows as the right one. It is asked apart from this process: where it hangs or ends its process,
    the training says so. Rewards by name are audited once and for all (docs/reward_audit.md)."""
    own = [name for name in config.reward.functions if is_file(name)]
    if not own or checked.conversations:  # an audit has no conversations
        return
    dataset = checked.dataset
    first = dataset.select_columns(["prompt", "gold", "task", ROW]).select(range(min(LOOKED_AT, len(dataset))))
    rows = rows_of_columns(first.to_list(), AUDITED)
    until = time.monotonic() + AUDIT_S
    for name in own:
        function, left = load_reward(name, config.reward.kwargs), until - time.monotonic()
        if rows and left > 0 and (wrong := call_apart(partial(pays_for_nothing, name, function, rows, left), left)):
            log.warning("%s %s: %s; python -m perl audit tells more", FLAG, name, wrong)


def pays_for_nothing(name: str, function: RewardFunction, rows: Sequence[Row], seconds: float) -> str | None:
    """What is wrong with a reward that pays an empty or a wrong answer as the right one, in words; None where it does
    not, or where that can't be seen by a few texts: no form in which it pays the right answer is known, it never asks
    for the answer, it raises, or it takes longer than `seconds`.

    Args:
        rows: a few; with the forms that their prompts are known to ask for.
    """
    payer, until = Payer(name, function), time.monotonic() + seconds
    for form in (None, *FORMS):
        asked = [replace(row, form=form or row.form) for row in rows]
        earned = payer.right_and_wrong(asked)
        if time.monotonic() > until or payer.raised:
            return None
        if earned and all(right > wrong + EQUAL for right, wrong in earned):
            break
    else:
        asked = list(rows)
        if not all(_asks_for_its_form(row) for row in rows):
            return None
    cases = [case for batch in cases_of(asked, FEW) for case in batch]
    pays = payer.pay(asked, cases)
    others = payer.pay(other_gold(asked), cases)
    blind = all(same_pay(one, two) for one, two in zip(pays, others, strict=True))
    if payer.raised or (blind and not payer.reads_gold):
        return None
    passes = judge(asked, cases, pays).false_passes
    return f"a wrong text earns what the right answer does, as on {passes.example}" if passes.count else None


def _asks_for_its_form(row: Row) -> bool:
    """Whether its prompt has the words of its task; a system prompt may ask for any other form."""
    words = row.form.partition(ANSWER)[0].strip()
    return bool(words) and words in row.asked and row.columns["prompt"][0]["role"] != "system"
