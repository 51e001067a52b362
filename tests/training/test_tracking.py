"""Where a run's metrics go besides metrics.jsonl."""

import contextlib
import importlib.util
import json
import os
import sqlite3

import pytest

from perl.base.errors import UserError
from perl.base.tracking import WandbRun, wandb_mode
from perl.config.load import parse
from perl.config.sft import parse as parse_sft
from perl.runs.rundir import default_run_dir, method_of
from perl.runs.tracking import check_trackers, configure, trackers
from perl.training.grpo import train
from tests.training.small_run import small_run


def config(*words):
    return parse([*words]).build()


@pytest.mark.parametrize(("tracker", "package"), [("trackio", "trackio"), ("wandb", "wandb"), ("azure_ml", "azureml")])
def test_a_tracker_that_is_not_installed_is_one_line_before_anything_is_loaded(monkeypatch, tracker, package):
    find = importlib.util.find_spec
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == package else find(name, *args))
    monkeypatch.setattr("perl.training.preflight.load_tokenizer", lambda name: pytest.fail("a tokenizer was loaded"))
    flag = "--config.training.report_to"
    with pytest.raises(UserError) as caught:
        train([flag, tracker])
    assert (
        str(caught.value)
        == f"{flag} {tracker}: {package} is not installed; pip install {package}, or write {flag} none"
    )


def test_an_unknown_tracker_is_named_with_the_nearest():
    with pytest.raises(
        UserError, match=r"^--config.training.report_to: unknown tracker 'trakio'; did you mean 'trackio'"
    ):
        check_trackers(config("--config.training.report_to", "trakio").training)


def test_wandb_that_is_disabled_need_not_be_installed(monkeypatch):
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None)
    training = config("--config.training.report_to", "[wandb]").training
    check_trackers(training)
    assert trackers(training) == []


def test_several_trackers_share_a_run(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_RESUME", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "")  # so that what configure sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.argv", ["perl.train"])
    WandbRun(id="abc12345", project="p").write(tmp_path)
    of_run = config(
        "--config.training.report_to", "[wandb, trackio, tensorboard]", "--config.model.model_name_or_path", "a/B-7B"
    )
    configure(of_run, tmp_path, "cpu")
    assert of_run.training.report_to == ["wandb", "trackio", "tensorboard"]
    assert of_run.training.project == os.environ["WANDB_PROJECT"] == "grpo-lora-b-7b-cpu"
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("abc12345", "allow")


def test_the_run_is_named_after_what_it_trains():
    """A run of PPO, or of all weights, is no grpo_lora."""
    flags = ["--config.model.model_name_or_path", "a/B-7B"]
    names = {
        "grpo_lora": [],
        "ppo_lora": ["--config.algorithm.name", "ppo"],
        "dapo_full": ["--config.algorithm.name", "dapo", "--config.peft.type", "none"],
        "rloo_dora": ["--config.algorithm.name", "rloo", "--config.peft.type", "dora"],
    }
    for name, further in names.items():
        values = parse([*flags, *further]).values
        assert default_run_dir(values, "npu").name.startswith(f"{name}_b_7b_npu_")
    for name, further in (("sft_lora", []), ("sft_full", ["--config.peft.type", "none"])):
        assert method_of(parse_sft([*flags, *further]).values) == name


def test_wandb_mode(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode() == "offline"


def test_wandb_is_online_after_a_login_to_a_server_of_ones_own(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = tmp_path / ".netrc"
    keys.write_text("machine wandb.example.com\n  login user\n  password 0123\n")
    keys.chmod(0o600)
    assert wandb_mode() == "offline"  # no key for the public server
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com:8080/")
    assert wandb_mode() == "online"
    monkeypatch.delenv("WANDB_BASE_URL")
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.com\n")  # of wandb login --host
    assert wandb_mode() == "online"
    keys.rename(tmp_path / "keys")
    assert wandb_mode() == "offline"
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert wandb_mode() == "online"


def test_a_file_that_names_no_run_is_one_line(tmp_path):
    assert WandbRun.read(tmp_path) is None
    (tmp_path / "wandb_run.json").write_text("{}")
    with pytest.raises(UserError, match=r"wandb_run\.json: names no W&B run .*; delete it to start a new one"):
        WandbRun.read(tmp_path)


def test_wandb_and_tensorboard_share_a_run_and_a_resumed_one_goes_on_in_it(tmp_path):
    report = ("--config.training.report_to", "[wandb, tensorboard]")
    run = small_run(tmp_path, "run", *report)
    written = WandbRun.read(run)
    assert written is not None
    assert list((run / "wandb").glob(f"offline-run-*-{written.id}"))
    assert written.project == "grpo-lora-model-cpu"
    assert list(run.rglob("events.out.tfevents.*"))
    on = ("--config.training.max_steps", "3", "--config.training.resume_from_checkpoint", "true")
    small_run(tmp_path, "run", *report, *on)
    assert WandbRun.read(run) == written
    assert len(list((run / "wandb").glob(f"offline-run-*-{written.id}"))) == 2


def test_a_tracker_that_is_lost_ends_no_training(tmp_path):
    """As by SIGTERM to all processes of a job, which W&B's does not outlive."""
    (tmp_path / "ends.py").write_text(
        "import psutil\n"
        "def ends(completions, **kwargs):\n"
        "    for child in psutil.Process().children(recursive=True):\n"
        "        if 'wandb-core' in child.name():\n"
        "            child.terminate()\n"
        "            psutil.wait_procs([child])\n"
        "    return [float(len(completion[0]['content'])) for completion in completions]\n"
    )
    ends = ("--config.reward.functions", json.dumps([str(tmp_path / "ends.py:ends")]))
    tables = ("--config.training.log_completions", "true")
    run = small_run(tmp_path, "run", "--config.training.report_to", "[wandb, tensorboard]", *ends, *tables)
    said = [line for line in (tmp_path / "run.log").read_text().splitlines() if "Error" in line]
    assert len(said) == 1
    assert "wandb failed (" in said[0]
    assert said[0].endswith(": the training goes on without it")
    assert (run / "adapter").is_dir()
    assert list(run.rglob("events.out.tfevents.*"))


def test_trackio_shares_a_run_with_tensorboard(tmp_path):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed (requirements_dev.txt)")
    report = ("--config.training.report_to", "[trackio, tensorboard]")
    run = small_run(tmp_path, "run", *report, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "trackio show --project grpo-lora-model-cpu" in (tmp_path / "run.log").read_text()
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "grpo-lora-model-cpu.db")) as database:
        rows = database.execute("select run_name, metrics from metrics order by step").fetchall()
    assert {name for name, _ in rows} == {"run"}
    tracked = [row["train/reward"] for row in (json.loads(text) for _, text in rows) if "train/reward" in row]
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert tracked == [row["reward"] for row in written if "reward" in row]
    assert len(tracked) == 2
    assert list(run.rglob("events.out.tfevents.*"))
