"""python -m perl real: the folder, the rows, and which stages are done again; the whole path on the quickstart's model
is slow."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from perl.base.errors import UserError
from perl.config.parser import Parser
from perl.tools import course, real
from perl.tools.stages import HERE, LOCK, alone

ROOT = Path(__file__).parents[2]
NOWHERE = Path("gsm8k that is not there.jsonl")
EXPRESSION = runpy.run_path(str(real.RECIPES["grpo"].with_name("real_reward.py")))["expression"]


def rows(count: int) -> list[str]:
    return [json.dumps({"question": f"How much is {i}?", "answer": f"{i}\n#### {i}"}) for i in range(count)]


def data(folder: Path, train: int = 10, test: int = 4) -> Path:
    folder.mkdir()
    for name, lines in (("train", rows(train)), ("test", rows(test))):
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def divided(there: dict[str, list[str]], **changes) -> dict[str, list[str]]:
    how = {"seed": 1, "sft_rows": 4, "sums": 0, "grpo_sums": 0, "held_out": None}
    return real.divide(there, **{**how, **changes})


def settings(**changes) -> real.Settings:
    common = {"seed": 1, "engine": "hf", "model": "smollm2", "data": "hash", "sft_rows": 4, "sums": 0, "grpo_sums": 0}
    return real.Settings(**{**common, "sft_steps": None, "grpo_steps": None, "held_out": None, **changes})


def run(*arguments: str) -> int:
    parser = Parser(prog="real")
    real.add_arguments(parser)
    return real.run(parser.parse_args(list(arguments)))


def quiet() -> Console:
    return Console(quiet=True)


def test_every_training_row_is_for_sft_or_for_grpo_and_the_seed_decides(tmp_path):
    there = real.read_data(data(tmp_path / "svamp"), NOWHERE, 4)
    assert set(there) == {"train", "test"}
    parts = {seed: divided(there, seed=seed, held_out=3) for seed in (1, 2)}
    for part in parts.values():
        assert (len(part["sft"]), len(part["grpo"])) == (4, 6)
        assert sorted(part["sft"] + part["grpo"]) == sorted(there["train"])
        assert part["test"] == there["test"][:3]
    assert parts[1]["sft"] != parts[2]["sft"]
    with_sums = divided(there, sums=2, grpo_sums=3)
    assert (with_sums["sft"][:4], with_sums["grpo"][:6]) == (parts[1]["sft"], parts[1]["grpo"])
    assert ["Work out the " in row for row in with_sums["sft"]] == [False] * 4 + [True] * 2
    assert ["What is the " in row for row in with_sums["grpo"]] == [False] * 6 + [True] * 3
    course.write_data(tmp_path / "run", with_sums)
    written = {file.stem: file.read_text().splitlines() for file in (tmp_path / "run").iterdir()}
    assert written == with_sums


def test_of_gsm8k_only_problems_of_one_step_are_scored(tmp_path):
    answers = {
        "one": "48/2 = <<48/2=24>>24\n#### 24",
        "two": "2+2=<<2+2=4>>4\n4*2=<<4*2=8>>8\n#### 8",
        "none": "He has 3.\n#### 3",
    }
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in answers.items()))
    there = real.read_data(data(tmp_path / "svamp"), file, 4)
    (tmp_path / "run").mkdir()
    course.write_data(tmp_path / "run" / "data", divided(there))
    held_out = tmp_path / "run" / "data" / "gsm8k_one_step.jsonl"
    assert [json.loads(line)["question"] for line in held_out.read_text().splitlines()] == ["one"]
    how = real.course_of(settings(model=str(ROOT / "assets" / "quickstart-base")), divided(there))
    assert course.evaluation(how, tmp_path / "run").more == (held_out,)


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("8 - 3 = 5\n#### 5", "5", 1.0),
        ("8 - 3 = 6\n#### 6", "5", 1.0),  # miscalculated, which accuracy tells
        ("8 + 3 = 5\n#### 5", "5", 0.0),
        ("10 - 3 ) - 5 = 2", "2", 1.0),  # rows may lack the brackets at their ends
        ("35 * ( 4 / 2 = 70", "70", 1.0),
        ("1,200 / 7 = 171", "171", 0.0),
        ("8 / 0 = 5", "5", 0.0),
        ("He had 8 - 3 = 5", "5", 0.0),
        ("__import__('os') = 5", "5", 0.0),
        ("9 ** 9 ** 9 = 5", "5", 0.0),
        ("(" * 90 + " = 5", "5", 0.0),
        ("(" * 400 + " = 5", "5", 0.0),
        ("", "5", 0.0),
        ("a", "b", 0.0),
    ],
)
def test_the_expression_decides_the_reward(completion, gold, reward):
    assert EXPRESSION([[{"role": "assistant", "content": completion}]], [gold], task=["svamp"]) == [reward]


def test_a_line_ends_with_a_newline_alone(tmp_path):
    """U+2028 and U+0085 may stand in a text."""
    folder = data(tmp_path / "svamp")
    strange = json.dumps({"question": "One\u2028two\x85three?", "answer": "#### 3"}, ensure_ascii=False)
    (folder / "test.jsonl").write_text(strange + "\n", encoding="utf-8")
    there = real.read_data(folder, NOWHERE, 4)
    assert there["test"] == [strange]
    course.write_data(tmp_path / "out", divided(there))
    assert (tmp_path / "out" / "test.jsonl").read_text(encoding="utf-8") == strange + "\n"


def test_svamp_as_its_authors_publish_it(tmp_path):
    """Seven of each ten problems are for training; the numbers and the outer brackets are those of GSM8K's form."""
    rows = [
        {"ID": f"chal-{i}", "Body": f"A box holds {i} pens. ", "Question": "How many?", "Equation": f"( {i}.0 + 1.0 )",
         "Answer": i + 1.0, "Type": "Addition"}
        for i in range(20)
    ]  # fmt: skip
    rows[0] |= {"Body": "Ann had 30 pens", "Equation": "( ( 30.0 - 10.0 ) * 1.05 )", "Answer": 21.0}
    rows[1] |= {"Equation": "( 1000000.0 - ( 2.0 + 3.0 ) )", "Answer": 999995}
    file = tmp_path / "SVAMP.json"
    file.write_text(json.dumps(rows))
    there = {name: [json.loads(row) for row in part] for name, part in real.read_data(file, NOWHERE, 4).items()}
    assert there["train"][0] == {
        "question": "Ann had 30 pens. How many?", "answer": "( 30 - 10 ) * 1.05 = 21\n#### 21"
    }  # fmt: skip
    assert there["train"][1]["answer"] == "1000000 - ( 2 + 3 ) = 999995\n#### 999995"
    assert [row["question"] for row in there["test"]] == [
        f"A box holds {i} pens. How many?" for i in (7, 8, 9, 17, 18, 19)
    ]
    assert len(there["train"]) == 14


@pytest.mark.parametrize("text", ["{", "[1]", '{"Body": "a"}', '[{"Body": "a", "Question": "b"}]', '[{"Body": 3}]'])
def test_another_file_than_svamp_is_one_line(tmp_path, text):
    file = tmp_path / "SVAMP.json"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"^--data {file}: is not SVAMP\.json of github.com/arkilpatel/SVAMP, a list"):
        run("--output_dir", str(tmp_path / "run"), "--data", str(file))


def test_data_that_is_not_there_or_too_little_is_one_line(tmp_path):
    with pytest.raises(UserError, match=rf"^--data {tmp_path}: no train\.jsonl; write SVAMP\.json of github"):
        run("--output_dir", str(tmp_path / "run"), "--data", str(tmp_path))
    with pytest.raises(UserError, match=r"^--sft_rows 10: leaves none of the 10 training rows for GRPO"):
        run("--output_dir", str(tmp_path / "run"), "--data", str(data(tmp_path / "svamp")), "--sft_rows", "10")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_of_one_run(tmp_path):
    assert not course.is_of_this_run(tmp_path / "run", settings())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()  # of a command that was killed before it wrote anything else
    course.open_folder(tmp_path / "run", settings())
    course.open_folder(tmp_path / "run", settings())
    assert course.is_of_this_run(tmp_path / "run", settings())
    with pytest.raises(UserError, match=r"holds a run with seed 1, not 2; grpo_steps None, not 5; write another"):
        course.open_folder(tmp_path / "run", settings(seed=2, grpo_steps=5))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds something else; write a new folder"):
        course.open_folder(tmp_path / "other", settings())


def test_a_finished_stage_is_not_repeated_and_a_failed_one_is(tmp_path):
    done = []

    def fail() -> None:
        done.append("failed")
        raise course.StageError("no")

    with pytest.raises(course.StageError):
        course.once(tmp_path, "sft", quiet(), fail)
    course.once(tmp_path, "sft", quiet(), lambda: done.append("sft"))
    course.once(tmp_path, "sft", quiet(), lambda: done.append("again"))
    course.once(tmp_path, "grpo", quiet(), lambda: done.append("grpo"))
    assert done == ["failed", "sft", "grpo"]
    noted = course.read_stages(tmp_path)
    assert [(row["stage"], row["finished"]) for row in noted] == [("sft", False), ("sft", True), ("grpo", True)]
    with (tmp_path / course.STAGES).open("a") as file:
        file.write('{"stage": "score grpo", "sec')  # cut off by a kill
    assert course.read_stages(tmp_path) == noted
    course.once(tmp_path, "score grpo", quiet(), lambda: None)  # its line continued the one that was cut off
    assert [row["stage"] for row in course.read_stages(tmp_path)] == ["sft", "sft", "grpo", "score grpo"]


def test_a_training_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(course, "train", lambda *arguments: called.append(arguments))
    course.train_on("perl.sft", real.RECIPES["sft"], ["--flag"], tmp_path, quiet(), HERE)
    assert called[-1][2] == ["--flag", "--config.training.resume_from_checkpoint", "auto"]


BF16 = ["--config.training.bf16", "true"]


def measured(monkeypatch, float32: float, bfloat16: float) -> list[tuple[int, ...]]:
    """On a CPU without AMX that multiplies in so many milliseconds; returns what is measured, as it is."""
    sizes: list[tuple[int, ...]] = []
    times = {"float32": float32, "bfloat16": bfloat16}
    monkeypatch.setattr(course.device, "detect", lambda: SimpleNamespace(kind="cpu"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(course.device, "time_products", lambda *size: sizes.append(size) or times)
    return sizes


def test_a_cpu_trains_in_what_it_multiplies_faster_to_the_end_of_the_run(tmp_path, monkeypatch, capsys):
    """AVX512_BF16 without AMX was float32, which took SFT 18 minutes for 11."""
    base = settings(model=str(ROOT / "assets" / "quickstart-base"))
    course.open_folder(tmp_path, base)
    sizes = measured(monkeypatch, 1.19, 0.57)
    chosen = course.with_dtype(base, tmp_path, Console(width=200))
    assert sizes == [(256, 128, 256)]
    said = "trains in bfloat16: a product of 256 x 128 x 256 takes 1.19 ms in float32 and 0.57 ms in bfloat16\n"
    assert capsys.readouterr().out == said
    assert all(course.flags_of(chosen, tmp_path, name)[4:6] == BF16 for name in course.TRAININGS)
    measured(monkeypatch, 0.57, 1.19)
    assert course.with_dtype(base, tmp_path, quiet()) == chosen
    assert course.is_of_this_run(tmp_path, base)
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    assert real.read_run(tmp_path, "sft", "--real") == chosen


@pytest.mark.parametrize("bfloat16", [1.19, 1.0])
def test_bfloat16_that_gains_too_little_is_float32(tmp_path, monkeypatch, bfloat16):
    base = settings(model=str(ROOT / "assets" / "quickstart-base"))
    course.open_folder(tmp_path, base)
    measured(monkeypatch, 1.19, bfloat16)
    chosen = course.with_dtype(base, tmp_path, quiet())
    assert chosen.dtype == "float32"
    assert "--config.training.bf16" not in course.flags_of(chosen, tmp_path, "sft")


def test_an_accelerator_decides_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(course.device, "detect", lambda: SimpleNamespace(kind="npu"))
    assert course.with_dtype(settings(), tmp_path, quiet()).dtype is None


def test_other_sums_are_another_run(tmp_path, monkeypatch):
    """Rows that another version makes of the same settings are other rows: its folder is not gone on with."""
    monkeypatch.setattr(course, "take", lambda *_: {})
    words = ["--output_dir", str(tmp_path / "run"), "--data", str(data(tmp_path / "svamp")), "--sft_rows", "4"]
    assert run(*words) == 0
    assert run(*words) == 0
    monkeypatch.setattr(real, "drill", lambda _: {"question": "1?", "answer": "#### 1"})
    with pytest.raises(UserError, match=r"holds a run with data \w+, not \w+; write another folder"):
        run(*words)


def test_a_process_of_an_evaluation_has_its_share_of_the_cores(tmp_path, monkeypatch):
    """Three of them run at once, and two threads each on two cores take several times as long as one."""
    shares = {}
    scores = SimpleNamespace(sampled=SimpleNamespace(value=0.0), greedy=SimpleNamespace(value=0.0), more={})

    def evaluate(how, folder, console, *adapter, where):
        shares[folder.name] = (how.dp_size, where.variables["OMP_NUM_THREADS"])
        return scores

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name, fake in {"evaluate": evaluate, "train": lambda *_: None, "report": lambda *_: "page"}.items():
        monkeypatch.setattr(course, name, fake)
    monkeypatch.setattr(course, "read_scores", lambda *_: scores)
    monkeypatch.setattr(course, "table", lambda *_: "")
    for count, share in ((2, (2, "1")), (16, (4, "3"))):
        folder = tmp_path / str(count)
        folder.mkdir()
        monkeypatch.setattr(course, "cores", lambda count=count: count)
        monkeypatch.setattr(course.device, "detect", lambda count=count: SimpleNamespace(kind="cpu", count=count))
        base = settings(model=str(ROOT / "assets" / "quickstart-base"))
        course.open_folder(folder, base)
        course.take(real.course_of(base, {}), folder, quiet(), HERE)
        assert shares == dict.fromkeys(("base", "after_sft", "after_grpo"), share)


def test_two_commands_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "take", lambda *_: {})
    folder = tmp_path / "run"
    words = ["--output_dir", str(folder), "--data", str(data(tmp_path / "data")), "--sft_rows", "4"]
    assert run(*words) == 0
    with alone(folder, "--output_dir", quiet()), pytest.raises(UserError) as error:
        run(*words)
    assert str(error.value) == f"--output_dir {folder}: another command works in it; wait until it has ended"
    assert run(*words) == 0


def test_a_wrong_model_is_corrected(tmp_path):
    """And nothing is made: the corrected command was told that the folder holds a run of the wrong one."""
    words = ["--output_dir", str(tmp_path / "run"), "--data", str(data(tmp_path / "svamp")), "--sft_rows", "4"]
    with pytest.raises(UserError, match=r"^--model: unknown model 'smollm'; did you mean 'smollm2'"):
        run(*words, "--model", "smollm")
    assert not (tmp_path / "run").exists()


def test_a_model_is_the_same_from_everywhere(monkeypatch):
    """A relative path was kept as it was typed: from another folder the same words named another model."""
    monkeypatch.chdir(ROOT / "assets")
    assert course.base_of("quickstart-base") == str(ROOT / "assets" / "quickstart-base")
    assert course.base_of("smollm2") == "smollm2"


def test_a_run_that_a_benchmark_begins_with(tmp_path):
    with pytest.raises(UserError, match=rf"^--real {tmp_path}: no real\.json in it; name a folder of `python -m perl"):
        real.read_run(tmp_path, "sft", "--real")
    course.open_folder(tmp_path, settings(seed=2))
    with pytest.raises(UserError, match=r"no sft/adapter in it; run `python -m perl real` to the end of sft"):
        real.read_run(tmp_path, "sft", "--real")
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    assert replace(real.read_run(tmp_path, "sft", "--real"), dtype=None) == settings(seed=2)


@pytest.mark.slow
def test_all_stages_and_a_run_that_was_interrupted(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "perl", "real", "--output_dir", str(folder), "--seed", "3"]
    command += ["--model", "assets/quickstart-base", "--data", "assets/quickstart-data"]
    command += ["--sft_rows", "64", "--sft_steps", "2", "--grpo_steps", "2", "--held_out", "8"]

    def start() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, **pipes)

    first = start()
    while first.poll() is None and not (folder / "sft").is_dir():
        time.sleep(0.2)
    first.terminate()
    assert first.communicate(timeout=600)[1].splitlines()[-1] == "stopped: SIGTERM; the same command goes on from here"
    assert first.returncode == 128 + signal.SIGTERM
    assert [row["finished"] for row in course.read_stages(folder)] == [True, False]
    second = start()
    output, errors = second.communicate(timeout=1500)
    assert second.returncode == 0, output + errors
    lines = output.splitlines()
    assert "score base: finished before" in lines
    result = json.loads(lines[-1])
    assert result == json.loads((folder / "result.json").read_text())
    assert set(result) == {"base", "sft", "grpo", "wall_s", "seed"}
    hashes = set()
    for name, place in (("base", "base"), ("sft", "after_sft"), ("grpo", "after_grpo")):
        summary = json.loads((folder / place / "sampled" / "test" / "summary.json").read_text())
        assert (summary["n"], summary["problems"]) == (8, 8)
        assert summary["generation"]["dp_size"] == min(len(os.sched_getaffinity(0)), course.MOST_PROCESSES)
        assert result[name]["avg@8"] == round(summary["metrics"]["accuracy"]["value"], 4)
        hashes.add(summary["adapter_hash"])
    assert len(hashes) == 3
    assert None in hashes
    assert json.loads((folder / "grpo" / "adapter" / "adapter_config.json").read_text())["r"] == 16
    for stage in ("sft", "grpo"):
        variables = json.loads((folder / stage / "environment.json").read_text())["variables"]
        assert course.device.START_VARIABLES["cpu"].items() <= variables.items()
    assert lines[-2] == f"report: {folder / 'report.html'}"
    third = start()
    assert third.communicate(timeout=300)[0].count("finished before") == 5
    results = tmp_path / "results.jsonl"
    listing = [sys.executable, "-m", "benchmarks.real", str(folder), "--output", str(results)]
    subprocess.run(listing, cwd=ROOT, check=True, capture_output=True)
    (row,) = map(json.loads, results.read_text().splitlines())
    assert result.items() <= row.items()
    change = result["grpo"]["avg@8"] - result["sft"]["avg@8"]
    assert row["grpo_over_sft"]["avg@8"][0] == pytest.approx(change, abs=2e-4)
    assert list(row["stages"]) == ["score base", "sft", "score sft", "grpo", "score grpo"]
