"""Trainings whose model calls tools that really run."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from perl.adapters import ADAPTERS
from perl.algorithms import ALGORITHMS
from perl.base.errors import RunError
from perl.config.evaluation import EvalConfig
from perl.config.schema import EnvironmentConfig, NoiseConfig
from perl.environments.tools import EnvironmentSource
from perl.evaluation.run import evaluate
from perl.reports.page import write_report
from perl.scoring.results import read_samples
from tests.environments.calling import calling_model, calling_tokenizer, save_calling
from tests.environments.scripted import talking
from tests.environments.training import fields_of, tokens, toolful
from tests.folders import metrics, write_sums
from tests.ranks import reports
from tests.tiny import END
from tests.trainers import SUMS
from tests.training.poison import Steps
from tests.training.small_run import SETTINGS, small_run
from tests.training.test_other_engines import in_a_process, on_cpu

ROOT = Path(__file__).parents[2]
UNKNOWN = 1
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Sums:
    def reset(self, gold: str, **row) -> str | None:
        self.gold, self.seen = gold, []
        return None

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.seen.append(a + b)
        if self.gold == "5":
            raise RuntimeError("no")
        return a + b

    def get_reward(self) -> float:
        return len(self.seen) / 10


def calls(completions, environments=None, **kwargs):
    return [sum(m["role"] == "tool" for m in c) + len(c[-1]["content"]) / 1000 for c in completions]
'''


def test_the_trainer_computes_what_was_drawn(tmp_path):
    """Log-probabilities of drawn tokens by a plain forward of the model before it is trained: those of the sampler. The
    others are in no mask."""
    trainer, batches = toolful(tmp_path, max_steps=1)
    model = trainer.policy.bare
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    (batch,) = batches
    model.eval()
    worst = 0.0
    for row, mask in zip(batch.rows, batch.mask.tolist(), strict=True):
        assert mask[: len(row.sampled)] == row.sampled
        assert not any(mask[len(row.sampled) :])
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids]])
        with torch.no_grad():
            logps = model(input_ids=ids).logits[0].float().log_softmax(-1)
        for place, (token, drawn, said) in enumerate(zip(row.token_ids, row.sampled, row.logprobs, strict=True)):
            assert math.isnan(said) != drawn
            if drawn:
                worst = max(worst, abs(logps[len(row.prompt_ids) + place - 1, token].item() - said))
    assert worst < 1e-4
    assert any(not all(row.sampled) for row in batch.rows)
    assert all(row.environment is None for row in batch.rows)
    (log,) = [row for row in trainer.state.log_history if "loss" in row]
    assert log["completions/mean_length"] == sum(sum(row.sampled) for row in batch.rows) / len(batch.rows)
    assert log["turns/mean"] == sum(row.turns for row in batch.rows) / len(batch.rows) > 1
    made = [call for row in batch.rows for message in row.completion for call in message.get("tool_calls", [])]
    answered = [m["content"] for row in batch.rows for m in row.completion if m["role"] == "tool"]
    assert {"5", "8"} <= set(answered)
    cut_off = sum(len(row.completion[-1].get("tool_calls", [])) for row in batch.rows if row.finish == "length")
    assert log["tools/call_frequency"] == pytest.approx((len(made) - cut_off) / len(batch.rows))
    assert 0 < log["tools/failure_frequency"] < 1
    assert log["environment/failure_frequency"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(tmp_path, name):
    """Two steps; the first would end where sampler and trainer are more than 1e-3 nats apart."""
    trainer, batches = toolful(tmp_path, **fields_of(name), prompts=SUMS[:8])
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(row["loss"]) for row in logs)
    assert any(row["grad_norm"] > 0 for row in logs)
    assert any(row.turns > 1 for batch in batches for row in batch.rows)
    assert logs[0]["rollout/logp_mismatch"] < 1e-3
    if ALGORITHMS[name].greedy:
        assert all(len(row.baseline) == 1 for batch in batches for row in batch.rows)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_and_all_weights(tmp_path, name):
    trainer, batches = toolful(tmp_path, adapter=name, **({"learning_rate": 1e-3} if name == "none" else {}))
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(row["loss"]) for row in logs)
    assert any(row.turns > 1 for batch in batches for row in batch.rows)
    assert all(row["rollout/logp_mismatch"] < 1e-3 for row in logs)


def test_one_draw_of_noise_for_all_turns(tmp_path):
    """The noisy policy is the old one: the trainer recomputes each drawn token of each turn with that draw."""
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=0.5, sigma_end=0.1, old_logps="noisy")
    trainer, batches = toolful(tmp_path, noise=noise)
    trainer.train()
    for batch in batches:
        assert batch.old is not None
        assert batch.sampler is not None
        assert any(row.turns > 1 for row in batch.rows)
        assert (batch.old - batch.sampler)[batch.mask].abs().max() < 1e-3


def test_what_fails_teaches_nothing(tmp_path):
    """Of a conversation that could not go on nothing counts in its group's statistics."""
    trainer, batches = toolful(tmp_path)
    conversations = trainer.conversations
    observation = conversations.template.observation

    def sometimes(messages):
        if any("error" in message["content"] for message in messages):
            raise ValueError("no such messages")
        return observation(messages)

    conversations.template.observation = sometimes
    trainer.train()
    failed = [(row, batch, place) for batch in batches for place, row in enumerate(batch.rows) if row.failure]
    assert failed
    for row, batch, place in failed:
        assert batch.advantages is not None
        assert math.isnan(row.rewards[0])
        assert not (batch.advantages[place] * batch.mask[place]).any()
    share = sum(row.failure is not None for row in batches[0].rows) / len(batches[0].rows)
    assert trainer.state.log_history[0]["environment/failure_frequency"] == share


class Broken:
    def reset(self, row):
        raise RuntimeError("no database")

    def step(self, message):
        raise NotImplementedError


def broken(folder: Path, **settings: Any) -> tuple[Any, Steps]:
    """A trainer all of whose conversations fail at their reset."""
    conversations = talking(calling_tokenizer(), source=EnvironmentSource(make=Broken, role="user"))
    trainer, _ = toolful(folder, conversations=conversations, callbacks=[steps := Steps()], **settings)
    return trainer, steps


@pytest.mark.parametrize("algorithm", [{}, {"dynamic_sampling": True}])
def test_conversations_that_all_fail_end_the_run_in_one_line(tmp_path, algorithm):
    trainer, _ = broken(tmp_path, algorithm=algorithm)
    with pytest.raises(RunError, match=r"^step 1: no reward of reward_tokens for any of the"):
        trainer.train()


@pytest.mark.parametrize("loss", ["dapo", "bnpo"])  # of the latter each micro-batch keeps its rows
def test_conversations_that_all_fail_make_no_update_where_such_are_skipped(tmp_path, loss):
    correction = {"rollout": {"importance_correction": "token"}}
    trainer, steps = broken(tmp_path, loss_type=loss, on_nonfinite="skip", max_steps=2, weight_decay=0.5, **correction)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert trainer.nonfinite.skipped == 2
    assert all(torch.equal(steps.weights[-1][name], weight) for name, weight in before.items())
    assert trainer.step.comparison.tolerance is None  # sampler and trainer are still to be compared


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_what_ends_a_turn_in_the_template_ends_a_completion(tmp_path, engine):
    """A base model's own end is another token."""
    model, tokenizer = calling_model(eos_token_id=UNKNOWN, scale=6.0), calling_tokenizer()
    tokenizer.eos_token = "<unk>"
    trainer, batches = toolful(tmp_path, max_steps=1, model=model, tokenizer=tokenizer, engine=engine)
    assert trainer.conversations.template.end == END
    trainer.train()
    turns = [row.turns for batch in batches for row in batch.rows]
    ends = [row.sampled_ids.count(END) + row.sampled_ids.count(UNKNOWN) for batch in batches for row in batch.rows]
    cut_off = [row.finish == "length" for batch in batches for row in batch.rows]
    assert max(turns) > 1
    assert all(n - cut <= end <= n for n, end, cut in zip(turns, ends, cut_off, strict=True))


def test_completions_are_logged_whatever_their_calls_have_as_arguments(tmp_path):
    """A column of Arrow has one type: of texts and numbers, or of no argument at all, there is none."""
    trainer, batches = toolful(tmp_path, max_steps=1, log_completions=True)
    template, arguments = trainer.conversations.template, itertools.cycle([{"a": "é\ud800"}, {"a": 3}, {}])
    parser = template.parser

    def parsed(text):
        rest, calls = parser(text)
        return rest, [{**call, "function": call["function"] | {"arguments": next(arguments)}} for call in calls]

    template.parser = parsed
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    (batch,) = batches
    table = pandas.read_parquet(file)
    assert sorted(map(str, map(json.loads, table["completion"]))) == sorted(str(row.completion) for row in batch.rows)
    assert [json.loads(text)[0]["role"] for text in table["prompt"]] == ["user"] * len(batch.rows)


def test_a_resumed_run_draws_the_same(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole, all_batches = toolful(tmp_path, **saving)
    whole.train()
    torch.manual_seed(123)
    resumed, rest = toolful(tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert tokens(rest) == tokens(all_batches)[1:]
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in resumed.model.named_parameters())


def test_two_processes_draw_what_one_does(tmp_path):
    trainer, batches = toolful(tmp_path / "alone")
    trainer.train()
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    launcher += [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.environments.training"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*launcher, str(tmp_path)], cwd=ROOT, env=env, check=True, timeout=300, capture_output=True)
    first, second = reports(tmp_path)
    both = [one | other for one, other in zip(first, second, strict=True)]
    assert both == json.loads(json.dumps(tokens(batches)))


def by_vllm(folder: Path) -> dict:
    """Two steps with vLLM in this process (a child)."""
    on_cpu()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_calling(folder / "model"))
    settings = {"engine": "vllm", "use_vllm": True, "vllm_max_model_length": 160}
    trainer, batches = toolful(folder, model=model, **settings)
    trainer.train()
    rows = [row for batch in batches for row in batch.rows]
    return {
        "mismatch": [row["rollout/logp_mismatch"] for row in trainer.state.log_history if "loss" in row],
        "turns": [row.turns for row in rows],
        "ends": [row.turns - row.sampled_ids.count(END) - (row.token_ids[-1] != END) for row in rows],
        "longest": max(len(row.token_ids) for row in rows),
    }


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_takes_the_same_feed(tmp_path):
    """In bfloat16, as vLLM chooses. A turn ends by one end-of-turn token, or is cut off."""
    found = in_a_process(by_vllm, tmp_path)
    assert max(found["mismatch"]) < 0.1
    assert max(found["turns"]) > 1
    assert set(found["ends"]) == {0}
    assert found["longest"] <= 64


# The command line


@pytest.fixture
def folder(tmp_path):
    """Of a model that calls add and python."""
    save_calling(tmp_path / "model")
    write_sums(tmp_path / "sums.jsonl")
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def logged(run: Path) -> list[dict]:
    rows = metrics(run)
    return [row for row in rows if "loss" in row]


def test_tools_on_the_command_line(folder):
    """One of the user's own and Python, which runs in its sandbox."""
    words = ["--config.environment.tools", f'["{folder}/tools.py:add","python"]', "--config.environment.max_turns", "3"]
    words += ["--config.environment.sandbox", "limits", "--config.training.max_completion_length", "64"]
    words += ["--config.reward.functions", f'["accuracy","{folder}/tools.py:calls"]']
    run = small_run(folder, "run", *words)
    rows = logged(run)
    assert len(rows) == int(SETTINGS["training.max_steps"])
    assert all(row["tools/call_frequency"] > 0 and row["turns/mean"] > 1 for row in rows)
    log = (folder / "run.log").read_text()
    assert "Python tool: " in log
    assert "the system prompt does, as Qwen's does" in log


def test_an_environment_of_trls_on_the_command_line(folder):
    """Its reward is the only one, and the score of a validation, as perl/eval.py has it."""
    words = ["--config.environment.factory", f"{folder}/tools.py:Sums", "--config.reward.functions", "[]"]
    words += ["--config.training.max_completion_length", "64", "--config.reward.weights", "null"]
    words += ["--config.validation.datasets", f'["{folder}/sums.jsonl"]', "--config.validation.max_new_tokens", "64"]
    words += ["--config.validation.n", "2", "--config.validation.temperature", "1"]
    words += ["--config.validation.save_best", "true"]
    run = small_run(folder, "run", *words)
    rows = logged(run)
    assert all("rewards/environment/mean" in row for row in rows)
    assert any(row["reward"] > 0 for row in rows)
    environment = EnvironmentConfig(factory=f"{folder}/tools.py:Sums")
    asked = {"n": 2, "temperature": 1.0, "max_new_tokens": 64, "environment": environment}
    evaluate(EvalConfig(str(folder / "model"), str(folder / "sums.jsonl"), str(folder / "results"), **asked))
    before, evaluated = (
        read_samples(each / "sums/samples.jsonl") for each in (run / "validation/step-0", folder / "results")
    )
    assert {key: record["conversation"] for key, record in before.items()} == {
        key: record["conversation"] for key, record in evaluated.items()
    }
    assert any(record["conversation"]["turns"] > 1 for record in before.values())
    assert any(0 < record["score"] == record["conversation"]["reward"] for record in before.values())
    assert (run / "best/best.json").is_file()
    (first,) = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["step"] == 0]
    assert first["val-core/openai/gsm8k/acc/mean@2"] == pytest.approx(
        sum(record["score"] for record in before.values()) / len(before)
    )
    assert first["val-aux/openai/gsm8k/turns"] > 1
    assert write_report(run).is_file()


def test_rows_without_an_answer_are_trained_and_validated_on_by_an_environments_reward(folder):
    asked = folder / "asked.jsonl"
    asked.write_text("".join(json.dumps({"question": f"What is {i} + 3 ?"}) + "\n" for i in range(8)))
    words = ["--config.environment.factory", f"{folder}/tools.py:Sums", "--config.reward.functions", "[]"]
    words += ["--config.dataset.dataset_name_or_path", str(asked), "--config.validation.datasets", f'["{asked}"]']
    words += ["--config.training.max_completion_length", "64", "--config.validation.max_new_tokens", "64"]
    run = small_run(folder, "run", *words, "--config.reward.weights", "null")
    assert any(row["reward"] > 0 for row in logged(run))
    records = read_samples(run / "validation/step-0/asked/samples.jsonl").values()
    assert all(record["score"] == record["conversation"]["reward"] for record in records)
    (first,) = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["step"] == 0]
    scores = [record["score"] for record in records]
    assert first["val-core/asked/acc/mean@1"] == pytest.approx(sum(scores) / len(scores))
