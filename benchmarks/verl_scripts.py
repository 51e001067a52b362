"""What `python -m perl from-verl` makes of every script in a folder, such as verl's examples.

    python -m benchmarks.verl_scripts FOLDER --set DEVICE=npu

prints a line for each script (translated, or the reasons that it is not) and ends in a line of JSON: how many there
are, how many are translated, of those that train dense text models by FSDP too, refusals by key, the slowest, keys
that are not in exactly one list, and tracebacks.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path

from perl.base.errors import UserError
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.shell import read_script
from perl.tools.from_verl.translate import translate

OTHER_BACKENDS = re.compile(r"megatron|mindspeed|veomni|torchtitan|automodel|deepspeed", re.IGNORECASE)
OTHER_MODELS = re.compile(
    r"data\.image_key|[-_]VL(?![a-z])|omni|video|internvl|minicpm|[-_]A\d+B|MoE|Next-80B|gpt-oss|Mixtral|DeepSeek-V"
    r"|multi_turn|teacher|distillation",
    re.IGNORECASE,
)
"""In the words of a command: images, mixtures of experts, several turns, other trainings than GRPO's kind."""


def outcome(file: Path, settings: dict[str, str]) -> tuple[str, dict[str, str], list[str]]:
    """("translated", "refused", "unreadable" or "traceback", reasons by key, keys that are not in exactly one list)."""
    try:
        result = translate(read_command(str(file), [], _read(file, settings)), Choices())
        words = read_script(file, {"HOME": str(Path.home())}, _read(file, settings))[0].words
    except UserError as error:
        return "unreadable", {"": str(error)}, []
    except Exception as error:  # noqa: BLE001 - counted
        return "traceback", {"": repr(error)}, []
    keys = {word.partition("=")[0].lstrip("+") for word in words if "=" in word and word[0] not in "-~"}
    lists = [*result.translated, *result.no_effect, *result.refused]
    astray = [key for key in keys if sum(it == key or it.startswith(f"{key}.") for it in lists) < 1]
    astray += [key for key, count in Counter(lists).items() if count > 1]
    return "refused" if result.refused else "translated", result.refused, astray


def _read(file: Path, settings: dict[str, str]) -> dict[str, str]:
    """The settings that the script reads; --set refuses others."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return {name: value for name, value in settings.items() if re.search(rf"\$\{{?{name}\b", text)}


def is_dense_text_by_fsdp(file: Path) -> bool:
    text = re.sub(r"(?m)^\s*#.*$", "", file.read_text(encoding="utf-8", errors="replace"))
    trains = re.search(r"main_ppo|main_dapo", text) is not None
    return trains and not OTHER_BACKENDS.search(text + file.name) and not OTHER_MODELS.search(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    settings = dict(word.split("=", 1) for word in args.set)
    kinds, dense, reasons, astray, slowest = Counter(), Counter(), Counter(), {}, (0.0, "")
    for file in sorted(args.folder.rglob("*.sh")):
        begin = time.perf_counter()
        kind, why, wrong = outcome(file, settings)
        name, is_dense = str(file.relative_to(args.folder)), is_dense_text_by_fsdp(file)
        slowest = max(slowest, (round(time.perf_counter() - begin, 2), name))
        kinds[kind] += 1
        dense[kind] += is_dense
        reasons.update(why.keys())
        astray |= {name: wrong} if wrong else {}
        lines = "".join(f"\n    {key or 'line'}: {text:.300}" for key, text in why.items())
        print(f"{name}: {'dense ' if is_dense else ''}{kind}{lines}")
    totals = {"scripts": sum(kinds.values()), **kinds, "dense_text_fsdp": dict(dense)}
    found = {"refused_by_key": dict(reasons.most_common()), "not_in_one_list": astray, "slowest_s": slowest}
    print(json.dumps(totals | found))


if __name__ == "__main__":
    main()
