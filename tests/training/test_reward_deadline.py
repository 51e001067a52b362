"""Rewards that do not return: the process ends at the deadline, whatever it is busy with."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """import asyncio, re, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from perl.base.lock import HeldLock
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

functions = [quick, slow, never]
names = ["quick", "mine.py:slow", "a folder/mine.py:never"]
functions = RewardDeadline(1.0, "write more").over(names, functions)
assert [f.__name__ for f in functions] == ["quick", "slow", "never"]
assert functions[0](completions=[]) == [1.0]
assert asyncio.run(both(functions[1], functions[1])) == [[2.0], [2.0]]
time.sleep(4)  # in none of them
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


def test_a_call_that_is_late_ends_the_process_and_names_function_and_line(tmp_path):
    done = run(tmp_path, "sleep")
    assert (done.returncode, done.stdout) == (1, "in time\n")
    assert done.stderr == (
        "error: --config.reward.functions: a folder/mine.py:never has not returned for 1 s (it is at mine.py:23);"
        " write more\n"
    )


def test_a_call_that_holds_the_interpreters_lock_ends_with_its_stack(tmp_path):
    done = run(tmp_path, "backtrack")
    assert (done.returncode, done.stdout) == (1, "in time\n")
    assert done.stderr.startswith("Timeout (0:00:03")
    assert f'File "{tmp_path}/mine.py", line 19 in backtrack\n' in done.stderr


def test_a_reward_and_what_is_watched_besides_share_the_timer(tmp_path):
    """A process has one: a reward that has returned does not stop it for others, nor they for a reward."""
    done = run(tmp_path, call="HeldLock(3.0).begin(); functions[0](completions=[]); backtrack()")
    assert (done.returncode, done.stdout) == (1, "in time\n")
    assert f'File "{tmp_path}/mine.py", line 19 in backtrack\n' in done.stderr
    done = run(tmp_path, "backtrack", call="HeldLock(999.0).begin(); functions[2](completions=[])")
    assert done.stderr.startswith("Timeout (0:00:0")


def test_calls_that_return_in_time_leave_nothing_behind(tmp_path):
    done = run(tmp_path, call="pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "in time\n", "")


def test_no_file_of_the_users_no_line(tmp_path):
    done = run(tmp_path, call='RewardDeadline(1.0, "write more").over(["accuracy"], [never])[0]()')
    assert done.stderr == "error: --config.reward.functions: accuracy has not returned for 1 s; write more\n"
