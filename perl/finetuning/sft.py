"""The main path of supervised fine-tuning: configuration -> rows -> TRL's SFTTrainer -> adapter, or model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perl.config.sft import parse
from perl.finetuning.rows import check_rows
from perl.runs.callbacks import StopOnSignal
from perl.runs.model_card import write_training_card
from perl.runs.out_of_memory import explain_out_of_memory
from perl.runs.run import (
    begin,
    describe_run,
    fit,
    hide_vllm,
    log_writers,
    push_result,
    users_error,
)
from perl.runs.setup import check_processes, load_model

if TYPE_CHECKING:
    from perl.finetuning.trainer import PerlSFTTrainer


def fine_tune(argv: Sequence[str]) -> Path:
    """Train as the command line `argv` says and return the run's folder; adapter/ in it, or model/, is
    the result.

    Raises:
        UserError: before a model is loaded, for whatever the user can fix.
        Stopped: a signal ended the run, after a checkpoint.
    """
    parsed = parse(argv)
    check_processes("perl.sft")
    parsed.require_files()
    config = parsed.build()
    with StopOnSignal() as stop, begin(config, parsed) as run_dir:
        checked = check_rows(config, run_dir)
        trainer_class = import_trainer()
        with explain_out_of_memory(config) as watch:
            describe_run(run_dir, config, parsed, checked)
            with users_error("--config"):  # TRL checks combinations of its own arguments
                trainer = trainer_class(
                    config,
                    model=load_model(config),
                    train_dataset=checked.dataset,
                    eval_dataset=checked.eval_dataset,
                    processing_class=checked.tokenizer,
                    write_card=functools.partial(write_training_card, run_dir, learned=checked.learned),
                    callbacks=[*log_writers(run_dir), stop],
                )
            watch.clock = trainer.clock
            fit(trainer, run_dir, checked.checkpoint, stop)
            push_result(trainer, run_dir)
    return run_dir


def import_trainer() -> type[PerlSFTTrainer]:
    hide_vllm()
    from perl.finetuning.trainer import PerlSFTTrainer

    return PerlSFTTrainer
