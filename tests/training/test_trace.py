"""One prompt's way from the data set's row to the loss: which files it passes, and in how many forms."""

import sys
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from perl.engines.scheduler import Sequence
from perl.records import Completion, Prompt, Trajectory
from perl.training.batch import Batch, MicroBatch
from perl.training.packing import Packed, Packing
from tests.trainers import make_trainer

PERL = Path(__file__).parents[2] / "perl"
FORMS = (Prompt, Sequence, Completion, Trajectory, Batch, MicroBatch, Packed)
ONE_FORM = {MicroBatch: Batch, Packing: Packed}
"""A part of a batch, and the layout of a packed one, which the model hands on to attention."""


def form_of(value: Any) -> Any:
    """The form of the datum that a value is, or a list of; None: it is none."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, dict) and set(value) == {"prompt"}:
        return "row"
    kind = type(value)
    return ONE_FORM.get(kind, kind) if kind in (*FORMS, Packing) else None


def test_a_prompt_passes_few_files_in_few_forms(tmp_path):
    trainer = make_trainer(tmp_path, engine="fast", max_steps=1)
    taken = [name for name in vars(trainer) if callable(getattr(GRPOTrainer, name, None))]
    files: dict[Path, set[Any]] = {}
    functions: set[Any] = set()
    active = 0

    def watch(frame, event, _):
        nonlocal active
        code = frame.f_code
        file = Path(code.co_filename)
        if code.co_name in ("_next", "compute_loss") and file == PERL / "training" / "trainer.py":
            active += {"call": 1, "return": -1}.get(event, 0)
        if not active or event not in ("call", "return") or PERL not in file.parents:
            return
        forms = {form_of(value) for value in list(frame.f_locals.values())} - {None}
        if forms:
            files.setdefault(file, set()).update(forms)
            functions.add(code)

    sys.setprofile(watch)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    names = sorted(str(file.relative_to(PERL)) for file in files)
    assert len(names) <= 15, " ".join(names)  # scheduler, runner and loop of the decoder are three
    forms = set().union(*files.values())
    assert len(forms) <= 7, forms
    assert {"row", Prompt, Completion, Trajectory, Batch, Packed} <= forms
    ours = [code for code in functions if "/training/" in code.co_filename]
    assert not [code.co_qualname for code in ours if "super" in code.co_names]
    assert taken == []  # no method of TRL's or transformers' is replaced on the trainer
