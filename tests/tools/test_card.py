"""One training and its evaluation, as a user runs them: the model card, and the W&B run that both log to."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from wandb.proto.wandb_internal_pb2 import Record

from perl import __version__
from perl.__main__ import main
from perl.base.errors import UserError, report_errors
from perl.base.tracking import WandbRun
from perl.models.folders import content_hash
from perl.runs.model_card import read_summaries
from tests.training.local_hub import local_hub
from tests.training.small_run import ROOT, small_run


def card_command(adapter: Path, results: Path) -> int:
    """The exit code."""
    return main(["card", str(adapter), "--results", str(results)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model/, whose card names a licence, and run/, a training of two steps that logs to W&B, offline."""
    folder = tmp_path_factory.mktemp("card")
    run = small_run(folder, "run", "--config.training.report_to", "wandb")
    assert run == folder / "run"
    (folder / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# a model\n")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> Path:
    """results/: the base, both checkpoints, the last of which is the adapter, scored on the sums, four samples each."""
    sampling = ["--n", "4", "--temperature", "1", "--max_new_tokens", "8", "--result_dir", "results"]
    adapters = ["--adapter", "base", "run", "--report_to", "wandb"]
    words = [str(ROOT / "perl" / "eval.py"), "--model", "model", "--dataset", "sums.jsonl", *sampling, *adapters]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env = clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "evaluation.log").write_text(done.stderr)
    return folder / "results"


def summary(results: Path, name: str) -> dict:
    return json.loads((results / name / "sums" / "summary.json").read_text())


def test_a_training_leaves_a_card_of_what_was_measured_in_the_adapter_and_each_checkpoint(folder):
    run = folder / "run"
    cards = {name: ModelCard.load(run / name / "README.md") for name in ("adapter", "checkpoint-1", "checkpoint-2")}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [f"{row['reward']:.3f}" for row in rows if "reward" in row]
    card = cards["adapter"]
    assert card.data.library_name == "peft"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["transformers", "lora", "grpo", "trl", "perl"]
    assert card.data.base_model is None  # a local folder is no model of the hub
    assert "\n# run\n" in card.text
    assert f"Made with perl {__version__}" in card.text
    assert "for 2 steps on `sums.jsonl` (local), with adaptive quantization noise" in card.text
    assert f"{rewards[0]} over the first tenth of the logged steps and {rewards[1]} over the last" in card.text
    assert [line.split(" | ")[:2] for line in card.text.splitlines() if line.startswith(("| 1 |", "| 2 |"))] == [
        ["| 1", rewards[0]],
        ["| 2", rewards[1]],
    ]
    assert "| rewards | accuracy, digits.py:digits |" in card.text
    assert "| noise (AQN) | linear, 10 stages, σ from 0.05 to 0.0005 |" in card.text
    assert "trl 1.16.0" in card.text
    assert "for 1 steps" in cards["checkpoint-1"].text
    assert cards["checkpoint-2"].text == card.text
    assert str(folder) not in "".join(each.content for each in cards.values())
    assert not (run / "README.md").exists()  # nothing is pushed from the run's folder


def test_the_scores_of_an_adapter_enter_its_card(folder, results, tmp_path, capsys):
    adapter = shutil.copytree(folder / "run" / "checkpoint-2", tmp_path / "copy")
    before = content_hash(adapter)
    assert card_command(adapter, results) == 0
    said = capsys.readouterr().out
    card = ModelCard.load(adapter / "README.md")
    scored = {
        name: json.loads((results / name / "sums" / "summary.json").read_text()) for name in ("base", "checkpoint-2")
    }
    metrics = scored["checkpoint-2"]["metrics"]
    found = {result.metric_type: result for result in card.data.eval_results}
    assert found.keys() - {"maj@2"} == {"accuracy", "pass@2", "pass@4", "maj@4"}
    assert ("maj@2" in found) == (metrics["maj@2"] != metrics["accuracy"])  # as some answers may be missing
    assert said == f"{adapter / 'README.md'}: {len(found)} results\n"
    for name, result in found.items():
        assert result.metric_value == pytest.approx(100 * metrics[name]["value"], abs=0.005)
        assert result.metric_args["interval_95"] == pytest.approx(
            [100 * metrics[name][end] for end in ("low", "high")], abs=0.005
        )
        assert (result.metric_args["problems"], result.metric_args["samples_per_problem"]) == (8, 4)
        assert (result.metric_args["temperature"], result.metric_args["max_new_tokens"]) == (1.0, 8)
        assert (result.task_type, result.dataset_type, result.dataset_name) == (
            "text-generation",
            "sums",
            "sums",
        )
    assert card.data.model_name == "run"
    assert card.data.license == "apache-2.0"
    for name, who in (("base", "the base"), ("checkpoint-2", "this adapter")):
        e = scored[name]["metrics"]["accuracy"]
        line = f"| sums | {who} | accuracy | {100 * e['value']:.2f} | {100 * e['low']:.2f} – {100 * e['high']:.2f} |"
        assert line in card.text
    assert "8 problems, 4 samples of each; temperature 1, top_p 1" in card.text
    assert "engine hf" in card.text
    assert "over the first tenth of the logged steps" in card.text  # what the training wrote is still there
    assert content_hash(adapter) == before  # an evaluation of it still knows it

    once = card.content
    assert card_command(adapter, results) == 0
    assert ModelCard.load(adapter / "README.md").content == once


def test_results_of_another_adapter_are_refused_in_one_line_and_nothing_is_written(folder, results, capsys):
    adapter = folder / "run" / "checkpoint-1"
    before = (adapter / "README.md").read_text()
    with pytest.raises(SystemExit) as done, report_errors():
        card_command(adapter, results / "checkpoint-2")
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --results {results / 'checkpoint-2'}: holds no results of {adapter}; score it")
    assert said.count("\n") == 1
    assert (adapter / "README.md").read_text() == before


@pytest.mark.parametrize("damaged", ["[1]", "{}", '{"adapter_hash": 5}', "[" * 100_000])
def test_a_damaged_summary_is_one_line(tmp_path, damaged):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "run.json").write_text("{}")
    (tmp_path / "sums" / "summary.json").write_text(damaged)
    with pytest.raises(UserError, match=r"^.*/sums/summary\.json is not readable \(.*\); the same command of perl"):
        read_summaries(tmp_path, "0" * 16, tmp_path)


def test_a_card_of_someone_else_keeps_its_text(folder, results, tmp_path):
    adapter = shutil.copytree(folder / "run" / "checkpoint-2", tmp_path / "copy")
    (adapter / "README.md").write_text("---\nlicense: mit\ntags:\n- mine\n---\n# My adapter\n\nMade with care.\n")
    assert card_command(adapter, results) == 0
    card = ModelCard.load(adapter / "README.md")
    assert card.text.startswith("# My adapter\n\nMade with care.\n\n## Results\n")
    assert (card.data.license, card.data.tags, card.data.library_name) == ("mit", ["mine"], "peft")
    assert card.data.eval_results[0].metric_type == "accuracy"


def test_the_page_of_what_is_pushed_is_our_card_from_the_first_checkpoint_on(tmp_path):
    """Over HTTP, to a hub on this machine: TRL's and PEFT's cards were what a visitor saw."""
    push = ("--config.training.push_to_hub", "true", "--config.training.hub_model_id", "me/sums-lora")
    every = ("--config.training.hub_strategy", "checkpoint", "--config.training.hub_always_push", "true")
    with local_hub() as hub:
        words = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
        small_run(tmp_path, "run", *push, *every, **words)
    pages = [(path, ModelCard(content.decode())) for commit in hub.commits for path, content in commit.items()
             if path.endswith("README.md")]  # fmt: skip
    assert {path for path, _ in pages} >= {"README.md", "last-checkpoint/README.md", "adapter/README.md"}
    assert "adapter_model.safetensors" in hub.commits[0]
    assert [path for commit in hub.commits for path in commit if path.startswith((".", "_"))] == []  # _lock
    steps = []
    for path, card in pages:
        assert (card.data.library_name, card.data.tags) == ("peft", ["transformers", "lora", "grpo", "trl", "perl"])
        assert "\n# sums-lora\n" in card.text
        if path == "README.md":
            steps.append(card.text.split("trained with ")[1].split(" for ")[1].split(" steps")[0])
    assert (steps[0], steps[-1]) == ("1", "2")


def records(run_file: Path) -> list[Record]:
    """The records of W&B's file: LevelDB's log format behind a header of 7 bytes, each piece at most to the end of a
    block of 32 KiB, with checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last)."""
    data, place, pieces, found = run_file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a head: zeros
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(pieces))
            pieces = b""
    return found


def test_the_evaluation_goes_on_in_the_trainings_wandb_run(folder, results):
    run = WandbRun.read(folder / "run")
    assert run is not None
    (offline,) = (results / "wandb").glob(f"offline-run-*-{run.id}")
    assert f"results go to the training's run, {run.project}/{run.id}" in (folder / "evaluation.log").read_text()
    logged = records(offline / f"run-{run.id}.wandb")
    (head,) = [record.run for record in logged if record.WhichOneof("record_type") == "run"]
    assert (head.run_id, head.project) == (run.id, run.project)
    steps = {}
    for record in logged:
        items = {"/".join([i.key] if i.key else i.nested_key): json.loads(i.value_json) for i in record.history.item}
        if "eval/sums/accuracy" in items:
            steps[items["train/global_step"]] = items
    assert steps.keys() == {0, 1, 2}
    for step, name in enumerate(("base", "checkpoint-1", "checkpoint-2")):
        metrics = summary(results, name)["metrics"]
        for metric in ("accuracy", "pass@4"):
            assert steps[step][f"eval/sums/{metric}"] == metrics[metric]["value"]
            assert steps[step][f"eval/sums/{metric}/low"] == metrics[metric]["low"]
    (table,) = (offline / "files").rglob("*.table.json")
    rows = json.loads(table.read_text())
    assert rows["columns"][:4] == ["adapter", "step", "dataset", "metric"]
    assert [row[:5] for row in rows["data"] if row[3] == "accuracy"] == [
        [adapter, step, "sums", "accuracy", steps[step]["eval/sums/accuracy"]]
        for step, adapter in enumerate(("base", "run/checkpoint-1", "run/checkpoint-2"))
    ]
