"""A hub that takes nothing: what the hub's client really raises becomes one line."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS

from perl.base.errors import RankError, UserError
from perl.base.files import SAVING, atomic_write
from perl.evaluation.store import locked
from perl.models.folders import written_whole
from perl.runs import push
from perl.runs.checkpoints import LEFT_BEHIND
from perl.runs.push import NEVER_PUSHED, make_repository, pushed
from perl.runs.rundir import held
from tests.training.local_hub import local_hub

NOBODY = "http://127.0.0.1:9"
"""No service listens on the port discard."""


def test_a_hub_that_cannot_be_reached_leaves_the_result_and_says_how_to_push_it(tmp_path):
    with pytest.raises(RankError) as error, pushed(tmp_path / "adapter", "me/sums"):
        HfApi(endpoint=NOBODY, token="hf_test").upload_folder(repo_id="me/sums", folder_path=tmp_path)
    said = str(error.value)
    assert said.startswith("--config.training.push_to_hub: the hub took nothing (")
    assert f"the result is in {tmp_path}/adapter: push it later with hf upload me/sums {tmp_path}/adapter" in said
    assert error.value.exit_code == 1


def test_a_hub_that_cannot_be_reached_is_told_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(push, "create_repo", HfApi(endpoint=NOBODY, token="hf_test").create_repo)
    args = SimpleNamespace(hub_model_id=None, output_dir=tmp_path / "sums", hub_token=None, hub_private_repo=None)
    message = r"the hub gave no repository .*; look at the network and at HF_TOKEN"
    with pytest.raises(UserError, match=message) as error:
        make_repository(args)
    assert error.value.exit_code == 2


def pushed_files(folder: Path, patterns: list[str]) -> list[str]:
    with local_hub() as hub:
        api = HfApi(endpoint=hub.endpoint, token="hf_test")
        api.upload_folder(repo_id="me/sums", folder_path=folder, ignore_patterns=patterns)
    return sorted(hub.commits[0])


def test_a_push_of_transformers_own_takes_nothing_of_what_works_in_the_folder(tmp_path):
    run, theirs = tmp_path / "sums", ["_*", "checkpoint-*"]  # Trainer._push_from_checkpoint
    before = list(DEFAULT_IGNORE_PATTERNS)
    with held(run, resuming=False):
        names = ["README.md", "best/adapter_config.json", "notes.partial"]
        for name in [*names, f"{SAVING}/checkpoint-2/x", f"{LEFT_BEHIND}/metrics.jsonl"]:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text("x")
        with atomic_write(run / "best.json") as file, written_whole(run / "merged") as merged:
            file.write("half")
            (merged / "config.json").write_text("{}")
            assert pushed_files(run, theirs) == names
    assert before == DEFAULT_IGNORE_PATTERNS  # the library's, for every push of the process


def test_the_last_push_takes_nothing_of_an_evaluation_into_a_folder_of_the_run(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "x").touch()
    with locked(tmp_path / "eval"), atomic_write(tmp_path / "eval" / "samples.jsonl"):
        (tmp_path / "eval" / "_mine").write_text("x")
        assert pushed_files(tmp_path, NEVER_PUSHED) == ["eval/_mine"]


def test_a_full_disk_is_not_the_hubs_fault(tmp_path):
    with pytest.raises(OSError, match="No space") as error, pushed(tmp_path, None):
        raise OSError(28, os.strerror(28))
    assert not isinstance(error.value, UserError)
