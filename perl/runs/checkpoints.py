"""The checkpoints of a run: written aside and put in place whole, found again, and what a resumed run leaves behind.

RUN/checkpoint-N            what transformers, TRL and perl write, and CONTENTS, which lists it
RUN/_saving/checkpoint-N    one that is being written; RUN/_saving/adapter likewise
RUN/_left_behind/           of an attempt that a resumed run has left behind: checkpoints and metrics of later steps
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from perl.base.errors import UserError
from perl.base.files import SAVING, atomic_write, read_json, typed
from perl.base.paths import checkpoints_in, step_of_checkpoint
from perl.base.tracking import WANDB_RUN
from perl.config.peft_fields import TARGETS
from perl.models.folders import content_hash
from perl.scoring.results import BEST, BEST_BEFORE, BEST_FILE, METRICS, VALIDATION

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)

LEFT_BEHIND = "_left_behind"
BEFORE = "before-"
"""In SAVING: the folder in whose place another one is put."""
CONTENTS = "checkpoint.json"
"""A Contents; written last."""
TRAINER_STATE, CARD = "trainer_state.json", "README.md"
CRITIC = Path("critic") / "critic.safetensors"
"""Where the critic lies in a checkpoint and in a run's folder, if there is one."""
RESULTS = ("adapter", "model", CRITIC.parent.name)
"""What a run that has ended leaves; one that goes on writes them again."""
TRACKERS = (WANDB_RUN, "tensorboard")
"""Where trackers go on with the run that the folder holds."""
FLAG = "--config.training.resume_from_checkpoint"
AUTO = "auto"

ADAPTER = "peft.adapter"

Made = dict[str, int | bool | str | None]
"""What the place in the data is counted in, by name: `made_by`."""
DECIDED = {
    "training": ("learning_rate", "weight_decay", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    "peft": ("adapter_mode", "type", "r", "lora_alpha", *TARGETS, "lora_plus_lr_ratio", "oft_block_size"),
    "critic": ("lr", "r"),
    "noise_injection": ("target_modules", "exclude_patterns"),
}
"""Fields, by group, that a checkpoint's optimizer, weights and noise decide, and not the run that goes on with it."""
READ = {
    "model": ("model_name_or_path", "dtype", "quantization"),
    "dataset": ("dataset_name_or_path", "split", "example_numbers"),
    "rollout": ("piece_size",),
}
"""Fields that say what the run reads, which may have been moved, and what its last bits depend on."""


class Contents(TypedDict):
    made: Made
    kept: NotRequired[dict[str, Any]]
    """`kept_of` the run; checkpoints of before 0.14 have none."""
    files: dict[str, int]
    """Size in bytes, by path."""


class TrainerState(TypedDict):
    """What is read of TRAINER_STATE."""

    global_step: int


class BestStep(TypedDict):
    """What is read of BEST_FILE."""

    step: int


# Written


def made_by(training: TrainingArguments) -> Made:
    """Processes, and the rows of all of them: of an optimizer step, and with GRPO of a rollout and of a prompt; of SFT
    what the number of an epoch's rows follows from."""
    args: Any = training
    rows = args.per_device_train_batch_size * args.world_size
    made: Made = {"processes": args.world_size, "rows of an optimizer step": rows * args.gradient_accumulation_steps}
    made["seed"] = args.seed
    if hasattr(args, "packing"):
        made["packing"] = args.packing_strategy if args.packing else False
        made |= {"max_length": args.max_length} if args.packing else {}
    if hasattr(args, "num_generations"):
        made["completions of a generation batch"] = args.generation_batch_size
        made["num_generations"] = args.num_generations
        made["num_iterations"] = args.num_iterations
    return made


def kept_of(config: Any) -> dict[str, Any]:
    """What a run that goes on has from its checkpoint, and what it has read, by the field's name.

    Args:
        config: perl.train's, or perl.sft's, which has fewer groups and fields.
    """
    begun_with = config.peft.adapter
    kept: dict[str, Any] = {ADAPTER: None if begun_with is None else _hash_of(begun_with)}
    for group, names in (DECIDED | READ).items():
        part = getattr(config, group, None)
        if part is not None and getattr(part, "enabled", True):
            kept |= {f"{group}.{name}": getattr(part, name) for name in names if hasattr(part, name)}
    return {
        name: sorted(value) if name.startswith("peft") and isinstance(value, list) else value
        for name, value in kept.items()
    }


@functools.cache
def _hash_of(adapter: str) -> str:
    """Of what it holds, as the run begins: it may be gone, or another one, when a checkpoint is written."""
    return content_hash(Path(adapter))


def put_in_place(made: Path, folder: Path, contents: Mapping[str, Any] | None = None) -> None:
    """`made` becomes `folder`, whole; where `made` is not there (another process has done it), nothing
    happens.

    Args:
        contents: what CONTENTS says of how it was made (Contents without `files`); None writes no CONTENTS.
    """
    if not made.is_dir():
        return
    files = {str(file.relative_to(made)): file.stat().st_size for file in sorted(made.rglob("*")) if file.is_file()}
    files.pop(CARD, None)  # python -m perl card changes it
    if contents is not None:
        with atomic_write(made / CONTENTS) as file:
            file.write(json.dumps({**contents, "files": files}, indent=1) + "\n")
    before = made.with_name(f"{BEFORE}{folder.name}")
    if folder.exists():
        folder.rename(before)
    made.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    with contextlib.suppress(OSError):  # another one is being written
        made.parent.rmdir()


def rotate(run_dir: Path, limit: int | None, best: str | None) -> None:
    """Remove the checkpoints of the lowest steps beyond `limit`, but for the newest and `best`. Folders of other names,
    such as a copy checkpoint-8-keep, neither count nor go, as they would with transformers' rotate_checkpoints."""
    there = checkpoints_in(run_dir)
    if limit is None:
        return
    old = [folder for folder in there[:-1] if best is None or folder != Path(best)]
    for folder in old[: max(len(there) - limit, 0)]:
        shutil.rmtree(folder, ignore_errors=True)


# Found


def find_checkpoint(wanted: str | None, run_dir: Path) -> str | None:
    """The checkpoint to go on from: a path, or the last whole one in the run's folder (`true`, and `auto`, for which
    None is the beginning). A UserError where it is not there, or not whole."""
    word = str(wanted).lower()
    if not goes_on(wanted):
        return None
    if word in ("true", AUTO):
        last = last_whole_checkpoint(run_dir)
        if last is None and word == "true":
            raise UserError(
                f"{FLAG} true: no whole checkpoint in {run_dir}; name the run's folder with"
                f" --config.training.output_dir, or a checkpoint's path, or write {AUTO} to begin where there is none"
            )
        return None if last is None else str(last)
    if not (Path(str(wanted)) / TRAINER_STATE).is_file():
        raise UserError(f"{FLAG}: {wanted} is no checkpoint (it has no {TRAINER_STATE})")
    if why := torn(Path(str(wanted))):
        raise UserError(f"{FLAG} {wanted}: it is not whole: {why}; name an earlier one, or write true for the last one")
    return str(wanted)


def goes_on(wanted: str | None) -> bool:
    """Whether a run's folder may hold the run already."""
    return str(wanted).lower() not in ("false", "none", "null", "")


def last_whole_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step with all of its files; one that is not whole is passed over with a line."""
    for folder in reversed(checkpoints_in(run_dir)):
        why = torn(folder)
        if why is None:
            return folder
        log.warning("%s is not whole: %s; it is passed over", folder, why)
    return None


def torn(checkpoint: Path) -> str | None:
    """What is missing in a checkpoint; None where it is whole, as CONTENTS lists it."""
    try:
        contents = typed(json.loads((checkpoint / CONTENTS).read_text(encoding="utf-8")), Contents)
    except FileNotFoundError:
        return f"it has no {CONTENTS}, which is written last"
    except (OSError, ValueError, RecursionError) as error:
        return f"{CONTENTS} is not readable ({type(error).__name__})"
    if "processes" not in contents["made"]:
        return f"{CONTENTS} does not say how many processes wrote it"
    for name, size in contents["files"].items():
        if not os.path.isfile(checkpoint / name):  # Path.is_file raises for a name that is too long
            return f"{name} is missing"
        if (actual := (checkpoint / name).stat().st_size) != size:
            return f"{name} has {actual} bytes of {size}"
    return None


def require_same_critic(checkpoint: str | None, algorithm: str, has_critic: bool) -> None:
    """Raise a UserError for a checkpoint of an algorithm with a critic where this one has none, and the other way
    round."""
    if checkpoint is not None and (Path(checkpoint) / CRITIC).is_file() != has_critic:
        raise UserError(
            f"{FLAG} {checkpoint}: it holds {'no' if has_critic else 'a'} critic, and"
            f" --config.algorithm.name {algorithm} has {'one' if has_critic else 'none'}; go on with the algorithm of"
            " the run's config.yaml"
        )


def check_made(checkpoint: str | None, config: Any) -> None:
    """A checkpoint of the other program, and other settings than its weights and optimizer have, are a UserError;
    another model or data set by name is a warning. Another number of processes goes on where it has the same batches,
    with one warning, as sums over processes are added in another order; where the place in the data would be another,
    it is a UserError, as it is with DeepSpeed, whose files belong to a process each. Other batches of as many
    processes, and another seed, are a warning: they were asked for."""
    kept = kept_of(config)
    if checkpoint is None:
        return
    contents = read_json(Path(checkpoint) / CONTENTS, FLAG, kind=Contents)
    then, now = contents["made"], made_by(config.training)
    by_grpo = "num_generations" in then
    if by_grpo != ("num_generations" in now):
        raise UserError(
            f"{FLAG} {checkpoint}: it is of perl.{'train' if by_grpo else 'sft'}; to begin with its adapter write"
            f" --config.peft.adapter {checkpoint}"
        )
    before, has_critic = contents.get("kept", {}), (Path(checkpoint) / CRITIC).is_file()
    for name, value in kept.items():
        group, had = name.partition(".")[0], before.get(name, value)
        if had == value or (group == "critic" and not has_critic):
            continue
        if name == ADAPTER:
            begun = "another adapter" if had and value else "an adapter" if had else "no adapter"
            raise UserError(
                f"{FLAG} {checkpoint}: the run was begun with {begun} by --config.{ADAPTER}, not with"
                f" {config.peft.adapter}; write what it was begun with, or begin another run"
            )
        if group in READ:
            log.warning("%s was written with --config.%s %s: the run goes on with %s", checkpoint, name, had, value)
        else:
            raise UserError(
                f"{FLAG} {checkpoint}: it goes on with --config.{name} {had}, not {value}; write the former, or begin"
                f" another run with --config.peft.adapter {checkpoint}"
            )
    changed = [f"{name} {then[name]}, now {now.get(name)}" for name in then if now.get(name) != then[name]]
    if not changed:
        return
    if then["processes"] == now["processes"]:
        log.warning(
            "%s was written with %s: the place in the data is counted in batches, so that prompts are repeated or left"
            " out", checkpoint, "; ".join(changed),
        )  # fmt: skip
        return
    if len(changed) > 1:
        raise UserError(
            f"{FLAG} {checkpoint}: it was written with {'; '.join(changed)}: the place in the data would be another;"
            f" start {then['processes']} processes, or have the rest as it was (per_device_train_batch_size and"
            " gradient_accumulation_steps make the batches)"
        )
    if any(Path(checkpoint).glob("global_step*")):
        raise UserError(
            f"{FLAG} {checkpoint}: it was written by {then['processes']} processes with DeepSpeed, now there are"
            f" {now['processes']}; start as many as then"
        )
    log.warning(
        "%s was written by %d processes, now there are %d: prompts and seeds are the same, but sums are rounded, and"
        " dropout is drawn, otherwise: the adapter is not that of the run that was never interrupted, bit for bit",
        checkpoint, then["processes"], now["processes"],
    )  # fmt: skip


# The best


def bests_in(run_dir: Path) -> list[tuple[int, Path]]:
    """BEST, and those before it that are kept, with the step that each is of, in the order of the steps; of one step
    BEST comes last."""
    folders = [*run_dir.glob(f"{BEST_BEFORE}*"), run_dir / BEST]
    found = [(step, folder) for folder in folders if (step := _step_of_best(folder)) is not None]
    return sorted(found, key=lambda best: best[0])


def _step_of_best(folder: Path) -> int | None:
    """None where it holds none."""
    if not (file := folder / BEST_FILE).is_file():
        return None
    return read_json(file, hint=f"remove {folder}", kind=BestStep)["step"]


def replace_best(run_dir: Path, made: Path) -> None:
    """`made` becomes BEST; the one before it stays aside where a run would go on from it."""
    best = run_dir / BEST
    if (step := _step_of_best(best)) not in (None, _step_of_best(made)):
        _remove(aside := run_dir / f"{BEST_BEFORE}-{step}")
        best.rename(aside)
    put_in_place(made, best)
    drop_bests(run_dir)


def drop_bests(run_dir: Path) -> None:
    """Remove those before BEST that are not the best up to any checkpoint that is there."""
    bests = bests_in(run_dir)
    last = [step_of_checkpoint(folder) for folder in checkpoints_in(run_dir)]
    needed = [folder for step in last for _, folder in [each for each in bests if each[0] <= step][-1:]]
    for folder in run_dir.glob(f"{BEST_BEFORE}*"):
        if folder not in needed:
            _remove(folder)


def _remove(folder: Path) -> None:
    """By way of SAVING, which the next attempt empties: half of one would look whole."""
    if folder.is_dir():
        gone = folder.parent / SAVING / folder.name
        shutil.rmtree(gone, ignore_errors=True)
        gone.parent.mkdir(exist_ok=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):  # another one is being written
            gone.parent.rmdir()


# Left behind


def leave_behind(run_dir: Path, checkpoint: str | None) -> None:
    """Make the run's folder that of a run at `checkpoint`, or at its beginning (one process alone): what was being
    written is removed; checkpoints, validations and the best adapter of later steps, which are another attempt's or
    torn, and what it has left as its result, are moved to LEFT_BEHIND. The metrics of later steps are cut by their
    writer, when the training begins. A checkpoint that lies elsewhere is another run's: all that is here is left
    behind, and that run's best adapter comes along."""
    for before in (run_dir / SAVING).glob(f"{BEFORE}*"):
        if not (run_dir / before.name.removeprefix(BEFORE)).exists():
            before.rename(run_dir / before.name.removeprefix(BEFORE))
    for unfinished in sorted((run_dir / SAVING).glob("*")):
        log.warning("%s: the run was ended while it was written: removed", unfinished)
    shutil.rmtree(run_dir / SAVING, ignore_errors=True)
    step = 0
    if checkpoint is not None:
        state = read_json(Path(checkpoint) / TRAINER_STATE, FLAG, "name an earlier checkpoint", TrainerState)
        step = state["global_step"]
    made_at = {folder: step_of_checkpoint(folder) for folder in checkpoints_in(run_dir)}
    for folder in (run_dir / VALIDATION).glob("step-*"):
        if (number := folder.name.removeprefix("step-")).isdecimal():
            made_at[folder] = int(number)
    made_at |= {folder: made for made, folder in bests_in(run_dir)}
    made_at |= {folder: math.inf for name in RESULTS if (folder := run_dir / name).is_dir()}
    last = step
    if checkpoint is not None and not _is_of(run_dir, checkpoint):
        if (run_dir / LEFT_BEHIND).resolve() in Path(checkpoint).resolve().parents:
            raise UserError(
                f"{FLAG} {checkpoint}: lies in what the run has left behind, where the rest of it would be moved to;"
                " move it to another folder, or write another --config.training.output_dir"
            )
        last = -1
        made_at |= {place: 0 for name in TRACKERS if (place := run_dir / name).exists()}
        if (run_dir / METRICS).is_file():
            cut(run_dir / METRICS, last)
    for folder, made in made_at.items():
        if made > last:
            kept = run_dir / LEFT_BEHIND / folder.relative_to(run_dir)
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(kept)
            whose = "of a later step than the run goes on from" if last >= 0 else "of another run than the checkpoint"
            whose = "the result of the attempt before" if made == math.inf else whose
            log.info("%s is %s: moved to %s", folder, whose, kept)
    best, before = run_dir / BEST, bests_in(run_dir)
    if before and not best.is_dir():
        before[-1][1].rename(best)
    drop_bests(run_dir)
    if checkpoint is not None and not best.is_dir():
        _bring_best(Path(checkpoint).resolve().parent, run_dir, step)


def _is_of(run_dir: Path, checkpoint: str) -> bool:
    """Whether the run has written it: it lies in its folder, or a link does so or leads there."""
    named = Path(checkpoint)
    return run_dir.resolve() in (named.parent.resolve(), named.resolve().parent)


def cut(path: Path, step: int) -> None:
    """Move the rows of metrics.jsonl after `step` to LEFT_BEHIND, with a line: an attempt has logged them that goes on
    from `step` now. So are its summary, which stands at its end alone, and a line that was torn by a kill."""
    rows = path.read_bytes().splitlines(keepends=True)
    kept = [row for row in rows if _stays(row, step)]
    if len(kept) == len(rows):
        return
    left = path.parent / LEFT_BEHIND / path.name
    left.parent.mkdir(exist_ok=True)
    with left.open("ab") as file:
        file.writelines(row.rstrip(b"\n") + b"\n" for row in rows if not _stays(row, step))
    with atomic_write(path, "wb") as file:
        file.writelines(kept)
    log.info("%s: %d rows of another attempt are moved to %s", path, len(rows) - len(kept), left)


def _stays(row: bytes, step: int) -> bool:
    try:
        metrics = json.loads(row)
        return row.endswith(b"\n") and metrics["step"] <= step and "train_runtime" not in metrics
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _bring_best(of: Path, run_dir: Path, step: int) -> None:
    """Copy the best adapter up to `step` from the run that the checkpoint is of, where it has one."""
    if there := [folder for made, folder in bests_in(of) if made <= step]:
        made, folder = run_dir / SAVING / BEST, there[-1]
        shutil.copytree(folder, made)
        put_in_place(made, run_dir / BEST)
        log.info("%s: the best so far, copied from %s", run_dir / BEST, folder)
