"""README and docs: every command is taken by the program it names, every file and link exists, every default, number
and field is the code's, and both languages of a page say the same."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from perl.__main__ import COMMANDS, main
from perl.adapters.merge import MergeReport
from perl.config.load import parse
from perl.config.schema import NoiseConfig
from perl.grading import Grader
from perl.noise.schedule import stage_at
from perl.rewards.functions import REWARDS, Reward, RewardContext, build_rewards, grade_rows
from perl.tasks import TASKS, load_problems
from perl.tasks.schemas import SCHEMAS
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.translate import translate
from tests.docs_commands import ROOT, blocks, check, commands

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PAIRS = [(page.with_name(page.name.replace("_zh", "")), page) for page in PAGES if page.stem.endswith("_zh")]
BOTH = {english.stem: [english, chinese] for english, chinese in PAIRS}
AQN, EVALUATION, TRAINING, VERL = (ROOT / "docs" / f"{page}.md" for page in ("aqn", "evaluation", "training", "verl"))


def name(value) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else getattr(value, "line", str(value))


def tables(page: Path) -> list[list[list[str]]]:
    """Each table as rows of cells, its head first, without backquotes."""
    found, rows = [], []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r" \|(?: |$)", line.removeprefix("| ").removeprefix("|"))
            rows.append([cell.strip().replace("`", "") for cell in cells[:-1]])
        elif rows:
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


def table_with(page: Path, cell: str) -> list[list[str]]:
    """The rows of the one table that has a row, or a head, with this cell."""
    (table,) = [table for table in tables(page) if any(cell in row for row in table)]
    return table[1:]


# Commands


@pytest.mark.parametrize(("page", "command"), [(page, c) for page in PAGES for c in commands(page)], ids=name)
def test_every_command_is_taken(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_bash(page):
    for block in blocks(page):
        assert subprocess.run(["bash", "-n", "-c", block], check=False).returncode == 0, block


def test_the_pages_to_start_with_are_there_in_both_languages():
    assert BOTH.keys() == {"README", "CONTRIBUTING", "SECURITY", "start", "ascend"}


def test_the_pages_are_no_more_than_can_be_kept_true():
    """The bars of tables are no words."""
    words = [word for page in (ROOT / "docs").glob("*.md") for word in page.read_text(encoding="utf-8").split()]
    assert sum(any(c.isalnum() for c in word) for word in words) <= 35_000


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=name)
def test_the_translation_has_the_same_commands_and_figures(english, chinese):
    for language in ("bash", "python"):
        assert blocks(english, language) == blocks(chinese, language)

    def outline(page):
        return re.findall(r"^#+ ", page.read_text(encoding="utf-8"), re.MULTILINE)

    def figures(page):
        cells = [" ".join(row) for table in tables(page) for row in table[1:]]
        return [[number.rstrip(".") for number in re.findall(r"\d[\d.]*(?:e-\d+)?", row)] for row in cells]

    assert outline(english) == outline(chinese)
    assert [[len(row) for row in table] for table in tables(english)] == [
        [len(row) for row in table] for table in tables(chinese)
    ]
    assert figures(english) == figures(chinese)


# Files and links


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_links_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\_", "_")
    folders = "perl|tests|docs|scripts|recipes|assets|benchmarks"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\.(?:py|md|sh|yaml|jsonl|json|txt)\b", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"(?<![\w/.])requirements\w*\.txt", text):
        assert (ROOT / path).is_file(), path
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).is_file(), link


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_into_pages_find_their_heading(page):
    for file, anchor in re.findall(r"\]\(((?:[\w./]+\.md)?)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors(page.parent / file if file else page), anchor


@pytest.mark.parametrize("page", [chinese for _, chinese in PAIRS], ids=name)
def test_the_chinese_pages_have_one_word_for_one_thing(page):
    """The glossary's: none of those that it forbids, outside of code, paths and the glossary itself."""
    text = re.sub(r"```[\s\S]*?```|`[^`]*`", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"^\|.*\| 不写 \|\n(?:\|.*\n)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"[\w-]*[./][\w./-]*|--\w+", "", text, flags=re.ASCII)
    forbidden = [word for row in table_with(ROOT / "CONTRIBUTING_zh.md", "不写") for word in row[2].split("、")]
    assert [word for word in forbidden if word in text] == []


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=name)
def test_a_chinese_page_leads_to_chinese_pages_where_there_are_any(english, chinese):
    """But for the one link to its own other half."""
    text = chinese.read_text(encoding="utf-8").replace("\\_", "_")
    links = [(chinese.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", text) if ":" not in link]
    translated = {page for page, _ in PAIRS}
    assert [link for link in links if link in translated] == [english]
    assert not [path for path in re.findall(r"docs/\w+\.md", text) if ROOT / path in translated]


def test_the_tree_is_the_tree():
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```\n(README.*?)^```", page, re.DOTALL | re.MULTILINE)
    above, below = tree.split("\nperl/\n")
    listed = {word.strip(",/") for line in above.splitlines() for word in line.split("  ")[0].split()}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").replace("/", "").splitlines()
    there = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in ignored}
    assert listed == {file for file in there if not file.endswith(".egg-info")} - {"perl"}
    modules = {line.split()[0].strip("/") for line in below.splitlines()}
    assert modules == {path.name for path in (ROOT / "perl").iterdir()} - {"__pycache__", "__init__.py"}


def test_what_is_not_there_yet_is_not_there():
    """Fails when it comes: then the page has to tell."""
    text = VERL.read_text(encoding="utf-8")
    settings = re.findall(r"`([\w.]+=(?:True|megatron))`", text)
    assert len(settings) == 3
    for setting in settings:
        refused = translate(read_command(None, [setting]), Choices()).refused
        assert setting.partition("=")[0] in refused, setting


@pytest.mark.parametrize("page", BOTH["README"], ids=name)
def test_the_quickstarts_numbers_have_their_place(page):
    text = page.read_text(encoding="utf-8")
    between = text.split("<!-- quickstart numbers -->")[1].split("<!-- end of quickstart numbers -->")[0]
    assert re.findall(r"^\| (\d) \|", between, re.MULTILINE) == ["1", "2", "3"]


# What "Adding something" promises


def test_a_task_is_one_entry(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "sums", dataclasses.replace(TASKS["gsm8k"], name="sums", hub=None, data_source="sums"))
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 2 ?", "answer": "3"}\n')
    (problem,) = load_problems(str(tmp_path / "sums.jsonl"), task="sums")
    with Grader() as grader:
        (grade,) = grade_rows(grader, ["#### 3"], [problem.gold], [problem.task])
    assert (problem.task, grade.score) == ("sums", 1.0)


def test_a_reward_is_one_entry(monkeypatch):
    monkeypatch.setitem(REWARDS, "half", Reward(lambda context: lambda completions, **_: [0.5] * len(completions)))
    with Grader() as grader:
        context = RewardContext(grader=grader, max_completion_length=256, overlong_cache_length=64)
        (reward,) = build_rewards(["half"], context)
    assert (reward.__name__, reward(completions=["a", "b"])) == ("half", [0.5, 0.5])


def test_a_command_is_one_entry(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ours", types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda _: 7))
    monkeypatch.setitem(COMMANDS, "ours", ("ours", "what it does"))
    assert main(["ours"]) == 7
    assert main([]) == 0
    assert "what it does" in capsys.readouterr().out


# Flags, defaults and fields


def shown(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_the_recipes_values_and_trls_defaults():
    recipe = yaml.safe_load((ROOT / "recipes" / "dapo_lora.yaml").read_text(encoding="utf-8"))["training"]
    trl = parse([]).values.training
    assert table_with(TRAINING, "training.max_steps") == [
        [f"training.{field}", shown(trl[field]), shown(value)] for field, value in recipe.items()
    ]


def test_schemas_and_rewards():
    assert dict(table_with(TRAINING, "question, answer")) == SCHEMAS
    assert [row[0] for row in table_with(TRAINING, "accuracy")] == list(REWARDS)


def test_the_reward_of_ones_own_works(tmp_path):
    (code,) = blocks(TRAINING, "python")
    (tmp_path / "brevity.py").write_text(code, encoding="utf-8")
    with Grader() as grader:
        context = RewardContext(grader=grader, max_completion_length=256, overlong_cache_length=64)
        (reward,) = build_rewards([f"{tmp_path / 'brevity.py'}:brevity"], context)
    message = [{"role": "assistant", "content": "#### 3"}]
    given = {"prompts": [message] * 2, "completions": [message] * 2, "gold": ["3"] * 2, "task": ["gsm8k"] * 2}
    assert reward(completion_ids=[[1] * 100, [1] * 101], **given) == [1.0, 0.0]


def test_the_tasks_sampling_and_rules():
    samplings = {task: TASKS[task].sampling for task in TASKS}
    assert table_with(EVALUATION, "aime24") == [
        [task, str(s.n), str(s.temperature), str(s.top_p), str(s.max_new_tokens)] for task, s in samplings.items()
    ]
    graded = {}
    for row in table_with(EVALUATION, "math-verify"):
        for task in row[0].split(", "):
            graded[task] = row[1:]
    assert graded.keys() == TASKS.keys()
    for task, (primary, beside, _) in graded.items():
        rubric = TASKS[task].rubric
        assert re.match(r"\w+", primary, re.ASCII)[0] == rubric.primary
        assert set(re.findall(r"strict|boxed|answer_line", beside)) == {*rubric.rules} - {rubric.primary}


def fields(table: list[list[str]]) -> list[str]:
    return [field for row in table for field in row[0].split(", ")]


def test_the_fields_of_a_merge():
    assert fields(table_with(EVALUATION, "rounding_error")) == [field.name for field in dataclasses.fields(MergeReport)]


# Numbers of docs/aqn.md


def test_sigma_by_stage():
    (table,) = [table[1:] for table in tables(AQN) if "from step" in table[0]]
    columns = [NoiseConfig(schedule=s) for s in ("linear", "exponential")]
    columns.append(NoiseConfig(schedule="exponential", warmup_stage=True))
    first = [next(s for s in range(1024) if stage_at(s, 1024, columns[0]).index == stage) for stage in range(10)]
    assert table == [
        [str(stage), str(step), *(f"{stage_at(step, 1024, config).sigma:.4g}" for config in columns)]
        for stage, step in enumerate(first)
    ]


def realized(weight: float, sigma: float) -> float:
    """Root mean square of round(weight + sigma e) - weight in bfloat16, e normal: the sum over bfloat16's neighbours
    of their distance squared, times the probability of being rounded to them."""

    def below(x):
        return 0.5 * (1 + math.erf((x - weight) / sigma / math.sqrt(2)))

    grid = [weight]
    for direction in (math.inf, -math.inf):
        number = torch.tensor(weight, dtype=torch.bfloat16)
        while abs(number.item() - weight) < 8 * sigma + 0.02:
            number = torch.nextafter(number, torch.tensor(direction, dtype=torch.bfloat16))
            grid.append(number.item())
    grid.sort()
    total = 0.0
    for low, here, high in zip(grid, grid[1:], grid[2:], strict=False):
        total += (below((here + high) / 2) - below((low + here) / 2)) * (here - weight) ** 2
    return math.sqrt(total)


def test_what_bfloat16_leaves_of_the_noise():
    sizes = (0.5, 1.0, 4.0)
    table = table_with(AQN, "w = 0.5")
    assert [row[0] for row in table] == ["0", "5", "7", "8", "9"]
    for stage, sigma, *left in table:
        assert sigma == f"{stage_at(int(stage), 10, NoiseConfig()).sigma:.4g}"
        assert left == [f"{realized(size, float(sigma)):.2g}" for size in sizes]
    text = AQN.read_text(encoding="utf-8")
    just_below = 1 - torch.nextafter(torch.tensor(1.0).bfloat16(), torch.tensor(0.0).bfloat16()).item()
    assert f"{torch.finfo(torch.bfloat16).eps}" in text
    assert f"{just_below}" in text
    assert f"−{just_below / 2 / 0.0005:.1f}" in text
    assert f" {torch.finfo(torch.bfloat16).eps / 2 / 0.0005:.1f}" in text


# Run for real


def run(words, cwd, **variables):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    words = [sys.executable if word == "python" else word for word in words]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def command_with(page: Path, *wanted: str):
    (command,) = [c for c in commands(page) if all(word in c.words for word in wanted)]
    return command


def test_the_doctor_runs():
    (command,) = [c for c in commands(BOTH["ascend"][0]) if c.words[-2:] == ("doctor", "--json")]
    done = run(command.words, ROOT)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["exit_code"] == done.returncode


def test_make_knows_its_targets():
    for command in (c for c in commands(BOTH["README"][0]) if c.words[0] == "make"):
        done = run([*command.words, "--dry-run"], ROOT, **command.variables)
        assert done.returncode == 0, done.stderr


def test_grade_as_the_page_writes_it(tmp_path):
    rows = [{"gold": "18", "output": "so it is\n#### 18"}, {"gold": "18", "output": "I do not know"}]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(command_with(EVALUATION, "grade", "gsm8k").words, tmp_path)
    assert done.returncode == 0, done.stderr
    graded = [json.loads(line) for line in (tmp_path / "graded.jsonl").read_text().splitlines()]
    assert [(row["score"], row["reason"]) for row in graded] == [(1.0, "correct"), (0.0, "unextracted")]


@pytest.mark.slow
def test_the_evaluation_of_the_quickstarts_base_writes_the_fields_of_the_page(tmp_path):
    words = [*command_with(EVALUATION, "assets/quickstart-base").words]
    words[words.index("--result_dir") + 1] = str(tmp_path)
    done = run(words, ROOT)
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in (tmp_path / "test" / "samples.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert len(samples) == 8
    assert set(fields(table_with(EVALUATION, "key, sample"))) == samples[0].keys()
    assert set(fields(table_with(EVALUATION, "problems, samples, n"))) == summary.keys()


@pytest.mark.slow
def test_the_readmes_small_run_leaves_what_the_page_promises(tmp_path):
    (command,) = [c for c in commands(BOTH["README"][0]) if "NUM_PROCESSES" in c.variables and "--recipe" in c.words]
    variables = command.variables | {"PYTHON": sys.executable}
    done = run([*command.words, "--config.training.output_dir", str(tmp_path / "run")], ROOT, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    left = {path.name for path in (tmp_path / "run").iterdir()}
    promised = {row[0] for row in table_with(TRAINING, "metrics.jsonl")}
    assert left <= {entry.strip("/") for row in promised for entry in row.split(", ")}
    assert left >= {"output.log", "metrics.jsonl", "config.yaml", "environment.json", "adapter"}
    assert "num_processes: 1" in (tmp_path / "run" / "output.log").read_text()
