"""How conversations go on and end: each end with its tokens, its finish and its reward."""

import asyncio
import copy
import enum
import functools
import gc
import json
import math
import pickle
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from perl.environments.scored import converse, trajectory_of
from perl.environments.tools import EnvironmentSource, ToolUse, methods_of
from perl.environments.waiting import Waiting
from perl.grading import Grader
from perl.records import Completion, Prompt, Sampling, Trajectory, row_seed
from perl.rewards.deadline import RewardDeadline
from perl.rewards.files import import_named, load_reward
from perl.rewards.functions import RewardContext, build_rewards
from perl.rewards.score import Rewards, environment, of_environments
from perl.training.batch import Batch
from tests.environments.scripted import (
    Scripted,
    add,
    byte_tokenizer,
    rows_of,
    talking,
    text_completion,
)

ROOT = Path(__file__).parents[2]
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOKENIZER = byte_tokenizer("qwen2_5")


def saying(*texts: str | None, end: str = END) -> Scripted:
    """Every row says these texts, turn by turn; one that ends with a … is cut off."""

    def say(prompt):
        turns = prompt.token_ids.count(TOKENIZER.convert_tokens_to_ids("<|im_start|>"))
        text = texts[(turns - 3) // 2] or ""
        return text_completion(TOKENIZER, text.removesuffix("…"), None if text.endswith("…") else end)

    return Scripted(say)


def talk(engine: Scripted, *tools, count: int = 1, budget: int = 10_000, context: int = 10**6, **settings: Any):
    conversations = talking(TOKENIZER, *(tools or (add,)), **settings)
    return list(conversations.run(rows_of(conversations, count, budget, context), engine))


def shown(row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.completion]


@pytest.mark.parametrize("failing", [0, 20])
def test_a_scored_conversation_begins_when_others_have_ended(failing):
    """Of 60 two for each of the engine's 4 rows go on at once, on as many environments, in one stream: the processes
    that a model is split over make as many. Also where the first ones all fail before a turn."""

    class Environment:
        made = 0

        def __init__(self):
            Environment.made += 1

        def reset(self, row):
            if row["number"] < failing:
                raise ValueError("no")
            return row["prompt"]

        def step(self, message):
            return None

    class Counting(Scripted):
        streams = 0

        def stream(self, feed):
            self.streams += 1
            return super().stream(feed)

    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Environment, role="user"))
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = tuple(conversations.template.prompt(question))
    prompt = Prompt(token_ids=ids, seed=0, sampling=Sampling(max_new_tokens=50))
    rows = [{"prompt": question, "number": number} for number in range(60)]
    asked = [trajectory_of(prompt, str(row["number"]), 0, row, None) for row in rows]
    engine = Counting(lambda prompt: text_completion(TOKENIZER, "5", END))
    found = dict(converse(conversations, engine, asked))
    assert [found[number].text for number in range(60)] == [""] * failing + ["5"] * (60 - failing)
    assert engine.streams == 1
    assert Environment.made <= 8 + failing
    assert len(conversations.source.instances) == Environment.made - failing


@pytest.mark.parametrize(("context", "failure"), [(4096, None), (None, "the prompt's ")])
def test_what_reset_adds_takes_no_tokens_of_a_score_as_of_no_training(context, failure):
    """It was taken of max_new_tokens, and every sample was wrong where the training was fine."""

    class Long(Guess):
        def reset(self, gold, **kwargs):
            return super().reset(gold) + "x" * 500

    conversations = talking(TOKENIZER, source=guesses(Long))
    (row,) = rows_of(conversations, 1, gold="7")
    prompt = Prompt(token_ids=row.prompt_ids, seed=0, sampling=Sampling(max_new_tokens=50))
    asked = trajectory_of(prompt, "0", 0, row.row, context)
    ((_, talked),) = converse(conversations, saying("7"), [asked])
    assert (talked.error or "").startswith(failure or "")
    assert (talked.error is None) == (failure is None)


def test_a_call_its_result_and_the_answer():
    (row,) = talk(saying(f"so {CALL}", "5"))
    assert row.completion == [
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}],
        },
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    assert (row.turns, row.finish, row.failure) == (2, "stop", None)
    text = TOKENIZER.decode(row.token_ids)
    assert text == f"so {CALL}{END}\n<|im_start|>user\n<tool_response>\n5\n</tool_response>{END}\n<|im_start|>assistant\n5{END}"  # noqa: E501  # fmt: skip
    assert TOKENIZER.decode(row.sampled_ids) == f"so {CALL}{END}5{END}"


def test_several_calls_of_a_turn_and_ones_that_fail():
    """TRL's words; the model is told, and goes on."""
    other = CALL.replace("add", "sub")
    lacking = CALL.replace(', "b": 3', "")
    (row,) = talk(saying(f"{CALL}\n{other}\n{lacking}\n<tool_call>add</tool_call>", "5"))
    assert [content for role, content in shown(row) if role == "tool"] == [
        "5",
        str({"error": "Tool sub not found."}),
        str({"error": "add() missing 1 required positional argument: 'b'"}),
        str({"error": "the call is no JSON: Expecting value: line 1 column 1 (char 0)"}),
    ]
    assert row.environment.outcomes == [False, True, True, True]


def test_a_tool_that_raises_or_leaves_or_waits():
    async def wait(seconds: int) -> str:
        """Wait.

        Args:
            seconds: So long.
        """
        return f"waited {seconds}"

    def leave(code: int) -> str:
        """Leave.

        Args:
            code: Of the process.
        """
        raise SystemExit(code)

    calls = [
        json.dumps({"name": name, "arguments": {key: 3}}) for name, key in (("wait", "seconds"), ("leave", "code"))
    ]
    (row,) = talk(saying("".join(f"<tool_call>{call}</tool_call>" for call in calls), "so"), wait, leave)
    assert [content for role, content in shown(row) if role == "tool"] == ["waited 3", str({"error": "3"})]


def test_the_last_turn_that_is_allowed_is_made_and_not_answered():
    made = []

    def note(a: int, b: int) -> str:
        """Note.

        Args:
            a: One.
            b: Two.
        """
        made.append((a, b))
        return "noted"

    call = CALL.replace("add", "note")
    (row,) = talk(saying(call, call, call), note, max_turns=2)
    assert [role for role, _ in shown(row)] == ["assistant", "tool", "assistant"]
    assert (row.turns, row.finish, made) == (2, "stop", [(2, 3)] * 2)
    assert row.sampled[-1]


def test_a_long_result_is_seen_as_the_policy_sees_it():
    def long(a: int, b: int) -> str:
        """Long.

        Args:
            a: One.
            b: Two.
        """
        return "abcdefgh" * a

    (row,) = talk(saying(CALL.replace("add", "long"), "5"), long, max_observation_tokens=4)
    assert shown(row)[1] == ("tool", "ab\n…\ngh")
    assert "\nab\n…\ngh\n</tool_response>" in TOKENIZER.decode(row.token_ids)


def test_a_turn_that_is_cut_off_is_not_stepped():
    (row,) = talk(saying(f"{CALL}…", "5"))
    assert (row.turns, row.finish) == (1, "length")
    assert [role for role, _ in shown(row)] == ["assistant"]


@pytest.mark.parametrize("by", ["budget", "context"])
@pytest.mark.parametrize("spare", [0, 1])
def test_an_observation_needs_room_for_a_token_behind_it(by, spare):
    """The budget counts all tokens behind the prompt, observed ones too, the context those of the prompt besides."""
    (whole,) = talk(saying(CALL, "5"))
    last = len(TOKENIZER(f"5{END}")["input_ids"])
    before = len(whole.token_ids) - last
    prompt = len(whole.prompt_ids)
    limit = {"budget": before + spare} if by == "budget" else {"context": prompt + before + spare}
    engine = saying(CALL, "5…")
    (row,) = talk(engine, **limit)
    assert row.finish == "length"
    assert row.turns == 1 + spare
    assert [role for role, _ in shown(row)] == ["assistant", "tool", "assistant"][: 1 + 2 * spare]
    assert row.sampled[-1]
    assert engine.prompts[-1].sampling.max_new_tokens == (1 if spare else (limit.get("budget") or before))


def test_a_turn_may_end_by_another_token():
    """Llama's end of a message, which calls a tool, is not that of a turn; each stands there once."""
    tokenizer = byte_tokenizer("llama3_1")
    conversations = talking(tokenizer, add)
    texts = iter([('{"name": "add", "parameters": {"a": 2, "b": 3}}', "<|eom_id|>"), ("5", "<|eot_id|>")])
    engine = Scripted(lambda prompt: text_completion(tokenizer, *next(texts)))
    (row,) = conversations.run(rows_of(conversations, 1), engine)
    assert tokenizer.decode(row.token_ids) == (
        '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"5"'
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n5<|eot_id|>"
    )


def test_rewards_see_what_was_drawn():
    (row,) = talk(saying(CALL, "5"))
    seen = {}

    def reward(completions, completion_ids, **others):
        seen.update(completions=completions, completion_ids=completion_ids)
        return [1.0]

    Rewards([reward], ["reward"], torch.ones(1), decode=TOKENIZER.decode).score([row], None)
    assert seen["completion_ids"] == [row.sampled_ids]
    assert len(row.sampled_ids) < len(row.token_ids)
    assert seen["completions"] == [row.completion]


def test_the_overlong_punishment_counts_what_the_budget_counts():
    """Half of the last 100 tokens of the budget are used, most of them by what was observed."""
    (row,) = talk(saying(CALL, "5"))
    with Grader() as grader:
        context = RewardContext(grader=grader, max_completion_length=len(row.token_ids) + 50, overlong_cache_length=100)
        (overlong,) = build_rewards(["overlong"], context)
    Rewards([overlong], ["overlong"], torch.ones(1), decode=TOKENIZER.decode).score([row], None)
    assert row.rewards == [-0.5]


@pytest.mark.parametrize("many", ["", "s"])
def test_a_reward_in_verls_form_has_the_whole_response(many, tmp_path):
    """verl decodes all behind the prompt, and counts the prompt, two turns of the policy and an observation."""
    (tmp_path / "reward.py").write_text(
        f"def compute_score(solution_str{many}, extra_info{many}):\n"
        f"    seen.append((solution_str{many}, extra_info{many}))\n    return {'[0.5]' if many else 0.5}\nseen = []\n"
    )
    name = f"{tmp_path}/reward.py:compute_score"
    facts = {"where": "a.jsonl:1", "data_source": "d", "ground_truth": "5", "extra_info": {"index": 7}}
    conversations = talking(TOKENIZER, add)
    (row,) = conversations.run(rows_of(conversations, 1, row=json.dumps(facts)), saying(CALL, "5"))
    (function,) = RewardDeadline(60, "").over([name], [load_reward(name, {})])
    decode = functools.partial(TOKENIZER.decode, skip_special_tokens=True)
    Rewards([function], ["compute_score"], torch.ones(1), decode=decode).score([row], None)
    response = f"{CALL}\nuser\n<tool_response>\n5\n</tool_response>\nassistant\n5"
    info = {"index": 7, "num_turns": 4}
    assert import_named(name).__globals__["seen"] == [([response], [info]) if many else (response, info)]
    assert row.rewards == [0.5]


def test_each_turn_has_a_seed_of_its_own():
    """The first one's is that of a completion without tools."""
    seeds = [row_seed(1, "stream-3", 2, turn) for turn in range(3)]
    assert seeds[0] == row_seed(1, "stream-3", 2)
    assert len(set(seeds)) == 3


def test_a_conversation_that_is_over_is_not_kept():
    """A worker's stream goes on for a whole evaluation."""
    conversations = talking(TOKENIZER, add)
    told, alive = [0], []

    def coming():
        for place in range(20):
            while told[0] < place - 3:  # four are under way, so that the stream goes on
                yield None
            yield rows_of(conversations, 1)[0]

    for row in conversations.run(coming(), saying(CALL, "5")):
        conversations.free([row])
        assert (row.turns, row.failure) == (2, None)
        told[0] += 1
        alive.append(sum(type(each) is Trajectory for each in gc.get_objects()))
    assert len(alive) == 20
    assert alive[-1] <= alive[0]


def test_a_turn_names_the_one_that_it_follows():
    engine = saying(CALL, CALL, "5")
    talk(engine, max_turns=3)
    assert [(prompt.follows, prompt.followed) for prompt in engine.prompts] == [(None, True), (0, True), (1, False)]


# Threads


def test_other_rows_are_drawn_while_a_tool_is_at_work():
    """Row 0's tool waits for row 1's answer, which a loop that stops for tools would never come to."""
    answered = threading.Event()

    def ask(a: int, b: int) -> str:
        """Ask.

        Args:
            a: One.
            b: Two.
        """
        return "yes" if answered.wait(60) else "no"

    def say(prompt):
        if prompt.sampling.seed == 1:
            turns = sum(each.sampling.seed == 1 for each in engine.prompts)
            if turns < 3:
                return text_completion(TOKENIZER, CALL, END)  # a tool that answers at once
            answered.set()
            return text_completion(TOKENIZER, "5", END)
        first = sum(each.sampling.seed == 0 for each in engine.prompts) == 1
        return text_completion(TOKENIZER, CALL.replace("add", "ask") if first else "5", END)

    engine = Scripted(say)
    rows = talk(engine, add, ask, count=2)
    assert [row.position for row in rows] == [1, 0]
    assert shown(rows[1])[1] == ("tool", "yes")


def test_each_turn_and_each_answer_is_a_sign_of_life():
    """Of two rows: an environment made, its reset, a turn, its call, another turn and no call after the last."""
    conversations = talking(TOKENIZER, add)
    signs = []
    conversations.on_turn = lambda: signs.append(1)
    rows = rows_of(conversations, 2)
    engine = saying(CALL, "5")
    found = list(conversations.run(rows, engine))
    assert [row.turns for row in found] == [2, 2]
    assert len(signs) == 2 * 6  # the end of the last turn is the environment's affair too


def test_rows_come_while_others_are_under_way():
    """As a worker's do: those that have ended are handed on before the sender is waited for, though the engine had
    nothing of them to draw."""
    conversations = talking(TOKENIZER, add)
    rows = rows_of(conversations, 4)
    for row in rows[::2]:
        row.asked = replace(row.asked, longest=0)
    told: list[int] = []

    def coming():
        for place, row in enumerate(rows):
            while len(told) < place:  # a row comes once the one before has been told of
                yield None
            yield row

    for row in conversations.run(coming(), saying("5")):
        told.append(row.position)
    assert told == [0, 1, 2, 3]
    assert [row.failure is None for row in rows] == [False, True, False, True]


def test_a_tool_that_takes_too_long_is_an_error_to_the_model():
    """What it says later is heard by nobody, and its thread keeps nothing from ending."""
    never, begun = threading.Event(), threading.Event()

    def hang(a: int, b: int) -> str:
        """Hang.

        Args:
            a: One.
            b: Two.
        """
        begun.set()
        never.wait(60)
        return "late"

    calls = f"{CALL}{CALL.replace('add', 'hang')}{CALL}"
    (row,) = talk(saying(calls, "5"), add, hang, tool_timeout_s=0.3)
    assert begun.is_set()
    error = str({"error": "no answer within 0.3 s"})
    assert [content for role, content in shown(row) if role == "tool"] == ["5", error, error]
    assert row.environment.outcomes == [False, True, True]
    assert row.failure is None
    never.set()


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise UserError('wrong')", 2, "error: wrong"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_process_ends_though_threads_of_a_tool_go_on(last, code, said):
    """Python would join those of executors, asyncio's own too."""
    program = f"""if True:
        import asyncio, atexit, sys, time
        from concurrent.futures import ThreadPoolExecutor
        from perl.base.errors import UserError, report_errors
        from tests.environments.test_conversation import asked, saying, talk

        async def awaited(word: str) -> str:
            '''Awaited.

            Args:
                word: For it.
            '''
            await asyncio.to_thread(time.sleep, 10_000)
            return "late"

        def executed(word: str) -> str:
            '''Executed.

            Args:
                word: For it.
            '''
            return ThreadPoolExecutor(1).submit(time.sleep, 10_000).result()

        atexit.register(lambda: sys.stdout.write("end"))
        with report_errors():
            (row,) = talk(saying(asked("awaited"), asked("executed"), "so"), awaited, executed, tool_timeout_s=0.3)
            sys.stdout.write(f"{{row.outcomes}} ")
            {last}
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (code, "[True, True] end")
    assert said in done.stderr


@pytest.mark.parametrize("late", [0.0, 1.5])
def test_a_tool_that_holds_the_interpreters_lock_ends_the_process_with_its_stack(late):
    """No thread could leave it: each needs the lock. One that has answered in time ends nothing; one that was left as
    late, and takes the lock then, does."""
    program = """if True:
        import re, sys, time
        from tests.environments.test_conversation import asked, saying, talk

        def grep(word: str) -> str:
            '''Grep.

            Args:
                word: In it.
            '''
            time.sleep(float(sys.argv[1]) if len(word) > 1 else 0.0)
            return str(re.match("(a+)+$", word))

        talk(saying(asked("grep"), "so"), grep, tool_timeout_s=0.5)
        time.sleep(7)
        sys.stdout.write("in time")
        sys.stdout.flush()
        talk(saying(asked("grep").replace('"a"', '"%sb"' % ("a" * 99)), "so"), grep, tool_timeout_s=0.5)
        time.sleep(60)
    """
    command = [sys.executable, "-c", program, str(late)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "in time")
    assert done.stderr.startswith("Timeout (0:00:0")
    assert "in grep\n" in done.stderr


def test_a_call_has_the_context_of_whoever_talks():
    """As TRL's calls, which are in its own thread: decimal's precision stands in a context variable."""

    def third(word: str) -> str:
        """Third.

        Args:
            word: None.
        """
        return str(Decimal(1) / Decimal(3))

    async def awaited(word: str) -> str:
        """Awaited.

        Args:
            word: None.
        """
        return third(word)

    with localcontext(prec=5):
        (row,) = talk(saying(asked("third") + asked("awaited"), "so"), third, awaited)
    assert [content for role, content in shown(row) if role == "tool"] == ["0.33333", "0.33333"]


def test_no_further_call_is_begun_where_very_many_hang(monkeypatch):
    """Of four turns three hang; the fourth's call is not begun. (The names: other tests leave threads behind too.)"""
    never = threading.Event()
    monkeypatch.setattr("perl.environments.conversation.MOST_THREADS", 3)
    monkeypatch.setattr("perl.environments.conversation.THREADS", "of this test")

    def hang(a: int, b: int) -> str:
        """Hang.

        Args:
            a: One.
            b: Two.
        """
        never.wait(60)
        return "late"

    (row,) = talk(saying(*[CALL.replace("add", "hang")] * 5), hang, tool_timeout_s=0.3)
    assert (row.turns, row.outcomes) == (4, [True] * 3)
    assert str(row.failure).startswith("RuntimeError: 3 calls of tools and environments hang; no further")
    never.set()


def test_a_system_without_further_threads_fails_a_conversation():
    """No thread has a stack of 64 TiB."""
    usual = threading.stack_size(1 << 46)
    try:
        (row,) = talk(saying("5"))
    finally:
        threading.stack_size(usual)
    assert str(row.failure).startswith("RuntimeError: can't start new thread (threading.py:")


def paying(may: threading.Event):
    """A tool that waits until it may, and the amounts that it was asked for."""
    paid = []

    def pay(a: int, b: int) -> int:
        """Pay.

        Args:
            a: One.
            b: Two.
        """
        paid.append(a)
        may.wait(60)
        return a

    return pay, paid


def test_what_took_too_long_makes_no_further_calls():
    """The model is told that they were not made."""
    may = threading.Event()
    pay, paid = paying(may)
    calls = "".join(CALL.replace("add", "pay").replace("2", str(amount)) for amount in (10, 20, 30))
    before = set(threading.enumerate())
    (row,) = talk(saying(calls, "5"), pay, tool_timeout_s=0.2)
    may.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert paid == [10]
    assert [content for role, content in shown(row) if role == "tool"] == [str({"error": "no answer within 0.2 s"})] * 3


def test_a_turn_that_is_late_before_it_begins():
    """Its thread, once it runs, makes no call, and the turn before it keeps its results."""
    tools = ToolUse({"add": add})
    tools.reset({"prompt": []})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    first, second = ({"role": "assistant", "content": "", "tool_calls": [call]} for _ in range(2))
    error = {"role": "tool", "name": "add", "content": str({"error": "no answer within 1 s"})}
    assert tools.timed_out(first, 1.0) == [error]
    assert tools.step(first) is None
    assert tools.step(second) == [{"role": "tool", "name": "add", "content": "5"}]
    assert tools.timed_out(dict(second), 1.0) == [error]
    assert tools.outcomes == [True, False, True]


def test_a_turn_of_very_many_calls():
    """16 are made, and the texts of all answers together are as long as one may be."""
    may = threading.Event()
    may.set()
    pay, paid = paying(may)
    many = CALL.replace("add", "pay").replace("2", "123456789") * 200
    (row,) = talk(saying(many, "5"), pay, budget=10**5, max_observation_tokens=17 * 4)
    assert len(paid) == 16
    answers = [content for role, content in shown(row) if role == "tool"]
    assert answers == ["12\n…\n89"] * 16 + ["{'\n…\n'}"]
    (row,) = talk(saying(many, "5"), pay, budget=10**5, max_observation_tokens=17 * 100)
    assert "184 further ones are not" in shown(row)[17][1]


# Environments


class Guess:
    """TRL's form: the number in the row is to be guessed."""

    def __init__(self):
        self.made = 0

    def reset(self, gold: str, **kwargs) -> str | None:
        self.number, self.tries = int(gold), []
        self.made += 1
        return f" Guess from 0 to {len(gold) * 10}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Yours.
        """
        self.tries.append(number)
        if number == 99:
            raise KeyError("99")
        return "right" if number == self.number else "wrong"

    def get_reward(self) -> float:
        return float(self.number in self.tries)


def guesses(kind: type = Guess) -> EnvironmentSource:
    from transformers.utils import get_json_schema

    return EnvironmentSource(
        make=lambda: ToolUse({}, kind()),
        schemas=[get_json_schema(method) for method in methods_of(kind()).values()],
        rewards=True,
    )


def guess(number: int) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


def test_an_environment_of_trls_form():
    conversations = talking(TOKENIZER, source=guesses())
    rows = rows_of(conversations, 2, gold="7")
    texts = {0: [guess(3), guess(7), "7"], 1: [guess(99), "3"]}
    engine = Scripted(lambda prompt: text_completion(TOKENIZER, texts[prompt.sampling.seed].pop(0), END))
    list(conversations.run(rows, engine))
    first, second = rows
    assert first.row["prompt"] == [{"role": "user", "content": "What is 2 + 3? Guess from 0 to 10."}]
    assert list(first.prompt_ids) == conversations.template.prompt(first.row["prompt"])
    assert [content for role, content in shown(first) if role == "tool"] == ["wrong", "right"]
    assert [content for role, content in shown(second) if role == "tool"] == [str({"error": "'99'"})]
    assert (first.environment_reward, second.environment_reward) == (1.0, 0.0)
    asked = []

    def user(environments, environment_rewards, completions, **kwargs):
        asked.append([each.tries for each in environments])
        return [float(len(completion)) for completion in completions]

    Rewards([user, environment], ["user", "environment"], torch.ones(2), decode=TOKENIZER.decode).score(rows, None)
    assert asked == [[[3, 7], [99]]]
    assert [row.rewards for row in rows] == [[5.0, 1.0], [3.0, 0.0]]
    conversations.free(rows)
    again = rows_of(conversations, 2, gold="8")
    list(conversations.run(again, saying("8")))
    assert [row.environment.instance.made for row in again] == [2, 2]  # constructed once, reset for each
    assert rows[0].environment is None


class Broken(Guess):
    def reset(self, gold: str, **kwargs) -> Any:
        if gold == "1":
            raise KeyError("missing")
        self.number, self.tries = int(gold), []
        return 5 if gold == "2" else None

    def get_reward(self) -> Any:
        return "none" if self.number == 3 else None if self.number == 4 else 1.0


def test_what_an_environment_raises_is_the_failure_of_its_trajectory():
    """Its functions are not asked, its reward is NaN, its group's others go on."""
    conversations = talking(TOKENIZER, source=guesses(Broken))
    rows = [rows_of(conversations, 1, gold=str(number))[0] for number in range(5)]
    for place, row in enumerate(rows):
        row.position = place
    list(conversations.run(rows, saying("5")))
    reasons = [row.failure and row.failure.partition(" (")[0] for row in rows]
    assert reasons == [
        None,
        "KeyError: 'missing'",
        "TypeError: reset gave 5, which is no text",
        "ValueError: could not convert string to float: 'none'",
        None,
    ]
    assert "test_conversation.py:" in (rows[1].failure or "")
    functions = [lambda completions, **_: [2.0] * len(completions), environment]
    Rewards(functions, ["two", "e"], torch.ones(2), decode=TOKENIZER.decode).score(rows, None)
    assert [str(row.rewards) for row in rows] == ["[2.0, 1.0]", *["[nan, nan]"] * 3, "[2.0, nan]"]
    metrics: dict[str, list[float]] = defaultdict(list)
    conversations.measure(rows, metrics)
    assert metrics["environment/failure_frequency"] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert metrics["turns/mean"] == [1.0, 0.0, 0.0, 1.0, 1.0]
    batch = Batch.of(rows, torch.device("cpu"), False, max(len(row.token_ids) for row in rows), False)
    assert [bool(row.any()) for row in batch.mask] == [True, False, False, False, True]  # nor is one trained on


def test_a_reset_may_change_its_row():
    """Each sample of a prompt has a row of its own, and what it adds to the prompt is read by the model."""

    class Adds(Guess):
        def reset(self, prompt, gold, **row):
            prompt[-1]["content"] += " extra"
            return super().reset(gold)

    conversations = talking(TOKENIZER, source=guesses(Adds))
    rows = rows_of(conversations, 3, gold="5")
    given = rows[0].row
    before = copy.deepcopy(given)
    list(conversations.run(rows, saying("5")))
    assert [row.failure for row in rows] == [None] * 3
    assert given == before
    assert [row.row["prompt"][-1]["content"].count("extra") for row in rows] == [1] * 3
    assert " extra Guess from" in TOKENIZER.decode(rows[0].prompt_ids)


def test_a_tool_may_change_its_arguments():
    """Rewards, samples.jsonl and checkpoints have them as they were drawn."""

    def order(items: list[dict]) -> int:
        """Order.

        Args:
            items: Them.
        """
        items[0]["price"] = Decimal("1.5")
        items.append({})
        return len(items)

    call = '<tool_call>{"name": "order", "arguments": {"items": [{"id": 1}]}}</tool_call>'
    (row,) = talk(saying(call, "so"), order)
    assert shown(row)[1] == ("tool", "2")
    assert row.completion[0]["tool_calls"][0]["function"]["arguments"] == {"items": [{"id": 1}]}


def test_a_step_may_change_its_message():
    class Own:
        def reset(self, row):
            return row["prompt"]

        def step(self, message):
            message["content"], message["seen"] = "", {1}

    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Own, role="user"))
    (row,) = conversations.run(rows_of(conversations, 1), saying("5"))
    assert row.completion == [{"role": "assistant", "content": "5"}]


def test_an_environment_that_hangs_is_a_failure_and_is_made_anew():
    never = threading.Event()

    class Hangs(Guess):
        def guess(self, number: int) -> str:
            """Guess.

            Args:
                number: Yours.
            """
            never.wait(60)
            return "late"

    conversations = talking(TOKENIZER, source=guesses(Hangs), tool_timeout_s=0.2)
    rows = rows_of(conversations, 1, gold="7")
    list(conversations.run(rows, saying(guess(7), "7")))
    assert rows[0].failure == "no answer within 0.2 s (environment.tool_timeout_s)"
    conversations.free(rows)
    assert conversations.source.instances == []
    never.set()


def test_an_environment_that_is_made_too_late_is_free_for_the_next_row():
    """Its own is over, and may be in a checkpoint: what is made holds a lock."""
    may = threading.Event()
    quick = guesses()

    def make() -> Any:
        may.wait(60)
        return quick.make()

    conversations = talking(TOKENIZER, source=replace(quick, make=make), tool_timeout_s=0.2)
    rows = rows_of(conversations, 1, gold="7")
    before = set(threading.enumerate())
    list(conversations.run(rows, saying("7")))
    conversations.free(rows)
    may.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert rows[0].failure == "no answer within 0.2 s (environment.tool_timeout_s)"
    assert (rows[0].environment, len(conversations.source.instances)) == (None, 1)
    conversations.config = replace(conversations.config, tool_timeout_s=60.0)
    (again,) = conversations.run(rows_of(conversations, 1, gold="7"), saying("7"))
    assert (again.failure, again.environment.instance.made) == (None, 1)
    batch = Batch.of([again], torch.device("cpu"), False, len(again.token_ids), False)
    assert Batch.restored(pickle.loads(pickle.dumps(batch.state()))).rows[0].environment is None


class Dialogue:
    """Our own form: asks again until a 7 is said."""

    def reset(self, row):
        return [{"role": "system", "content": "Say seven."}, *row["prompt"]]

    def step(self, message):
        if "7" in message["content"]:
            return None
        if message["content"] == "odd":
            return [{"role": "critic", "content": "no"}]
        return "no" if message["content"] == "text" else [{"role": "user", "content": "Again?"}]


def test_an_environment_of_our_own_form():
    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Dialogue, role="user"))
    rows = rows_of(conversations, 3)
    texts = {0: ["5", "6", "7"], 1: ["text"], 2: ["odd"]}
    engine = Scripted(lambda prompt: text_completion(TOKENIZER, texts[prompt.sampling.seed].pop(0), END))
    list(conversations.run(rows, engine))
    assert shown(rows[0]) == [
        ("assistant", "5"), ("user", "Again?"), ("assistant", "6"), ("user", "Again?"), ("assistant", "7"),
    ]  # fmt: skip
    assert TOKENIZER.decode(rows[0].prompt_ids).startswith("<|im_start|>system\nSay seven.<|im_end|>")
    assert rows[1].failure == "step gave 'no', no list of messages, each with role and content"
    assert rows[2].failure == "the chat template shows nothing of messages of role critic"


class Untellable(Exception):
    def __str__(self) -> str:
        raise ValueError


class Odd:
    """Raises or says what its row holds."""

    def reset(self, row: dict) -> list:
        self.said = row["said"]
        if isinstance(self.said, Exception):
            raise self.said
        return row["prompt"]

    def step(self, message: dict) -> list:
        return [{"role": "user", "content": "and", **self.said}]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"name": 3}, "whose name is no text"),
        ({"at": {1, 2}}, "whose fields are no JSON"),
        ({"at": Odd}, "whose fields are no JSON"),
        ({"at": float("nan")}, "whose fields are no JSON"),
        ({"at": "\ud800"}, "whose fields are no JSON"),
        ({"role": "\ud800"}, "whose fields are no JSON"),
        ({"tool_calls": "abc"}, "which the model alone makes"),
        (ValueError("a\ud800\nb"), r"ValueError: a\ud800 b (test_conversation.py:"),
        (ValueError("x" * 10**6), f"ValueError: {'x' * 500}… ("),
        (Untellable(), "Untellable: its text can't be had: ValueError ("),
    ],
)
def test_what_no_file_takes_is_a_failure(said, why):
    """It would end whatever writes the conversation down, and with it all others."""
    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Odd, role="user"))
    (row,) = conversations.run(rows_of(conversations, 1, said=said), saying("5", "6"))
    assert why in (row.failure or "")
    json.dumps([row.failure, row.completion], ensure_ascii=False).encode()


def test_further_fields_of_a_message_are_kept():
    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Odd, role="user"), max_turns=2)
    (row,) = conversations.run(rows_of(conversations, 1, said={"at": [1.5]}), saying("5", "6"))
    assert row.failure is None
    assert row.completion
    assert row.completion[1] == {"role": "user", "content": "and", "at": [1.5]}


class Role(enum.StrEnum):
    USER = "user"


@pytest.mark.parametrize("said", [{"role": Role.USER}, {"of": [Role.USER]}, {"content": Role.USER}])
def test_a_text_of_the_users_own_kind_becomes_a_text(said):
    """A process that has not run the user's file, as a Ray actor, could not read it."""
    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Odd, role="user"), max_turns=2)
    (row,) = conversations.run(rows_of(conversations, 1, said=said), saying("5", "6"))
    assert row.failure is None
    assert "Role" not in repr([row.completion, row.row["prompt"]])


def test_timed_out_of_an_environment_is_its_own_affair():
    """It was called, and what it raised ended the run."""
    never = threading.Event()

    class Held(Dialogue):
        timed_out = True

        def step(self, message):
            never.wait(60)

    conversations = talking(TOKENIZER, source=EnvironmentSource(make=Held, role="user"), tool_timeout_s=0.3)
    (row,) = conversations.run(rows_of(conversations, 1), saying("5"))
    assert row.failure == "no answer within 0.3 s (environment.tool_timeout_s)"
    never.set()


@pytest.mark.parametrize("outcomes", [None, "won", lambda: [1]])
def test_outcomes_of_an_environment_are_its_own_affair(outcomes):
    """They were taken for those of tools."""
    made = Dialogue()
    made.outcomes = outcomes  # type: ignore[attr-defined]
    conversations = talking(TOKENIZER, source=EnvironmentSource(make=lambda: made, role="user"))
    (row,) = conversations.run(rows_of(conversations, 1), saying("7"))
    assert (row.failure, row.outcomes) == (None, [])


def test_what_the_engine_could_not_draw_is_a_failure():
    (row,) = talk(Scripted(lambda prompt: Completion.failed("too long")))
    assert (row.failure, row.token_ids) == ("too long", [])


def test_a_prompt_that_leaves_no_room():
    (row,) = talk(saying("5"), context=20)
    assert "leave no room in a context of 20" in (row.failure or "")


def test_what_reset_has_added_and_has_no_room_is_not_kept():
    """The trainer computes all rows of its batch, those that have failed too."""

    class Long(Guess):
        def reset(self, gold, **kwargs):
            return "x" * 5000

    conversations = talking(TOKENIZER, source=guesses(Long))
    rows = rows_of(conversations, 1, context=4096, gold="7")
    before = rows[0].prompt_ids, rows[0].row
    list(conversations.run(rows, saying("7")))
    assert rows[0].failure == f"the prompt's {len(before[0]) + 5000} tokens leave no room in a context of 4096"
    assert (rows[0].prompt_ids, rows[0].row) == before


def test_a_tool_that_raises_what_no_exception_is_ends_its_conversation_at_once():
    """asyncio's own, or Rust's panics: nobody waits for its time to be over."""

    def cancelled(a: int, b: int) -> str:
        """Cancelled.

        Args:
            a: One.
            b: Two.
        """
        raise asyncio.CancelledError("of another task")

    (row,) = talk(saying(CALL.replace("add", "cancelled"), "so"), cancelled, tool_timeout_s=20.0)
    assert str(row.failure).startswith("CancelledError: of another task (test_conversation.py:")


@pytest.mark.parametrize("given", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_as_one_of_a_function(given):
    """NaN would be none: common.on_nonfinite says what becomes of it."""

    class Gives(Guess):
        def get_reward(self):
            return given

    conversations = talking(TOKENIZER, source=guesses(Gives))
    (row,) = conversations.run(rows_of(conversations, 1, gold="7"), saying("7"))
    rewards = Rewards([environment], ["environment"], torch.ones(1), decode=TOKENIZER.decode)
    rewards.score([row], None)
    assert (row.environment_reward, row.rewards, len(rewards.infinite([row]))) == (math.inf, [math.inf], 1)


def test_a_reward_gets_the_instances_whatever_their_truth():
    class Empty(Guess):
        def __len__(self):
            return 0

    class Own:
        instance = "a connection"

    held = [ToolUse({}, Empty()), Own(), ToolUse({"add": add})]
    rows = [Trajectory(row={}, position=0, sample=0, prompt_ids=(1,), environment=each) for each in held]
    assert of_environments(rows)["environments"] == [held[0].instance, held[1], held[2]]


def test_a_tool_is_called_by_the_name_that_the_model_is_told():
    class Looks:
        def reset(self, **row):
            return None

        def _look(self, word: str) -> str:
            """Look.

            Args:
                word: For it.
            """
            return f"seen {word}"

        look = _look

    conversations = talking(TOKENIZER, source=replace(guesses(Looks), rewards=False))
    (name,) = [schema["function"]["name"] for schema in conversations.source.schemas]
    (row,) = conversations.run(rows_of(conversations, 1), saying(asked(name), "so"))
    assert shown(row)[1] == ("tool", "seen a")


def asked(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"word": "a"}}}}\n</tool_call>'


def test_asynchronous_tools_share_a_loop():
    """A queue that one call has made, and its task, serve the next; a semaphore of the module those of all rows."""
    one = asyncio.Semaphore(1)
    loops, most, now = [], [], [0]

    async def search(word: str) -> str:
        """Search.

        Args:
            word: For it.
        """
        loops.append(asyncio.get_running_loop())
        async with one:
            now[0] += 1
            most.append(now[0])
            await asyncio.sleep(0.02)
            now[0] -= 1
        return f"found {word}"

    rows = talk(saying(asked("search"), asked("search"), "so"), search, count=4)
    assert [content for row in rows for role, content in shown(row) if role == "tool"] == ["found a"] * 8
    assert (len(loops), len(set(loops)), set(most)) == (8, 1, {1})


def test_asynchronous_calls_of_a_turn_go_on_together():
    """Each waits for the other; their results stand in the order of the calls, around that of one that is not async."""
    came = {word: asyncio.Event() for word in "ab"}

    async def meet(word: str, other: str) -> str:
        """Meet.

        Args:
            word: Of this one.
            other: Of the other one.
        """
        came[word].set()
        await came[other].wait()
        return f"{word} has met {other}"

    def add(a: int) -> int:
        """Add.

        Args:
            a: To it.
        """
        return a + 1

    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    turn = call("meet", word="b", other="a") + "\n" + call("add", a=1) + "\n" + call("meet", word="a", other="b")
    (row,) = talk(saying(turn, "so"), meet, add, tool_timeout_s=30)
    assert [content for role, content in shown(row) if role == "tool"] == ["b has met a", "2", "a has met b"]
    assert row.outcomes == [False, False, False]


def test_what_a_turn_has_answered_in_time_is_shown():
    """Behind a call that is late, too."""

    async def wait(seconds: float) -> str:
        """Wait.

        Args:
            seconds: So long.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    turn = "\n".join(
        f'<tool_call>\n{{"name": "wait", "arguments": {{"seconds": {n}}}}}\n</tool_call>' for n in (60, 0.0)
    )
    (row,) = talk(saying(turn, "so"), wait, tool_timeout_s=0.5)
    late = str({"error": "no answer within 0.5 s"})
    assert [content for role, content in shown(row) if role == "tool"] == [late, "waited 0.0"]
    assert row.outcomes == [True, False]


def test_an_asynchronous_tool_that_is_late_is_cancelled():
    ended, loops = [], []

    async def late(word: str) -> str:
        """Late.

        Args:
            word: For it.
        """
        loops.append(asyncio.get_running_loop())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(word)
            raise
        return "late"

    error = str({"error": "no answer within 0.3 s"})
    for _ in range(2):
        (row,) = talk(saying(asked("late"), "so"), late, tool_timeout_s=0.3)
        assert shown(row)[1:] == [("tool", error), ("assistant", "so")]
    assert (ended, len(set(loops))) == (["a", "a"], 1)


def test_a_late_turn_begins_no_further_asynchronous_calls():
    """The first takes its time before it is awaited, so that the turn is over when it has begun."""
    begun, ended, over = [], [], threading.Event()

    async def answer(word: str) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(word)
            over.set()
            raise
        return word

    def slow(word: str):
        """Slow to begin.

        Args:
            word: For it.
        """
        begun.append(word)
        over.wait(2)
        return answer(word)

    turn = "\n".join(
        f'<tool_call>\n{{"name": "slow", "arguments": {{"word": "{word}"}}}}\n</tool_call>' for word in "ab"
    )
    talk(saying(turn, "so"), slow, tool_timeout_s=0.3)
    assert over.wait(30)
    assert (begun, ended) == (["a"], ["a"])


def test_an_asynchronous_tool_that_does_not_await_holds_itself_alone():
    never = threading.Event()

    async def held(word: str) -> str:
        """Held.

        Args:
            word: For it.
        """
        never.wait(60)
        return "late"

    async def search(word: str) -> str:
        """Search.

        Args:
            word: For it.
        """
        return "found"

    async def leave(word: str) -> str:
        """Leave.

        Args:
            word: For it.
        """
        raise SystemExit(3)

    turns = [asked(name) for name in ("held", "search", "leave", "search")]
    (row,) = talk(saying(*turns, "so"), held, search, leave, tool_timeout_s=0.3, max_turns=8)
    late, three = str({"error": "no answer within 0.3 s"}), str({"error": "3"})
    assert [content for role, content in shown(row) if role == "tool"] == [late, "found", three, "found"]
    never.set()


def test_a_loop_that_was_left_is_waited_for_once(monkeypatch):
    """By the engine's thread, for which nothing is drawn meanwhile: of a batch that is late on it, each row would."""
    never, held, rows = threading.Event(), threading.Event(), [Waiting(), Waiting()]

    async def hold() -> None:
        held.set()
        never.wait(60)

    async def wait() -> None:
        await asyncio.sleep(60)

    begun = [row.begun(call) for row, call in zip(rows, (hold, wait), strict=True)]
    assert held.wait(60)
    monkeypatch.setattr("perl.environments.waiting.TURN_S", 0.1)
    rows[0].cancel()
    monkeypatch.setattr("perl.environments.waiting.TURN_S", 60.0)
    cancelling = threading.Thread(target=rows[1].cancel, daemon=True)
    cancelling.start()
    cancelling.join(30)
    assert (cancelling.is_alive(), [future.cancelled() for future in begun]) == (False, [True, True])
    never.set()


def test_the_environments_that_are_free_are_those_that_were_here():
    """Rows that a worker has talked have none."""
    conversations = talking(TOKENIZER, add)
    conversations.free(rows_of(conversations, 3))
    assert conversations.source.instances == []
