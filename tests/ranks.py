"""One rank of several, and the test that has started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist


def report(folder: Path, rank: int, content: Any) -> None:
    """What the rank says, in `folder`/rank<N>.json."""
    (folder / f"rank{rank}.json").write_text(json.dumps(content))


def leave(folder: Path, rank: int, content: Any) -> None:
    """`report` as the rank's last words. All ranks end together: with one that leaves early gloo can end the others."""
    report(folder, rank, content)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def reports(folder: Path, processes: int = 2) -> list[Any]:
    """What they have left."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
