"""Files that a recipe names by a relative path: in the working directory, else beside the recipe, else in the
repository, so that a recipe of the repository trains from any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsonargparse import Namespace

from perl.base.errors import UserError

REPOSITORY = Path(__file__).parents[2]
FIELDS = (
    "model.model_name_or_path",
    "dataset.dataset_name_or_path",
    "dataset.eval_dataset",
    "validation.datasets",
    "peft.adapter",
    "reward.functions",
    "environment.tools",
    "environment.factory",
)
"""Fields, or lists, of paths; names of tasks, of rewards, of tools and on the hub may stand there too."""
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".py", ".yaml")


def find_files(values: Namespace, flags: Namespace, written_in: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Give the paths in `values` that the recipe names the place where they are.

    Args:
        values: the resolved configuration, changed in place.
        flags: what the command line says: its paths are the working directory's alone.
        written_in: field that the recipe says -> the file that says it, the recipe or a base.

    Returns:
        A line for each path that was found elsewhere than in the working directory, and one for each that is nowhere.

    Raises:
        UserError: a path is beside the recipe and in the repository, and the two are not one file.
    """
    found: list[str] = []
    missing: list[str] = []
    for field in FIELDS:
        if field not in written_in or field in flags or values[field] is None:
            continue
        where = f"the recipe's {field}"
        folders = [written_in[field].parent, REPOSITORY]
        names = values[field] if isinstance(values[field], list) else [values[field]]
        places = [_of_field(name, where, folders, found, missing) for name in names]
        values[field] = places if isinstance(values[field], list) else places[0]
    return found, missing


def look_for(name: str, where: str, folders: Sequence[Path] = (REPOSITORY,)) -> tuple[str, list[str]]:
    """The path that `name` is meant for, and a line where that is in one of `folders`, not in the working directory. A
    name that is nowhere, no relative path, or one of a task, stays as it is.

    Raises UserError where it is in two of `folders`, as different files.
    """
    if not _is_relative_path(name) or os.path.exists(name):
        return name, []
    places = [str(folder / name) for folder in folders if os.path.exists(folder / name)]
    if not places:
        return name, []
    if any(not os.path.samefile(places[0], other) for other in places):
        raise UserError(
            f"{where} {name}: is not in {Path.cwd()}, and there are {' and '.join(places)}; write one of them"
        )
    return places[0], [f"{where} {name}: not in {Path.cwd()}, taken from {places[0]}"]


def _of_field(name: str, where: str, folders: Sequence[Path], found: list[str], missing: list[str]) -> str:
    file, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    place, lines = look_for(file, where, folders)
    found += lines
    looks_like_path = file.endswith(SUFFIXES) or file.startswith(".") or file.count("/") > 1
    if _is_relative_path(file) and looks_like_path and not os.path.exists(place):
        looked = ", ".join(map(str, dict.fromkeys([Path.cwd(), *folders])))
        missing.append(f"{where} {file}: no such file or folder; looked for in {looked}")
    return f"{place}{colon}{function}"


def _is_relative_path(name: str) -> bool:
    return not name.startswith(("/", "~")) and ("/" in name or "." in name)
