"""What the hub does not take: one line, with the result where it is and how to push it later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import create_repo, upload_folder
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from perl.base.errors import DISK_ERRORS, RankError, UserError
from perl.base.files import LOCK

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)

FLAG = "--config.training.push_to_hub"
NEVER_PUSHED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", f"*/{LOCK}", "*/_*.partial", "*/_*.partial/*"]
"""As patterns of fnmatch: the first two are those of transformers' own pushes; the others are of evaluations into a
folder of the run's."""


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


def make_repository(args: TrainingArguments) -> None:
    """Before the run begins. A UserError where the hub can't be reached, or refuses."""
    name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
    try:
        create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
    except Exception as error:
        if (why := _why(error)) is None:
            raise
        raise UserError(
            f"{FLAG} true: the hub gave no repository ({why}); look at the network and at HF_TOKEN, or leave the flag"
            " out and push the result later, with hf upload"
        ) from error


def upload(trainer: Any, result: Path) -> None:
    """What transformers would push at the end, by the main process: the run's folder without its checkpoints.

    Args:
        trainer: one of transformers'.
        result: where it also lies.
    """
    args = trainer.args
    with pushed(result, args.hub_model_id):
        trainer._finish_current_push()
        upload_folder(
            repo_id=trainer.hub_model_id,
            folder_path=args.output_dir,
            commit_message="Model save",
            token=args.hub_token,
            ignore_patterns=NEVER_PUSHED,
            revision=args.hub_revision,
        )


def _why(error: Exception) -> str | None:
    """Why the hub took nothing, in one line; None for what is not the hub's fault, such as a full disk."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return None
    if not isinstance(error, OSError | httpx.HTTPError | httpx.InvalidURL | HfHubHTTPError | HFValidationError):
        return None
    log.debug("what the hub's client raised", exc_info=error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
