"""The command: read, translate, print the three lists, write the recipe, start it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml

from perl.base.errors import EXIT_USER_ERROR, UserError
from perl.base.files import atomic_write, target
from perl.base.paths import user_path
from perl.base.redact import hide
from perl.tools.from_verl.batch import N
from perl.tools.from_verl.handlers import NOISE_RULES
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.translate import Translation, translate
from perl.tools.launch import CONFIGS

ROOT = Path(__file__).parents[3]
SCRIPT = "scripts/trl/openr1/dapo_lora_npu.sh"
REDIRECTING = ("HF_ENDPOINT", "HF_HOME")
"""Variables that decide to whom the user's token is sent, and whose stored code is run."""
HEADER = "# Made by python -m perl from-verl"
GROUPS = ("common", "model", "dataset", "algorithm", "critic", "peft", "rollout", "noise_injection", "reward",
          "environment", "validation", "logging", "training")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="*", help="a script (.sh) or a configuration (.yaml) of verl; or, after --, KEY=VALUE …, which"
        " override what the file says"
    )  # fmt: skip
    parser.add_argument(
        "--output", default=None, help="recipe to write (from_verl.yaml, or the file's name + _perl.yaml)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script, as DEVICE=npu, or"
        " an argument, as 1=8; overrides the environment's, and stands in for what only a run would show; repeatable"
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the lists as one line of JSON")
    parser.add_argument("--run", action="store_true", help="start the training")
    parser.add_argument(
        "--engine", default="fast", choices=["fast", "vllm"], help="what samples where verl says vllm or sglang"
    )  # fmt: skip
    parser.add_argument(
        "--noise_rule", default="guide", choices=list(NOISE_RULES), help="which published meaning noise_injection has:"
        " the Ascend guide's or that of QeRL's code"
    )  # fmt: skip
    parser.add_argument(
        "--num_processes", type=int, default=None, help="devices to train on, where they are not verl's nnodes x"
        " n_gpus_per_node; the batch stays the same"
    )  # fmt: skip
    parser.add_argument(
        "--learning_rate_factor", type=float, default=None, help="multiply verl's learning rate; default: 10 where verl"
        " trains all weights and LoRA is trained here, else 1"
    )  # fmt: skip
    parser.add_argument(
        "--full", action="store_true", help="train all weights, as verl does without lora_rank, and not a LoRA adapter"
    )


def run(args: argparse.Namespace) -> int:
    """Print what becomes of every key; 0 when all of it is translated, 2 when something is refused."""
    source, words = _source(list(args.source or []))
    if args.num_processes is not None and args.num_processes < 1:
        raise UserError(f"--num_processes {args.num_processes}: give a whole number from 1")
    if args.learning_rate_factor is not None and not args.learning_rate_factor > 0:
        raise UserError(f"--learning_rate_factor {args.learning_rate_factor}: give a number above 0")
    choices = Choices(args.engine, args.noise_rule, args.num_processes, args.learning_rate_factor, args.full)
    recipe = (
        Path(args.output) if args.output else Path(f"{Path(source).stem}_perl.yaml" if source else "from_verl.yaml")
    )
    try:
        result = translate(read_command(source, words, _settings(args.set)), choices)
        if not result.refused:
            _write(target(recipe) if args.output else recipe, result, source)
    except UserError as error:
        if args.json:
            _print_json(as_json(Translation(), "") | {"refusals": [_refusal(source, "", str(error))]})
        raise
    command = launch_command(result, recipe)
    if args.json:
        refusals = [_refusal(source, key, why) for key, why in result.refused.items()]
        _print_json(as_json(result, command) | {"refusals": refusals})
    else:
        print(hide(as_text(result, recipe, command)))
    if result.refused:
        # What the user wrote goes first: what is missing besides may come of the same mistake, and stands in the list.
        # Where the batch of a fragment does not divide, what it lacks goes first.
        written = {key: why for key, why in result.refused.items() if key in result.values and key != result.follows}
        if result.follows:
            written = {N: result.refused[N]} | written
        for key, why in (written or result.refused).items():
            print(hide(f"error: {_setting(result, key)}: {why}"), file=sys.stderr)
        return EXIT_USER_ERROR
    return _start(result, recipe) if args.run else 0


def _source(words: list[str]) -> tuple[str | None, list[str]]:
    """The file, where the first word is one, and the other words."""
    first = words[0] if words else ""
    if "=" in first or first.startswith("-") or not first:
        return None, words
    if Path(first).suffix in (".sh", ".bash", ".yaml", ".yml") or (len(words) == 1 and Path(first).is_file()):
        return first, words[1:]
    if len(words) == 1 and not first.startswith("~"):
        what = "a folder" if Path(first).is_dir() else "no such file"
        raise UserError(f"{first}: {what}; give a script (.sh), a configuration (.yaml), or -- KEY=VALUE …")
    return None, words


def _settings(words: list[str]) -> dict[str, str]:
    """The variables that --set gives."""
    for word in words:
        if not re.match(r"([A-Za-z_]\w*|[1-9]\d?)=", word):
            raise UserError(f"--set {word.partition('=')[0]}: write --set NAME=VALUE, such as --set DEVICE=npu")
    return dict(word.split("=", 1) for word in words)


# What is written


def _write(path: Path, result: Translation, source: str | None) -> None:
    if not path.parent.is_dir():
        raise UserError(f"--output: no such folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder; name a file in it")
    with atomic_write(path) as file:
        file.write(f"{HEADER} {source or ''}".rstrip() + ". Behind # stands the key of verl that a value comes from.\n")
        file.write(recipe_text(result))


def recipe_text(result: Translation) -> str:
    """The recipe as YAML, each field with the key of verl that it comes from."""
    fields = result.recipe()
    lines = []
    for group in GROUPS:
        inside = {name: pair for name, pair in fields.items() if name.partition(".")[0] == group}
        if inside:
            lines.append(f"{group}:")
        for name, (value, key) in inside.items():
            by_user = "" if key in result.translated else ", verl's default"
            lines.append(f"  {name.partition('.')[2]}: {_yaml(value)}  # {key}{by_user}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:.1e}"
        return "0.0" if value == 0 else short if float(short) == value and value < 0.001 else repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def launch_command(result: Translation, recipe: Path) -> str:
    """What starts the run, as a line of shell."""
    variables = result.variables()
    processes = variables.pop("NUM_PROCESSES", "1")
    before = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    if result.nodes > 1:
        config = f"scripts/accelerate/{CONFIGS.get(result.device, CONFIGS['npu'])}"
        words = ["accelerate", "launch", "--config_file", config, "--deepspeed_multinode_launcher", "standard"]
        words += ["--num_machines", str(result.nodes), "--num_processes", processes]
        words += ["--machine_rank", "RANK", "--main_process_ip", "ADDRESS", "--main_process_port", "29500"]
        return " ".join([*before, shlex.join([*words, "-m", "perl.train", "--recipe", str(recipe)])])
    return " ".join([*before, f"NUM_PROCESSES={processes}", shlex.join(["bash", SCRIPT, "--recipe", str(recipe)])])


def _start(result: Translation, recipe: Path) -> NoReturn:
    if result.nodes > 1:
        raise UserError(f"--run: {result.nodes} nodes; start the printed command on each of them")
    for name in REDIRECTING:
        value = result.variables().get(name)
        if value not in (None, os.environ.get(name)):
            raise UserError(
                hide(
                    f"--run: the script sets {name}={value}, which decides where your token goes and whose code runs;"
                    " export it yourself, or start the printed command"
                )
            )
    words = ["bash", str(ROOT / SCRIPT), "--recipe", str(recipe.absolute())]
    sys.stdout.flush()
    # In this process's place: a parent that Ctrl-C reaches too would kill the script before the checkpoint is saved.
    os.execvpe(words[0], words, {"PYTHON": sys.executable, **os.environ, **result.variables()})


# What is printed


def _print_json(found: dict[str, Any]) -> None:
    print(hide(json.dumps(found, ensure_ascii=False, default=str)))


def _refusal(source: str | None, key: str, why: str) -> dict[str, Any]:
    """Where a refusal comes from: the line that it names, or else that of its key in the script."""
    line = None
    if source is not None:
        name = re.escape(source)
        named = re.search(rf"(?:{name}|{re.escape(str(user_path(source)))}):(\d+)", why)
        line = int(named[1]) if named else _line_of(Path(user_path(source)), key)
    return {"file": source, "line": line, "key": key, "reason": why}


def _line_of(file: Path, key: str) -> int | None:
    """The last line of a script that sets a key, outside of its comments; None where there is none."""
    if not key or file.suffix not in (".sh", ".bash"):
        return None
    setting = re.compile(rf"^(?!\s*#).*(?<![\w.]){re.escape(key)}=")
    lines = file.read_text(encoding="utf-8").splitlines()
    return max((number for number, line in enumerate(lines, 1) if setting.match(line)), default=None)


def as_json(result: Translation, command: str) -> dict[str, Any]:
    return {
        "translated": result.translated,
        "no_effect": result.no_effect,
        "refused": result.refused,
        "batch": result.batch.as_dict() if result.batch else {},
        "command": "" if result.refused else command,
        "defaults": result.defaults,
        "notes": result.notes,
    }


def as_text(result: Translation, recipe: Path, command: str) -> str:
    parts = [
        ("translated", [f"{_setting(result, key)} -> {_fields(fields)}" for key, fields in result.translated.items()]),
        ("verl's defaults, written out", [f"{key} -> {_fields(fields)}" for key, fields in result.defaults.items()]),
        ("without effect here", [f"{_setting(result, key)}: {why}" for key, why in result.no_effect.items()]),
        ("refused", [f"{_setting(result, key)}: {why}" for key, why in result.refused.items()]),
        ("batch", _batch_lines(result)),
        ("notes", result.notes),
    ]
    lines = [line for title, rows in parts if rows for line in (title, *(f"  {row}" for row in rows), "")]
    end = [f"recipe: {recipe}", command] if not result.refused else ["no recipe is written: something is refused"]
    return "\n".join([*lines, *end])


def _setting(result: Translation, key: str) -> str:
    return f"{key}={result.values[key]}" if key in result.values else key


def _fields(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_yaml(value)}" for name, value in fields.items())


def _batch_lines(result: Translation) -> list[str]:
    """verl's terms on the left, ours on the right."""
    if result.batch is None:
        return []
    b = result.batch
    each = f"per_device {b.per_device_train_batch_size} x {b.devices}"
    rollout, update = b.prompts_per_rollout * b.n, b.prompts_per_update * b.n
    rows = [
        ("", "verl", "here"),
        ("devices", f"{b.devices}", f"NUM_PROCESSES {b.devices}"),
        ("prompts a rollout", f"train_batch_size {b.prompts_per_rollout}", f"{b.prompts_per_rollout}"),
        (
            "completions a rollout",
            f"{b.prompts_per_rollout} x n {b.n} = {rollout}",
            f"{each} x steps_per_generation {b.steps_per_generation} = {rollout}",
        ),
        ("prompts an update", f"ppo_mini_batch_size {b.prompts_per_update}", f"{b.prompts_per_update}"),
        (
            "completions an update",
            f"{b.prompts_per_update} x n {b.n} = {update}",
            f"{each} x accumulation {b.gradient_accumulation_steps} = {update}",
        ),
        ("updates a rollout", f"k x ppo_epochs = {b.updates_per_rollout}", f"{b.updates_per_rollout} optimizer steps"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{a:{widths[0]}}  {v:{widths[1]}}  {h}".rstrip() for a, v, h in rows]
