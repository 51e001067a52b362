"""Every field of every file that a report or a comparison reads, damaged: one line that names the file, or a page."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from perl.base.errors import UserError
from perl.base.files import write_json
from perl.base.provenance import provenance
from perl.base.tracking import WandbRun
from perl.evaluation.compare import compare
from perl.reports import agreement_page
from perl.reports.agreement import compare_runs
from perl.reports.curves import read_curves
from perl.reports.page import render
from perl.reports.sources import read_material
from tests.reports.conftest import CONFIG, write_training
from tests.results import record, summary, sweep

MISSING = object()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


DAMAGES = [
    MISSING, None, 5, -1, 0.5, True, "x", "\ud800", [], {}, [1], {"a": 1}, float("nan"), float("inf"), 1e308, 10**400,
    nested(300),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of the whole, of each field and of the first entry of each list."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def damaged(value: Any) -> Iterator[Any]:
    """`value` with each damage at each place."""
    for path in places(value):
        for damage in DAMAGES:
            if not path:
                if damage is not MISSING:
                    yield damage
                continue
            whole = copy.deepcopy(value)
            holder = whole
            for key in path[:-1]:
                holder = holder[key]
            if damage is MISSING:
                del holder[path[-1]]
            else:
                holder[path[-1]] = damage
            yield whole


ROWS = [record(f"{i:016x}-0", sample) for i in range(2) for sample in range(2)]
GENERATION = {
    "engine": "hf", "executor": "local", "dp_size": 1, "tp_size": 1, "device": "cpu", "rows": 4, "tokens": 40,
    "start_s": 1.0, "wall_s": 2.0, "tokens_per_s": 20.0, "worker_restarts": 0, "enforce_eager": True,
    "gpu_memory_utilization": 0.9,
}  # fmt: skip
SUMMARY = summary(
    ROWS, 2, generation=GENERATION, trained_on={"run": "r", "problems": 1}, merge={"dtype": "bfloat16"},
    rescored={"changed": 1, "provenance": provenance()},
    styles={"gsm8k": {"template": "{question}", "system_prompt": "s", "few_shot": [["q", "a"]]}},
)  # fmt: skip
METRICS = {
    "reward": 0.5,
    "loss": 0.1,
    "timing/step": 2.0,
    "rewards/accuracy/mean": 0.5,
    "val-core/gsm8k/acc/mean@1": 0.5,
}
TRAINED = [{"step": step, **METRICS} for step in (1, 2)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Evaluations a and b, of which b was compared with a, a sweep, and a training."""
    for target in ("a/gsm8k", "b/gsm8k", "sweep/checkpoint-5/gsm8k"):
        (tmp_path / target).mkdir(parents=True)
        write_lines(tmp_path / target / "samples.jsonl", ROWS)
        write(tmp_path / target / "summary.json", SUMMARY)
    write(tmp_path / "sweep" / "sweep.json", sweep("checkpoint-5"))
    write_json(tmp_path / "b" / "compare.json", asdict(compare(tmp_path / "a", tmp_path / "b")))
    write_training(tmp_path / "run", TRAINED)
    return tmp_path


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def write_lines(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Tried:
    """Damages tried on one file, and what was said of them."""

    def __init__(self, file: Path, caplog: pytest.LogCaptureFixture, also: str = ""):
        """`also`: a pattern of lines that say enough without the file's name."""
        self.file, self.caplog, self.also = file, caplog, also
        self.seen: list[Any] = []
        self.lines: list[str] = []

    def is_new(self, read: Any) -> bool:
        """Not read before: what is left out leaves the same, which need not be drawn again."""
        text = repr(read)
        new = text not in self.seen
        self.seen.append(text)
        return new

    def report(self, folder: Path) -> None:
        material = self.answer(lambda: read_material([folder]))
        if material is not None and self.is_new(material):
            self.answer(lambda: render(material))

    def answer(self, call: Any) -> Any:
        """What `call` returns, or None where it ends in a line that names the file."""
        self.caplog.clear()
        try:
            value, said = call(), []
        except UserError as error:
            value, said = None, [str(error)]
        said += self.caplog.messages
        assert not any("\n" in line for line in said)
        assert all(self.file.name in line or re.search(self.also or "^$", line) for line in said), said
        self.lines += said
        return value


def test_summary(folder, caplog):
    tried = Tried(folder / "b" / "gsm8k" / "summary.json", caplog, "samples.jsonl has 4 rows|no problem is in both")
    (folder / "b" / "compare.json").unlink()
    for content in damaged(SUMMARY):
        write(tried.file, content)
        tried.report(folder / "b")
        compared = tried.answer(lambda: compare(folder / "a", folder / "b", flags=("A", "B")))
        if compared:
            write_json(folder / "compare.json", asdict(compared))
    assert any("Expected `float`, got `null` - at `$.metrics[...].value`" in line for line in tried.lines)
    assert any("missing required field `mean_tokens`" in line for line in tried.lines)


def test_samples(folder, caplog):
    tried = Tried(folder / "b" / "gsm8k" / "samples.jsonl", caplog)
    (folder / "b" / "compare.json").unlink()
    for content in damaged(ROWS[1]):
        write_lines(tried.file, [ROWS[0], content, *ROWS[2:]])
        tried.report(folder / "b")
    assert any("1 broken lines left out (line 2: Expected `int`, got `null` - at `$.seed`)" in x for x in tried.lines)
    write_lines(tried.file, [None])
    assert tried.answer(lambda: read_material([folder / "b"])) is None


def test_sweep(folder, caplog):
    tried = Tried(
        folder / "sweep" / "sweep.json",
        caplog,
        "is left out: .*not scored yet|no results in|has not ended|left out: x|left out: .ud800",
    )
    metrics = {"gsm8k": {"accuracy": {"value": 1.0, "low": 0.5, "high": 1.0}}}
    for content in damaged(sweep("checkpoint-5", metrics=metrics)):
        write(tried.file, content)
        tried.report(folder / "sweep")


def test_comparison(folder, caplog):
    tried = Tried(folder / "b" / "compare.json", caplog)
    content = json.loads(tried.file.read_text())
    content["differs"] = [{"name": "dtype", "other": "bfloat16", "this": "float32"}]
    content["datasets"]["gsm8k"]["changed"] = {ROWS[0]["key"]: [0.0, 1.0]}
    for broken in damaged(content):
        write(tried.file, broken)
        tried.report(folder / "b")


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", "trainer_state.json"])
def test_training(folder, name, caplog):
    """The page, and the comparison with the whole run."""
    run = folder / "run"
    whole = read_curves(run, "A")
    tried = Tried(run / name, caplog)

    def compared(path: Path) -> None:
        curves = tried.answer(lambda: read_curves(path, "B"))
        if curves is not None and tried.is_new(curves):
            runs = {"A": [whole], "B": [curves]}
            try:
                comparison = compare_runs(runs)
            except UserError:  # the curves share nothing
                return
            assert comparison.verdict
            agreement_page.write_agreement(comparison, runs, folder / "page.html")

    environment = {
        "command": ["perl/train.py"], "device": "npu", "num_processes": 3, "folder": "f", "git_commit": "c",
        "machine": "m", "packages": {"torch": "2"},
    }  # fmt: skip
    training = CONFIG["training"] | {"steps_per_generation": 2, "generation_batch_size": 8, "num_iterations": 1}
    peft, noise = {"type": "dora"}, {"enabled": True}
    config = CONFIG | {"training": training, "algorithm": {"name": "grpo"}, "peft": peft, "noise_injection": noise}
    record = {"config.yaml": config, "environment.json": environment, "metrics.jsonl": TRAINED[1]}.get(
        name, {"log_history": [{"step": 1, "reward": 0.5, "loss": 0.1}, {"step": 2, "reward": 0.5, "loss": 0.1}]}
    )
    for content in damaged(record):
        if name == "config.yaml":
            tried.file.write_text(yaml.safe_dump(content), encoding="utf-8")
        elif name == "metrics.jsonl":
            write_lines(tried.file, [TRAINED[0], content])
        else:
            write(tried.file, content)
        if name != "trainer_state.json":
            tried.report(run)
        compared(run if name != "trainer_state.json" else tried.file)
    assert tried.lines


def test_wandb_run(tmp_path, caplog):
    tried = Tried(tmp_path / "wandb_run.json", caplog)
    for content in damaged({"id": "i", "project": "p", "entity": None}):
        write(tried.file, content)
        tried.answer(lambda: WandbRun.read(tmp_path))
    assert any("Expected `str`, got `int` - at `$.id`" in line for line in tried.lines)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"step": ' + "9" * 5000 + "}", "9" * 5000, '{"a":' * 3000, "\udcff", ""]
)
def test_what_no_json_reader_takes(folder, text, caplog):
    """Brackets without end, and whole numbers of 5,000 digits."""
    caplog.set_level(logging.WARNING)
    for file in [path for path in folder.rglob("*.json*") if path.parent != folder]:
        before = file.read_bytes()
        file.write_bytes(text.encode("utf-8", "surrogateescape") + b"\n")
        for call in (lambda: render(read_material([folder / "run"])), lambda: render(read_material([folder / "b"])),
                     lambda: read_curves(folder / "run", "A"), lambda: render(read_material([folder / "sweep"])),
                     lambda: compare(folder / "a", folder / "b")):  # fmt: skip
            with contextlib.suppress(UserError):
                call()
        file.write_bytes(before)


def test_folders_that_are_named_like_checkpoints(tmp_path):
    for name, reward in (("checkpoint-2", 0.5), ("checkpoint-best", 0.1), ("checkpoint-" + "9" * 200, 0.2)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "trainer_state.json", {"log_history": [{"step": 1, "reward": reward}]})
    assert read_curves(tmp_path, "A").metrics["reward"] == {1: 0.5}


def test_tensorboards_files(tmp_path):
    """Cut off, bytes changed, bytes put in: a curve of what is whole, or one line."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", '{"gradient_accumulation_steps": 2}')
        for step in range(1, 4):
            writer.add_scalar("train/reward", 0.5, step)
    (file,) = tmp_path.iterdir()
    whole, draw = file.read_bytes(), random.Random(0)
    for _ in range(40):
        place, junk = draw.randrange(len(whole)), draw.randbytes(draw.randrange(20))
        for content in (
            whole[:place],
            whole[:place] + junk + whole[place:],
            whole[:place] + junk + whole[place + 20 :],
        ):
            file.write_bytes(content)
            with contextlib.suppress(UserError):
                assert set(read_curves(tmp_path, "A").metrics) == {"reward"}
    (tmp_path / "x.wandb").write_bytes(b":W&B" + draw.randbytes(500))
    file.unlink()
    with pytest.raises(UserError, match="W&B has no reader"):
        read_curves(tmp_path, "A")


LONG = """
import sys
from pathlib import Path
from perl.reports.curves import read_verl
log = Path(sys.argv[1])
for unit in ("A", "1", " ", "0%|", "(a pid=1 ", "- ", "step:1", "\\n", "A (", "\\x1b[", "- a:1", "0%|0|", "0%|0|["):
    text = unit.encode().decode("unicode_escape") * (300_000 // len(unit))
    log.write_text(f"step:1 - critic/score/mean:0.5\\n{text}\\n")
    assert read_verl(log).metrics["reward"] == {1: 0.5}, unit
"""


def test_a_long_line_takes_time_by_its_length_and_not_by_its_square(tmp_path):
    """300,000 characters of what may begin a bar of tqdm, a value or a prefix: the squares take ten minutes."""
    command = [sys.executable, "-c", LONG, str(tmp_path / "verl.log")]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2])
