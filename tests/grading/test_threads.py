"""math-verify as an environment's methods call it: in a thread."""

import threading
import time
from concurrent.futures import Future

import pytest
from math_verify import parse, verify

from perl.config.schema import EnvironmentConfig
from perl.environments.tools import load_environment
from perl.grading.threads import bound_in_threads
from tests.environments.scripted import rows_of, talking
from tests.environments.test_conversation import TOKENIZER, saying, shown

MATHS = '''
from math_verify import parse, verify

class Maths:
    def reset(self, **row):
        self.answer = ""

    def submit(self, answer: str) -> str:
        """Submit.

        Args:
            answer: Yours.
        """
        self.answer = answer
        return str(verify(parse("$5$"), parse(answer)))

    def get_reward(self):
        return float(verify(parse("$5$"), parse(self.answer)))
'''


def in_a_thread(call):
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize(("answer", "reward"), [("$\\\\frac{10}{2}$", 1.0), ("$6$", 0.0)])
def test_an_environment_that_grades_by_it(answer, reward, tmp_path):
    (tmp_path / "maths.py").write_text(MATHS)
    source = load_environment(EnvironmentConfig(factory=f"{tmp_path}/maths.py:Maths"))
    conversations = talking(TOKENIZER, source=source)
    call = f'<tool_call>{{"name": "submit", "arguments": {{"answer": "{answer}"}}}}</tool_call>'
    (row,) = conversations.run(rows_of(conversations, 1), saying(call, "so"))
    assert shown(row)[1] == ("tool", str(bool(reward)))
    assert (row.environment_reward, row.failure) == (reward, None)


def test_what_no_alarm_could_end_holds_nobody():
    bound_in_threads()
    asked = in_a_thread(lambda: verify(parse("$5$"), parse("$9^{9^{9^9}}$"), timeout_seconds=1))
    looked = 0
    while not asked.done():
        time.sleep(0.05)
        looked += 1
    assert asked.result(0) is False
    assert looked > 5


def test_what_is_read_is_what_the_main_thread_reads():
    bound_in_threads()
    texts = [
        "$x^2+1$",
        "\\boxed{\\{1,2\\}}",
        "$\\begin{pmatrix}1\\\\2\\end{pmatrix}$",
        "7",
        "nothing",
        "$a<b$",
        "$(1,2]$",
    ]
    futures = [in_a_thread(lambda text=text: parse(text)) for text in texts]
    read = [future.result(60) for future in futures]
    assert read == [parse(text) for text in texts]
    same = [in_a_thread(lambda each=each: verify(each, each)).result(60) for each in read]
    assert same == [verify(each, each) for each in read]


def test_what_it_raises_is_raised():
    bound_in_threads()
    asked = in_a_thread(lambda: parse(5, raise_on_error=True))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="TypeError"):
        asked.result(60)
