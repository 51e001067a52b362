"""CONTRIBUTING.md's recipes, followed to the letter in a copy of perl/; the version that CHANGELOG.md speaks of."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perl
from perl.base import provenance
from perl.engines import ENGINES, LoadedEngine
from perl.engines.base import Engine
from tests.docs_commands import ROOT
from tests.tiny import save_tiny

PLACES = {
    "TASKS": ("perl/tasks/registry.py", "TASKS: dict[str, Task] = {\n"),
    "REWARDS": ("perl/rewards/functions.py", "REWARDS: dict[str, Reward] = {\n"),
    "ADAPTERS": ("perl/adapters/__init__.py", "ADAPTERS: dict[str, Adapter] = {\n"),
    "ALGORITHMS": ("perl/algorithms/__init__.py", "ALGORITHMS: dict[str, Algorithm] = {\n"),
    "ENGINES": ("perl/engines/__init__.py", "ENGINES: dict[str, Callable[..., LoadedEngine]] = {\n"),
}


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of perl/ with the page's functions above, and its lines in, the tables that it names."""
    shutil.copytree(ROOT / "perl", tmp_path / "perl", ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("\\_", "_")
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        names = [name for name in PLACES if f"`{name}`" in section and "```python" in section]
        if not names or names == ["ENGINES"]:  # which has no builder on the page
            continue
        name = names[0]
        file, start = PLACES[name]
        assert file in section, f"the page does not say where {name} stands"
        *functions, entry = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(start) == 1
        added = "".join(f"{function}\n\n" for function in functions) + start + entry
        (tmp_path / file).write_text(text.replace(start, added), encoding="utf-8")
    return tmp_path


def in_copy(copy, *words):
    env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=copy, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_task_a_reward_an_adapter_and_an_algorithm_as_the_page_adds_them(copy):
    rows = [{"gold": "3", "output": "so #### 3"}, {"gold": "3", "output": "so #### 4"}]
    (copy / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    in_copy(copy, "perl", "grade", "--task", "sums", "--input", "in.jsonl", "--output", "out.jsonl")
    assert [json.loads(line)["score"] for line in (copy / "out.jsonl").read_text().splitlines()] == [1.0, 0.0]

    model = save_tiny(copy / "model", scale=4.0)
    rows = [{"question": f"What is {i} + 3 ?", "answer": str(i + 3)} for i in range(4)]
    (copy / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "model.model_name_or_path": str(model),
        "dataset.dataset_name_or_path": "sums.jsonl",
        "dataset.task": "sums",
        "peft.type": "lora_gaussian",
        "algorithm.name": "median",
        "reward.functions": '["brief"]',
        "training.output_dir": "run",
        "training.max_steps": "1",
        "training.per_device_train_batch_size": "4",
        "training.num_generations": "4",
        "training.max_completion_length": "8",
        "training.logging_steps": "1",
    }
    in_copy(copy, "perl.train", *[word for name, value in flags.items() for word in (f"--config.{name}", value)])
    adapter = json.loads((copy / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter["init_lora_weights"] == "gaussian"
    (row, *_) = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.0 <= row["rewards/brief/mean"] <= 1.0
    assert row["reward"] == row["rewards/brief/mean"]
    # `brief` is 0 or 1, and so is the median of four (the lower of the two in the middle)
    assert {row["advantages/max"], row["advantages/min"]} <= {-1.0, 0.0, 1.0}


def test_the_page_names_what_an_engine_has():
    """The table and the members of the protocol."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ") if part.startswith("Add an engine")]
    file, start = PLACES["ENGINES"]
    assert (ROOT / file).read_text(encoding="utf-8").count(start) == 1
    members = {
        name for kind in (Engine, LoadedEngine) for name in (*vars(kind), *kind.__annotations__) if name[0] != "_"
    }
    assert members == set(re.findall(r"`(\w+)`", section)) - {"LoadedEngine", "ENGINES", *ENGINES}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CONTRIBUTING_zh.md"])
def test_the_tables_that_the_page_names_are_there(page):
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "perl").rglob("*.py"))
    names = set(re.findall(r"`([A-Z][A-Z_]+)`", (ROOT / page).read_text(encoding="utf-8")))
    assert names > PLACES.keys()
    assert [name for name in names if not re.search(rf"^{name}\b", code, re.MULTILINE)] == []


def test_the_changelog_begins_with_the_version_and_counts_down():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert ".".join(versions[0]) == perl.__version__
    numbers = [tuple(map(int, version)) for version in versions]
    assert numbers == sorted(numbers, reverse=True)
    heads = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert heads <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_is_printed_and_recorded():
    command = [sys.executable, "-m", "perl", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"perl {perl.__version__}\n"
    assert provenance.versions()["perl"] == perl.__version__
