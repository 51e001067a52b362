"""A hub that takes nothing: what the hub's client really raises becomes one line."""

import os
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from perl.base.errors import RankError, UserError
from perl.runs import push
from perl.runs.push import make_repository, pushed

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


def test_a_full_disk_is_not_the_hubs_fault(tmp_path):
    with pytest.raises(OSError, match="No space") as error, pushed(tmp_path, None):
        raise OSError(28, os.strerror(28))
    assert not isinstance(error.value, UserError)
