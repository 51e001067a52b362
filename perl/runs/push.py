"""What the hub does not take: one line, with the result where it is and how to push it later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from perl.base.errors import DISK_ERRORS, RankError, UserError

log = logging.getLogger(__name__)

FLAG = "--config.training.push_to_hub"


@contextlib.contextmanager
def pushed(folder: Path, repository: str | None) -> Iterator[None]:
    """`folder` is pushed inside, by one process. A RankError where the hub can't be reached, or refuses.

    Args:
        repository: on the hub, where the user has named one.
    """
    try:
        yield
    except Exception as error:
        if (why := _why(error)) is None:
            raise
        raise RankError(
            f"{FLAG}: the hub took nothing ({why}); the result is in {folder}: push it later with hf upload"
            f" {repository or 'NAME/OF_THE_REPOSITORY'} {folder}"
        ) from error


@contextlib.contextmanager
def repository_made() -> Iterator[None]:
    """The repository is made inside, before the run begins. A UserError where the hub can't be reached, or refuses."""
    try:
        yield
    except Exception as error:
        if (why := _why(error)) is None:
            raise
        raise UserError(
            f"{FLAG} true: the hub gave no repository ({why}); look at the network and at HF_TOKEN, or leave the flag"
            " out and push the result later, with hf upload"
        ) from error


def _why(error: Exception) -> str | None:
    """Why the hub took nothing, in one line; None for what is not the hub's fault, such as a full disk."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return None
    if not isinstance(error, OSError | httpx.HTTPError | httpx.InvalidURL | HfHubHTTPError | HFValidationError):
        return None
    log.debug("what the hub's client raised", exc_info=error)
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
