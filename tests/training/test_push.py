"""A hub that takes nothing: what the hub's client really raises becomes one line."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi

from perl.base.errors import RankError, UserError
from perl.runs import push
from perl.runs.push import make_repository, pushed
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


def test_what_works_in_the_folder_is_never_pushed(tmp_path, monkeypatch):
    names = ["README.md", "best/adapter_config.json", "notes.partial"]
    ours = [".lock", ".best.json.ab_12cd3.partial", "best/.lock", "best/.x.ab_12cd3.partial", ".saving/checkpoint-2/x",
            ".model.77.partial/config.json"]  # fmt: skip
    for name in names + ours:
        (tmp_path / "sums" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / name).write_text("x")
    with local_hub() as hub:
        api = HfApi(endpoint=hub.endpoint, token="hf_test")
        monkeypatch.setattr(push, "create_repo", api.create_repo)
        args: Any = SimpleNamespace(hub_model_id="me/sums", hub_token=None, hub_private_repo=None)
        make_repository(args)
        api.upload_folder(repo_id="me/sums", folder_path=tmp_path / "sums", ignore_patterns=["_*", "checkpoint-*"])
    assert sorted(hub.commits[0]) == names


def test_a_full_disk_is_not_the_hubs_fault(tmp_path):
    with pytest.raises(OSError, match="No space") as error, pushed(tmp_path, None):
        raise OSError(28, os.strerror(28))
    assert not isinstance(error.value, UserError)
