"""Evaluations whose model calls tools that really run, in workers, and what is left of them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig, parse
from perl.config.schema import EnvironmentConfig
from perl.evaluation.compare import compare
from perl.evaluation.datasets import load_problem_sets
from perl.evaluation.generate import make_job
from perl.evaluation.rescore import rescore
from perl.evaluation.run import evaluate
from perl.evaluation.setup import Setup
from perl.records import Grade
from perl.reports.embed import turns_of
from perl.reports.page import write_report
from perl.scoring.samples import rewarded
from perl.workers.worker import Ready, WeightsSpec
from tests.environments.calling import calling_model, calling_tokenizer, save_calling
from tests.evaluation.conftest import Records, read

ROOT = Path(__file__).parents[2]
HTML = "<script>document.title = 'owned'</script>"
TOOLS = f'''
import os, time


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
        file.write(".")
    if a == 7:
        raise ValueError("{HTML}" + "x" * 100_000)
    return "{HTML}" + str(a + b)


class Sums:
    def reset(self, gold: str, **row) -> str:
        self.gold, self.made = gold, 0
        return " Use the tool."

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.made += 1
        return a + b

    def get_reward(self) -> float | None:
        if self.gold == "0":
            raise RuntimeError("lost")
        return None if self.gold == "1" else self.made - 0.5


class Free(Sums):
    def reset(self, gold: str | None, prompt: list, **row) -> str:
        assert gold is None
        self.given = "1 +" not in prompt[-1]["content"]
        self.made = 0
        return " Use the tool."

    def get_reward(self) -> float | None:
        return self.made - 0.5 if self.given else None


class Slow(Sums):
    def reset(self, **row) -> None:
        time.sleep(5)
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Of a model that calls add, tools.py and five sums."""
    folder = tmp_path_factory.mktemp("environment")
    save_calling(folder / "model")
    rows = [{"question": f"What is {i} + 0 ?", "answer": f"so #### {i}"} for i in range(5)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.py").write_text(TOOLS)
    return folder


@pytest.fixture(scope="module")
def config(made) -> EvalConfig:
    environment = EnvironmentConfig(tools=[f"{made}/tools.py:add"], max_turns=3, max_observation_tokens=24)
    asked = {"n": 4, "temperature": 1.0, "max_new_tokens": 96, "environment": environment}
    return EvalConfig(model=str(made / "model"), dataset=str(made / "sums.jsonl"), **asked)


def flags_of(config: EvalConfig, folder: Path) -> list[str]:
    words = ["--model", config.model, "--dataset", config.dataset, "--result_dir", str(folder), "--n", "4"]
    words += ["--temperature", "1", "--max_new_tokens", "96", "--environment.max_observation_tokens", "24"]
    return [*words, "--environment.tools", json.dumps(config.environment.tools), "--environment.max_turns", "3"]


@pytest.fixture(scope="module")
def scored(config, tmp_path_factory) -> Path:
    """By the command line."""
    folder = tmp_path_factory.mktemp("scored")
    command = [sys.executable, str(ROOT / "perl/eval.py"), *flags_of(config, folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def observed(records: Records) -> list[str]:
    messages = [m for record in records.values() for m in record["conversation"]["messages"]]
    return [message["content"] for message in messages if message["role"] == "tool"]


@pytest.mark.slow
def test_each_turn_stands_in_the_samples_and_in_the_page(scored):
    """What tools say is cut, and nothing of it is markup in the page."""
    records = read(scored)
    assert len(records) == 20
    for record in records.values():
        talked = record["conversation"]
        turns = [message for message in talked["messages"] if message["role"] == "assistant"]
        assert len(turns) == talked["turns"] <= 3
        assert record["completion"] == talked["messages"][-1]["content"] == turns[-1]["content"]
        assert (talked["observed_tokens"] > 0) == (talked["turns"] > 1)
        assert record["tokens"] + talked["observed_tokens"] <= 96
        assert talked["reward"] is None
        assert record["error"] is None
    said = observed(records)
    assert any(HTML in each and each.endswith("5") for each in said) or any("5" in each for each in said)
    assert any("\n…\n" in each for each in said)
    page = (scored / "report.html").read_text()
    assert "owned" not in page  # samples are deflated data
    assert "max_observation_tokens 24" in page
    summary = json.loads((scored / "sums/summary.json").read_text())
    assert summary["environment"]["max_turns"] == 3


@pytest.mark.slow
def test_an_interrupted_one_goes_on_without_asking_again(scored, config, made, tmp_path):
    """What was done is taken from the store; the rest is what it would have been, with other neighbours and fewer at
    once."""
    file = tmp_path / "sums/samples.jsonl"
    file.parent.mkdir()
    lines = (scored / "sums/samples.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:15]) + lines[15][:40])
    (tmp_path / "sums/run.json").write_text((scored / "sums/run.json").read_text())
    (made / "calls").write_text("")
    evaluate(replace(config, result_dir=str(tmp_path), max_batch_tokens=160))
    assert read(tmp_path) == read(scored)
    done = [(record["key"], record["sample"]) for record in map(json.loads, lines[:15])]
    rest = [record for place, record in read(scored).items() if place not in done]
    turns = [message for record in rest for message in record["conversation"]["messages"] if "tool_calls" in message]
    assert len((made / "calls").read_text()) <= sum(len(message["tool_calls"]) for message in turns)
    evaluate(replace(config, result_dir=str(tmp_path)))
    comparison = compare(scored, tmp_path)
    assert comparison.datasets["sums"].changed == {}
    assert comparison.differs == []
    before = read(tmp_path)
    rescore(EvalConfig(model="", dataset="", result_dir=str(tmp_path), rescore=True))
    assert read(tmp_path) == before
    other = replace(config.environment, max_turns=2)
    with pytest.raises(UserError, match=r"environment\.max_turns was 3, is 2"):
        evaluate(replace(config, result_dir=str(tmp_path), environment=other))


@pytest.mark.slow
def test_an_environments_own_reward_is_the_score(config, made, tmp_path):
    """Held between 0 and 1; where it has no opinion the grader decides, and where it raises the sample has failed."""
    environment = EnvironmentConfig(factory=f"{made}/tools.py:Sums", max_turns=3)
    summary = evaluate(replace(config, result_dir=str(tmp_path), environment=environment))["sums"]
    records = read(tmp_path).values()
    for record in records:
        assert record["prompt"].count("Use the tool.") == 1  # as reset has changed it
        if record["gold"] == "0":
            assert record["error"].startswith("RuntimeError: lost (tools.py:")
            assert (record["score"], record["completion"]) == (0.0, "")
        elif record["gold"] == "1":
            assert record["conversation"]["reward"] is None
            assert "environment" not in record["scores"]
        else:
            assert record["score"] == min(1.0, max(0.0, record["conversation"]["reward"]))
    assert summary["not_generated"] == 4
    assert summary["metrics"]["avg@4"]["value"] == sum(record["score"] for record in records) / 20
    before = read(tmp_path)
    rescore(EvalConfig(model="", dataset="", result_dir=str(tmp_path), rescore=True))
    assert read(tmp_path) == before


@pytest.mark.slow
def test_rows_without_an_answer_are_scored_by_an_environment_that_rewards_alone(config, made, tmp_path):
    """Where it has no opinion the sample has failed, which is said."""
    (tmp_path / "asked.jsonl").write_text("".join(f'{{"question": "What is {i} + 0 ?"}}\n' for i in range(3)))
    asked = replace(config, dataset=str(tmp_path / "asked.jsonl"), result_dir=str(tmp_path / "results"))
    with pytest.raises(UserError, match=r"asked\.jsonl:1: there is no answer to grade by; add a column answer"):
        evaluate(asked)
    summary = evaluate(replace(asked, environment=EnvironmentConfig(factory=f"{made}/tools.py:Free", max_turns=3)))
    records = read(tmp_path / "results", "asked")
    for record in records.values():
        reward = record["conversation"]["reward"]
        assert (record["task"], record["gold"], record["extracted"]) == ("", "", None)
        if "1 +" in record["prompt"]:
            assert record["error"] == "get_reward gave None, and the row has no answer that a task grades"
            assert (reward, record["score"], record["reason"]) == (None, 0.0, "error")
        else:
            assert record["score"] == min(1.0, max(0.0, reward)) == record["scores"]["environment"]
    assert any(record["score"] > 0 for record in records.values())
    assert (summary["asked"]["tasks"], summary["asked"]["grading"], summary["asked"]["not_generated"]) == ([""], {}, 4)
    rescore(EvalConfig(model="", dataset="", result_dir=str(tmp_path / "results"), rescore=True))
    assert read(tmp_path / "results", "asked") == records
    assert "by its environment" in write_report(tmp_path / "results").read_text()


@pytest.mark.slow
def test_an_environment_that_hangs_fails_its_samples_alone(config, made, tmp_path):
    environment = EnvironmentConfig(factory=f"{made}/tools.py:Slow", tool_timeout_s=0.2)
    summary = evaluate(replace(config, result_dir=str(tmp_path), environment=environment, max_samples=2, n=1))["sums"]
    assert summary["not_generated"] == 2
    errors = {record["error"] for record in read(tmp_path).values()}
    assert errors == {"no answer within 0.2 s (environment.tool_timeout_s)"}


def test_a_worker_that_starts_later_does_not_take_other_tools(config, tmp_path):
    """A user goes on writing the file while rows are scored."""
    tools = tmp_path / "tools.py"
    tools.write_text(TOOLS)
    setup = Setup.of(replace(config, environment=EnvironmentConfig(tools=[f"{tools}:add"])))
    (problem_set,) = load_problem_sets(setup.config, setup.template)
    job = pickle.loads(pickle.dumps(make_job(setup, problem_set.samples)))
    weights, inbox = WeightsSpec(str(setup.model), "auto"), None  # which has a part in what comes after Ready alone
    assert str(tools) in job.paths(weights)
    assert isinstance(next(job.serve(weights, inbox)), Ready)
    tools.write_text(TOOLS.replace("a + b", "a - b"))
    with pytest.raises(UserError, match=f"{tools} is not what it was when the workers began"):
        next(job.serve(weights, inbox))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_has_the_same_conversations(config, made, tmp_path):
    """Greedy in float32, as transformers has them. The best token of each first turn is 0.2 ahead of the next."""
    pytest.importorskip("vllm")
    calling_model(seed=175).save_pretrained(made / "calls_first")
    calling_tokenizer().save_pretrained(made / "calls_first")
    greedy = replace(config, model=str(made / "calls_first"), n=1, temperature=0.0)
    evaluate(replace(greedy, result_dir=str(tmp_path / "hf")))
    vllm = replace(greedy, use_vllm=True, enforce_eager=True, gpu_memory_utilization=0.3, dp_size=2)
    evaluate(replace(vllm, result_dir=str(tmp_path / "vllm")))
    hf, other = read(tmp_path / "hf"), read(tmp_path / "vllm")
    ours, theirs = ({place: row["conversation"] for place, row in rows.items()} for rows in (hf, other))
    assert all(talked["observed_tokens"] for talked in ours.values())
    assert theirs == ours


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--environment.max_turns", "2"], "--environment.max_turns: has no effect without --environment.tools"),
        (["--environment.tool_call_parser", "hermes"], "--environment.tool_call_parser: has no effect without"),
    ],
)
def test_what_can_not_be_meant(flags, said):
    with pytest.raises(UserError, match=f"^{said}"):
        parse(["--model", "m", "--dataset", "gsm8k", *flags])


def test_errors_name_the_evaluators_flags(config, tmp_path):
    missing = EnvironmentConfig(tools=[f"{tmp_path}/no.py:add"])
    with pytest.raises(UserError, match=r"^--environment\.tools: .*no\.py:add: no such file"):
        evaluate(replace(config, environment=missing, result_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("reward", "score", "reason"),
    [(-2.0, 0.0, "wrong"), (0.25, 0.25, "wrong"), (1.0, 1.0, "correct"), (9, 1.0, "correct")],
)
def test_a_reward_as_a_score(reward, score, reason):
    graded = rewarded(Grade(score=1.0, scores={"strict": 1.0}, extracted="5", reason="correct"), reward)
    assert graded == Grade(score=score, scores={"strict": 1.0, "environment": score}, extracted="5", reason=reason)


def test_turns_as_the_page_shows_them():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "x" * 200},
        {"role": "assistant", "content": ""},
    ]
    said = turns_of({"conversation": {"messages": messages}}, 60)  # type: ignore[typeddict-item]
    assert said is not None
    assert [who for who, _ in said] == ["call", "tool", "assistant"]
    assert said[0][1] == '{"name": "add", "arguments": {"a": 1}}'
    assert said[1][1].startswith("x" * 30 + "\n\n[… 140 characters are left out")
