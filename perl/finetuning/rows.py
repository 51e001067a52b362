"""The rows of a supervised fine-tuning, and every check of such a run that needs no loaded model.

    messages                 all turns are learned, or the assistant's alone (training.assistant_only_loss)
    prompt, completion       texts, the turns of user and assistant, or messages: the completion is learned
    question, answer, …      a problem, as perl.train and perl/eval.py read it: asked in its task's words, and the
                             answer's text is learned

All are worded by the model's chat template, tools included, and go through TRL's SFTTrainer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
from datasets import Dataset, DatasetInfo, Features, Json, Value, disable_progress_bars
from transformers import PreTrainedTokenizerBase

from perl.adapters.checks import check_layers, check_method, strategy_of
from perl.base.errors import UserError, lookup
from perl.grading.entries import read_entry
from perl.grading.rules import RULES
from perl.models.folders import resolve_model
from perl.models.images import has_images
from perl.prompts import build_messages, worded
from perl.runs import checkpoints, rundir
from perl.runs.setup import (
    MODEL_FLAG,
    PROBLEM,
    check_checkpoints,
    check_length,
    check_quantization,
    load_tokenizer,
    model_dtype,
)
from perl.runs.tracking import check_trackers
from perl.tasks import TASKS, data_name, problem_of_row, rows_of, training_split, worked_answer
from perl.tasks.files import Row, require_characters, structure, text_or_turns
from perl.tasks.trained import asked_hash

if TYPE_CHECKING:
    from perl.config.sft import SFTRunConfig
    from perl.config.training import SFTTrainingConfig

log = logging.getLogger(__name__)

FORMS = "messages; prompt and completion; question and answer"
TURNS = ("messages", "prompt", "completion")
"""Columns that hold turns of a chat."""
WHERE = "where"
"""A row's place, for messages to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """What the checks have read, for the run to use."""

    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    eval_dataset: Dataset | None
    problems: list[str]
    """Which problems its rows are, as far as they are problems."""
    learned: str
    """Which tokens of a row, in words."""
    checkpoint: str | None
    """To go on from."""


def check_rows(config: SFTRunConfig, run_dir: Path) -> CheckedRows:
    """All checks before a model is loaded, the cheap ones first: fields, the run's folder, tokenizer, rows.

    Raises UserError for the first mistake found. Nothing is written.
    """
    data, training = config.dataset, config.training
    strategy = strategy_of(training)
    check_method(config.peft, training, strategy)
    check_length(training)
    check_checkpoints(training)
    check_trackers(training)
    model_dtype(config)
    check_quantization(config, strategy)
    rundir.check_folder(run_dir, resuming=checkpoints.goes_on(training.resume_from_checkpoint))
    checkpoint = checkpoints.find_checkpoint(training.resume_from_checkpoint, run_dir)
    checkpoints.check_made(checkpoint, config)
    tokenizer = load_tokenizer(config.model.model_name_or_path)
    if has_images(tokenizer):
        raise UserError(
            f"--config.model.model_name_or_path {config.model.model_name_or_path}: perl.sft takes no"
            " vision-language model; name one of texts alone"
        )
    check_layers(config.peft, resolve_model(config.model.model_name_or_path, MODEL_FLAG))
    split = data.split or training_split(data.dataset_name_or_path)
    rows = read(data.dataset_name_or_path, split, data.example_numbers, data.task, data.system_prompt)
    check_loss(training, rows[0], tokenizer)
    eval_rows = []
    if data.eval_dataset is not None:
        eval_rows = read(data.eval_dataset, data.eval_split, data.eval_example_numbers, data.task, data.system_prompt)
        check_loss(training, eval_rows[0], tokenizer)
        if learned(training, eval_rows[0]) != (those := learned(training, rows[0])):
            raise UserError(
                f"--config.dataset.eval_dataset {data.eval_dataset}: its columns are not those of the rows that are"
                f" trained on, of which {those} are learned: eval_loss would not be theirs; name rows of the same"
                " columns"
            )
    check_template([*rows, *eval_rows], tokenizer, own=not training.assistant_only_loss)
    log.info("%d rows from %s", len(rows), data.dataset_name_or_path)
    return CheckedRows(
        tokenizer=tokenizer,
        dataset=to_dataset(rows),
        eval_dataset=to_dataset(eval_rows) if eval_rows else None,
        problems=[row[PROBLEM] for row in rows if PROBLEM in row],
        learned=learned(training, rows[0]),
        checkpoint=checkpoint,
    )


def check_loss(training: SFTTrainingConfig, row: Row, tokenizer: PreTrainedTokenizerBase) -> None:
    """Which tokens are learned must be possible for rows like this one."""
    if training.completion_only_loss and "messages" in row:
        raise UserError(
            "--config.training.completion_only_loss true: rows of messages have no completion; write"
            " --config.training.assistant_only_loss true"
        )
    if not training.assistant_only_loss:
        return
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise UserError(
            "--config.training.assistant_only_loss true: the chat template does not mark the assistant's tokens, and"
            " TRL knows no form of it that does; put {% generation %} … {% endgeneration %} around them in the model's"
            " chat_template.jinja, or leave the flag out"
        ) from error


def check_template(rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, own: bool = True) -> None:
    """The chat template must take each row: its prompt and the whole, as TRL asks for them. One line where it leaves
    out text of the answers, as many do of reasoning before </think>; a UserError where it does so of all.

    Args:
        own: rows are worded by it, and not by one that TRL has for assistant_only_loss.
    """
    answers, shortened = 0, []
    for row in rows:
        prompt, tools = row.get("prompt"), {"tools": row.get("tools")}
        if prompt is not None:
            worded(tokenizer, prompt, tools, where=row[WHERE])
        whole = row["messages"] if prompt is None else prompt + row["completion"]
        text = _without_space(worded(tokenizer, whole, tools, answered=True, where=row[WHERE]))
        for turn in row["messages"] if prompt is None else row["completion"]:
            if turn["role"] == "assistant":
                answers += 1
                shortened += [row[WHERE]] if _without_space(turn["content"] or "") not in text else []
    if not own:
        return
    if shortened and len(shortened) == answers:
        raise UserError(
            f"{shortened[0]}: the chat template leaves out text of the answer, as of all others (reasoning before"
            " </think>?): it would not be learned; keep it in the model's chat_template.jinja, or leave it out of the"
            " rows"
        )
    if shortened:
        log.warning("%d of %d answers lose text to the chat template, as %s", len(shortened), answers, shortened[0])


def _without_space(text: str) -> str:
    return "".join(text.split())


def learned(training: SFTTrainingConfig, row: Row) -> str:
    """Which tokens of rows like this one TRL's SFTTrainer learns."""
    if training.assistant_only_loss:
        return "the assistant's turns"
    only = training.completion_only_loss
    return "completions" if only or (only is None and "completion" in row) else "all turns"


def read(spec: str, split: str | None, limit: int | None, task: str | None, system_prompt: str | None) -> list[Row]:
    """The first `limit` rows that `spec` names, in one of the forms above; all must be messages, or none."""
    if task is not None:
        lookup(TASKS, task, "task", "--config.dataset.task")
    rows: list[Row] = []
    for row, where in islice(_rows(spec, split, task, system_prompt), limit):
        if rows and ("messages" in row) != ("messages" in rows[0]):
            raise UserError(f"{where}: some rows are messages and some are not; write them into files of their own")
        rows.append(row)
    if not rows:
        raise UserError(f"{spec}: no rows" + (f" in split {split!r}" if split else ""))
    return rows


def _rows(spec: str, split: str | None, task: str | None, system_prompt: str | None) -> Iterator[tuple[Row, str]]:
    for row, where, known in rows_of(data_name(spec), split, task):
        if any(row.get(name) for name in ("image", "images", "videos")):
            raise UserError(f"{where}: perl.sft takes no images; train on rows of text")
        made = _chat(row, where, system_prompt) or _worked_answer(row, where, known, system_prompt)
        made |= _tools(row, where) | {WHERE: where}
        require_characters(made, where)
        yield made, where


def _chat(row: Row, where: str, system_prompt: str | None) -> Row | None:
    """A row of messages, or of prompt and completion; None for another one."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    if row.get("messages") is not None:
        turns = _turns(row["messages"], "messages", where)
        if not any(turn["role"] == "assistant" for turn in turns):
            raise UserError(f"{where}: no turn of the assistant in messages: there is nothing to learn")
        return {"messages": turns if turns[0]["role"] == "system" else [*system, *turns]}
    if row.get("prompt") is None or "completion" not in row:
        return None
    prompt = _turns(row["prompt"], "prompt", where, "user")
    completion = _turns(row["completion"], "completion", where, "assistant")
    return {"prompt": prompt if prompt[0]["role"] == "system" else [*system, *prompt], "completion": completion}


def _worked_answer(row: Row, where: str, task: str | None, system_prompt: str | None) -> Row:
    """A problem, asked as in a rollout and in an evaluation, and the text of its answer."""
    try:
        problem = problem_of_row(row, where, task)
    except UserError as error:
        raise UserError(f"{error} (perl.sft reads rows of {FORMS})") from error
    style = TASKS[problem.task].style
    if system_prompt is not None:
        style = replace(style, system_prompt=system_prompt)
    if read_entry(problem.gold) is None:
        answer = worked_answer(row, where)
    else:  # of reasoning-gym: the column has the whole entry, which its scoring reads
        answer = RULES[TASKS[problem.task].rubric.form].state(problem.gold)
    if answer is None:
        raise UserError(f"{where}: no text of an answer to learn; write it into a column answer or completion")
    return {
        "prompt": build_messages(problem, style),
        "completion": [{"role": "assistant", "content": answer}],
        PROBLEM: asked_hash(problem),
    }


def _turns(value: Any, column: str, where: str, role: str | None = None) -> list[dict[str, Any]]:
    """The turns of a column; a text is one turn of `role`. What a turn has besides role and content (tool_calls, name,
    …) stays; a parquet file fills up what it lacks with nulls."""
    value = text_or_turns(value, where)
    if isinstance(value, str) and role is not None and value.strip():
        return [{"role": role, "content": value}]
    allowed = "a list of {role, content} messages" if role is None else "a text or a list of {role, content} messages"
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {column} must be {allowed}, and not empty")
    turns = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: {column} must be {allowed}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UserError(f"{where}: the content of a turn in {column} must be a text, not {content!r:.60}")
        turns.append({k: _plain(v) for k, v in message.items() if v is not None or k == "content"})
    return turns


def _tools(row: Row, where: str) -> Row:
    """The tools that the row's chat template is told of."""
    tools = structure(row.get("tools"), where)
    if tools is None or tools == "":
        return {}
    if not isinstance(tools, list):
        raise UserError(f"{where}: tools must be a list of JSON schemas, not {tools!r:.60}")
    return {"tools": _plain(tools)}


def _plain(value: Any) -> Any:
    """Without the Decimals that JSON's fractions are read as."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value


class ExactJson(Json):
    """The library's own keeps ten digits of a fraction, and loses a turn with a whole number of more than 64 bits."""

    def decode_example(self, example_data: str, token_per_repo_id: Any = None) -> Any:
        return json.loads(example_data)


def to_dataset(rows: list[Row]) -> Dataset:
    """Rows for TRL. Turns and tools are JSON: a column of structs would give each the fields of all others."""
    disable_progress_bars()  # of TRL's tokenization too: they redraw themselves all over a log file
    features = Features({name: ExactJson() for name in TURNS if name in rows[0]})
    if any("tools" in row for row in rows):
        features["tools"] = Value("string")  # TRL reads it
    columns = {n: [json.dumps(row[n], default=str) if n in row else None for row in rows] for n in features}
    return Dataset(pyarrow.table(columns, schema=features.arrow_schema), DatasetInfo(features=features))
