"""perl.sft: what is learned, what is left, what each mistake says; and GRPO that starts from its adapter."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from perl.__main__ import main as perl
from perl.base.errors import RunError, Stopped, UserError
from perl.config.load import parse as parse_grpo
from perl.config.sft import parse
from perl.finetuning.rows import check_template, learned, read, to_dataset
from perl.finetuning.sft import fine_tune, import_trainer
from perl.models.folders import content_hash
from perl.prompts import ChatTemplate, encode
from perl.reports.page import write_report
from perl.runs.callbacks import MetricsWriter
from perl.runs.setup import build_dataset
from perl.tasks import load_problems
from perl.tasks.trained import read_trained
from perl.training.grpo import train
from tests.folders import metrics
from tests.tiny import CHAT_TEMPLATE, END, save_tiny, tiny_model, tiny_tokenizer
from tests.training.poison import poison

ROOT = Path(__file__).parents[2]
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|> {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <|end|>{% endgeneration %} {% else %}{{ message['content'] }} <|end|> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
"""CHAT_TEMPLATE with the assistant's tokens marked. The tiny tokenizer drops blanks: none may end what is marked."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), scale=2.0)


def sums(count=20):
    return [{"question": f"What is {i} + 3 ?", "answer": f"{i} + 3 = {i + 3} #### {i + 3}"} for i in range(count)]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "sums.jsonl", sums())


def argv(model, data, folder, **changes):
    settings = {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": data,
        "training.output_dir": folder,
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 4,
        "training.learning_rate": 0.01,
        "training.logging_steps": 1,
        "training.gradient_checkpointing": "false",
        "peft.r": 4,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def require_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, model, data):
    """Eight steps, with a checkpoint and an evaluation every four."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    wanted = {"training__max_steps": 8, "training__save_steps": 4, "training__lr_scheduler_type": "constant"}
    looked_at = {"dataset__eval_dataset": data, "training__eval_strategy": "steps", "training__eval_steps": 4}
    return fine_tune(argv(model, data, folder, **wanted, **looked_at))


def test_a_run_learns_and_leaves_what_a_training_leaves(tuned, model, data):
    rows = [row for row in metrics(tuned) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert {"mean_token_accuracy", "grad_norm", "timing/step", "perf/throughput"} <= rows[0].keys()
    evaluated = [row for row in metrics(tuned) if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [4, 8]
    assert evaluated[1]["eval_loss"] < evaluated[0]["eval_loss"] < rows[0]["loss"]

    assert {file.name for file in tuned.iterdir()} >= {"config.yaml", "environment.json", "checkpoint-4", "adapter"}
    assert not (tuned / "adapter" / "training_args.bin").exists()
    assert len(read_trained(tuned / "adapter")) == 20
    assert yaml.safe_load((tuned / "config.yaml").read_text())["training"]["max_length"] == 1024
    card = (tuned / "adapter" / "README.md").read_text()
    assert "trained with supervised fine-tuning for 8 steps" in card
    assert "\n- sft\n" in card
    assert "grpo" not in card.lower()
    assert ", of completions" in card
    page = write_report(tuned).read_text()
    assert f"{model.name}: SFT with LoRA" in page
    assert "evaluation" in page
    assert "loss, first and last tenth" in page
    assert "GRPO" not in page


def test_only_the_adapter_changes(tuned, model):
    assert weights(tuned / "adapter")
    assert all("lora_" in name for name in weights(tuned / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(model)
    trainer = trainer_of(sums(), model=tiny_model(scale=2.0), max_steps=2)
    trainer.train()
    changed = dict(trainer.model.named_parameters())
    assert any(parameter.abs().sum() > 0 for name, parameter in changed.items() if "lora_B" in name)
    for name, parameter in base.named_parameters():
        module, _, own = name.rpartition(".")
        inside = f"base_model.model.{module}"
        found = changed.get(f"{inside}.base_layer.{own}", changed.get(f"{inside}.{own}"))
        assert torch.equal(found, parameter), name


def test_the_first_loss_is_the_cross_entropy_of_the_answers(tmp_path, model, data):
    """All rows in one micro-batch: the mean over the tokens of all answers, the end token among them."""
    run = fine_tune(
        argv(model, data, tmp_path / "run", training__max_steps=1, training__per_device_train_batch_size=20)
    )
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    losses = []
    for row in sums():
        question = f'{row["question"]} Let\'s think step by step and output the final answer after "####".'
        asked = tokenizer.encode(f"<|user|> {question} <|end|> <|assistant|> ")
        answered = tokenizer.encode(f"{row['answer']} <|end|> ")
        assert answered[-1] == END
        with torch.no_grad():
            logits = base(torch.tensor([asked + answered])).logits[0]
        logps = logits.log_softmax(-1)[len(asked) - 1 : -1]
        losses += (-logps.gather(1, torch.tensor(answered)[:, None])).flatten().tolist()
    assert metrics(run)[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def trainer_of(rows, model=None, template=CHAT_TEMPLATE, **training):
    """The trainer of `rows`, as the user's file has them, on a tiny model."""
    file = Path(os.environ["PYTEST_TMP"]) / "rows.jsonl"
    read_rows = read(str(write(file, rows)), None, None, None, None)
    settings = {"per_device_train_batch_size": 4, "gradient_checkpointing": "false", "report_to": "none"} | training
    words = [word for name, value in settings.items() for word in (f"--config.training.{name}", str(value))]
    config = parse([*words, "--config.training.output_dir", str(file.parent / "out"), "--config.peft.r", "4"]).build()
    return import_trainer()(
        config,
        model=model or tiny_model(scale=2.0),
        train_dataset=to_dataset(read_rows),
        processing_class=tiny_tokenizer(template),
    )


def test_a_signal_to_all_processes_leaves_the_loader_its_own():
    """Else the trainer could not go on to its checkpoint."""
    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1, "per_device_train_batch_size": 1}
    batches, others = iter(trainer_of(sums(), **workers).get_train_dataloader()), psutil.Process().children()
    next(batches)
    (worker,) = (child for child in psutil.Process().children() if child not in others)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    assert len(list(itertools.islice(batches, len(sums()) - 2))) == len(sums()) - 2
    worker.terminate()  # as the trainer ends one that is stuck
    assert worker.wait(timeout=60) == 0


@pytest.fixture(autouse=True)
def _folder_for_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def test_prompts_are_those_of_the_rollouts(data):
    tokenizer = tiny_tokenizer()
    rows = trainer_of(sums()).train_dataset
    grpo = parse_grpo(["--config.dataset.dataset_name_or_path", str(data)]).build()
    prompts = build_dataset(grpo.dataset, ChatTemplate(tokenizer))["prompt"]
    for row, prompt, problem in zip(rows, prompts, sums(), strict=True):
        asked = encode(tokenizer, prompt)
        answered = tokenizer.encode(f"{problem['answer']} <|end|> ")
        assert row["input_ids"] == asked + answered
        assert row["labels"] == [-100] * len(asked) + answered


@pytest.mark.parametrize(
    ("task", "row", "worked"),
    [
        ("gsm8k", {"question": "How many?", "answer": "12 and 12 are 24.\n#### 24"}, "12 and 12 are 24.\n#### 24"),
        ("math", {"problem": "Find x.", "solution": "x is \\boxed{4}.", "answer": "4"}, "x is \\boxed{4}."),
    ],
)
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_prepared_file_teaches_the_worked_answer_of_its_source(tmp_path, task, row, worked, times):
    file = write(tmp_path / "train.jsonl", [row])
    for time in range(times):
        prepared = tmp_path / str(time)
        assert perl(["prepare", task, "--local_save_dir", str(prepared), "--source", str(file)]) == 0
        file = prepared / "train.parquet"
    (found,) = read(str(file), None, None, task, None)
    assert found["completion"] == [{"role": "assistant", "content": worked}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1 + 2 ?", "completion": "3"},
        {
            "prompt": [{"role": "user", "content": "What is 1 + 2 ?"}],
            "completion": [{"role": "assistant", "content": "3"}],
        },
    ],
)
def test_prompt_and_completion_as_text_or_messages_are_turns_of_a_chat(row):
    (found,) = trainer_of([row]).train_dataset
    tokenizer = tiny_tokenizer()
    asked = tokenizer.encode("<|user|> What is 1 + 2 ? <|end|> <|assistant|> ")
    answered = tokenizer.encode("3 <|end|> ")
    assert found["input_ids"] == asked + answered
    assert found["labels"] == [-100] * len(asked) + answered


@pytest.mark.parametrize("text", ['{"name": "Bo"}', "[2, 3]", "[]", "{}", '[{"a": 1}]'])
def test_a_text_that_is_json_is_a_text(tmp_path, text):
    turns = json.dumps([{"role": "user", "content": "so"}])
    rows = [{"prompt": text, "completion": text}, {"prompt": turns, "completion": text}]
    one, other = read(str(write(tmp_path / "rows.jsonl", rows)), None, None, None, None)
    assert one["prompt"] == [{"role": "user", "content": text}]
    assert other["prompt"] == [{"role": "user", "content": "so"}]
    assert one["completion"] == other["completion"] == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_a_column_of_images_that_holds_none_is_no_image(tmp_path, nothing):
    row = {"prompt": "1", "completion": "2", "image": nothing, "images": nothing}
    (found,) = read(str(write(tmp_path / "rows.jsonl", [row])), None, None, None, None)
    assert found["completion"] == [{"role": "assistant", "content": "2"}]


TALK = [
    {"role": "user", "content": "What is 1 + 2 ?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "#### 3"},
]


def test_the_repeats_of_a_data_set_on_the_hub_are_read_once(monkeypatch):
    name = "BytedTsinghua-SIA/DAPO-Math-17k"
    one = [{"prompt": f"Find {i}.", "solution": str(i), "data_source": "math_dapo"} for i in range(3)]
    monkeypatch.setattr("perl.tasks.hub_rows", lambda *_: ((dict(row), f"x:{n}") for n, row in enumerate(one * 4)))
    assert len(read(name, "train", None, None, None)) == len(load_problems(name, "train")) == 3


def test_all_turns_of_messages_are_learned_or_the_assistants_alone():
    (whole,) = trainer_of([{"messages": TALK}]).train_dataset
    assert whole["labels"] == whole["input_ids"]
    (found,) = trainer_of([{"messages": TALK}], template=MARKED, assistant_only_loss="true").train_dataset
    assert found["input_ids"] == whole["input_ids"]
    tokenizer = tiny_tokenizer()
    parts = ("<|user|> What is 1 + 2 ? <|end|> <|assistant|> ", "3 <|end|> ", "<|user|> so <|end|> <|assistant|> ")
    asked, first, again = (tokenizer.encode(part) for part in parts)
    last = tokenizer.encode("#### 3 <|end|> ")
    assert found["labels"] == [-100] * len(asked) + first + [-100] * len(again) + last


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        ({"messages": TALK}, {}, "all turns"),
        ({"messages": TALK}, {"template": MARKED, "assistant_only_loss": "true"}, "the assistant's turns"),
        ({"prompt": "so", "completion": "3"}, {}, "completions"),
        ({"prompt": "so", "completion": "3"}, {"completion_only_loss": "false"}, "all turns"),
    ],
)
def test_the_model_card_says_what_is_learned(row, changes, said):
    trainer = trainer_of([row], **changes)
    assert learned(trainer.args, row) == said
    (found,) = trainer.train_dataset
    assert (found["labels"] == found["input_ids"]) == (said == "all turns")


def test_tool_calls_and_tools_reach_the_template_as_they_are():
    """Arrow would give each call the arguments of all others, as nulls."""
    template = (
        "{% if tools %}{{ tools | tojson }} {% endif %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %} <|end|> {% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    def row(arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        answer = {"role": "tool", "name": "f", "content": "3"}
        return {"messages": [TALK[0], call, answer, TALK[3]], "tools": [tool]}

    numbers = [0.7, 1 / 3, 10**20, -(2**63) - 1, 5e-324, -0.0]  # as the library's own JSON would not keep them
    rows = [row({"1": 2}), row({"3": {"4": 0.5}}), {"messages": TALK}, row({"1": numbers})]
    tokenizer = tiny_tokenizer(template)
    for found, made in zip(trainer_of(rows, template=template).train_dataset, rows, strict=True):
        text = tokenizer.apply_chat_template(made["messages"], tools=made.get("tools"), tokenize=False)
        assert found["input_ids"] == tokenizer.encode(text)
        assert "null" not in text


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_do_not_see_each_other(attention):
    """Eight rows as one micro-batch, and packed into one row: the same loss, and the same gradient."""

    def loss_and_gradient(**training):
        model = tiny_model(scale=2.0, attn_implementation=attention)
        trainer = trainer_of(sums(8), model=model, per_device_train_batch_size=8, max_steps=1, **training)
        (batch,) = list(trainer.get_train_dataloader())
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        norm = sum(p.grad.square().sum() for p in trainer.model.parameters() if p.grad is not None)
        return loss.item(), norm.item(), batch

    loss, norm, batch = loss_and_gradient()
    packed_loss, packed_norm, packed = loss_and_gradient(packing="true", max_length=512)
    assert len(batch["input_ids"]) == 8
    assert len(packed["input_ids"]) == 1
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert packed_norm == pytest.approx(norm, rel=1e-4)


def test_rows_of_which_nothing_to_learn_is_left_are_one_line():
    rows = [{"prompt": "1 2 3", "completion": "4"}, {"prompt": "1 2 3 4", "completion": "5"}]
    with pytest.raises(
        UserError, match=r"max_length 2: nothing to learn is left of any row; the longest has \d+ tokens"
    ):
        trainer_of(rows, max_length=2)


@pytest.mark.parametrize(
    ("changes", "learned", "told"),
    [
        ({}, None, "end"),
        ({"packing": "true"}, None, "end"),
        ({"truncation_mode": "keep_end"}, 3, "start"),
        ({"packing": "true", "packing_strategy": "bfd_split"}, 3, None),
        ({"packing": "true", "packing_strategy": "wrapped"}, 3, None),
    ],
)
def test_what_is_told_to_be_cut_is_what_trl_cuts(caplog, changes, learned, told):
    """A prompt of more than 4 tokens, and 3 to learn: two words and the end."""
    rows = [{"prompt": "1 2 3 4", "completion": "5 6"}]
    if learned is None:
        with pytest.raises(UserError, match=r"max_length 4: nothing to learn is left of any row"):
            trainer_of(rows, max_length=4, **changes)
    else:
        made = trainer_of(rows, max_length=4, **changes).train_dataset
        assert sum(label != -100 for row in made for label in row["labels"]) == learned
    assert (f"max_length 4 tokens and are cut at their {told};" in caplog.text) == (told is not None)
    assert ("are cut at their" in caplog.text) == (told is not None)


def test_rows_that_are_cut_and_answers_without_an_end_are_told(caplog):
    rows = [*({"prompt": "so", "completion": "1"} for _ in range(3)), {"prompt": "1 " * 30, "completion": "2"}]
    with caplog.at_level("WARNING"):
        assert len(trainer_of(rows, max_length=10).train_dataset) == 3
        assert "1 of 4 rows are longer than --config.training.max_length 10 tokens" in caplog.text
        assert "of 1 nothing to learn is left" in caplog.text
        assert "learn to stop" not in caplog.text
        trainer_of(rows, template="{% for m in messages %}{{ m.content }} {% endfor %}")
    assert "learn to stop" in caplog.text


def test_the_end_of_a_turn_may_be_named_by_generation_config_alone(caplog):
    named = tiny_tokenizer().convert_tokens_to_ids("7")
    for ends, told in (([0], True), ([0, named], False)):
        model = tiny_model(scale=2.0)
        model.generation_config.eos_token_id = ends
        caplog.clear()
        trainer_of(sums(4), model=model, template=CHAT_TEMPLATE.replace("<|end|>", "7"))
        assert ("learn to stop" in caplog.text) == told


def test_rows_that_the_model_has_no_tokens_or_positions_for_are_one_line(caplog):
    with pytest.raises(UserError, match=r"^train row 1: the prompt holds token \d+, but the model knows 12 tokens"):
        trainer_of(sums(4), model=tiny_model(vocab_size=12))

    def table():
        return tiny_model("opt", max_position_embeddings=16, ffn_dim=64, word_embed_proj_dim=64)

    with pytest.raises(UserError, match=r"max_length 1024: a row of \d+ tokens is more than 16, and it has a table of"):
        trainer_of(sums(4), model=table())
    for changes in ({}, {"packing": "true"}, {"packing": "true", "packing_strategy": "bfd_split"}):
        trainer_of(sums(4), model=table(), max_length=16, **changes)
    assert "was made for" not in caplog.text
    trainer_of(sums(4), model=tiny_model(max_position_embeddings=16))
    assert "max_length 1024: a row of 21 tokens is more than the 16 that the model was made for" in caplog.text
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    trainer_of(sums(4), model=tiny_model(max_position_embeddings=16, rope_parameters=rope))  # one policy: its own


def test_a_loss_that_is_not_finite_stops_the_run_with_the_rows_of_the_update(tmp_path):
    trainer = trainer_of(sums(), gradient_accumulation_steps=2, max_steps=3)
    poison(trainer, "loss", {2})
    with pytest.raises(RunError, match=r"^step 2: the loss and the norm of the gradient are not finite; the batch is"):
        trainer.train()
    folder = tmp_path / "out" / "nonfinite_step_2"
    rows = json.loads((folder / "rank-0.json").read_text())
    assert len(rows) == 8
    assert all("What" in row["text"] for row in rows)  # the tiny tokenizer drops blanks
    assert {"0.input_ids", "1.labels"} <= load_file(folder / "rank-0.safetensors").keys()


def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path, tuned, model, data):
    flags = {"training__max_steps": 8, "training__lr_scheduler_type": "constant"}
    more = {"training__resume_from_checkpoint": tuned / "checkpoint-4"}
    run = fine_tune(argv(model, data, tmp_path / "run", **flags, **more))
    assert [row["step"] for row in metrics(run) if "loss" in row] == [5, 6, 7, 8]
    require_same(weights(run / "adapter"), weights(tuned / "adapter"))


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch, model, data):
    def stop(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # after the end of step 1: step 2 is finished

    monkeypatch.setattr(MetricsWriter, "on_log", stop)
    with pytest.raises(Stopped, match="SIGTERM after step 2 of 5, checkpoint-2 is saved"):
        fine_tune(argv(model, data, tmp_path / "run", training__max_steps=5))
    assert (tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "rows.jsonl: no rows"),
        ([{"text": "so"}], "rows.jsonl:1: no known schema has the columns text"),
        ([{"question": "What is 1 ?"}], "rows.jsonl:1:"),
        ([{"prompt": "1", "completion": ""}], "rows.jsonl:1: completion must be a text or a list of"),
        ([{"prompt": "1", "completion": "1"}, {"prompt": "1", "completion": None}], "rows.jsonl:2: completion"),
        ([{"messages": []}], "rows.jsonl:1: messages must be a list of {role, content} messages, and not empty"),
        ([{"messages": f"[{'9' * 5000}]"}], "rows.jsonl:1: a number of more than 4300 digits"),
        ([{"prompt": "[" * 50000, "completion": "1"}], "rows.jsonl:1: not valid json: brackets nest too deep"),
        ([{"messages": TALK, "tools": "[" * 50000}], "rows.jsonl:1: not valid json: brackets nest too deep"),
        ([{"messages": TALK[:1]}], "rows.jsonl:1: no turn of the assistant in messages"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "rows.jsonl:1: the content of a turn"),
        ([{"messages": TALK, "images": ["a.png"]}], "rows.jsonl:1: perl.sft takes no images"),
        ([{"messages": TALK, "tools": "calculator"}], "rows.jsonl:1: tools must be a list"),
        ([{"messages": TALK}, {"prompt": "1", "completion": "1"}], "rows.jsonl:2: some rows are messages and some"),
        ([{"prompt": TALK[:1], "reward_model": {"ground_truth": "3"}, "data_source": "openai/gsm8k"}], "no text of an"),
    ],
)
def test_a_mistake_in_the_rows_is_one_line(tmp_path, model, rows, says):
    with pytest.raises(UserError) as error:
        fine_tune(argv(model, write(tmp_path / "rows.jsonl", rows), tmp_path / "run"))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training__auto_find_batch_size": "true"}, "training would begin again from step 0 with weights that are"),
        ({"training__eval_strategy": "epoch"}, "there are no rows to evaluate on; name --config.dataset.eval_dataset"),
        ({"dataset__eval_dataset": "gsm8k"}, "is never looked at; write --config.training.eval_strategy epoch"),
        ({"training__packing": "true", "training__max_length": "null"}, "give it a number"),
        (
            {"dataset__eval_dataset": "gsm8k", "training__eval_strategy": "epoch", "training__eval_packing": "true"},
            "--config.training.eval_packing true: without --config.training.packing true the rows that are evaluated",
        ),
        ({"training__chat_template_path": "a.jinja"}, "own; put it into chat_template.jinja in the model"),
        ({"training__dataset_num_proc": "2"}, "numbers in turns would be rounded on their way to other"),
        ({"training__eos_token": "<|end|>"}, "own; put it into tokenizer_config.json in the model's folder"),
        ({"training__max_steps": 0}, "no step to train"),
        ({"training__assistant_only_loss": "true"}, "{% generation %}"),
        ({"peft__type": "lorra"}, "lora"),
        ({"reward__functions": "[]"}, "unknown flag --config.reward.functions"),
        ({"peft__adapter": "nowhere"}, "--config.peft.adapter nowhere: no such folder"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(tmp_path, model, data, changes, says):
    with pytest.raises(UserError) as error:
        fine_tune(argv(model, data, tmp_path / "run", **changes))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ALTERNATE = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
ALTERNATE += "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}so"


@pytest.mark.parametrize(
    ("template", "row", "says"),
    [
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {"messages": [TALK[0], CALL]}, "concatenate"),
        (ALTERNATE, {"messages": [TALK[0], *TALK]}, "roles must alternate"),
        (ALTERNATE, {"prompt": TALK[:2], "completion": "3"}, "roles must alternate"),
        ("so{% if tools %}{{ tools[0] + 'so' }}{% endif %}", {"messages": TALK, "tools": [{"a": 1}]}, "unsupported"),
        (
            "so{% if add_generation_prompt and messages[-1].role != 'user' %}{{ raise_exception('no question') }}"
            "{% endif %}",
            {"prompt": TALK[:2], "completion": TALK[2:]},
            "no question",
        ),
    ],
)
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_row_that_the_chat_template_does_not_take_is_named_before_the_model_is_loaded(
    tmp_path, monkeypatch, evaluated, template, row, says
):
    model = save_tiny(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    good = {"messages": TALK} if "messages" in row else {"prompt": "so", "completion": "3"}
    rows, fine = write(tmp_path / "rows.jsonl", [good, row]), write(tmp_path / "fine.jsonl", [good])
    more = {"dataset__eval_dataset": rows, "training__eval_strategy": "epoch"} if evaluated else {}
    monkeypatch.setattr("perl.finetuning.sft.load_model", None)
    with pytest.raises(
        UserError, match=rf"^rows\.jsonl:2: .*model: the chat template fails: .*{says}.*; correct the pr"
    ):
        fine_tune(argv(model, fine if evaluated else rows, tmp_path / "run", **more))


@pytest.mark.parametrize("evaluated", [0, 1])
def test_rows_to_evaluate_on_have_the_columns_of_those_that_are_learned(tmp_path, model, evaluated):
    """TRL decides by the latter of which tokens eval_loss is."""
    rows = [{"messages": TALK}, {"prompt": "so", "completion": "3"}]
    files = [write(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    wanted = {"dataset__eval_dataset": files[evaluated], "training__eval_strategy": "epoch"}
    with pytest.raises(UserError, match=rf"eval_dataset \S+{evaluated}\.jsonl: its columns are not those of the rows"):
        fine_tune(argv(model, files[1 - evaluated], tmp_path / "run", **wanted))


STRIPPED = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1].strip()")
"""CHAT_TEMPLATE without reasoning, as DeepSeek-R1-Distill's."""


def test_answers_that_lose_text_to_the_chat_template_are_told(tmp_path, caplog):
    turns = [
        TALK[0],
        {"role": "assistant", "content": "so </think> 3"},
        TALK[2],
        {"role": "assistant", "content": " 3"},
    ]
    rows = [{"messages": turns}, {"messages": TALK}]
    read_rows = read(str(write(tmp_path / "rows.jsonl", rows)), None, None, None, None)
    check_template(read_rows, tiny_tokenizer())
    assert "chat template" not in caplog.text
    check_template(read_rows, tiny_tokenizer(STRIPPED))
    assert "1 of 4 answers lose text to the chat template, as rows.jsonl:1" in caplog.text
    rows = [{"prompt": "so", "completion": f"so </think> {i}"} for i in range(2)]
    read_rows = read(str(write(tmp_path / "rows.jsonl", rows)), None, None, None, None)
    with pytest.raises(UserError, match=r"^rows\.jsonl:1: the chat template leaves out text of the answer, as of all"):
        check_template(read_rows, tiny_tokenizer(STRIPPED))
    check_template(read_rows, tiny_tokenizer(STRIPPED), own=False)  # TRL words them by another


def test_completion_only_loss_of_messages_is_refused(tmp_path, model):
    file = write(tmp_path / "rows.jsonl", [{"messages": TALK}])
    with pytest.raises(UserError, match="rows of messages have no completion"):
        fine_tune(argv(model, file, tmp_path / "run", training__completion_only_loss="true"))


# From an adapter


def test_an_adapter_that_is_trained_further_brings_its_own_shape(tuned, tmp_path):
    adapter = str(tuned / "adapter")
    parsed = parse(["--config.peft.adapter", adapter, "--config.peft.lora_plus_lr_ratio", "4"])
    assert (parsed.values.peft.r, parsed.values.peft.lora_alpha) == (4, 32)
    assert "model.layers.0.self_attn.q_proj" in parsed.values.peft.target_modules
    with pytest.raises(UserError, match=r"--config.peft.r 8: the adapter in .* has r 4, and it is trained further"):
        parse(["--config.peft.adapter", adapter, "--config.peft.r", "8"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("peft: {r: 8, lora_alpha: 32}\n")
    warnings = parse(["--recipe", str(recipe), "--config.peft.adapter", adapter]).warnings
    assert warnings == ["--config.peft.adapter: the adapter's own r 4 override the recipe's"]
    merged = parse(["--config.peft.adapter", adapter, "--config.peft.adapter_mode", "merge", "--config.peft.r", "8"])
    assert merged.values.peft.r == 8
    assert parse(["--config.peft.adapter_mode", "merge"]).warnings == [
        "--config.peft.adapter_mode has no effect: peft.adapter names no adapter"
    ]


def grpo(folder, model, data, tuned, **changes):
    """Two steps of GRPO from the adapter of `tuned`, with a reference policy."""
    reward = folder / "digits.py"
    reward.write_text(
        "def digits(completions, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
    )
    flags = {
        "training__num_generations": 4,
        "training__max_completion_length": 8,
        "training__beta": 0.1,
        "reward__functions": json.dumps([f"{reward}:digits"]),
        "peft__adapter": tuned / "adapter",
    } | changes
    words = argv(model, data, folder / "run", **flags)
    if flags.get("peft__adapter_mode") != "merge":
        place = words.index("--config.peft.r")
        del words[place : place + 2]
    return train(words)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_that_goes_on_in_its_second_epoch_logs_and_learns_the_same(tmp_path, model, data, strategy):
    """Five steps an epoch, four a log: the checkpoint of step 7 lies between two logs."""
    settings = {"training__max_steps": 8, "training__logging_steps": 4, "training__save_steps": 7}
    settings["training__train_sampling_strategy"] = strategy
    whole = fine_tune(argv(model, data, tmp_path / "whole", **settings))
    shutil.copytree(whole, tmp_path / "cut")
    checkpoint = tmp_path / "cut" / "checkpoint-7"
    cut = fine_tune(argv(model, data, tmp_path / "cut", **settings, training__resume_from_checkpoint=checkpoint))
    require_same(weights(cut / "adapter"), weights(whole / "adapter"))
    times = ("time", "timing/", "perf/", "train_runtime", "train_samples_per", "train_steps_per")
    one, other = ([{k: v for k, v in r.items() if not k.startswith(times)} for r in metrics(f)] for f in (cut, whole))
    assert one == other


def test_grpo_goes_on_with_the_adapter_and_stays_near_it(tmp_path, model, data, tuned):
    """The reference is the adapter as it was: no divergence from it in the first step, none of the bare base."""
    run = grpo(tmp_path, model, data, tuned, training__save_steps=1)
    rows = [row for row in metrics(run) if "reward" in row]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows[1]["kl"] > 1e-6
    before, after = weights(tuned / "adapter"), weights(run / "adapter")
    assert before.keys() == after.keys()
    moved = [(after[name] - before[name]).abs().max().item() for name in before]
    assert 0 < max(moved) < 0.05  # two steps of learning rate 0.01: it did not start from zero
    assert not list(run.rglob("ref"))  # of a checkpoint that holds it transformers would load nothing else
    assert yaml.safe_load((run / "config.yaml").read_text())["peft"]["r"] == 4
    assert "continues an earlier adapter" in (run / "adapter" / "README.md").read_text()

    again = grpo(
        tmp_path,
        model,
        data,
        tuned,
        training__output_dir=tmp_path / "again",
        training__resume_from_checkpoint=run / "checkpoint-1",
    )
    require_same(weights(again / "adapter"), after)


def test_grpo_trains_a_new_adapter_on_the_merged_base(tmp_path, model, data, tuned):
    changes = {"peft__adapter_mode": "merge", "training__save_steps": 1}
    run = grpo(tmp_path, model, data, tuned, **changes)
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tuned / "adapter")
    merged = wrapped.merge_and_unload().state_dict()
    base = load_file(run / "base" / "model.safetensors")
    assert all(torch.allclose(base[name], merged[name], atol=1e-6) for name in base)
    rows = [row for row in metrics(run) if "reward" in row]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    made = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert made["base_model_name_or_path"] == str(run / "base")
    assert len(read_trained(run / "adapter")) == 20

    written = (run / "base" / "model.safetensors").stat().st_mtime_ns
    again = grpo(
        tmp_path, model, data, tuned, **changes, training__max_steps=3, training__resume_from_checkpoint="true"
    )
    assert (again / "base" / "model.safetensors").stat().st_mtime_ns == written
    assert [row["step"] for row in metrics(again) if "reward" in row] == [1, 2, 3]


def test_another_bases_adapter_is_refused(tmp_path, data, tuned):
    other = save_tiny(tmp_path / "other", layers=1)
    with pytest.raises(UserError, match=r"--config.peft.adapter .*: belongs to another base model"):
        fine_tune(argv(other, data, tmp_path / "run", peft__adapter=tuned / "adapter"))


# As a user starts it


def environment(**extra):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "RANK", "WORLD"))}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | extra


@pytest.mark.slow
def test_the_evaluator_takes_a_checkpoint(tmp_path, tuned, model, data):
    command = [sys.executable, "perl/eval.py", "--model", str(model), "--adapter", str(tuned / "checkpoint-4")]
    command += ["--dataset", str(data), "--result_dir", str(tmp_path), "--max_samples", "2", "--max_new_tokens", "8"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (summary,) = [json.loads(file.read_text()) for file in tmp_path.glob("*/summary.json")]
    assert summary["problems"] == 2
    assert summary["adapter_hash"] == content_hash(tuned / "checkpoint-4")


@pytest.mark.slow
def test_it_starts_by_accelerate_and_says_a_mistake_in_one_line(tmp_path, model, data):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "scripts/accelerate/cpu.yaml"), "--num_processes", "2", "-m", "perl.sft"]
    words = argv(model, data, tmp_path / "run", training__per_device_train_batch_size=2)
    done = subprocess.run(
        [*launch, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "num_processes: 2" in done.stdout
    assert "progress: step 2/2" in done.stdout
    one = fine_tune(argv(model, data, tmp_path / "one"))  # the same four rows a step
    both = [[row["loss"] for row in metrics(folder) if "loss" in row] for folder in (tmp_path / "run", one)]
    assert both[0] == pytest.approx(both[1], rel=1e-3)

    alone = [sys.executable, "-m", "perl.sft", *words, "--config.training.pakcing", "true"]
    done = subprocess.run(
        alone, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("did you mean --config.training.packing?")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["npu_4.yaml", "npu_zero3.yaml", "npu_fsdp2.yaml"])
def test_two_npus_train_and_grpo_goes_on_there(tmp_path, run_npu, model, data, config):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "scripts/accelerate" / config), "--num_processes", "2", "-m"]
    words = argv(model, data, tmp_path / "sft", training__per_device_train_batch_size=2, training__save_steps=1)
    done = run_npu([*launch, "perl.sft", *words], cwd=tmp_path, PYTHONPATH=str(ROOT), timeout=500)
    assert "progress: step 2/2" in done.stdout
    assert any(tensor.abs().sum() > 0 for name, tensor in weights(tmp_path / "sft/adapter").items() if "lora_B" in name)
    words = argv(
        model,
        data,
        tmp_path / "grpo",
        peft__adapter=tmp_path / "sft/adapter",
        training__num_generations=4,
        training__max_completion_length=8,
        training__beta=0.1,
        training__per_device_train_batch_size=2,
    )
    place = words.index("--config.peft.r")
    del words[place : place + 2]
    run_npu([*launch, "perl.train", *words], cwd=tmp_path, PYTHONPATH=str(ROOT), timeout=500)
    rows = [row for row in metrics(tmp_path / "grpo") if "reward" in row]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-3)


def test_a_finished_run_that_goes_on_trains_nothing_and_says_so(tmp_path, tuned, model, data, capsys):
    run = tmp_path / "run"
    shutil.copytree(tuned, run)
    shutil.rmtree(run / "adapter")  # killed between its last checkpoint and its adapter
    flags = {"training__max_steps": 8, "training__lr_scheduler_type": "constant"}
    fine_tune(argv(model, data, run, **flags, training__resume_from_checkpoint="true"))
    assert "progress: step 8/8  nothing is left to train" in capsys.readouterr().out
    require_same(weights(run / "adapter"), weights(tuned / "adapter"))
    assert max(row["step"] for row in metrics(run)) == 8
    assert not (run / "checkpoint-9").exists()


def test_the_memory_of_several_steps_is_their_last_peak(tmp_path):
    trainer = trainer_of([{"prompt": "1", "completion": "1"}])
    for allocated in (1.0, 3.0):
        trainer._log_step({"perf/max_memory_allocated_gb": allocated, "perf/throughput": allocated})
    assert trainer._metrics["train"]["perf/max_memory_allocated_gb"] == [3.0]
    assert trainer._metrics["train"]["perf/throughput"] == [1.0, 3.0]


def test_of_an_entry_of_reasoning_gym_the_answer_is_learned(tmp_path):
    """Its column has all that the scoring reads, which was learned as it stood."""
    entry = json.dumps({"answer": "3", "generator": "chain_sum", "settings": {}, "question": "1+2?", "metadata": {}})
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1+2?", "answer": entry}) + "\n")
    (row,) = read(str(file), None, None, "reasoning_gym", None)
    assert row["completion"] == [{"role": "assistant", "content": "<answer>3</answer>"}]
