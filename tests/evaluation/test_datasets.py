import importlib.util
import json
from dataclasses import replace

import pytest

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.evaluation.datasets import given, load_problem_set, load_problem_sets
from perl.prompts import ChatTemplate, PromptStyle, build_messages
from perl.records import Problem, row_seed
from perl.scoring.samples import cluster_of, folder_name, problem_keys, sampling_of_task
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


def problem(question: str, gold: str = "1") -> Problem:
    return Problem(task="gsm8k", question=question, gold=gold)


def test_keys_follow_content_and_occurrence():
    keys = problem_keys([problem("a"), problem("b"), problem("a"), problem("a", gold="2")])
    assert len(set(keys)) == 4
    assert cluster_of(keys[0]) == cluster_of(keys[2])
    assert cluster_of(keys[0]) != cluster_of(keys[3])
    assert keys[0].endswith("-0")
    assert keys[2].endswith("-1")
    assert set(problem_keys([problem("a"), problem("a", gold="2"), problem("b"), problem("a")])) == set(keys)


def test_rows_have_their_own_seeds(config, sums):
    made = load_problem_set(config, ChatTemplate(tiny_tokenizer()), str(sums), "sums")
    assert len(made.keys) == 40
    assert len(made.samples) == 640
    assert len({sample.seed for sample in made.samples}) == 640
    first = made.samples[3]
    assert first.seed == row_seed(0, first.key, 3)
    assert first.prompt_text.startswith("<|user|> What is 0 + 0 ?")
    assert first.problem.gold == "0"


def test_the_chat_template_gets_its_arguments(config, sums):
    """A template that closes the thoughts where enable_thinking is false, as Qwen3's does."""
    tokenizer = tiny_tokenizer(f"{CHAT_TEMPLATE}{{% if enable_thinking is false %}}0 0{{% endif %}}")
    plain = load_problem_set(config, ChatTemplate(tokenizer), str(sums), "sums")
    made = load_problem_set(config, ChatTemplate(tokenizer, {"enable_thinking": False}), str(sums), "sums")
    zero = tokenizer.convert_tokens_to_ids("0")
    for one, other in zip(plain.samples, made.samples, strict=True):
        assert other.token_ids == (*one.token_ids, zero, zero)
        assert other.prompt_text == f"{one.prompt_text}0 0"
    assert "chat_template_kwargs" not in plain.asked
    assert made.asked["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(UserError, match=r"^sums\.jsonl:1: .*: the chat template fails: "):
        load_problem_set(config, ChatTemplate(tokenizer, {"tokenize": True}), str(sums), "sums")


def test_more_samples_keep_the_rows_there_are(config, sums):
    few = load_problem_set(config, ChatTemplate(tiny_tokenizer()), str(sums), "sums")
    more = load_problem_set(replace(config, n=20), ChatTemplate(tiny_tokenizer()), str(sums), "sums")
    again = [replace(sample, sampling=few.sampling) for sample in more.samples]
    assert [sample for sample in few.samples if sample not in again] == []


def test_flags_stand_over_the_tasks_sampling():
    config = EvalConfig(model="m", dataset="d", top_p=0.5, seed=3)
    sampling = sampling_of_task("aime24", given(config))
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.seed) == (32, 1.0, 0.5, 3)
    assert sampling_of_task("aime24", given(EvalConfig(model="m", dataset="d", temperature=0.0))).n == 1
    with pytest.raises(UserError, match="greedy completions"):
        sampling_of_task("gsm8k", given(EvalConfig(model="m", dataset="d", n=4)))
    with pytest.raises(UserError, match="--top_p 0"):
        sampling_of_task("aime24", given(EvalConfig(model="m", dataset="d", top_p=0.0)))


def test_a_sampling_flag_without_a_temperature_gets_a_line(config, sums, caplog):
    greedy = replace(config, temperature=0.0, top_p=0.95, n=1)
    load_problem_set(greedy, ChatTemplate(tiny_tokenizer()), str(sums), "sums")
    assert "is scored greedily: without --temperature --top_p has no effect" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_what_grades_a_file_is_asked_for_before_anything_is_generated(tmp_path, config):
    entry = {"generator": "chain_sum", "settings": "{}", "answer": "5"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "2 + 3 = ?", "answer": json.dumps(entry), "data_source": "reasoning_gym"}))
    with pytest.raises(UserError, match="reasoning-gym, which grades these, is not installed"):
        load_problem_set(replace(config, task="reasoning_gym"), ChatTemplate(tiny_tokenizer()), str(file), "rows")


def test_few_shot_from_the_train_file(tmp_path, config):
    train = [{"question": f"train {i}", "answer": f"a long derivation of {i}, it is {i} #### {i}"} for i in range(3)]
    for split, rows in (("train", train), ("test", [{"question": "test", "answer": "#### 4"}])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = load_problem_set(
        replace(config, few_shot="2", system_prompt="Be brief."), ChatTemplate(tiny_tokenizer()), str(tmp_path), "x"
    )
    assert made.styles["gsm8k"].few_shot == tuple((row["question"], row["answer"]) for row in train[:2])
    text = made.samples[0].prompt_text
    assert text.index("Be brief.") < text.index("train 0") < text.index("derivation of 1") < text.index("test")
    with pytest.raises(UserError, match="holds 3 usable rows"):
        load_problem_set(replace(config, few_shot="5"), ChatTemplate(tiny_tokenizer()), str(tmp_path), "x")


def test_few_shot_examples_must_not_be_scored(tmp_path, config, sums):
    with pytest.raises(UserError, match="among the problems"):
        load_problem_set(replace(config, few_shot="1"), ChatTemplate(tiny_tokenizer()), str(sums), "x")
    shots = tmp_path / "shots.jsonl"
    shots.write_text('{"question": "1 + 1 ?", "answer": "#### 2"}\n')
    made = load_problem_set(replace(config, few_shot=str(shots)), ChatTemplate(tiny_tokenizer()), str(sums), "x")
    assert made.styles["gsm8k"].few_shot == (("1 + 1 ?", "#### 2"),)
    refused = {
        b'{"question": "1 + 1 ?"}\n': r"shots\.jsonl:1: not a row",
        b"\n": r"shots\.jsonl: holds no row",
        b'{"question": "\xff"}\n': r"shots\.jsonl: not readable as UTF-8",
    }
    for content, message in refused.items():
        shots.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_problem_set(replace(config, few_shot=str(shots)), ChatTemplate(tiny_tokenizer()), str(sums), "x")


def test_examples_may_hold_any_line_separator_of_unicode(tmp_path, config, sums):
    shots = tmp_path / "shots.jsonl"
    shots.write_text('{"question": "1\u2028+ 1 ?", "answer": "#### 2"}\n', encoding="utf-8")
    made = load_problem_set(replace(config, few_shot=str(shots)), ChatTemplate(tiny_tokenizer()), str(sums), "x")
    assert made.styles["gsm8k"].few_shot == (("1\u2028+ 1 ?", "#### 2"),)


def test_examples_stand_between_a_rows_own_system_prompt_and_its_question():
    asked = ({"role": "system", "content": "Count."}, {"role": "user", "content": "1 + 2"})
    problem = Problem(task="gsm8k", question="", gold="3", source="", messages=asked)
    style = PromptStyle(system_prompt="Be brief.", few_shot=(("1 + 1", "2"),))
    assert [(m["role"], m["content"]) for m in build_messages(problem, style)] == [
        ("system", "Count."), ("user", "1 + 1"), ("assistant", "2"), ("user", "1 + 2"),
    ]  # fmt: skip


def test_folder_names(tmp_path, config, sums):
    assert folder_name("gsm8k") == "gsm8k"
    assert folder_name("open-r1/DAPO-Math-17k-Processed") == "open-r1_DAPO-Math-17k-Processed"
    assert folder_name(str(sums)) == "sums"
    with pytest.raises(UserError, match=r"would both be written to .*sums"):
        load_problem_sets(
            replace(config, dataset=f"{sums},{sums.parent}/../{sums.parent.name}/sums.jsonl"),
            ChatTemplate(tiny_tokenizer()),
        )
