"""Score a model, or a base model with an adapter, on tasks: python perl/eval.py --model M --dataset gsm8k."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

# `python perl/eval.py` puts perl/ first on sys.path; the repository's root belongs there, here and in spawned workers.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() not in (_HERE, _HERE.parent))]

from perl.base.errors import EXIT_NOT_ALL_GENERATED, UserError, report_errors, stopped_by_signals  # noqa: E402

with report_errors():  # without the environment, one line
    from perl.base.redact import hide, hide_secrets_in_logs
    from perl.config.evaluation import find_files, parse


def main(argv: list[str]) -> int:
    config = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    hide_secrets_in_logs()
    logging.getLogger("perl").setLevel(logging.INFO)
    config, lines = find_files(config)
    for line in lines:
        logging.getLogger("perl").info(line)
    from perl.evaluation.rescore import rescore
    from perl.evaluation.run import SweepError, evaluate
    from perl.reports.page import write_report
    from perl.workers.pool import WorkerError

    code, summaries = 0, {}
    try:
        with stopped_by_signals("the rows that are done stay, and the same command goes on"):
            if config.rescore:
                rescore(config)
            else:
                summaries = evaluate(config)
    except WorkerError as error:
        print(f"error: {hide(str(error))}; the same command does the rest", file=sys.stderr)
        return 1
    except SweepError as error:
        print(f"error: {hide(str(error))}", file=sys.stderr)
        code = 1
    if any((run.parent / "summary.json").is_file() for run in Path(config.result_dir).glob("**/run.json")):
        try:
            print(f"report: {write_report(Path(config.result_dir))}")
        except UserError as error:  # what is scored stays so
            logging.getLogger("perl").warning("no report, which python -m perl report makes too: %s", error)
    if any(summary["not_generated"] for summary in summaries.values()):
        return EXIT_NOT_ALL_GENERATED
    return code


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
