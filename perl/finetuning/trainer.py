"""TRL's SFTTrainer on an adapter, with what every training here measures and leaves."""

from __future__ import annotations

import copy
import functools
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTTrainer

from perl.adapters import ADAPTERS
from perl.adapters.start import own_precision
from perl.base.errors import UserError
from perl.config.sft import SFTRunConfig
from perl.config.training import SFTTrainingConfig
from perl.models.context import has_table
from perl.models.folders import token_ids
from perl.prompts import require_known
from perl.runs.adapter_trainer import AdapterTrainer, WriteCard
from perl.runs.callbacks import StopOnSignal
from perl.runs.metrics import StepClock, add_step, model_size, sequences
from perl.runs.nonfinite import save_batch

log = logging.getLogger(__name__)


class PerlSFTTrainer(AdapterTrainer, SFTTrainer):
    """Supervised fine-tuning of an adapter.

    Args (besides SFTTrainer's):
        config: the run's.
        write_card: writes the model card into a folder that holds an adapter, given the log history; None:
            PEFT's card.
    """

    args: SFTTrainingConfig
    model: Any

    def __init__(self, config: SFTRunConfig, *, write_card: WriteCard | None = None, **kwargs: Any):
        self.config, model = config, kwargs.pop("model")
        self._shape = model.config.get_text_config()
        self._ends = token_ids(model.generation_config.eos_token_id)
        wrapped = isinstance(model, PeftModel)  # its adapter is trained further
        new = None if wrapped else ADAPTERS[config.peft.type].build(config.peft)
        with own_precision(model, new, config.training.seed) as (model, peft_config):
            super().__init__(model=model, args=config.training, peft_config=peft_config, **kwargs)
        self.start_adapter(config.peft, write_card, config.common.on_nonfinite)
        self._micro_batches: deque[dict[str, Any]] = deque(maxlen=self.args.gradient_accumulation_steps)
        """Of the update under way, and of the one before where that has begun."""
        self.clock = StepClock(model_size(self.model), self.accelerator.gather, self._log_step)  # type: ignore[arg-type]
        self.add_callback(self.clock)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """TRL's, in two passes: between them stand all tokens of each row, and what max_length cuts can be told."""
        prepare, further = super()._prepare_dataset, (formatting_func, dataset_name)
        if "input_ids" in dataset.column_names:
            return prepare(dataset, processing_class, args, packing, *further)
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        tokens: Any = prepare(dataset, processing_class, whole, False, *further)
        for number, row in enumerate(tokens["input_ids"], start=1):
            require_known(row, self._shape.vocab_size, f"{dataset_name} row {number}")
        tell_what_is_cut(tokens, args, packing, {*self._ends, *token_ids(processing_class.eos_token_id)})
        prepared = prepare(tokens, processing_class, args, packing, *further)
        check_positions(prepared, self._shape, args.max_length)
        return prepared

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        return ByLength(sampler, self.args.seed) if isinstance(sampler, LengthGroupedSampler) else sampler

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader: Any = super()._get_dataloader(*args, **kwargs)
        own = loader.base_dataloader
        own.worker_init_fn = functools.partial(without_signals, own.worker_init_fn)
        return loader

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self._micro_batches.append(inputs)
            lengths = lengths_of(inputs)
            self.clock.count_trained(sum(lengths))
            self.clock.count_update(sequences(lengths))
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self.nonfinite.add(result[0] if isinstance(result, tuple) else result)
        return result

    def _save_batch(self, folder: Path) -> None:
        tokenizer: Any = self.processing_class
        rows = [{"text": text} for batch in self._micro_batches for text in tokenizer.batch_decode(batch["input_ids"])]
        tensors = {
            f"{index}.{name}": value
            for index, batch in enumerate(self._micro_batches)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        save_batch(folder, self.args.process_index, rows, tensors)

    def _log_step(self, metrics: dict[str, float]) -> None:
        whole = {k: v for k, v in metrics.items() if k == "timing/step" or k.startswith("perf/")}  # no other phases
        add_step(self._metrics["train"], whole)


def without_signals(init: Callable[[int], None] | None, worker: int) -> None:
    """worker_init_fn of a data loader's process. A signal to all processes of a job is the trainer's to hear, which
    needs its rows until it has saved a checkpoint. The trainer's own ends it."""
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, StopOnSignal.SIGNALS)
        threading.Thread(target=end_by_the_parents_signal, daemon=True).start()
    if init is not None:
        init(worker)


def end_by_the_parents_signal() -> None:
    while signal.sigwaitinfo(StopOnSignal.SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


class ByLength(LengthGroupedSampler):
    """transformers' for group_by_length, but that an epoch's order follows from seed and epoch, as RandomSampler's does
    here: its own is drawn from torch's global generator, which a resumed run can't put back into the epoch's start."""

    def __init__(self, sampler: LengthGroupedSampler, seed: int):
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def lengths_of(inputs: dict[str, Any]) -> list[int]:
    """Tokens of each sequence of a micro-batch, padded or packed."""
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum(dim=1).tolist()
    return inputs["cu_seq_lens_q"].diff().tolist()


def kept(args: SFTTrainingConfig, packing: bool) -> slice:
    """Which tokens of a row TRL keeps: packing cuts at the end alone, and its other strategies divide a long row."""
    if args.max_length is None or (packing and args.packing_strategy != "bfd"):
        return slice(None)
    return (
        slice(-args.max_length, None) if args.truncation_mode == "keep_end" and not packing else slice(args.max_length)
    )


def check_positions(rows: Any, shape: Any, max_length: int | None) -> None:
    """One line for rows of more tokens than the model was made for.

    Args:
        rows: cut, or packed.
        shape: the model's configuration, of its text part.

    Raises:
        UserError: the model has no positions for them.
    """
    packed = rows["seq_lengths"] if "seq_lengths" in rows.column_names else [[len(row)] for row in rows["input_ids"]]
    longest = max(length for lengths in packed for length in lengths)
    context = getattr(shape, "max_position_embeddings", None)
    if context is not None and longest > context and has_table(shape, context):
        raise UserError(
            f"--config.training.max_length {max_length}: a row of {longest} tokens is more than {context}, and it has a"
            f" table of so many positions; write at most {context}"
        )
    if context is not None and longest > context:
        log.warning(
            "--config.training.max_length %s: a row of %d tokens is more than the %d that the model was made for"
            " (max_position_embeddings)", max_length, longest, context,
        )  # fmt: skip


def tell_what_is_cut(rows: Dataset, args: SFTTrainingConfig, packing: bool, ends: set[int]) -> None:
    """One line for rows that max_length cuts, and one where no row teaches the model to stop.

    Args:
        rows: whole, with `input_ids` and `labels`.
        ends: tokens that end a completion.

    Raises:
        UserError: max_length cuts all that is learned from every row.
    """
    ids, labels, part = rows["input_ids"], rows["labels"], kept(args, packing)
    if cut := [row for row in labels if len(row[part]) < len(row)]:
        lost = sum(all(label == -100 for label in row[part]) for row in cut)
        log.warning(
            "%d of %d rows are longer than --config.training.max_length %d tokens and are cut at their %s; of %d"
            " nothing to learn is left", len(cut), len(ids), args.max_length, "start" if part.start else "end", lost,
        )  # fmt: skip
        if lost == len(labels):
            raise UserError(
                f"--config.training.max_length {args.max_length}: nothing to learn is left of any row; the longest has"
                f" {max(map(len, ids))} tokens: write more"
            )
    if ends and not any(ends.intersection(row) for row in labels):
        log.warning(
            "no row ends its answer with an end-of-sequence token: the model will not learn to stop; look at the chat"
            " template"
        )
