"""TRL's SFTTrainer on an adapter, with what every training here measures and leaves."""

from __future__ import annotations

import copy
import logging
from collections import deque
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from trl import SFTTrainer

from perl.adapters import ADAPTERS
from perl.adapters.start import own_precision
from perl.base.errors import UserError
from perl.config.sft import SFTRunConfig
from perl.config.training import SFTTrainingConfig
from perl.runs.adapter_trainer import AdapterTrainer, WriteCard
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
        tell_what_is_cut(tokens, args, packing, processing_class.eos_token_id)
        return prepare(tokens, processing_class, args, packing, *further)

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


def tell_what_is_cut(rows: Dataset, args: SFTTrainingConfig, packing: bool, eos: int | None) -> None:
    """One line for rows that max_length cuts, and one where no row teaches the model to stop.

    Args:
        rows: whole, with `input_ids` and `labels`.

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
    if eos is not None and not any(eos in row for row in labels):
        log.warning(
            "no row ends its answer with the end-of-sequence token: the model will not learn to stop; look at the chat"
            " template"
        )
