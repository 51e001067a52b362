"""Bad input, one case for each row of bad_input.md: what makes it, and which program meets it.

The message and the exit code of a case stand in that table alone, where test_bad_input.py reads them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perl.models.folders import content_hash
from perl.scoring.results import Identity
from tests.reliability.place import Place, Words, cut, field, garbage, remove, tensors, text
from tests.results import record, summary
from tests.tiny import noise_png

GIB = 1 << 30
SECRET = "d41d8cd98f00b204"
"""What the environment of every case holds under names of secrets."""
INDEX, OUTSIDE = (
    "model/model.safetensors.index.json",
    json.dumps({"weight_map": {"lm_head.weight": "../own.safetensors"}}),
)
USER = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "4"}


@dataclass(frozen=True)
class Case:
    """One mistake."""

    name: str
    command: str
    """As the table names it."""
    make: Callable[[Place], Words]
    """Makes it in the folder, and gives the command's words."""


def train(name: str, make: Callable[[Place], Words]) -> Case:
    return Case(name, "perl.train", make)


def flags(name: str, **settings: Any) -> Case:
    return train(name, lambda p: p.train(None, **settings))


def model(name: str, **changes: Callable[[Path], object]) -> Case:
    """Of a model's folder with changed files."""
    return train(name, lambda p: p.train(None, model__model_name_or_path=p.model(**changes)))


def recipe(name: str, content: str | bytes) -> Case:
    return train(name, lambda p: p.train(None, "--recipe", p.write("recipe.yaml", content)))


def adapter(name: str, *settings: str, **changes: Callable[[Path], object]) -> Case:
    """Of an adapter that is trained further, with changed files."""
    return train(name, lambda p: p.train(None, *settings, peft__adapter=p.adapter(**changes)))


def sft(name: str, *rows: Any, **settings: Any) -> Case:
    return Case(name, "perl.sft", lambda p: p.sft(p.rows(*rows) if rows else None, **settings))


def score(name: str, *words: str, make: Callable[[Place], object] = lambda p: None, data: str | None = None) -> Case:
    return Case(name, "perl/eval.py", lambda p: (make(p), p.evaluate(data, *words))[1])


def tool(name: str, *words: str, make: Callable[[Place], object] = lambda p: None) -> Case:
    return Case(name, f"perl {words[0]}", lambda p: (make(p), list(words[1:]))[1])


def both(place: Place) -> None:
    place.model()
    place.adapter()


def row(**changes: Any) -> dict[str, Any]:
    return {"question": "What is 1 + 3 ?", "answer": "#### 4"} | changes


def mounted(place: Place, size: str, *options: str) -> str:
    """A file system of its own in the folder disk; the test unmounts it."""
    (place / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place / "disk")]
    try:
        subprocess.run(command, check=True, capture_output=True)
        if options:
            subprocess.run(["mount", "-o", f"remount,{options[0]}", str(place / "disk")], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no rights to mount a small disk")
    return "disk/run"


def fewer_tokens(held: dict[str, Any]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = held[name][:20].clone()


def zero(held: dict[str, Any]) -> None:
    for tensor in held.values():
        tensor.zero_()


DATA = [
    train("empty_file", lambda p: p.train(p.write("data.jsonl", ""))),
    train("empty_parquet", lambda p: p.train(p.write("data.parquet", ""))),
    train("empty_folder", lambda p: ((p / "data").mkdir(), p.train("./data"))[1]),
    train("no_such_file", lambda p: p.train("data.jsonl")),
    train("unknown_suffix", lambda p: p.train(p.write("data.tsv", "question\tanswer\n"))),
    train("cut_off_jsonl", lambda p: p.train(p.write("data.jsonl", json.dumps(row()) + '\n{"question": "Wha'))),
    train("cut_off_json", lambda p: p.train(p.write("data.json", json.dumps([row(), row()])[:-1]))),
    train("cut_off_csv", lambda p: p.train(p.write("data.csv", 'question,answer\n"What is 1 + 3 ?","4'))),
    train("cut_off_parquet", lambda p: (p.table([row()] * 8), cut(p / "data.parquet"), p.train("data.parquet"))[2]),
    train("csv_with_more_fields", lambda p: p.train(p.write("data.csv", "question,answer\nWhat, now?,4\n"))),
    train("not_utf8", lambda p: p.train(p.write("data.jsonl", b'{"question": "\xff"}\n'))),
    train("huge_jsonl", lambda p: p.train(p.sparse("data.jsonl", 64 * GIB))),
    train("huge_json", lambda p: p.train(p.sparse("data.json", 64 * GIB))),
    train("huge_csv", lambda p: p.train(p.sparse("data.csv", 64 * GIB))),
    train("huge_parquet", lambda p: p.train(p.sparse("data.parquet", 64 * GIB))),
    train("brackets_without_end", lambda p: p.train(p.write("data.jsonl", '{"question": ' + "[" * 100_000))),
    train("number_without_end", lambda p: p.train(p.write("data.jsonl", '{"question": "?", "answer": ' + "1" * 5000))),
    train("row_is_no_object", lambda p: p.train(p.rows([1, 2]))),
    train("other_columns", lambda p: p.train(p.rows({"text": "a", "label": 1}))),
    train("question_is_a_number", lambda p: p.train(p.sums(question=7))),
    train("question_is_empty", lambda p: p.train(p.sums(question=" "))),
    train("half_a_character", lambda p: p.train(p.sums(question="What \ud800 ?"))),
    train("answer_is_a_list", lambda p: p.train(p.sums(answer=[4]))),
    train("no_gold", lambda p: p.train(p.sums(answer=...))),
    train("gold_is_empty", lambda p: p.train(p.sums(answer="  "))),
    train("nothing_behind_the_marker", lambda p: p.train(p.sums(answer="1 + 3 ####"))),
    train("gold_is_nan", lambda p: p.train(p.sums(answer=float("nan")))),
    train("gold_lost_digits", lambda p: p.train(p.table([row(answer=2.0**60)]))),
    train("a_device_for_data", lambda p: p.train("/dev/null")),
    train("messages_without_content", lambda p: p.train(p.rows({"prompt": [{"role": "user"}], "answer": "4"}))),
    train("no_messages", lambda p: p.train(p.rows({"prompt": [], "answer": "4"}))),
    train(
        "foreign_data_source",
        lambda p: p.train(p.rows({"prompt": "?", "data_source": "mine", "reward_model": {"ground_truth": "4"}})),
    ),
    train(
        "image_for_a_text_model", lambda p: (p.write("a.png", noise_png(8, 8)), p.train(p.rows(row(image="a.png"))))[1]
    ),
    train("broken_image", lambda p: (p.write("a.png", "none"), p.train(p.rows(row(image="a.png"))))[1]),
    train("no_such_image", lambda p: p.train(p.rows(row(image="a.png")))),
    flags("all_prompts_too_long", dataset__max_prompt_length=2),
    flags("a_prompt_too_long", dataset__max_prompt_length=2, dataset__filter_overlong_prompts="false"),
    train("fewer_prompts_than_a_batch", lambda p: p.train(p.sums(1), training__per_device_train_batch_size=8)),
    train(
        "no_such_split",
        lambda p: ((p / "data").mkdir(), p.sums(name="data/train.jsonl"), p.train("data", dataset__split="dev"))[2],
    ),
    train("names_with_commas", lambda p: p.train("a.jsonl,b.jsonl")),
    train("bench_without_training_split", lambda p: p.train("aime24")),
    flags("unknown_task", dataset__task="gsm9k"),
    train("duration_in_parquet", lambda p: p.train(p.table([row(answer=timedelta(days=10**8))]))),
    train(
        "exponent_without_end", lambda p: p.train(p.write("data.json", '[{"question": "?", "answer": 1e' + "9" * 30))
    ),
    train("nul_in_the_path_of_an_image", lambda p: p.train(p.rows(row(image="a\0.png")))),
    train("prompt_with_an_unknown_role", lambda p: p.train(p.rows({"prompt": [{"role": 7, "content": "?"}]}))),
]
MODEL = [
    flags("no_such_model", model__model_name_or_path="./nothing"),
    train("adapter_for_a_model", lambda p: p.train(None, model__model_name_or_path=p.adapter())),
    model("no_config", config_json=remove),
    model("broken_config", config_json=text("{")),
    model("config_is_a_list", config_json=text("[]")),
    model("unknown_architecture", config_json=field(model_type="qwen9")),
    model("no_weights", model_safetensors=remove),
    model("cut_off_weights", model_safetensors=cut),
    model("garbage_weights", model_safetensors=garbage),
    model(
        "a_weight_is_infinite", model_safetensors=tensors(lambda held: held["model.norm.weight"].fill_(float("inf")))
    ),
    model("weights_of_another_shape", config_json=field(intermediate_size=32)),
    model("a_weight_is_missing", model_safetensors=tensors(lambda held: held.pop("model.norm.weight"))),
    model("untied_without_a_head", model_safetensors=tensors(lambda held: held.pop("lm_head.weight"))),
    model("no_tokenizer", tokenizer_json=remove),
    model("cut_off_tokenizer", tokenizer_json=cut),
    model("pad_is_no_token_of_the_model", tokenizer_config_json=field(pad_token="<none>")),
    model(
        "vocabulary_smaller_than_the_tokenizer",
        config_json=field(vocab_size=20),
        model_safetensors=tensors(fewer_tokens),
    ),
    model("no_chat_template", chat_template_jinja=remove),
    model("broken_chat_template", chat_template_jinja=text("{% for m in %}")),
    model("chat_template_refuses", chat_template_jinja=text("{{ raise_exception('no such role') }}")),
    model("empty_chat_template", chat_template_jinja=text("{{ '' }}")),
    model("tokenizer_is_a_list", tokenizer_json=text("[]")),
    model("tokenizer_config_is_a_list", tokenizer_config_json=text("[]")),
    model("tokenizer_of_an_unknown_kind", tokenizer_json=field(model={"type": "Runes"})),
    train(
        "index_of_weights_outside",
        lambda p: p.train(
            None,
            model__model_name_or_path=(p.model(model_safetensors=remove), p.write(INDEX, OUTSIDE))[0],
        ),
    ),
    flags("unknown_model_argument", training__model_init_kwargs='{"nothing": 1}'),
]
CONFIGURATION = [
    train("no_list_and_no_yaml", lambda p: p.train(None, "--config.validation.datasets", "{0")),
    train("unknown_flag", lambda p: p.train(None, "--config.training.max_stepz", "3")),
    flags("no_number", training__learning_rate="fast"),
    flags("not_finite", training__learning_rate=".nan"),
    flags("infinite_resampling", algorithm__name="dapo", algorithm__max_resample_factor="inf"),
    flags("infinite_noise", noise_injection__enabled="true", noise_injection__sigma_start="inf"),
    flags("nan_among_the_weights", reward__weights="[.nan]"),
    flags("negative_epsilon", training__epsilon=-0.2),
    flags("negative_entropy_coef", training__entropy_coef=-1),
    flags("num_iterations_0", training__num_iterations=0),
    flags("beta_1", training__adam_beta2=1),
    flags("unknown_generation_argument", training__generation_kwargs='{"top_kk": 4}'),
    flags("batch_size_0", training__per_device_train_batch_size=0),
    flags("max_completion_length_0", training__max_completion_length=0),
    flags("save_steps_0", training__save_steps=0),
    flags("negative_seed", common__seed=-1),
    flags("max_steps_0", training__max_steps=0),
    flags("no_epochs", training__max_steps=-1, training__num_train_epochs=0),
    flags("num_generations_does_not_divide", training__num_generations=3),
    flags("example_numbers_0", dataset__example_numbers=0),
    flags("use_liger_kernel", training__use_liger_kernel="true"),
    flags("unknown_optimizer", training__optim="adamm"),
    flags("unknown_algorithm", algorithm__name="grpoo"),
    flags("unknown_adapter_type", peft__type="lorra"),
    flags("no_such_layer", peft__target_modules='["query"]'),
    flags("rank_of_no_layer", peft__type="pissa", peft__r=65),
    flags("unknown_reward", reward__functions='["acuracy"]'),
    flags("no_such_reward_file", reward__functions='["mine.py:f"]'),
    train(
        "reward_file_does_not_compile",
        lambda p: (p.write("mine.py", "def f(:\n"), p.train(None, reward__functions='["mine.py:f"]'))[1],
    ),
    flags("more_weights_than_rewards", reward__weights="[1, 2]"),
    flags("no_such_validation_data", validation__datasets='["nothing.jsonl"]'),
    flags("unknown_tracker", training__report_to="wandbb"),
    flags("no_checkpoint_to_go_on_from", training__resume_from_checkpoint="true"),
    train("no_such_recipe", lambda p: p.train(None, "--recipe", "recipe.yaml")),
    train("recipe_is_a_folder", lambda p: ((p / "recipes").mkdir(), p.train(None, "--recipe", "recipes"))[1]),
    recipe("recipe_is_no_yaml", "a: [1"),
    recipe("recipe_is_no_utf8", b"a: \xff"),
    recipe("recipe_is_a_text", "hello"),
    recipe("recipe_with_an_unknown_group", "trainning: {max_steps: 1}"),
    recipe("recipe_with_an_unknown_field", "training: {max_stepz: 1}"),
    recipe("recipe_with_a_list_for_a_group", "training: [1, 2]"),
    recipe("recipe_that_runs_code", "training: !!python/object/apply:os.system ['true']"),
    recipe("recipe_that_holds_a_secret", f"training: {{max_steps: {SECRET}}}"),
    recipe("recipe_that_names_itself", "training: &a {max_steps: *a}"),
    recipe("recipe_nested_too_deep", "training: " + "[" * 2000),
]
FOLDERS_AND_ADAPTERS = [
    train("a_file_in_the_folders_place", lambda p: (p.write("run", ""), p.train())[1]),
    train("below_a_file", lambda p: (p.write("file", ""), p.train(None, training__output_dir="file/run"))[1]),
    flags("folder_that_cannot_be_made", training__output_dir="/proc/run"),
    train("folder_of_another_run", lambda p: (p.write("run/metrics.jsonl", "{}\n"), p.train())[1]),
    train("read_only_disk", lambda p: p.train(None, training__output_dir=mounted(p, "1m", "ro"))),
    train("full_disk", lambda p: p.train(None, training__output_dir=mounted(p, "40k"), training__save_steps=1)),
    flags("no_such_adapter", peft__adapter="adapter"),
    flags("adapter_of_no_user", peft__adapter="~no-such-user/adapter"),
    flags("adapter_with_too_long_a_name", peft__adapter="a" * 300),
    adapter("adapter_of_another_rank", "--config.peft.r", "8"),
    adapter("adapter_of_another_base", adapter_model_safetensors=tensors(lambda t: narrow(t))),
    adapter("broken_adapter_config", adapter_config_json=text("{")),
    adapter("adapter_config_is_a_list", adapter_config_json=text("[]")),
    adapter("adapter_of_an_unknown_method", adapter_config_json=field(peft_type="LORRA")),
    adapter("adapter_of_a_negative_rank", adapter_config_json=field(r=-4)),
    adapter("adapter_whose_rank_is_a_text", adapter_config_json=field(r="four")),
    adapter("adapter_whose_layers_are_a_number", adapter_config_json=field(target_modules=7)),
    adapter("cut_off_adapter", adapter_model_safetensors=cut),
]


def narrow(held: dict[str, Any]) -> None:
    """An adapter of a model with half as many hidden units."""
    for name in held:
        if "lora_A" in name:
            held[name] = held[name][:, :32].clone()


SFT = [
    sft("no_turn_of_the_assistant", {"messages": [USER]}),
    sft("turn_without_a_text", {"messages": [USER, {"role": "assistant", "content": 3}]}),
    sft("messages_and_pairs", {"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"}),
    sft("empty_completion", {"prompt": "a", "completion": ""}),
    sft("images_in_a_fine_tuning", {"messages": [USER, ANSWER], "images": ["a.png"]}),
    sft("tools_that_are_no_list", {"messages": [USER, ANSWER], "tools": {"a": 1}}),
    sft("nothing_left_to_learn", {"prompt": "a", "completion": "b"}, training__max_length=1),
    sft("batch_size_0_of_a_fine_tuning", {"messages": [USER, ANSWER]}, training__per_device_train_batch_size=0),
    Case(
        "broken_chat_template_of_a_fine_tuning",
        "perl.sft",
        lambda p: p.sft(
            p.rows({"messages": [USER, ANSWER]}),
            model__model_name_or_path=p.model(chat_template_jinja=text("{% for m in %}")),
        ),
    ),
]
EVALUATION = [
    score("no_such_model_to_score", "--model", "nothing"),
    score("no_such_data_to_score", data="nothing.jsonl"),
    score("cut_off_weights_to_score", make=lambda p: p.model(model_safetensors=cut)),
    score("no_such_adapter_to_score", "--adapter", "adapter"),
    score(
        "adapter_of_another_rank_to_score",
        "--adapter",
        "adapter",
        make=lambda p: p.adapter(adapter_config_json=field(r=8)),
    ),
    score(
        "adapter_that_changes_nothing",
        "--adapter",
        "adapter",
        make=lambda p: p.adapter(adapter_model_safetensors=tensors(zero)),
    ),
    score("result_dir_is_a_file", make=lambda p: p.write("results", "")),
    score("results_cannot_be_read", make=lambda p: p.write("results/data/run.json", "{")),
    score("nothing_to_compare_with", "--compare", "nothing"),
    score(
        "examples_without_an_answer",
        "--few_shot",
        "few.jsonl",
        make=lambda p: p.write("few.jsonl", '{"question": 1}\n'),
    ),
    score("longer_than_the_context", "--max_model_len", "99999"),
    score("examples_in_another_encoding", "--few_shot", "few.jsonl", make=lambda p: p.write("few.jsonl", b"\xff")),
    Case("nothing_to_rescore", "perl/eval.py", lambda p: RESCORE),
    Case("summary_to_rescore_breaks_off", "perl/eval.py", lambda p: (results(p, summary="{"), RESCORE)[1]),
    Case(
        "sample_to_rescore_without_a_text", "perl/eval.py", lambda p: (results(p, samples='{"key": 1}\n'), RESCORE)[1]
    ),
    Case("identity_to_rescore_is_a_list", "perl/eval.py", lambda p: (results(p, run="[]"), RESCORE)[1]),
    Case("lock_to_rescore_is_a_link", "perl/eval.py", lambda p: (results(p), link(p, "results/_lock"), RESCORE)[2]),
    score("negative_temperature", "--temperature", "-1"),
]
MERGE = ("merge", "--model", "model", "--adapter", "adapter", "--output", "merged")
PLAN = ("plan", "recipe.yaml")
GRADE = ("grade", "--task", "gsm8k", "--input", "in.jsonl", "--output", "out.jsonl")
PREPARE = ("prepare", "gsm8k", "--local_save_dir", "out", "--source")
LOGGED = '{"step": 1, "reward": 0.5}\n'


RESCORE = ["--rescore", "--result_dir", "results"]
REPORT = ("report", "results")
CARD = ("card", "adapter", "--results", "results")
DOUBLING = "A=aaaaaaaa\n" + "for i in " + " ".join("12345678" * 8) + '; do A="$A$A"; done\n'


def results(place: Place, **content: str) -> None:
    """The results of an evaluation of two samples; `content` is what a file holds in its place."""
    rows = [record(f"{i:016x}-0") for i in range(2)]
    scored = content_hash(place / "adapter") if (place / "adapter").exists() else None
    whole = summary(rows, 1, adapter_hash=scored)
    made_with = {name: whole.get(name) for name in Identity.__annotations__}
    files = {
        "summary.json": json.dumps(whole),
        "samples.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "run.json": json.dumps(made_with),
    }
    for name, held in files.items():
        place.write(f"results/gsm8k/{name}", content.get(name.partition(".")[0], held))


def twice(place: Place, name: str, content: str | bytes) -> None:
    """In folders a and b."""
    for folder in "ab":
        place.write(f"{folder}/{name}", content)


def link(place: Place, name: str) -> None:
    """A link in the place of a file, to a file that is somebody's own."""
    (place / name).unlink(missing_ok=True)
    (place / name).symlink_to(place / place.write("own.txt", "mine"))


def graded(**changes: Any) -> Callable[[Place], str]:
    return lambda p: p.rows({"gold": "4", "output": "#### 4"} | changes, name="in.jsonl")


TOOLS = [
    tool("unknown_command", "merg"),
    tool("no_adapter_to_merge", *MERGE, make=Place.model),
    tool("cut_off_adapter_to_merge", *MERGE, make=lambda p: (p.model(), p.adapter(adapter_model_safetensors=cut))),
    tool("cut_off_base_to_merge", *MERGE, make=lambda p: (p.model(model_safetensors=cut), p.adapter())),
    tool("output_that_is_no_merge", *MERGE, make=lambda p: (both(p), p.write("merged/notes.txt", "mine"))),
    tool(
        "broken_adapter_config_to_merge", *MERGE, make=lambda p: (p.model(), p.adapter(adapter_config_json=text("{")))
    ),
    tool(
        "adapter_of_another_base_to_merge",
        *MERGE,
        make=lambda p: (p.model(), p.adapter(adapter_model_safetensors=tensors(narrow))),
    ),
    tool("merge_into_a_file", *MERGE, make=lambda p: (both(p), p.write("merged", "mine"))),
    tool("unknown_dtype", *MERGE, "--dtype", "int8", make=both),
    tool("no_recipe_to_plan", *PLAN),
    tool("unknown_device", *PLAN, "--device", "tpu", make=lambda p: p.write("recipe.yaml", "")),
    tool("no_devices", *PLAN, "--count", "0", make=lambda p: p.write("recipe.yaml", "")),
    tool("nothing_to_compare", "compare", "a", "b"),
    tool(
        "broken_logs_to_compare",
        "compare",
        "a",
        "b",
        make=lambda p: [p.write(f"{x}/metrics.jsonl", "x\n") for x in "ab"],
    ),
    tool("nothing_to_report", "report", "a", make=lambda p: (p / "a").mkdir()),
    tool(
        "report_into_no_folder",
        "report",
        "a",
        "--output",
        "b/c.html",
        make=lambda p: p.write("a/metrics.jsonl", LOGGED),
    ),
    tool("summary_to_report_breaks_off", *REPORT, make=lambda p: results(p, summary="{")),
    tool("summary_to_report_without_metrics", *REPORT, make=lambda p: results(p, summary="{}")),
    tool("sample_to_report_without_a_seed", *REPORT, make=lambda p: results(p, samples='{"key": "a-0"}\n')),
    tool(
        "page_is_a_folder",
        "report",
        "a",
        "--output",
        "b",
        make=lambda p: (p.write("a/metrics.jsonl", LOGGED), (p / "b").mkdir()),
    ),
    tool("brackets_without_end_to_compare", "compare", "a", "b", make=lambda p: twice(p, "metrics.jsonl", "[" * 10**5)),
    tool(
        "step_of_5000_digits_to_compare",
        "compare",
        "a",
        "b",
        make=lambda p: twice(p, "metrics.jsonl", '{"step": ' + "9" * 5000),
    ),
    tool(
        "wandb_file_to_compare_is_none",
        "compare",
        "a/a.wandb",
        "b/a.wandb",
        make=lambda p: twice(p, "a.wandb", b"\xff" * 99),
    ),
    tool(
        "checkpoint_without_a_step_to_compare",
        "compare",
        "a",
        "b",
        make=lambda p: twice(p, "checkpoint-best/trainer_state.json", "{}"),
    ),
    tool(
        "results_compared_with_a_training",
        "compare",
        "results",
        "a",
        make=lambda p: (results(p), p.write("a/metrics.jsonl", LOGGED)),
    ),
    tool(
        "limit_is_nan", "compare", "a", "a", "--reward_limit", "nan", make=lambda p: p.write("a/metrics.jsonl", LOGGED)
    ),
    tool("unknown_task_to_prepare", "prepare", "gsm9k", "--local_save_dir", "out"),
    tool("source_of_no_split", *PREPARE, "data.jsonl", make=Place.sums),
    tool("cut_off_source", *PREPARE, "train.jsonl", make=lambda p: p.write("train.jsonl", '{"question": "a", "ans')),
    tool(
        "prepare_into_a_file", *PREPARE, "train.jsonl", make=lambda p: (p.sums(name="train.jsonl"), p.write("out", ""))
    ),
    tool("nothing_to_grade", *GRADE, make=lambda p: p.write("in.jsonl", "")),
    tool("no_output_to_grade", *GRADE, make=lambda p: p.rows({"gold": "4"}, name="in.jsonl")),
    tool("output_is_a_number", *GRADE, make=graded(output=4)),
    tool("gold_is_null", *GRADE, make=graded(gold=None)),
    tool("deadline_is_nan", *GRADE, "--deadline_s", "nan", make=graded()),
    tool("unknown_task_to_grade", "grade", "--task", "gsm9k", *GRADE[3:], make=graded()),
    tool("rows_to_grade_in_another_encoding", *GRADE, make=lambda p: p.write("in.jsonl", b"\xff")),
    tool("escape_codes_to_grade", *GRADE, make=lambda p: p.rows({"\x1b[2J": 1}, name="in.jsonl")),
    tool("grades_into_no_folder", *GRADE[:-1], "none/out.jsonl", make=graded()),
    tool("card_is_a_link", *CARD, make=lambda p: (p.adapter(), results(p), link(p, "adapter/README.md"))),
    tool("summary_for_a_card_breaks_off", *CARD, make=lambda p: (p.adapter(), results(p, summary="{"))),
    tool(
        "card_with_broken_fields",
        *CARD,
        make=lambda p: (p.adapter(), results(p), p.write("adapter/README.md", "---\na: [\n---\n")),
    ),
    tool("no_adapter_for_a_card", "card", "adapter", "--results", "results"),
    tool("no_results_for_a_card", "card", "adapter", "--results", "results", make=Place.adapter),
    tool("unknown_model_to_fetch", "fetch", "smollm9", "--output", "out"),
    tool("fetch_into_a_file", "fetch", "smollm2", "--output", "out", make=lambda p: p.write("out", "mine")),
    tool(
        "fetch_into_a_full_folder",
        "fetch",
        "smollm2",
        "--output",
        "out",
        make=lambda p: p.write("out/notes.txt", "mine"),
    ),
    tool("script_of_verl_in_another_encoding", "from-verl", "a.sh", make=lambda p: p.write("a.sh", b"\xff\xfe")),
    tool("script_of_verl_that_doubles_for_ever", "from-verl", "a.sh", make=lambda p: p.write("a.sh", DOUBLING)),
    tool("script_of_verl_nested_too_deep", "from-verl", "a.sh", make=lambda p: p.write("a.sh", "A=" + "$(" * 3000)),
    tool("script_of_verl_without_a_command", "from-verl", "a.sh", make=lambda p: p.write("a.sh", "echo 1\n")),
    tool("configuration_of_verl_is_a_list", "from-verl", "a.yaml", make=lambda p: p.write("a.yaml", "[1]")),
    tool("no_such_script_of_verl", "from-verl", "train.sh"),
    tool("broken_configuration_of_verl", "from-verl", "train.yaml", make=lambda p: p.write("train.yaml", "a: [")),
    tool("unknown_key_of_verl", "from-verl", "--", "algoritm.adv_estimator=grpo"),
]
LAUNCH = [
    Case("launch_with_a_mistake", "launch script", lambda p: p.train(None, training__max_steps=0)),
    Case(
        "launch_with_cut_off_weights",
        "launch script",
        lambda p: p.train(p.sums(), model__model_name_or_path=p.model(model_safetensors=cut)),
    ),
]
CASES = [*DATA, *MODEL, *CONFIGURATION, *FOLDERS_AND_ADAPTERS, *SFT, *EVALUATION, *TOOLS, *LAUNCH]
SLOW = frozenset(
    """
    empty_folder no_such_file unknown_suffix cut_off_parquet not_utf8 row_is_no_object question_is_empty
    messages_without_content no_messages foreign_data_source no_such_image broken_image no_such_split
    names_with_commas bench_without_training_split unknown_task no_such_model adapter_for_a_model no_config
    unknown_architecture no_weights garbage_weights cut_off_tokenizer unknown_model_argument unknown_flag
    no_number no_epochs example_numbers_0 unknown_optimizer unknown_algorithm unknown_adapter_type
    unknown_reward no_such_reward_file reward_file_does_not_compile more_weights_than_rewards
    no_such_validation_data unknown_tracker no_checkpoint_to_go_on_from no_such_recipe recipe_is_no_yaml
    recipe_is_a_text recipe_with_an_unknown_group recipe_with_an_unknown_field a_file_in_the_folders_place
    folder_of_another_run no_such_adapter adapter_of_another_rank broken_adapter_config no_turn_of_the_assistant
    turn_without_a_text messages_and_pairs images_in_a_fine_tuning tools_that_are_no_list nothing_left_to_learn
    launch_with_a_mistake max_completion_length_0 save_steps_0 batch_size_0 negative_seed nan_among_the_weights
    infinite_noise huge_json huge_csv huge_parquet beta_1 unknown_generation_argument no_such_layer
    rank_of_no_layer recipe_is_a_folder a_device_for_data
    """.split()  # noqa: SIM905  # a list of 60 lines says no more
)
"""Cases left to the slow tests: other tests of the suite make the same checks below the command line."""
