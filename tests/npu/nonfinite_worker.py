"""One rank of tiny runs whose numbers are not finite on rank 1, started by accelerate: python -m
tests.npu.nonfinite_worker OUT SETTINGS.

Of four updates that are skipped where they must be, the second has a loss that is NaN, the third a gradient; then a run
that stops at its second. Writes OUT/rank<N>.json.
"""

import json
import sys
from pathlib import Path

from perl.base.errors import RunError
from tests.ranks import leave
from tests.trainers import make_trainer, reward_tokens
from tests.training.poison import Steps, poison


def main() -> None:
    out, steps = Path(sys.argv[1]), Steps()
    settings = json.loads(sys.argv[2]) | {"rewards": (reward_tokens,)}
    skips = make_trainer(out / "skips", max_steps=4, callbacks=[steps], on_nonfinite="skip", **settings)
    if skips.args.process_index == 1:
        poison(skips, "loss", {2})
        poison(skips, "gradient", {3})
    skips.train()
    report = {
        "moved": steps.moved(),
        "skipped": skips.nonfinite.skipped,
        "sum": sum(weight.double().abs().sum().item() for weight in steps.weights[-1].values()),
    }
    stops = make_trainer(out / "stops", **settings)
    if stops.args.process_index == 1:
        poison(stops, "loss", {2})
    try:
        stops.train()
    except RunError as error:
        report["said"] = str(error)
    leave(out, skips.args.process_index, report)


if __name__ == "__main__":
    main()
