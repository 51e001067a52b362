"""What fails on one process ends all of them, in one line: none is left waiting for another in a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from perl.base.errors import RunError


@contextlib.contextmanager
def failing_together(what: str) -> Iterator[None]:
    """What one process cannot write (a full disk) is a RunError of all. Every process must come here.

    Args:
        what: that is written, as the line says.
    """
    failure = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        failure = str(error)
    if failures := [each for each in gather_object([failure]) if each]:
        raise RunError(f"{what} cannot be written: {failures[0]}")


def fail_with_rank_0(failure: str | None, where: torch.device) -> None:
    """RunError of all processes where rank 0 has met `failure`; every process must come here. Asks with one number, so
    that it can be done at each step.

    Args:
        failure: what it says; on the other processes anything.
        where: the device of collectives.
    """
    failures = [failure]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        failed = torch.tensor(int(failure is not None), device=where)
        torch.distributed.broadcast(failed, src=0)
        if not failed.item():
            return
        broadcast_object_list(failures)
    if failures[0] is not None:
        raise RunError(failures[0])
