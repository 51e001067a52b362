"""--help of every program: ends with exit code 0 and names flags that there are."""

import os
import subprocess
import sys

import pytest

from perl.__main__ import COMMANDS, main
from perl.config.help import MOST_USED
from perl.config.load import GRPO, build_parser, parse
from perl.config.sft import SFT
from perl.config.sft import parse as parse_sft
from tests.docs_commands import LAUNCH, ROOT

SCRIPTS = sorted(str(script.relative_to(ROOT)) for script in (ROOT / "scripts").rglob("*.sh"))
FIELDS = [name for texts in MOST_USED.values() for name in texts]


def shown(capsys, argv, parse=parse):
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith("  --config.")]


def test_the_most_used_flags_come_first_and_the_rest_is_named(capsys):
    text = shown(capsys, ["--recipe", "no_such.yaml", "--help"])
    assert flags_in(text) == [f"--config.{name}" for name in FIELDS if name != "training.max_length"]
    assert len(text.splitlines()) < 120
    assert "--help all lists every flag" in text
    assert shown(capsys, ["-h"]) == shown(capsys, ["--help"])


def test_a_group_and_all_of_them(capsys):
    assert flags_in(shown(capsys, ["--help", "critic"])) == [
        f"--config.critic.{name}" for name in ("lr", "r", "warmup_steps", "value_clip")
    ]
    every = {flag for flag in build_parser(GRPO).known_flags() if flag.startswith("--config.") and flag[-1] != "+"}
    assert {flag.rstrip(",") for flag in flags_in(shown(capsys, ["--help", "all"]))} >= every


def test_fine_tuning_shows_what_it_has(capsys):
    flags = flags_in(shown(capsys, ["--help"], parse_sft))
    assert "--config.training.max_length" in flags
    assert "--config.reward.functions" not in flags
    assert set(flags) <= set(build_parser(SFT).known_flags())


@pytest.mark.parametrize("name", COMMANDS)
def test_of_every_command(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: python -m perl {name}" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_of_every_script(script, flag, tmp_path):
    words = [script, "--recipe", "x.yaml", flag] if script == LAUNCH else [script, flag]
    done = subprocess.run(
        ["bash", ROOT / words[0], *words[1:]], cwd=tmp_path, env=os.environ | {"PYTHON": sys.executable},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first = "--config.model.model_name_or_path" if script == LAUNCH else "--"
    assert first in done.stdout
    assert list(tmp_path.iterdir()) == []
