"""The folder of a run: what cannot be written in it is one line that names it."""

from types import SimpleNamespace

import pytest

from perl.base.errors import UserError
from perl.config.load import parse
from perl.runs.rundir import prepare
from perl.runs.tracking import WandbRunWriter


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"^--config.training.output_dir {tmp_path}: {name}: Is a directory; give"):
        prepare(tmp_path, parse([]), 1)


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match=f"^--config.training.output_dir {tmp_path}/run: File exists; give another"):
        prepare(tmp_path / "run", parse([]), 1)


def test_the_name_of_the_wandb_run_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "run", SimpleNamespace(id="abc", project="p", entity=None))
    (tmp_path / "wandb_run.json").mkdir()
    args, state = SimpleNamespace(report_to=["wandb"]), SimpleNamespace(is_world_process_zero=True)
    with pytest.raises(UserError, match=f"output_dir {tmp_path}: wandb_run.json: Is a directory"):
        WandbRunWriter(tmp_path).on_train_begin(args, state, None)
