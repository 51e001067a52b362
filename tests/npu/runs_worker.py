"""One rank of several tiny runs, one after the other in this process: python -m tests.npu.runs_worker OUT_FOLDER RUNS.

RUNS is JSON: by name the module of this folder that has the run, and the settings for it. Each leaves
OUT_FOLDER/<name>/rank<N>.json.
"""

import importlib
import json
import sys
from pathlib import Path

from accelerate import PartialState

from tests.ranks import leave, report


def main() -> None:
    out = Path(sys.argv[1])
    for name, (module, settings) in json.loads(sys.argv[2]).items():
        (out / name).mkdir(exist_ok=True)
        content = importlib.import_module(f"tests.npu.{module}").run(out / name, settings)
        report(out / name, PartialState().process_index, content)
    leave(out, PartialState().process_index, None)


if __name__ == "__main__":
    main()
