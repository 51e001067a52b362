"""Random kills: what a run loses that is killed again and again, and goes on by the same command each time.

    python -m benchmarks.kills [--kills 20] [--seed 0] [--use_vllm]
    python -m benchmarks.kills --training [--kills 50] [--seed 0]
    python -m benchmarks.kills --pool [--kills 30] [--seed 0]
    python -m benchmarks.kills --environment [--pool] [--kills 20] [--seed 0]

An evaluation (evaluation.py), a training (training.py), one whose workers draw ahead, one of several turns, or one
whose workers have those, with the quickstart's model and problems, against one that nothing happens to. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, help="default: 20 of an evaluation, 50 of a training, 30 of one with workers"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--use_vllm", action="store_true", help="of an evaluation")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--pool", action="store_true", help="a training with workers; two kills of three are theirs")
    parser.add_argument("--environment", action="store_true", help="a training of several turns, killed between them")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    if arguments.training or arguments.pool or arguments.environment:
        from benchmarks.kills.training import measure as measure_training

        kills = arguments.kills or (30 if arguments.pool else 20 if arguments.environment else 50)
        found = measure_training(folder, kills, arguments.seed, arguments.pool, arguments.environment)
    else:
        from benchmarks.kills.evaluation import measure

        found = measure(folder, arguments.kills or 20, arguments.seed, arguments.use_vllm)
    print(json.dumps({**found, "seed": arguments.seed, "seconds": round(time.monotonic() - began)}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
