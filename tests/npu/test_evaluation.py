"""perl/eval.py with transformers on two emulated NPUs."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from perl.config.evaluation import EvalConfig
from perl.evaluation.run import evaluate
from tests.evaluation.conftest import read
from tests.tiny import save_tiny

EVAL = Path(__file__).parents[2] / "perl" / "eval.py"
pytestmark = pytest.mark.npu


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict:
    """A float32 model, sixteen sums and greedy sampling."""
    folder = tmp_path_factory.mktemp("given")
    model = save_tiny(folder / "tiny", scale=8.0)
    rows = [{"question": f"What is {i} + {i % 7} ?", "answer": f"so #### {i + i % 7}"} for i in range(16)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": str(model), "dataset": str(folder / "sums.jsonl"), "temperature": 0.0, "max_new_tokens": 24}


@pytest.fixture
def run_eval(run_npu, given, tmp_path):
    def run(dp_size: int, **variables):
        settings = given | {"dp_size": dp_size, "result_dir": tmp_path / "npu"}
        flags = [f"--{name}={value}" for name, value in settings.items()]
        return run_npu([sys.executable, str(EVAL), *flags], devices=2, check=False, cwd=tmp_path, **variables)

    return run


@pytest.mark.slow
def test_two_npus_give_the_rows_of_one_cpu(run_eval, given, tmp_path):
    operators = tmp_path / "operators"
    done = run_eval(2, NPUEMU_OP_LOG=operators)
    assert done.returncode == 0, done.stderr
    evaluate(EvalConfig(**given, dp_size=1, result_dir=str(tmp_path / "cpu")))
    rows = read(tmp_path / "npu")
    assert rows == read(tmp_path / "cpu")
    assert len(rows) == 16
    assert len({row["completion"] for row in rows.values()}) > 4
    generation = json.loads((tmp_path / "npu" / "sums" / "summary.json").read_text())["generation"]
    assert (generation["device"], generation["dp_size"], generation["worker_restarts"]) == ("npu", 2, 0)

    places = defaultdict(set)
    for line in operators.read_text().splitlines():
        process, place, physical, _, _ = line.split("\t")
        places[process].add((place, physical))
    # Each worker computed on what it sees as its only device, and these are two devices of the machine.
    assert sorted(map(sorted, places.values())) == [[("npu:0", "0")], [("npu:0", "1")]]


def test_more_workers_than_npus_is_one_line(run_eval, tmp_path):
    done = run_eval(3)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --dp_size 3: there are 2 npu devices; write --dp_size 2\n"
