"""A new user's walk: each command of README_zh.md (README.md has the same) from a clone, on three staged machines. It
works, or ends with one line that says what to do; nothing is suggested that belongs to another kind of machine.

What takes long is read by its program's parser here and run elsewhere: `make quickstart` and `make test` in
tests/test_makefile.py, a training in tests/test_launch_script.py, fine-tuning in tests/training/test_sft.py, the sweep
in tests/tools/test_sweep.py, an evaluation in tests/evaluation/test_run.py.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from perl import device
from perl import eval as evaluator
from perl.__main__ import main
from perl.base.errors import UserError
from perl.tools import launch
from perl.tools.doctor.checks import diagnose
from perl.tools.doctor.findings import OK
from tests.docs_commands import LAUNCH, ROOT, check_words, commands
from tests.tools.doctor import machines

PAGE = ROOT / "README_zh.md"
MACHINES = {
    "npu": (device.Devices("npu", 8), "npu_910b_training"),
    "cuda": (device.Devices("cuda", 8), "cuda_h200"),
    "cpu": (device.Devices("cpu", 4), "cpu_nothing_installed"),
}
"""Kind -> what is seen of the devices, and the doctor's staged machine."""
FOREIGN = {"npu": r"requirements\w*_cpu\b", "cuda": r"requirements\w*_[nc]pu\b", "cpu": r"requirements\w*_npu\b"}
"""Files that would break the environment of this kind of machine."""
OURS = {
    "/path/to/Qwen2.5-7B": "assets/quickstart-base",
    "/path/to/train.parquet": "assets/quickstart-data/train.jsonl",
}
"""Placeholder -> what stands there in a clone."""
MODEL = ["--config.model.model_name_or_path", "assets/quickstart-base"]
DATA = ["--config.dataset.dataset_name_or_path", "assets/quickstart-data/train.jsonl"]


@pytest.fixture(params=MACHINES)
def kind(request, monkeypatch, tmp_path):
    """Of the staged machine; the working directory is a clone there, and vLLM is not installed yet."""
    devices, _ = MACHINES[request.param]
    for file in ROOT.iterdir():
        if not file.name.startswith(".") and file.name not in ("outputs", "results"):
            (tmp_path / file.name).symlink_to(file)
    found = importlib.util.find_spec
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(device, "detect", lambda: devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a))
    return request.param


def with_prefix(*words):
    return [c for c in commands(PAGE) if c.words[: len(words)] == words]


def said(work):
    """The line that a user reads where `work` ends with one; None where it works."""
    try:
        code = work()
    except UserError as error:
        line = str(error)
        assert line
        assert "\n" not in line
        return line
    assert code in (None, 0)
    return None


def in_a_clone(words: Sequence[str]) -> list[str]:
    return [OURS.get(word, word) for word in words]


def test_every_command_has_its_place_in_the_walk():
    walked = [
        *with_prefix("make"), *with_prefix("pip"), *with_prefix("accelerate"), *with_prefix("bash"),
        *with_prefix("python", "perl/eval.py"), *with_prefix("python", "-m", "perl"),
        *with_prefix("python", "-m", "perl.sft"),
    ]  # fmt: skip
    assert [c.line for c in commands(PAGE) if c not in walked] == []


@pytest.mark.parametrize("command", with_prefix("make"), ids=lambda c: c.line)
def test_make(command, tmp_path):
    done = subprocess.run(
        ["make", "-n", "-C", ROOT, *command.words[1:]], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"requirements\w*_npu\b", done.stdout)


def test_the_doctor_suggests_nothing_of_another_machine(kind):
    for check, finding in diagnose(machines.machine(MACHINES[kind][1])).items():
        assert finding.status == OK or not re.search(FOREIGN[kind], finding.fix), (check, finding.fix)


@pytest.mark.parametrize("command", with_prefix("bash", "scripts/install_npu.sh"), ids=lambda c: c.line)
def test_the_installer(command):
    words = [*command.words[2:], "--dry-run"]
    done = subprocess.run(
        ["bash", ROOT / "scripts/install_npu.sh", *dict.fromkeys(words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    named = re.findall(r"[\w./-]*requirements\w*\.txt", done.stdout)
    assert named
    assert not re.search(FOREIGN["npu"], done.stdout)
    assert all((ROOT / Path(file).name).is_file() for file in named)


@pytest.mark.parametrize(
    "command",
    [*with_prefix("pip"), *with_prefix("accelerate"), *with_prefix("python", "-m", "perl.sft")],
    ids=lambda c: c.line,
)
def test_what_is_read_only(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_words(command)


def in_this_clone(command):
    """The words of a training, as the page has them and with what is in a clone."""
    words = list(command.words[2:])
    as_written = words if "--recipe" in words else ["--recipe", "recipes/dapo_lora.yaml", *words]
    here = [*in_a_clone(as_written), "--config.training.report_to", "none"]
    for flags in (MODEL, DATA):
        here += flags if flags[0] not in here and "recipes/quickstart.yaml" not in here else []
    return as_written, here


def check_plan(plan, kind, command):
    assert plan["DEVICE"] == kind
    assert plan["NUM_PROCESSES"] == command.variables.get("NUM_PROCESSES", str(1 if kind == "cpu" else 8))
    assert Path(plan["ACCELERATE_CONFIG"]).is_file()


TRAININGS = with_prefix("bash", LAUNCH)
# gsm8k is on the hub
LOCAL_TRAININGS = [each for each in TRAININGS if "--config.validation.datasets" not in each.words]


@pytest.mark.parametrize("kind", ["cuda", "cpu"], indirect=True)
@pytest.mark.parametrize("command", TRAININGS, ids=lambda c: c.line)
def test_a_training_is_planned_or_says_what_is_missing(command, kind, monkeypatch):
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    as_written, here = in_this_clone(command)
    line = said(lambda: launch.plan(as_written) and None)
    assert line is None or not re.search(FOREIGN[kind], line)
    if command in LOCAL_TRAININGS:
        check_plan(launch.plan(here), kind, command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npu"], indirect=True)
@pytest.mark.parametrize("command", LOCAL_TRAININGS, ids=lambda c: c.line)
def test_a_training_is_planned_on_npus(command, kind, run_npu):
    _, here = in_this_clone(command)
    program = [sys.executable, "-m", "perl.tools.launch", *here]
    done = run_npu(program, devices=MACHINES[kind][0].count, cwd=Path.cwd(), **command.variables)
    check_plan(dict(word.split("=", 1) for word in shlex.split(done.stdout) if "=" in word), kind, command)


@pytest.mark.parametrize("command", with_prefix("python", "perl/eval.py"), ids=lambda c: c.line)
def test_an_evaluation_says_what_is_missing(command, kind):
    for words in (command.words[2:], in_a_clone(command.words[2:])):
        line = said(lambda words=words: evaluator.main(list(words)))
        assert line is not None
        assert not re.search(FOREIGN[kind], line)


@pytest.mark.parametrize("command", with_prefix("python", "-m", "perl"), ids=lambda c: c.line)
def test_a_tool_works_or_says_what_is_missing(command, kind, tmp_path):
    name, *words = command.words[3:]
    if name == "sweep":
        check_words(command)
        return
    line = said(lambda: main([name, *words]))
    assert line is None or not re.search(FOREIGN[kind], line)
    if name == "from-verl":
        assert (tmp_path / "gsm8k_grpo.yaml").is_file()
