"""docs/reward_audit.md and perl/tasks/reasoning_gym.json say what benchmarks/reward_audit.py has found."""

import json
import re

from benchmarks.reward_audit import OWN, ROOT
from perl.tasks import TASKS
from perl.tasks.reasoning_gym import AUDITED
from tests.test_docs import table_with

FOUND = json.loads((ROOT / "docs" / "results" / "reward_audit.json").read_text(encoding="utf-8"))
PAGE = ROOT / "docs" / "reward_audit.md"


def test_the_data_is_the_audits():
    audited = json.loads(AUDITED.read_text(encoding="utf-8"))
    sound = [name for name, row in FOUND["generators"].items() if row["verdict"] == "sound"]
    assert (audited["version"], sorted(audited["sound"])) == (FOUND["version"], sorted(sound))
    assert audited["refused"].keys() == FOUND["generators"].keys() - set(sound)


def test_the_page_names_every_refused_generator_and_the_counts():
    refused = [name for row in table_with(PAGE, "puzzle24") for name in row[0].split(", ")]
    audited = json.loads(AUDITED.read_text(encoding="utf-8"))
    assert sorted(refused) == sorted(audited["refused"])
    text = PAGE.read_text(encoding="utf-8")
    assert f"{len(FOUND['generators'])} generators {len(audited['sound'])} are sound" in text
    assert FOUND["own"].keys() == OWN.keys() <= TASKS.keys()
    for place, (paid, texts) in enumerate(re.findall(r"(\d+) of ([\d,]+) (?:wrong texts paid|right ones)", text)):
        rows = [row[("false_passes", "refusals")[place]] for row in FOUND["own"].values()]
        assert (int(paid), int(texts.replace(",", ""))) == (sum(r[0] for r in rows), sum(r[1] for r in rows))
