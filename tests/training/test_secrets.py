"""One training and one evaluation with a secret in every place that can hold one: no file that they write has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.training.small_run import ROOT, write_inputs

MARK = "Pl4nted"
"""Begins every secret; what follows tells where a found one was planted."""


def secret(place: str) -> str:
    return f"{MARK}{place}0123456789"


def url(place: str) -> str:
    return f"https://me:{secret(place)}@host.invalid/x?split=a&token={secret(place)}"


VARIABLES = {
    "WANDB_API_KEY": secret("wandbkey"),
    "HF_TOKEN": secret("hftoken"),
    "HUGGING_FACE_HUB_TOKEN": secret("hubtoken"),
    "OPENAI_API_KEY": secret("openai"),
    "VLLM_API_KEY": secret("vllmkey"),
    "PERL_PASSWORD": secret("password"),
    "VLLM_URL": url("vllmurl"),
    "ACCELERATE_X": url("accelerate"),
    "AZURE_CLIENT_SECRET": secret("azure"),
    "WANDB_MODE": "offline",
}
RECIPE = {
    "reward": {"kwargs": {"api_key": secret("kwargs"), "deep": {"password": secret("deep")}, "url": url("kwargsurl")}},
    "training": {"hub_revision": url("server")},
}
FLAGS = {
    "training.hub_token": secret("hubflag"),
    "training.model_init_kwargs": json.dumps({"token": secret("init")}),
    "training.report_to": "[wandb, tensorboard, trackio]",
    "training.max_steps": "1",
}
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None, deep=None, url=None):\n"
    "    print('asked with', api_key, url, deep)\n"
    "    return float(sum(c.isdigit() for c in solution_str))\n"
)


def words(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--config.{name}", value)]


def found_in(folder: Path, inputs: set[Path]) -> list[tuple[str, str]]:
    """(file, what of the secret is there) for each file below `folder` but the inputs."""
    places = []
    for file in folder.rglob("*"):
        if not file.is_file() or file in inputs:
            continue
        text = file.read_bytes()
        for start in (
            [i for i in range(len(text)) if text.startswith(MARK.encode(), i)] if MARK.encode() in text else []
        ):
            places.append((str(file.relative_to(folder)), text[start : start + 24].decode(errors="replace")))
    return sorted(set(places))


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The folder, which is a git checkout, in which a run was supervised as the launch script does; and its inputs."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    folder = tmp_path_factory.mktemp("planted")
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", url("remote"))
    settings = write_inputs(folder)
    (folder / "asked.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    inputs = {file for file in folder.rglob("*") if file.is_file()}
    own = {"reward.functions": f'["{folder / "asked.py"}:compute_score"]', "training.output_dir": str(folder / "run")}
    flags = ["--recipe", str(folder / "recipe.yaml"), *words(settings | FLAGS | own)]
    config = str(ROOT / "scripts" / "accelerate" / "single.yaml")
    command = ["-m", "perl.tools.supervise", str(folder / "run"), "--config_file", config, "--num_processes", "1"]
    done = run([*command, "-m", "perl.train", *flags], folder)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "run" / "output.log").read_text()[-3000:]
    return folder, inputs, done


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "TENSORBOARD"))}
    env = kept | VARIABLES | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRACKIO_DIR": str(folder / "trackio")}
    env |= {"HOME": str(folder / "home")}  # W&B and trackio write there too
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)


def test_a_training_writes_no_secret(planted):
    folder, inputs, done = planted
    assert found_in(folder, inputs) == []
    assert MARK not in done.stdout + done.stderr
    written = folder / "run"
    assert "asked with <secret> https://<secret>@host.invalid" in (written / "output.log").read_text()
    assert list(written.glob("wandb/offline-run-*/*.wandb"))
    assert list(written.rglob("events.out.tfevents.*"))
    assert list((folder / "trackio").glob("*.db"))
    assert list(written.glob("checkpoint-1/optimizer.pt"))
    assert not list(written.rglob("training_args.bin"))  # a pickle of every argument
    assert "https://<secret>@host.invalid/x?split=a&token=<secret>" in (written / "config.yaml").read_text()


@pytest.mark.slow
def test_an_evaluation_of_it_writes_no_secret(planted):
    folder, inputs, _ = planted
    words = ["--model", "model", "--adapter", "run/adapter", "--dataset", "sums.jsonl", "--result_dir", "scores"]
    more = ["--max_new_tokens", "4", "--max_samples", "2", "--report_to", "wandb"]
    done = run([str(ROOT / "perl" / "eval.py"), *words, *more], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "scores" / "report.html").is_file()
    assert found_in(folder, inputs) == []
    assert MARK not in done.stdout + done.stderr
    said = run([str(ROOT / "perl" / "eval.py"), "--model", url("model"), "--dataset", url("dataset")], folder)
    assert (said.returncode, MARK in said.stderr) == (2, False)
