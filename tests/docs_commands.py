"""The commands of the documentation, and for each program a check by what would read the command.

`check(command)` parses flags with the program's own parser, so that a renamed flag, a wrong type, a contradiction or a
flag without effect fails the page that shows it. A command that nothing here knows fails too.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from perl.__main__ import COMMANDS
from perl.config.evaluation import parse as parse_evaluation
from perl.config.load import parse as parse_training
from perl.config.parser import Parser
from perl.config.sft import parse as parse_fine_tuning
from perl.runs.rundir import default_run_dir

ROOT = Path(__file__).parents[1]
LAUNCH = "scripts/trl/openr1/dapo_lora_npu.sh"
RECIPE = "recipes/dapo_lora.yaml"
"""The launch script's; it also stands for outputs/RUN/config.yaml, which is a recipe of the same form."""


TAKEN: set[str] = set()
"""Lines that `check` has found to be taken."""


@dataclass(frozen=True, slots=True)
class Command:
    """One line of a bash block, continued lines joined."""

    variables: dict[str, str]
    """NAME=value before the program."""
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


def blocks(page: Path, language: str = "bash") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[Command]:
    found = []
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
            if words:
                variables = dict(word.split("=", 1) for word in words[:count])
                found.append(Command(variables, tuple(words[count:])))
    return found


def check(command: Command) -> None:
    """Raise (UserError, AssertionError, SystemExit) for a command that would not be taken.

    A command that was taken is not tried again: the pages of both languages have the same.
    """
    if command.line in TAKEN:
        return
    check_variables(command)
    check_words(command)
    TAKEN.add(command.line)


def check_variables(command: Command) -> None:
    for name, value in command.variables.items():
        known_variable(name)
        if name == "ACCELERATE_CONFIG":
            assert (ROOT / value).is_file(), value


def check_words(command: Command) -> None:
    words = command.words
    if Path(words[0]).name == "python":
        words = ("python", *words[1:])
    for prefix, checker in CHECKS.items():
        if words[: len(prefix)] == prefix:
            checker(words[len(prefix) :])
            return
    assert words[0] in NOT_OURS, f"nothing checks this command: {command.line}"


def training(words: Sequence[str]) -> None:
    """The flags of a run, over the launch script's recipe unless they name another."""
    flags = [RECIPE if word.startswith("outputs/") and word.endswith("/config.yaml") else word for word in words]
    flags = [adapter_folder() if before == "--config.peft.adapter" else word for before, word in with_before(flags)]
    parsed = parse_training(flags if "--recipe" in flags else ["--recipe", RECIPE, *flags])
    assert parsed.warnings == []


def fine_tuning(words: Sequence[str]) -> None:
    assert parse_fine_tuning(list(words)).warnings == []


def with_before(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(["", *words], words, strict=False))


@cache
def adapter_folder() -> str:
    """A folder that stands for the adapter of a run, of the recipe's shape."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    peft = parse_training(["--recipe", RECIPE]).values.peft
    (folder / "adapter_config.json").write_text(json.dumps({**peft.as_dict(), "peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


def launcher(words: Sequence[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(list(words))
    assert (ROOT / args.config_file).is_file(), args.config_file
    assert args.module
    {"perl.train": training, "perl.sft": fine_tuning}[args.training_script](args.training_script_args)


def tool(words: Sequence[str]) -> None:
    """A command of `python -m perl`, parsed but not run."""
    parser = Parser(prog=words[0])
    importlib.import_module(COMMANDS[words[0]][0]).add_arguments(parser)
    parser.parse_args(list(words[1:]))


def benchmark(words: Sequence[str]) -> None:
    importlib.import_module(words[0]).make_parser().parse_args(list(words[1:]))


def installer(words: Sequence[str]) -> None:
    arguments = ["bash", str(ROOT / "scripts" / "install_npu.sh"), *words, "--dry-run"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tests(words: Sequence[str]) -> None:
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    known = {marker.partition(":")[0] for marker in markers["markers"]} | {"not", "and", "or"}
    for option, value in itertools.pairwise(words):
        assert option != "-m" or set(value.split()) <= known, value


def make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = rf"\$\({name}\)" if is_variable else rf"^{name}:"
        assert re.search(known, text, re.MULTILINE), word


def pip(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for option, value in itertools.pairwise(words):
        if option == "-r":
            assert (ROOT / value).is_file(), value
        if option == "-e" and (extras := re.fullmatch(r"\.\[(.*)\]", value)):
            assert set(extras[1].split(",")) <= project["optional-dependencies"].keys(), value


def python_code(words: Sequence[str]) -> None:
    compile(words[0], "documentation", "exec")


def log_file(words: Sequence[str]) -> None:
    """tail and grep: their pattern matches the log of a run that the guide's default configuration makes."""
    log = str(default_run_dir(parse_training([]).values, "npu") / "output.log")
    assert fnmatch(log, words[-1]), words[-1]


def exported(words: Sequence[str]) -> None:
    for word in words:
        known_variable(word.split("=", 1)[0])


def known_variable(name: str) -> None:
    assert name in OTHERS_VARIABLES or name in our_sources(), f"nothing here reads {name}"


@cache
def our_sources() -> str:
    """Text of everything that may read an environment variable."""
    files = [*(ROOT / "perl").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh"), ROOT / "Makefile"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


CHECKS: dict[tuple[str, ...], Callable[[Sequence[str]], object]] = {
    ("bash", LAUNCH): training,
    ("python", "-m", "perl.train"): training,
    ("python", "-m", "perl.sft"): fine_tuning,
    ("accelerate", "launch"): launcher,
    ("python", "perl/eval.py"): lambda words: parse_evaluation(list(words)),
    ("python", "-m", "perl"): tool,
    **{
        ("python", "-m", name): lambda words, name=name: benchmark([name, *words])
        for name in (
            "benchmarks.rollout",
            "benchmarks.train_step",
            "benchmarks.scaling",
            "benchmarks.reward_curves",
            "benchmarks.adapter_paths",
            "benchmarks.aqn",
            "benchmarks.staleness",
            "benchmarks.quantised_training",
            "benchmarks.delivery",
            "benchmarks.pieces",
            "benchmarks.real",
            "benchmarks.accelerator",
            "benchmarks.report_page",
            "benchmarks.readme_figure",
            "benchmarks.validation",
            "benchmarks.soak",
            "benchmarks.python_tool",
            "scripts.pins",
            "tests.grading.measure",
            "tests.reliability.generated",
        )
    },
    ("python", "-m", "benchmarks.evaluator"): lambda words: benchmark(["benchmarks.evaluator.__main__", *words]),
    ("python", "-m", "benchmarks.kills"): lambda words: benchmark(["benchmarks.kills.__main__", *words]),
    ("bash", "scripts/check_npu_env.sh"): lambda words: tool(["doctor", *words]),
    ("bash", "scripts/install_npu.sh"): installer,
    ("make",): make,
    ("python", "-m", "pytest"): tests,
    ("pip",): pip,
    ("python", "-m", "pip"): pip,
    ("python", "-c"): python_code,
    ("tail", "-f"): log_file,
    ("grep",): log_file,
    ("export",): exported,
}
"""The start of a command -> a check of the words behind it."""
NOT_OURS = {"docker", "npu-smi", "ps", "ray", "source", "tensorboard", "trackio", "vllm", "wandb", "watch"}
OTHERS_VARIABLES = {
    "GLOO_SOCKET_IFNAME",
    "HCCL_SOCKET_IFNAME",
    "HF_ENDPOINT",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_TARGET_DEVICE",
}
"""Read by libraries alone."""
