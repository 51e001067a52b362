"""What counts as a secret, and what stands in its place."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.base.errors import UserError, report_errors
from perl.base.redact import HIDDEN, HideSecrets, drop_secrets, hide, is_secret_name, redact

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "name",
    ["hub_token", "token", "api_key", "apikey", "apiKey", "accessToken", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
     "password", "db-passwd", "credentials", "Authorization", "training.hub_token", "client.secret"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["eos_token", "pad_token", "image_key", "data.prompt_key", "max_tokens", "monkey", "TOKENIZERS_PARALLELISM"]
)
def test_names_of_other_things(name):
    assert not is_secret_name(name)


def test_a_mapping_loses_its_secrets_at_any_depth():
    given = {
        "hub_token": None, "eos_token": "<|end|>", "key": 3, "use_cache": False, "password": 1234,
        "kwargs": {"apiKey": "s3cret", "n": 2, "url": "postgres://me:s3cret@host/db"},
        "list": [{"token": "s3cret", "a": 1}, "https://host/x.jsonl?split=a&token=s3cret"],
        "credentials": {"user": "me", "pass": "s3cret"}, "api_keys": ["s3cret"],
    }  # fmt: skip
    assert drop_secrets(given) == {
        "eos_token": "<|end|>", "key": 3, "use_cache": False,
        "kwargs": {"n": 2, "url": f"postgres://{HIDDEN}@host/db"},
        "list": [{"a": 1}, f"https://host/x.jsonl?split=a&token={HIDDEN}"],
    }  # fmt: skip


def test_a_command_line_without_its_secrets():
    argv = [
        "train.py", "--config.training.hub_token", "s3cret", "--config.training.hub_token=s3cret",
        "--config.reward.kwargs.apiKey=s3cret", "--config.training.model_init_kwargs",
        '{"token": "s3cret", "use_cache": false}', "--config.reward", "kwargs: {list: [{password: 12}]}",
        "--dataset=https://me:s3cret@host/x", "+trainer.wandb_api_key=s3cret", "--config.training.max_steps", "3",
        "--config.reward.functions", '["r.py:f"]', "--config.training.pad_token", "<pad>",
    ]  # fmt: skip
    assert redact(argv) == [
        "train.py", "--config.training.hub_token", HIDDEN, f"--config.training.hub_token={HIDDEN}",
        f"--config.reward.kwargs.apiKey={HIDDEN}", "--config.training.model_init_kwargs",
        f'{{"token": "{HIDDEN}", "use_cache": false}}', "--config.reward",
        f'{{"kwargs": {{"list": [{{"password": "{HIDDEN}"}}]}}}}',
        f"--dataset=https://{HIDDEN}@host/x", f"+trainer.wandb_api_key={HIDDEN}", "--config.training.max_steps", "3",
        "--config.reward.functions", '["r.py:f"]', "--config.training.pad_token", "<pad>",
    ]  # fmt: skip


def test_a_text_without_its_secrets(monkeypatch):
    assert hide("ray://me:s3cret@host:1 and https://host/x?X-Amz-Signature=s3cret&part=2") == (
        f"ray://{HIDDEN}@host:1 and https://host/x?X-Amz-Signature={HIDDEN}&part=2"
    )
    assert hide("hf_" + "a" * 30 + " Authorization: Bearer abcdefghij") == f"{HIDDEN} Authorization: Bearer {HIDDEN}"
    assert hide("a@b.c 2@3 x=1?y=2 https://host/a@b") == "a@b.c 2@3 x=1?y=2 https://host/a@b"
    monkeypatch.setenv("SOME_API_KEY", "correct horse")
    monkeypatch.setenv("SOME_OTHER_KEY", "short")
    assert hide("it said correct horse, short") == f"it said {HIDDEN}, short"


@pytest.mark.parametrize("recipe", ["--recipe my.yaml", "--recipe=my.yaml"])
def test_what_command_line_and_recipe_say_is_known_to_every_text(tmp_path, recipe):
    (tmp_path / "my.yaml").write_text("reward: {kwargs: {api_key: c0rrectly, n: horse}}\n")
    code = "from perl.base.redact import hide; print(hide('a b4tteries, b st4plers, c c0rrectly horse'))"
    words = ["--x.hub_token", "b4tteries", "--y", '{"api_key": "st4plers"}', *recipe.split()]
    command = [sys.executable, "-c", code, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert done.stdout == f"a {HIDDEN}, b {HIDDEN}, c {HIDDEN} horse\n"


def test_errors_and_log_lines_hold_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "correct horse")
    with pytest.raises(SystemExit), report_errors():
        raise UserError("--dataset https://me:pw@host/x.jsonl?token=abc correct horse: no such file")
    assert capsys.readouterr().err == (
        f"error: --dataset https://{HIDDEN}@host/x.jsonl?token={HIDDEN} {HIDDEN}: no such file\n"
    )
    record = logging.LogRecord("perl", logging.INFO, "f", 1, "from %s, %d rows", ("https://me:pw@host", 3), None)
    HideSecrets().filter(record)
    assert record.getMessage() == f"from https://{HIDDEN}@host, 3 rows"
