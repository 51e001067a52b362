"""python -m perl retool: problems and solutions, what the arms differ in, the chat template that is written for tools;
the whole path on a tiny model is slow."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken

from benchmarks.retool import row_of
from perl.__main__ import main
from perl.base.errors import UserError
from perl.environments.conversation import open_conversations
from perl.environments.python_tool import PythonTool
from perl.environments.tools import load_environment
from perl.models.folders import load_tokenizer
from perl.prompts import ChatTemplate
from perl.tools import arithmetic, course, retool
from perl.tools.arithmetic import Problem
from perl.tools.fetch import MODELS
from tests.environments.calling import CALLS
from tests.environments.scripted import byte_tokenizer, template_of
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PROMPT = [{"role": "user", "content": "?"}]


def rows(**changes) -> dict[str, list[dict]]:
    how = {"seed": 1, "arm": "tool", "sft_rows": 6, "grpo_rows": 8, "held_out": 4, "sandbox": "limits"}
    return {name: list(map(json.loads, part)) for name, part in retool.make_rows(**{**how, **changes}).items()}


def settings(**changes) -> retool.Settings:
    common = {"seed": 1, "model": "smollm2", "data": "hash", "sft_rows": 4, "sft_steps": None, "grpo_steps": None}
    common |= {"held_out": 4, "arm": "tool", "grpo_rows": 4, "sandbox": "limits"}
    return retool.Settings(**{**common, **changes})


def save_bytes(folder: Path, template: str) -> Path:
    """A tiny model of bytes, which has calls of tools for words too, and what is the same in each prompt: bytes of it
    would be more than the recipe's longest prompt."""
    tokenizer = byte_tokenizer("qwen2_5")
    tokenizer.chat_template = template
    row = rows()["sft"][0]
    prompt = tokenizer.apply_chat_template(row["messages"][:1], tools=row["tools"], tokenize=False)
    same = prompt.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
    asked = row["messages"][0]["content"].partition("\n")[2]
    tokenizer.add_tokens([AddedToken(text) for text in (*CALLS, same, asked)])
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_model(vocab_size=len(tokenizer), scale=4.0)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    return folder


def test_values_are_those_of_the_expressions():
    numbers = random.Random(0)
    problems = [arithmetic.make(numbers) for _ in range(200)]
    assert all(problem.value == eval(problem.expression) > 0 for problem in problems)
    assert {len(problem.terms) for problem in problems} == {1, 2, 4}
    assert any(" - " in problem.expression for problem in problems)


def test_a_product_in_writing():
    """1204 * 300 = 361200, 1204 * 7 = 8428; the zero of 307 gives no line. 369628 - 1000 = 368628."""
    problem = Problem("What is 307 times 1204, less 1000?", ((307, 1204), (1000,)), 1)
    assert problem.expression == "307 * 1204 - 1000"
    assert arithmetic.in_writing(problem, PROMPT)["completion"].splitlines() == [
        "1204 * 300 = 361200",
        "1204 * 7 = 8428",
        "361200 + 8428 = 369628",
        "369628 - 1000 = 368628",
        "\\boxed{368628}",
    ]


def test_a_sum_in_writing():
    problem = Problem("What is the sum of 10, 20 and 30?", ((10,), (20,), (30,)))
    completion = arithmetic.in_writing(problem, PROMPT)["completion"]
    assert completion == "10 + 20 = 30\n30 + 30 = 60\n\\boxed{60}"


def test_no_problem_is_in_two_splits_and_the_arms_have_the_same():
    tool, text = rows(), rows(arm="text")
    told = [row["problem"] for name in ("grpo", "test") for row in tool[name]]
    told += [row["messages"][0]["content"].splitlines()[0] for row in tool["sft"]]
    assert len(told) == len(set(told)) == 18
    assert (text["grpo"], text["test"]) == (tool["grpo"], tool["test"])
    for ours, theirs in zip(tool["sft"], text["sft"], strict=True):
        assert ours["messages"][0] == theirs["prompt"][0]
        assert theirs["completion"].endswith(ours["messages"][-1]["content"])
    assert rows(seed=2)["test"] != tool["test"]


def test_other_numbers_of_solutions_leave_the_problems():
    """benchmarks.retool gives each arm as many solutions as come to the same tokens."""
    few, many = rows(), rows(sft_rows=9)
    assert (few["grpo"], few["test"]) == (many["grpo"], many["test"])
    assert many["sft"][:6] == few["sft"]


def test_sft_and_rollout_see_the_same_tokens(tmp_path):
    """The turns of a solution under the template are the prompt of a rollout, the drawn turns with their end, and what
    is observed between them; only what is drawn is marked for the loss."""
    tokenizer = load_tokenizer(str(save_bytes(tmp_path / "model", retool.TEMPLATE.read_text())))
    config = retool.environment(settings())
    template = open_conversations(config, load_environment(config), ChatTemplate(tokenizer)).template
    assert template.lists_tools
    row = rows()["sft"][0]
    call, answer = row["messages"][1], row["messages"][2]
    encoded = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marked = encoded["input_ids"], encoded["assistant_masks"]
    prompt = template.prompt(row["messages"][:1])
    assert ids[: len(prompt)] == prompt
    assert not any(marked[: len(prompt)])
    end = len(prompt) + ids[len(prompt) :].index(template.end) + 1
    assert all(marked[len(prompt) : end])
    drawn = template.message(ids[len(prompt) : end - 1])
    assert drawn["tool_calls"] == call["tool_calls"]
    observed = template.observation([answer])
    assert ids[end : end + len(observed)] == observed
    assert not any(marked[end : end + len(observed)])
    assert marked[end + len(observed)] == 1


def test_a_template_without_tools_is_replaced_in_what_was_fetched_alone(tmp_path):
    model = save_bytes(tmp_path / "mine", template_of("smollm2"))
    with pytest.raises(UserError, match=r"lists no tools; .* put perl/tools/retool_template\.j2 into its folder"):
        retool.tell_of_tools(settings(model=str(model)), tmp_path)
    shutil.copytree(model, tmp_path / "model")
    retool.tell_of_tools(settings(model=next(iter(MODELS))), tmp_path)
    assert load_tokenizer(str(tmp_path / "model")).chat_template == retool.TEMPLATE.read_text()
    retool.tell_of_tools(settings(model=str(tmp_path / "model")), tmp_path)


def test_what_the_arms_differ_in():
    text, tool = settings(arm="text"), settings()
    assert retool.arm_flags(tool, "sft") == ["--config.training.assistant_only_loss", "true"]
    assert retool.arm_flags(text, "sft") == []
    assert '["python"]' in retool.arm_flags(tool, "grpo")
    assert retool.arm_flags(text, "grpo") == ["--config.training.max_completion_length", "256"]


def test_another_arm_needs_another_folder(tmp_path):
    course.open_folder(tmp_path, settings())
    assert course.is_of_this_run(tmp_path, settings())
    with pytest.raises(UserError, match="holds a run with arm tool, not text"):
        course.is_of_this_run(tmp_path, settings(arm="text"))
    with pytest.raises(UserError, match="sandbox limits, not namespaces"):  # whose scores are in folders of their own
        course.is_of_this_run(tmp_path, replace(settings(), sandbox="namespaces"))


def test_a_sandbox_that_can_not_be_had_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(PythonTool, "_try", lambda self, level: "not here" if level == "namespaces" else None)
    command = ["retool", "--output_dir", str(tmp_path / "run"), "--sft_rows", "1", "--grpo_rows", "1"]
    with pytest.raises(UserError, match=r"can't be isolated by namespaces here: not here; .* or require 'limits'"):
        main(command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "flag"),
    [("retool", "held_out"), ("retool", "grpo_rows"), ("retool", "sft_rows"), ("real", "sums"), ("real", "grpo_sums")],
)
def test_more_rows_than_a_script_can_make_are_one_line(tmp_path, command, flag):
    """They were made one by one, for ever."""
    with pytest.raises(UserError, match=rf"^--{flag} {10**12}: a script makes these rows, 100000 at most; write less$"):
        main([command, "--output_dir", str(tmp_path / "run"), f"--{flag}", str(10**12)])
    assert not (tmp_path / "run").exists()


def test_the_sandbox_has_the_name_of_verls_recipe_too():
    from perl.config.schema import EnvironmentConfig

    source = load_environment(EnvironmentConfig(tools=["code_interpreter"], sandbox="limits"))
    with source.opened():
        environment = source.make()
        environment.reset({"prompt": PROMPT})
        call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}}
        shown = environment.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert shown == [{"role": "tool", "name": "code_interpreter", "content": "42"}]


@pytest.mark.slow
def test_all_stages(tmp_path):
    """A model whose vocabulary has whole calls of the tool: the base draws some, and its code really runs."""
    model = save_bytes(tmp_path / "model", retool.TEMPLATE.read_text())
    command = [sys.executable, "-m", "perl", "retool", "--output_dir", str(tmp_path / "run"), "--model", str(model)]
    command += ["--sft_rows", "8", "--grpo_rows", "16", "--held_out", "3", "--sandbox", "limits"]
    command += ["--sft_steps", "2", "--grpo_steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() == {"base", "sft", "grpo", "wall_s", "seed", "arm"}
    for stage in ("base", "sft", "grpo"):
        summary = json.loads((tmp_path / "run" / f"after_{stage}" / "sampled" / "test" / "summary.json").read_text())
        assert (summary["n"], summary["problems"]) == (8, 3)
        assert result[stage]["avg@8"] == round(summary["metrics"]["accuracy"]["value"], 4)
        assert not (tmp_path / "run" / f"after_{stage}" / "merged").exists()
    logged = [json.loads(line) for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "loss" in row] == [1, 2]
    assert "tools/call_frequency" in logged[0]
    line = row_of(tmp_path / "run", tokens=7)
    assert {name: line[name] for name in result} == result
    assert (line["steps"], line["sft_tokens"], line["settings"]["arm"]) == (2, 7, "tool")
    assert line["step_s"] == pytest.approx(sum(row.get("step_time", 0.0) for row in logged) / 2, abs=0.01)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout.count("finished before") == 5
    assert json.loads(again.stdout.splitlines()[-1]) == result
