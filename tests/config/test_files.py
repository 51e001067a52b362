"""Relative paths in a recipe: the working directory, then beside the recipe, then the repository."""

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.config import files
from perl.config.evaluation import find_files
from perl.config.evaluation import parse as parse_evaluation
from perl.config.load import parse
from perl.config.sft import parse as parse_sft
from tests.docs_commands import ROOT

ROW = '{"question": "1 + 1?", "answer": "#### 2"}\n'


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A working directory without the recipe's files."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def recipe(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(text)
    return ["--recipe", str(folder / "mine.yaml")]


def test_the_quickstarts_recipe_from_another_folder(there):
    parsed = parse(["--recipe", "recipes/quickstart.yaml"])
    base, data = ROOT / "assets/quickstart-base", ROOT / "assets/quickstart-data/train.jsonl"
    assert parsed.values.model.model_name_or_path == str(base)
    assert parsed.values.dataset.dataset_name_or_path == str(data)
    assert parsed.warnings[:3] == [
        f"--recipe recipes/quickstart.yaml: not in {there}, taken from {ROOT / 'recipes/quickstart.yaml'}",
        f"the recipe's model.model_name_or_path assets/quickstart-base: not in {there}, taken from {base}",
        "the recipe's dataset.dataset_name_or_path assets/quickstart-data/train.jsonl:"
        f" not in {there}, taken from {data}",
    ]
    parsed.require_files()


def test_the_working_directory_goes_first_and_says_nothing(there, tmp_path):
    argv = recipe(tmp_path / "r", "dataset: {dataset_name_or_path: rows.jsonl}\n")
    for folder in (there, tmp_path / "r"):
        (folder / "rows.jsonl").write_text(ROW)
    parsed = parse(argv)
    assert parsed.values.dataset.dataset_name_or_path == "rows.jsonl"
    assert parsed.warnings == []


def test_beside_the_recipe_an_environment(there, tmp_path):
    argv = recipe(tmp_path / "r", "environment: {factory: 'mine.py:Talk', tools: [python, 'mine.py:add']}\n")
    (tmp_path / "r" / "mine.py").touch()
    environment = parse(argv).values.environment
    assert environment.factory == f"{tmp_path / 'r' / 'mine.py'}:Talk"
    assert environment.tools == ["python", f"{tmp_path / 'r' / 'mine.py'}:add"]


def test_beside_the_recipe_data_and_reward(there, tmp_path):
    text = "dataset: {dataset_name_or_path: [rows.jsonl, gsm8k]}\nreward: {functions: [accuracy, 'mine.py:brief']}\n"
    argv = recipe(tmp_path / "r", text)
    (tmp_path / "r" / "rows.jsonl").write_text(ROW)
    (tmp_path / "r" / "mine.py").touch()
    values = parse(argv).values
    assert values.dataset.dataset_name_or_path == [str(tmp_path / "r" / "rows.jsonl"), "gsm8k"]
    assert values.reward.functions == ["accuracy", f"{tmp_path / 'r' / 'mine.py'}:brief"]
    assert parse_sft(
        recipe(tmp_path / "r", "dataset: {eval_dataset: rows.jsonl}\ntraining: {eval_strategy: epoch}\n")
    ).values.dataset.eval_dataset == str(tmp_path / "r" / "rows.jsonl")


def test_a_path_in_a_base_is_looked_for_beside_the_base(there, tmp_path):
    (tmp_path / "r" / "base").mkdir(parents=True)
    (tmp_path / "r" / "base" / "b.yaml").write_text("dataset: {dataset_name_or_path: rows.jsonl}\n")
    for folder in (tmp_path / "r", tmp_path / "r" / "base"):
        (folder / "rows.jsonl").write_text(ROW)
    parsed = parse(recipe(tmp_path / "r", "base: base/b.yaml\n"))
    assert parsed.values.dataset.dataset_name_or_path == str(tmp_path / "r" / "base" / "rows.jsonl")


def test_plan_takes_a_recipe_of_the_repository_from_any_folder(there, capsys):
    assert main(["plan", "recipes/quickstart.yaml", "--device", "h100", "--count", "1", "--parallel", "single"]) == 0
    assert f"recipes/quickstart.yaml: not in {there}, taken from {ROOT}" in " ".join(capsys.readouterr().out.split())


def test_a_flag_is_the_working_directorys(there, tmp_path):
    argv = recipe(tmp_path / "r", "dataset: {dataset_name_or_path: rows.jsonl}\n")
    (tmp_path / "r" / "rows.jsonl").write_text(ROW)
    parsed = parse([*argv, "--config.dataset.dataset_name_or_path", "rows.jsonl"])
    assert parsed.values.dataset.dataset_name_or_path == "rows.jsonl"
    assert parsed.warnings == []


def test_two_files_are_one_line(there, tmp_path, monkeypatch):
    argv = recipe(tmp_path / "r", "dataset: {dataset_name_or_path: rows.jsonl}\n")
    for folder in (tmp_path / "r", tmp_path / "repository"):
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text(ROW)
    monkeypatch.setattr(files, "REPOSITORY", tmp_path / "repository")
    with pytest.raises(UserError) as error:
        parse(argv)
    assert str(error.value) == (
        f"the recipe's dataset.dataset_name_or_path rows.jsonl: is not in {there}, and there are"
        f" {tmp_path / 'r/rows.jsonl'} and {tmp_path / 'repository/rows.jsonl'}; write one of them"
    )


def test_none_is_one_line_with_the_places(there, tmp_path):
    parsed = parse(recipe(tmp_path / "r", "dataset: {dataset_name_or_path: data/rows.jsonl}\n"))
    with pytest.raises(UserError) as error:
        parsed.require_files()
    assert str(error.value) == (
        "the recipe's dataset.dataset_name_or_path data/rows.jsonl: no such file or folder; looked for in"
        f" {there}, {tmp_path / 'r'}, {ROOT}"
    )


def test_the_evaluators_files_from_another_folder(there):
    flags = ["--model", "assets/quickstart-base", "--dataset", "gsm8k,assets/quickstart-data/test.jsonl"]
    config, lines = find_files(parse_evaluation([*flags, "--few_shot", "3"]))
    base, data = ROOT / "assets/quickstart-base", ROOT / "assets/quickstart-data/test.jsonl"
    assert (config.model, config.dataset, config.few_shot) == (str(base), f"gsm8k,{data}", "3")
    assert lines == [
        f"--model assets/quickstart-base: not in {there}, taken from {base}",
        f"--dataset assets/quickstart-data/test.jsonl: not in {there}, taken from {data}",
    ]
