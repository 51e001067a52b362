"""One rank of several, started by accelerate: python -m tests.training.resume_worker FOLDER NAME…

Trains each of tests.training.test_resume.SETTINGS whole and resumed, one after the other. Writes FOLDER/rank<N>.json:
by name, whether weights, prompts and metrics are the same.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.test_resume import CUT, SETTINGS, rows, run


def compare(folder: Path, name: str) -> list[bool]:
    whole, asked = run(folder / "whole", **SETTINGS[name])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole", folder / "cut")
    dist.barrier()
    torch.manual_seed(123)
    resumed, rest = run(folder / "cut", str(folder / "cut" / f"checkpoint-{CUT}"), **SETTINGS[name])
    dist.barrier()
    same_weights = whole.keys() == resumed.keys() and all(torch.equal(t, resumed[n]) for n, t in whole.items())
    return [same_weights, rest == asked[len(asked) - len(rest) :], rows(folder / "cut") == rows(folder / "whole")]


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    found = {name: compare(folder / name.replace(" ", "_"), name) for name in names}
    assert dist.get_world_size() == 2
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
