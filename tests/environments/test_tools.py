"""What environment.tools and environment.factory name, and what is said where it can't be used."""

import json
import os
import re
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from perl.base.errors import UserError
from perl.config.load import parse
from perl.config.schema import DatasetConfig, EnvironmentConfig
from perl.environments import python_tool
from perl.environments.scored import row_of_sample
from perl.environments.tools import ToolUse, columns_of, load_environment
from perl.grading import Grader
from perl.prompts import ChatTemplate
from perl.rewards.files import ROW
from perl.rewards.functions import build_rewards, reward_context
from perl.runs.setup import PROBLEM, build_dataset
from perl.tasks import load_problems
from perl.training.preflight import check_metric, check_patience, check_run, open_conversations
from tests.tiny import tiny_tokenizer

GOOD = '''
import functools

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def bare(a, b):
    return a + b


def untold(a: int) -> int:
    """Say nothing of a."""
    return a


def hinted(a: "list[") -> int:
    """Hinted.

    Args:
        a: One.
    """
    return 1


def unknown(a: "Nowhere") -> int:
    """Unknown.

    Args:
        a: One.
    """
    return 1


def chosen(a: str) -> int:
    """Chosen.

    Args:
        a: One (choices: [x, y])
    """
    return 1


part = functools.partial(add, b=1)


class Game:
    """As TRL's documentation has them."""

    def reset(self, answer: str, **kwargs) -> str | None:
        self.answer = answer
        return "Begin."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: Yours.
        """
        return str(word == self.answer)

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return 1.0


class Adds(Game):
    def add(self, a: int) -> int:
        """Add.

        Args:
            a: One.
        """
        return a


class NoReset:
    def guess(self, word: str) -> str:
        """Guess."""
        return word


class NoTools:
    def reset(self, **row):
        return None


class Talks:
    def reset(self, row):
        return row["prompt"]

    def step(self, message):
        return None


class Asynchronous(Talks):
    async def step(self, message):
        return None


class Chat:
    def reset(self, **kwargs):
        return None

    def step(self, message: str) -> str:
        """Say something.

        Args:
            message: A text.
        """
        return "echo " + message


class ChatOfARow(Chat):
    def reset(self, row: str = ""):
        return None


class Fails:
    def __init__(self):
        raise OSError("no server")


NUMBER = 5
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(GOOD)
    return str(path)


def test_functions_and_a_class_of_trls(file):
    source = load_environment(EnvironmentConfig(tools=[f"{file}:add"], factory=f"{file}:Game"))
    assert [schema["function"]["name"] for schema in source.schemas] == ["add", "guess"]
    assert (source.role, source.rewards, list(source.needed)) == ("tool", True, ["answer"])
    (first,) = source.instances  # made to be looked at, and used
    assert isinstance(first, ToolUse)
    assert sorted(first.tools) == ["add", "guess"]
    row = {
        "prompt": [{"role": "user", "content": "Hello. "}],
        ROW: '{"where": "a.jsonl:1", "data_source": "d", "ground_truth": "g", "extra_info": {"answer": "x"}}',
    }
    assert first.reset(row) == [{"role": "user", "content": "Hello. Begin."}]
    assert row["prompt"][0]["content"] == "Hello. "
    call = {"type": "function", "function": {"name": "guess", "arguments": {"word": "x"}}}
    assert first.step({"role": "assistant", "content": "", "tool_calls": [call]}) == [
        {"role": "tool", "name": "guess", "content": "True"}
    ]
    assert first.step({"role": "assistant", "content": "x"}) is None
    source.check_rows([row])
    with pytest.raises(UserError, match=r"nothing is given to reset as answer for a.jsonl:1; it gets data_source, .*"):
        source.check_rows([row | {ROW: '{"where": "a.jsonl:1", "data_source": "d"}'}])


def test_reset_gets_all_columns_of_a_row(tmp_path, caplog):
    """TRL: "all dataset columns". The evaluator's rows are those of a training."""
    (tmp_path / "env.py").write_text(GOOD)
    row = {"prompt": [{"role": "user", "content": "Play."}], "word": "crane", "level": 3, "answer": "crane", "task": 1}
    pandas.DataFrame([row | {"raw": b"x", "tries": [2, 4]}]).to_parquet(tmp_path / "rows.parquet")
    source = load_environment(EnvironmentConfig(factory=f"{tmp_path}/env.py:Game"))
    data = DatasetConfig(dataset_name_or_path=str(tmp_path / "rows.parquet"))
    dataset = build_dataset(data, ChatTemplate(tiny_tokenizer()), graded=False, columns=True).remove_columns(PROBLEM)
    (problem,) = load_problems(str(tmp_path / "rows.parquet"), graded=False, columns=True)
    sample = SimpleNamespace(problem=problem, messages=problem.messages)
    seen = {"word": "crane", "level": 3, "answer": "crane", "tries": [2, 4], "gold": "crane", "task": problem.task}
    for given in (dataset[0], row_of_sample(sample)):
        columns = columns_of(given)
        assert {name: columns[name] for name in seen} == seen
        assert source.make().reset(given)[-1]["content"] == "Play.Begin."
    told = [line for line in caplog.messages if "is not given" in line]
    assert [line.partition(": ")[2] for line in told[:2]] == [
        "column task is not given to the environment's reset: a column of that name is perl's own; give it another"
        " name",
        "column raw is not given to the environment's reset: bytes is no JSON; store a text or a number",
    ]
    assert load_problems(str(tmp_path / "rows.parquet"), graded=False)[0].columns == {}


def test_no_more_calls_at_once_than_the_sandbox_runs(monkeypatch):
    """One that waits for its turn there would have its seconds counted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100)))
    assert load_environment(EnvironmentConfig(tools=["python"])).at_once == python_tool.MOST_AT_ONCE == 32


def test_an_environment_of_our_own(file):
    source = load_environment(EnvironmentConfig(factory=f"{file}:Talks"))
    assert (source.role, source.schemas, source.rewards) == ("user", [], False)
    assert source.make() is not source.instances[0]


@pytest.mark.parametrize("name", ["Chat", "ChatOfARow"])
def test_a_tool_of_trls_may_be_called_step(name, file):
    source = load_environment(EnvironmentConfig(factory=f"{file}:{name}"))
    assert (source.role, [schema["function"]["name"] for schema in source.schemas]) == ("tool", ["step"])
    made = source.make()
    made.reset({"prompt": [{"role": "user", "content": "x"}]})
    call = {"type": "function", "function": {"name": "step", "arguments": {"message": "hi"}}}
    assert made.step({"role": "assistant", "content": "", "tool_calls": [call]}) == [
        {"role": "tool", "name": "step", "content": "echo hi"}
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": ["pyhton"]}, "--config.environment.tools: unknown tool 'pyhton'; did you mean 'python'? known:"),
        ({"tools": ["FILE:sub"]}, "'sub' is not defined there; functions there: add, bare, untold, hinted"),
        ({"tools": ["FILE:NUMBER"]}, "'NUMBER' is no function"),
        ({"tools": ["none.py:add"]}, "--config.environment.tools: none.py:add: no such file"),
        ({"tools": ["FILE:bare"]}, "bare: Cannot generate JSON schema for bare because it has no docstring!"),
        ({"tools": ["FILE:untold"]}, "a tool has a type hint and, under Args: of its docstring, a line for each"),
        ({"tools": ["FILE:hinted"]}, "hinted: Forward reference must be an expression"),
        ({"tools": ["FILE:unknown"]}, "unknown: name 'Nowhere' is not defined; a tool has a type hint and"),
        ({"tools": ["FILE:chosen"]}, "chosen: Expecting value: line 1 column 2 (char 1); a tool has a type hint"),
        ({"tools": ["FILE:part"]}, "FILE:part: a partial has no name that a model could call; write a def around it"),
        ({"tools": ["FILE:add", "FILE:add"]}, "two tools are called add; give one another name"),
        ({"factory": "FILE:Gone"}, "--config.environment.factory: FILE:Gone: 'Gone' is not defined there"),
        ({"factory": "FILE:Fails"}, "FILE:Fails() raised OSError: no server"),
        ({"factory": "FILE:NoReset"}, "FILE:NoReset has no reset; write def reset(self, **row)"),
        ({"factory": "FILE:NoTools"}, "FILE:NoTools has no public method, which would be a tool"),
        ({"tools": ["FILE:add"], "factory": "FILE:Adds"}, "both have a tool add; rename one"),
        ({"factory": "FILE:Asynchronous"}, "--config.environment.factory: FILE:Asynchronous: step is async; write a"),
        ({"tools": ["FILE:add"], "factory": "FILE:Talks"}, "FILE:Talks has a step of its own, which answers"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_none(fields, said, file):
    def named(value):
        return (
            [each.replace("FILE", file) for each in value] if isinstance(value, list) else value.replace("FILE", file)
        )

    with pytest.raises(UserError, match=re.escape(said.replace("FILE", file))) as caught:
        load_environment(EnvironmentConfig(**{name: named(value) for name, value in fields.items()}))
    assert "\n" not in str(caught.value)


TOOLS = ["--config.environment.tools", '["python"]']


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--config.rollout.workers", "2", "--config.rollout.deadline_s", "30"],
            "--config.environment.tool_timeout_s 30: a worker may say nothing for so long, and"
            " --config.rollout.deadline_s is 30 s; write less, or raise deadline_s",
        ),
        (
            ["--config.rollout.engine", "vllm", "--config.training.vllm_tensor_parallel_size", "2"],
            "--config.training.vllm_tensor_parallel_size 2: processes that share an engine",
        ),
        (
            ["--config.rollout.engine", "vllm", "--config.training.generation_kwargs", '{"stop": ["</tool_call>"]}'],
            "--config.training.generation_kwargs: with --config.environment.tools a completion that a string ends",
        ),
        (
            ["--config.dataset.truncation", "left", "--config.dataset.filter_overlong_prompts", "false"],
            "--config.dataset.truncation left: a prompt that lists tools can't be cut",
        ),
    ],
)
def test_what_several_turns_can_not_be_had_with(flags, said):
    parse(flags)
    with pytest.raises(UserError, match=re.escape(said)):
        parse([*TOOLS, *flags])


def test_a_tool_that_hangs_is_waited_for_in_time(file):
    """1,024 rows of a process are 16 times 64 calls: 16 x 8 turns x 30 s. A validation's 1,000 are 8 times."""
    flags = ["--config.environment.tools", f'["{file}:add"]', "--config.training.per_device_train_batch_size", "64"]
    flags += ["--config.training.gradient_accumulation_steps", "16"]
    validated: Any = SimpleNamespace(problem_sets=[SimpleNamespace(samples=range(1000))])

    def check(*more, processes=2, validation=None):
        config = parse([*flags, *more]).build(processes=processes)
        check_patience(config, load_environment(config.environment), validation)

    with pytest.raises(UserError) as error:
        check()
    assert str(error.value) == (
        "--config.environment.tool_timeout_s 30: with 1024 conversations of a process, 64 calls at once and max_turns 8"
        " other processes may wait 3840 s, and --config.training.ddp_timeout is 1800 s; write less, or raise"
        " ddp_timeout"
    )
    check(processes=1)
    check("--config.training.ddp_timeout", "3841")
    check("--config.rollout.workers", "2")
    with pytest.raises(UserError, match=r"with 500 conversations of a process, .* may wait 1920 s"):
        check("--config.rollout.workers", "2", validation=validated)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": ["FILE:add"]},
        {"tools": ["python", "FILE:add"]},
        {"tools": ["code_interpreter"]},
        {"tools": ["python"], "factory": "FILE:Game"},
        {"factory": "FILE:Talks"},
    ],
)
def test_blocks_of_python_call_python_alone(fields, file):
    """Another tool would be listed nowhere, and none of its calls be read."""
    fields = json.loads(json.dumps(fields).replace("FILE", file))
    with pytest.raises(UserError) as error:
        load_environment(EnvironmentConfig(tool_call_parser="python_fence", **fields))
    assert str(error.value) == (
        "--config.environment.tool_call_parser python_fence: blocks of code are calls of the tool python, and nothing"
        " else can be called; write --config.environment.tools '[\"python\"]' alone, or leave it out"
    )
    load_environment(EnvironmentConfig(tool_call_parser="python_fence", tools=["python"]))


def test_no_function_is_needed_where_an_environment_may_give_the_reward():
    flags = ["--config.reward.functions", "[]"]
    with pytest.raises(UserError, match=r"reward\.functions is empty"):
        parse([*flags, *TOOLS])
    parse([*flags, "--config.environment.factory", "env.py:Game"])


def test_a_reward_function_of_trls_that_needs_environments(tmp_path):
    """Of a run that has none it is refused before a model is loaded."""
    (tmp_path / "reward.py").write_text(
        "def own(environments, **kwargs):\n    return [each.score for each in environments]\n"
    )
    name = f"{tmp_path}/reward.py:own"
    flags = ["--config.reward.functions", f'["{name}"]']
    with Grader() as grader:
        context = reward_context(parse([*TOOLS, *flags]).build(processes=1), grader)
        (own,) = build_rewards([name], context)
        assert own(completions=["a"], environments=[SimpleNamespace(score=0.5)]) == [0.5]
        with pytest.raises(UserError, match="as environments but of conversations, in a training with"):
            build_rewards([name], reward_context(parse(flags).build(processes=1), grader))
        flags += ["--config.rollout.workers", "1"]
        with pytest.raises(UserError, match=r"as environments where rollout\.workers have them; write"):
            build_rewards([name], reward_context(parse([*TOOLS, *flags]).build(processes=1), grader))


def test_dynamic_sampling_by_the_reward_of_an_environment(file, tmp_path):
    """Of one that gives none it is refused before a model is loaded."""
    flags = ["--config.algorithm.dynamic_sampling", "true", "--config.algorithm.dynamic_sampling_metric", "environment"]
    flags += ["--config.environment.factory", f"{file}:Talks"]
    with pytest.raises(UserError, match=r"Talks has no get_reward; write one of accuracy, .*sum"):
        check_run(parse(flags).build(processes=1), tmp_path)
    game = parse([*flags[:-1], f"{file}:Game"]).build(processes=1)
    check_metric(game, load_environment(game.environment))


def test_a_model_that_takes_images_is_refused(file):
    source = load_environment(EnvironmentConfig(tools=[f"{file}:add"]))
    with pytest.raises(UserError, match="a model that takes images answers in one turn"):
        open_conversations(EnvironmentConfig(), source, ChatTemplate(SimpleNamespace(image_processor=None)))


def test_flags_without_effect():
    assert any("environment.max_turns" in line for line in parse(["--config.environment.max_turns", "2"]).warnings)
    assert any("environment.sandbox" in line for line in parse(
        ["--config.environment.tools", '["a.py:f"]', "--config.environment.sandbox", "limits"]).warnings)  # fmt: skip
    assert not parse([*TOOLS, "--config.environment.max_turns", "2"]).warnings
