"""docs/flags.md is what the code prints, and names what can be chosen."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from perl.adapters import ADAPTERS
from perl.algorithms import ALGORITHMS
from perl.config.evaluation import EvalConfig
from perl.config.flags import descriptions, page
from perl.config.schema import AlgorithmConfig, PeftConfig, RewardConfig
from perl.rewards.functions import REWARDS


def test_the_page_of_flags_is_printed_by_the_code():
    written = Path("docs/flags.md").read_text(encoding="utf-8")
    assert written == page(), "python -m perl.config.flags > docs/flags.md"


def test_the_page_names_the_fields_of_trl_that_have_another_default_here():
    assert "| `--config.training.vllm_importance_sampling_mode` | text | token_truncate |" in page()


def test_the_evaluators_n_counts_the_flags_whose_default_is_the_tasks():
    fields = list(dataclasses.fields(EvalConfig))
    behind = fields[[field.name for field in fields].index("n") + 1 :]
    of_the_task = list(itertools.takewhile(lambda field: field.default is None, behind))
    assert (len(of_the_task), of_the_task[-1].name) == (4, "max_new_tokens")
    assert "This and the next four: default is the task's own" in descriptions(EvalConfig)["n"]


@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [(AlgorithmConfig, "name", ALGORITHMS), (PeftConfig, "type", ADAPTERS), (RewardConfig, "functions", REWARDS)],
)
def test_what_can_be_chosen_is_named(kind, field, names):
    assert set(names) <= set(re.findall(r"\w+", descriptions(kind)[field]))
