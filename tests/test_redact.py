"""What counts as a secret, and what stands in its place."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from perl.base.errors import UserError, report_errors
from perl.base.redact import HIDDEN, HideSecrets, drop_secrets, hide, is_secret_name, redact

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "name",
    ["hub_token", "token", "api_key", "apikey", "apiKey", "accessToken", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
     "password", "db-passwd", "credentials", "Authorization", "training.hub_token", "client.secret",
     "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "HF_TOKEN_READ", "HF_TOKEN_2", "SLACK_WEBHOOK",
     "SLACK_WEBHOOK_URL", "tokens", "access_tokens", "passwords", "pwd", "pass", "cookie", "private_key_pem",
     "ACCESSTOKEN", "hubtoken", "MYTOKEN2"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["eos_token", "pad_token", "image_key", "data.prompt_key", "max_tokens", "monkey", "TOKENIZERS_PARALLELISM",
     "tokens_per_second", "num_tokens", "num_tokens_2", "pass@8", "pass_at_k", "tokenizer", "PWD", "OLDPWD", "pattern",
     "SSH_ASKPASS", "compass", "forward_pass", "num_key_value_heads", "max_tokens_per_microbatch", "SSH_AUTH_SOCK",
     "completion_tokens", "token_type_ids", "keys", "author", "stop_token_ids", "secretary", "patience"],
)  # fmt: skip
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


def test_numbers_under_the_names_of_texts_stay():
    given = {"tokens": [3, 4], "pass": 0.5, "key": 3, "pass@8": 0.25, "tokens_per_second": 12.0, "num_tokens": "12"}
    assert drop_secrets(given) == given
    assert drop_secrets({"tokens": ["s3cret"], "pass": "s3cret", "passwords": [12, 34]}) == {}


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


@pytest.mark.parametrize(
    "text",
    ["Authorization: Basic dXNlcjpwYXNz", '"authorization": "basic dXNlcjpwYXNz"', "Basic dXNlcjpwYXNzd29yZA==",
     "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "AIzaSyAbCdEfGhIjKlMnOpQrStUvWxYz0123456",
     "https://user:pa/ss@host/x", "https://host/?a=b&pass=hunter22", "https://hooks.slack.com/services/T0/B0/abc",
     "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_secrets_that_are_known_by_their_form(text):
    shown = hide(f"a {text} b")
    assert HIDDEN in shown
    assert not any(part in shown for part in ("dXNl", "eyJz", "SyAb", "pa/ss", "hunter22", "B0/abc", "MIIabc"))


@pytest.mark.parametrize(
    "text",
    ["basic arithmetic with n=3", "Basic requirements: none", "https://host:8080/a@b", "http://[::1]:80/a@b",
     "tokens_per_second=12 num_tokens=3 pass@8=0.25 max_tokens=7", "https://host/x?max_tokens=3&pass@8=1",
     "the tokenizer is authoritative, a password is not", "eyJust.a.word", "step 3/9 reward 0.5 pass 2"],
)  # fmt: skip
def test_ordinary_words_stay(text):
    assert hide(text) == text


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "HF_TOKEN_READ", "SLACK_WEBHOOK", "API_SECRET"]
)
def test_a_secret_of_the_environment_is_hidden_in_every_spelling(monkeypatch, name):
    value = 'we"ird\\sec/ret é'
    monkeypatch.setenv(name, value)
    spellings = [value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr({"k": value}), quote(value)]
    for text in [*spellings, quote(value, safe=""), quote_plus(value)]:
        assert "ird" not in hide(f"x {text} y"), text
    monkeypatch.setenv(name, "first line\nand the second\n")
    assert hide("x first line\n") == f"x {HIDDEN}\n"
    assert hide(f"  and the second{json.dumps(os.environ[name])}") == f'  {HIDDEN}"{HIDDEN}"'


@pytest.mark.parametrize("where", ["", "import threading; threading.Thread(target=fail).start()", "logging.exception"])
def test_a_traceback_holds_no_secret(where):
    code = "import logging\nfrom perl.base.errors import report_errors\nfrom perl.base.redact import *\n"
    code += "def fail():\n    int(__import__('os').environ['HF_TOKEN'])\n"
    body = where or "fail()"
    if where == "logging.exception":
        code += "logging.basicConfig(); hide_secrets_in_logs()\n"
        body = "try: fail()\n    except ValueError: logging.exception('failed')"
    code += f"with report_errors():\n    {body}\n"
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_TOKEN": "correct-horse"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "Traceback" in done.stderr
    assert f"ValueError: invalid literal for int() with base 10: '{HIDDEN}'" in done.stderr
    assert "horse" not in done.stderr


@pytest.mark.parametrize("recipe", ["--recipe my.yaml", "--recipe=my.yaml"])
def test_what_command_line_and_recipe_say_is_known_to_every_text(tmp_path, recipe):
    (tmp_path / "my.yaml").write_text("reward: {kwargs: {api_key: c0rrectly, n: horse}}\n")
    code = "from perl.base.redact import hide; print(hide('a b4tteries, b st4plers, c c0rrectly horse'))"
    words = ["--x.hub_token", "b4tteries", "--y", '{"api_key": "st4plers"}', *recipe.split()]
    command = [sys.executable, "-c", code, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert done.stdout == f"a {HIDDEN}, b {HIDDEN}, c {HIDDEN} horse\n"


def test_what_a_recipes_base_says_is_known_too(tmp_path):
    """Of a recipe that is named without a flag too, as a sweep's is; one that builds on itself ends nothing."""
    (tmp_path / "a.yaml").write_text("base: sub/b.yaml\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.yaml").write_text("base: ../a.yaml\ntraining: {hub_token: plumtreeforest}\n")
    code = "from perl.base.redact import hide; print(hide('a plumtreeforest'))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in (["--recipe", "a.yaml"], ["--recipe=a.yaml"], ["sweep", "a.yaml"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
        assert done.stdout == f"a {HIDDEN}\n"


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


@pytest.mark.parametrize("word", ["https://", "https://a:", "a.", "-----BEGIN RSA PRIVATE KEY-----\n", "-eyJaaaaaaaa."])
def test_a_long_line_takes_time_by_its_length_and_not_by_its_square(word):
    """A completion may be such a line: 128 kB of addresses took 35 s, and 640 kB a quarter of an hour."""
    program = "import sys; from perl.base.redact import hide; hide(sys.argv[1] * (640_000 // len(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", program, word], cwd=ROOT, check=True, timeout=120)
