"""Rewards that do not return: the process ends at the deadline, in one line, whatever it is busy with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perl.rewards.deadline import line_of

ROOT = Path(__file__).parents[2]
PROGRAM = """import asyncio, re, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from perl.rewards.deadline import RewardDeadline

def quick(**_):
    return [1.0]

async def slow(**_):
    await asyncio.sleep(0.1)
    return [2.0]

def never(**_):
    with ThreadPoolExecutor(1) as pool:  # would wait for its thread, were the interpreter to end in order
        pool.submit({stuck})
        {stuck}()

def backtrack():
    re.match("(a+)+$", "a" * 99 + "b")  # holds the interpreter's lock

def sleep():
    try:
        time.sleep(99)
    except BaseException:
        sleep()

async def both(one, other):
    return await asyncio.gather(one(completions=[]), other(completions=[]))

with RewardDeadline(1.0, "write more") as deadline:
    functions = deadline.over(["quick", "mine.py:slow", "a folder/mine.py:never"], [quick, slow, never])
    assert [f.__name__ for f in functions] == ["quick", "slow", "never"]
    assert functions[0](completions=[]) == [1.0]
    assert asyncio.run(both(functions[1], functions[1])) == [[2.0], [2.0]]
    time.sleep(1.5)  # in none of them
    print("in time", flush=True)
    {call}
"""


def run(folder, stuck="sleep", call="functions[2](completions=[])"):
    file = folder / "mine.py"
    file.write_text(PROGRAM.format(stuck=stuck, call=call))
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("stuck", "line"), [("backtrack", 18), ("sleep", 22)])
def test_a_call_that_is_late_ends_the_process_and_names_function_and_line(tmp_path, stuck, line):
    done = run(tmp_path, stuck)
    assert (done.returncode, done.stdout) == (1, "in time\n")
    assert done.stderr == (
        "error: --config.reward.functions: a folder/mine.py:never has not returned for 1 s (it is at"
        f" mine.py:{line}); write more\n"
    )


def test_calls_that_return_in_time_leave_nothing_behind(tmp_path):
    done = run(tmp_path, call="pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "in time\n", "")


def test_the_line_is_the_innermost_of_the_functions_own_file():
    frames = """Thread 0x01 (most recent call first):
  File "/usr/lib/re.py", line 166 in match
  File "/home/me/rewards/mine.py", line 7 in inner
  File "/home/me/rewards/mine.py", line 12 in score
  File "/home/me/not_mine.py", line 3 in call
"""
    assert line_of("rewards/mine.py:score", frames) == "mine.py:7"
    assert line_of("not_mine.py:call", frames) == "not_mine.py:3"
    assert line_of("accuracy", frames) is None
