"""One rank of the trainings of tests/training/every_algorithm.py, one after the other in this process:
python -m tests.npu.every_algorithm_worker OUT_FOLDER SETTINGS.

SETTINGS is JSON with fields that differ. Leaves OUT_FOLDER/rank<N>.json: the device, and of each training and the same
from its first checkpoint the losses; OUT_FOLDER/<number>/whole and resumed: what they have trained.
"""

import json
import shutil
import sys
from pathlib import Path

from accelerate import PartialState

from tests.ranks import leave
from tests.training.every_algorithm import RUNS, train


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    losses: dict[str, list[list[float]]] = {}
    for number, name in enumerate(RUNS):
        folder = out / str(number)
        whole = train(name, folder / "run", folder / "whole", **settings)
        resumed = train(name, folder / "run", folder / "resumed", resumed=True, **settings)
        losses[name] = [[row["loss"] for row in logs] for logs in (whole, resumed)]
        PartialState().wait_for_everyone()
        if PartialState().is_main_process:
            shutil.rmtree(folder / "run")
    leave(out, PartialState().process_index, {"device": str(PartialState().device), "losses": losses})


if __name__ == "__main__":
    main()
