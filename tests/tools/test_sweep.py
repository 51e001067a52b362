"""python -m perl sweep: its runs, its checks, its folder, and what is done again; the whole path, killed in the middle
and gone on with, is slow."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from perl import device
from perl.__main__ import main
from perl.base.errors import UserError
from perl.base.files import SAVING
from perl.config.load import GRPO, parse
from perl.reports.methods import COMPARISON, PAGE, SAMPLED, SETTINGS, STATE, Comparison, Place, Run, Setting
from perl.scoring.statistics import Estimate
from perl.tools.stages import HERE, StageError, Where, alone
from perl.tools.stages import run as run_stage
from perl.tools.sweep import cli, work
from perl.tools.sweep.grid import check, folder_of, make_grid, read_vary, slug, split_values
from tests.tiny import save_tiny
from tests.tools.test_stages import alive, wait_for

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/quickstart.yaml"
KNOWN = ["peft.type", "peft.r", "training.learning_rate", "reward.functions"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def sweep(*arguments: str) -> int:
    return main(["sweep", RECIPE, *arguments])


def test_values_are_split_at_commas_outside_of_brackets():
    assert split_values("lora,dora, miss") == ["lora", "dora", "miss"]
    assert split_values('["accuracy"],["accuracy","format"]') == ['["accuracy"]', '["accuracy","format"]']
    assert split_values("") == [""]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["peft.typ=lora"], "--vary peft.typ: unknown field; did you mean peft.type?"),
        (["r=8,16"], "--vary r: unknown field; did you mean peft.r?"),
        (["peft.type"], "--vary peft.type: no values; write --vary peft.type=VALUE,VALUE"),
        (["peft.type="], "--vary peft.type=: an empty value; write --vary peft.type=VALUE,VALUE"),
        (["peft.type=lora,,dora"], "--vary peft.type=lora,,dora: an empty value; write --vary peft.type=VALUE,VALUE"),
        (["peft.type=lora,lora"], "--vary peft.type=lora,lora: lora is given twice; write each value once"),
        (["peft.type=lora", "peft.type=dora"], "--vary peft.type: given twice; write all its values in one --vary"),
        (["common.seed=1,2"], "--vary common.seed: seeds have a flag of their own; write --seeds N"),
        (
            ["training.output_dir=a,b"],
            "--vary training.output_dir: each run has a folder of its own below --output; leave it out",
        ),
    ],
)
def test_a_wrong_vary_is_one_line(vary, message):
    with pytest.raises(UserError) as raised:
        read_vary(vary, [*KNOWN, "common.seed", "training.output_dir"])
    assert str(raised.value) == message


def test_the_runs_are_the_product_with_seeds_from_the_recipes_on(tmp_path):
    vary = ["--config.peft.type=lora,dora", "training.learning_rate=1e-4,2e-4"]
    grid = make_grid(GRPO, RECIPE, ["--config.training.max_steps", "2"], vary, 2, tmp_path)
    assert [(*run.values.values(), run.seed) for run in grid.runs] == [
        (method, rate, seed) for method in ("lora", "dora") for rate in ("1e-4", "2e-4") for seed in (1, 2)
    ]
    assert grid.argv(grid.runs[-1]) == [
        "--recipe", RECIPE, "--config.training.max_steps", "2", "--config.peft.type", "dora",
        "--config.training.learning_rate", "2e-4", "--config.common.seed", "2",
    ]  # fmt: skip
    assert grid.runs[0].folder == tmp_path / "runs" / "peft.type=lora,training.learning_rate=1e-4" / "seed_1"
    seeded = make_grid(GRPO, RECIPE, ["--config.training.seed", "7"], [], 3, tmp_path)
    assert [run.seed for run in seeded.runs] == [7, 8, 9]
    assert seeded.flags == []
    assert seeded.runs[0].folder == tmp_path / "runs" / "recipe" / "seed_7"


@pytest.mark.parametrize(("workers", "processes"), [("0,3", 5), ("0", 8)])
def test_workers_leave_the_trainings_fewer_devices(tmp_path, monkeypatch, workers, processes):
    """As many processes in all runs, or the number of completions would differ."""
    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    flags = [
        "--config.training.per_device_train_batch_size",
        "40",
        "--config.training.gradient_accumulation_steps",
        "1",
    ]
    grid = make_grid(GRPO, RECIPE, flags, [f"rollout.workers={workers}"], 1, tmp_path)
    assert check(grid, device.Devices("npu", 8)).processes == processes


def test_a_flag_of_what_varies_or_of_a_single_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^--config\.peft\.type: --vary peft\.type has its values; leave the flag out"):
        make_grid(GRPO, RECIPE, ["--config.peft.type", "dora"], ["peft.type=lora"], 1, tmp_path)
    with pytest.raises(UserError, match=r"^--config\.training\.output_dir: each run has a folder of its own below"):
        make_grid(GRPO, RECIPE, ["--config.training.output_dir", "x"], [], 1, tmp_path)


def test_every_set_of_values_has_a_folder_of_its_own():
    assert slug("1e-4") == "1e-4"
    names = {slug(value) for value in ("a/b", "a_b", "a b", "x" * 50, "x" * 51, '["accuracy"]', "../../etc")}
    assert len(names) == 7
    assert not any("/" in name or (name.startswith(".") and len(name) < 3) for name in names)
    assert folder_of({}) == "recipe"


def test_a_folders_name_is_as_long_as_a_file_system_takes(tmp_path):
    long = {"dataset.system_prompt": "请" * 50, "reward.functions": "a" * 40, "peft.target_modules": "b" * 40}
    assert len(folder_of(long).encode()) == 255
    lists = [long | {"peft.target_modules": f'["{end}"]'} for end in ("q_proj", "k_proj")]
    names = {folder_of(values) for values in (long, *lists)}
    assert len(names) == 3
    for name in names:
        (tmp_path / name).mkdir()


def test_values_and_models_that_read_as_markup_are_shown_as_they_are():
    values = ["models/m[/data]", "models/m[hard]"]
    bases = {model: {Place("gsm8k", SAMPLED): Estimate(0.5, 0.4, 0.6)} for model in values}
    settings = [
        Setting(
            values={"model.model_name_or_path": value}, model=value, runs=[], finished=[], scores={}, changes={},
            curve=None, step_time=None,
        )
        for value in values
    ]  # fmt: skip
    places = [Place("gsm8k", SAMPLED)]
    shown = Comparison(
        recipe="r", fields=["model.model_name_or_path"], n=1, places=places, bases=bases, settings=settings
    )
    screen = io.StringIO()
    Console(file=screen, width=300).print(cli.table(shown, "gsm8k"))
    said = screen.getvalue()
    for text in ("base m[hard]", "change from models/m[/data]"):
        assert text in said


def test_every_combination_is_checked_before_anything_starts(tmp_path, capsys):
    output = tmp_path / "out"
    cases = {
        ("--vary", "peft.type=lora,foo"): r"^--vary peft\.type=foo: --config\.peft\.type: unknown adapter type 'foo'",
        ("--vary", "peft.r=8,x"): r"^--vary peft\.r=x: --config\.peft\.r: expected a whole number from 1, not x",
        ("--vary", "training.learning_rate=1e-4,0.0001"): r"=0\.0001: is the same training as --vary training\.learni",
        ("--seeds", "0"): r"^--seeds: expected a whole number from 1, not 0",
        ("--evaluate", "nothere.jsonl"): r"^--evaluate nothere\.jsonl: no such file",
        ("--eval_flags", "--n 4"): r"^--eval_flags --n: the sweep sets it; leave it out",
        ("--eval_flags", "--dp_sice 4"): r"^--eval_flags unknown flag --dp_sice; did you mean --dp_size\?",
    }
    for arguments, message in cases.items():
        with pytest.raises(UserError, match=message):
            sweep(*arguments, "--output", str(output))
    with pytest.raises(UserError, match=r"^--recipe: no file recipes/no\.yaml"):
        main(["sweep", "recipes/no.yaml", "--vary", "peft.type=lora", "--output", str(output)])
    assert not output.exists()


def test_a_dry_run_prints_every_run_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "out"
    assert sweep("--vary", "peft.type=lora,dora", "--seeds", "2", "--dry_run", "--output", str(output)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/4] peft.type=lora seed 1", "[2/4] peft.type=dora seed 1",
        "[3/4] peft.type=lora seed 2", "[4/4] peft.type=dora seed 2",
    ]  # fmt: skip
    assert lines[1].endswith(f"python -m perl.train --recipe {RECIPE} --config.peft.type lora --config.common.seed 1")
    assert "--dataset assets/quickstart-data/test.jsonl --seed 0 --max_new_tokens 24" in lines[-1]
    assert not output.exists()
    fine_tuning = ["recipes/real_sft.yaml", "--vary", "peft.r=4,8"]
    fine_tuning += ["--config.dataset.dataset_name_or_path", "assets/quickstart-data/train.jsonl"]
    fine_tuning += ["--config.model.model_name_or_path", "assets/quickstart-base"]
    assert main(["sweep", *fine_tuning, "--dry_run", "--json", "--output", str(output)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["program"] == "perl.sft"
    assert [run["values"] for run in found["runs"]] == [{"peft.r": "4"}, {"peft.r": "8"}]
    assert not output.exists()


def test_the_runs_are_scored_with_the_prompts_that_they_are_trained_with(tmp_path, capsys):
    """But for what --eval_flags says, and for a task of other data; runs with different prompts can't be."""
    given = ["--config.dataset.system_prompt", "Be brief.", "--config.dataset.task", "gsm8k"]
    given += ["--config.training.chat_template_kwargs", '{"enable_thinking": false}']

    def flags(*words: str) -> list[str]:
        assert sweep(*words, "--dry_run", "--json", "--output", str(tmp_path / "out")) == 0
        return json.loads(capsys.readouterr().out)["evaluation"]

    test = "assets/quickstart-data/test.jsonl"
    start = ["--dataset", test, "--seed", "0", "--max_new_tokens", "24"]
    template = ["--chat_template_kwargs", '{"enable_thinking": false}']
    assert flags(*given) == [*start, "--system_prompt=Be brief.", *template, "--task", "gsm8k"]
    said = ["--eval_flags", "--system_prompt So --task math"]
    assert flags(*given, *said) == [*start, *template, "--system_prompt", "So", "--task", "math"]
    shutil.copy(ROOT / test, tmp_path / "other.jsonl")
    assert "--task" not in flags(*given, "--evaluate", str(tmp_path / "other.jsonl"))
    varied = ["--vary", "dataset.system_prompt=Be brief.,Think."]
    with pytest.raises(
        UserError, match=r"^--vary: the runs differ in dataset\.system_prompt, and all are scored alike"
    ):
        flags(*varied)
    assert flags(*varied, *said)[-4:-2] == ["--system_prompt", "So"]


def test_the_runs_are_scored_in_the_conversations_that_they_are_trained_in():
    config = parse(["--config.environment.tools", '["python"]', "--config.environment.max_turns", "3"]).build()
    assert cli.evaluator_flags({"gsm8k": "gsm8k"}, [], [config, config])[-4:] == [
        "--environment.tools", '["python"]', "--environment.max_turns", "3",
    ]  # fmt: skip
    said = ["--environment.tools", "[]"]
    assert cli.evaluator_flags({"gsm8k": "gsm8k"}, said, [config, parse([]).build()])[-2:] == said
    with pytest.raises(UserError, match=r"^--vary: the runs differ in environment, and all are scored alike"):
        cli.evaluator_flags({"gsm8k": "gsm8k"}, [], [config, parse([]).build()])


def test_adapters_are_scored_unmerged_and_a_base_without_that_flag(tmp_path, monkeypatch):
    flags = cli.read_eval_flags("--use_vllm --adapter_mode lora")
    assert flags == ["--use_vllm", "--adapter_mode", "lora"]
    with pytest.raises(UserError, match=r"^--eval_flags --adapter_mode lora: needs --use_vllm"):
        cli.read_eval_flags("--adapter_mode lora")
    asked = []
    monkeypatch.setattr(work, "run_evaluations", lambda commands, *_, **__: asked.extend(commands.values()))
    for words in (flags, ["--use_vllm", "--adapter_mode=lora"]):
        for model in (["--model", "m"], ["--model", "m", "--adapter", "a"]):
            work.score(shop(Console(quiet=True), evaluator=words), model, tmp_path)
    assert ["adapter_mode" in " ".join(command) for command in asked] == [False, False, True, True] * 2
    assert all("--use_vllm" in command and "lora" not in command for command in [*asked[:2], *asked[4:6]])


def test_what_belongs_to_the_training_data_is_scored_on(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "alone.parquet"):
        (tmp_path / name).touch()
    assert cli.held_out(str(tmp_path / "train.jsonl")) == str(tmp_path / "test.jsonl")
    assert cli.held_out(str(tmp_path / "alone.parquet")) is None
    assert cli.held_out(str(tmp_path / "test.jsonl")) is None
    assert cli.held_out(str(tmp_path)) == str(tmp_path)
    assert cli.held_out("gsm8k") == "gsm8k"
    assert cli.held_out("dapo-math") is None  # has a single split


def test_a_folder_takes_more_values_and_seeds_but_no_other_settings(tmp_path):
    settings = {
        "vary": ["peft.type"],
        "evaluation": {"flags": ["--dataset", "test.jsonl"], "n": 8},
        "config": {"program": "perl.train", "training.max_steps": 20},
    }
    cli.check_output(tmp_path / "new", settings)
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    cli.check_output(tmp_path, settings)
    longer = settings | {"config": {"program": "perl.train", "training.max_steps": 40, "peft.r": 4}}
    with pytest.raises(UserError, match=r"holds a sweep with peft.r left open, not 4; training.max_steps 20, not 40;"):
        cli.check_output(tmp_path, longer)
    with pytest.raises(UserError, match=r"holds a sweep with --vary peft\.type, not peft\.r; write another folder$"):
        cli.check_output(tmp_path, settings | {"vary": ["peft.r"]})
    (tmp_path / SETTINGS).write_text('{"vary": []}')
    with pytest.raises(UserError, match=r"^--output: .*settings\.json is not readable \(.*\); delete it, or write"):
        cli.check_output(tmp_path, settings)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds something else; write a new folder$"):
        cli.check_output(tmp_path / "mine", settings)


def shop(
    console: Console, kind: device.Kind = "cpu", evaluator: Sequence[str] = (), where: Where = HERE
) -> work.Workshop:
    return work.Workshop(
        program="perl.train", argv=lambda run: [], processes=1, kind=kind, evaluator=evaluator, n=2, where=where,
        console=console,
    )  # fmt: skip


def test_a_failed_run_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    """The first seed of all values comes first; what is finished is not repeated, what failed is tried again."""
    runs = [
        Run(values={"peft.type": method}, seed=seed, model="m", folder=tmp_path / method / str(seed))
        for method in ("lora", "dora")
        for seed in (1, 2)
    ]
    done, broken = [], ["peft.type=dora seed 1"]

    def train(_, run: Run) -> None:
        done.append(run.name)
        if run.name in broken:
            raise StageError("training ended with exit code 1; read train.log")

    monkeypatch.setattr(work, "train", train)
    monkeypatch.setattr(work, "score", lambda *_: None)
    compared: list[int] = []
    for _ in range(2):
        with Console(quiet=True) as console:
            work.work(shop(console), runs, {}, lambda: compared.append(1))
    order = ["peft.type=lora seed 1", "peft.type=dora seed 1", "peft.type=lora seed 2", "peft.type=dora seed 2"]
    assert done == [*order, "peft.type=dora seed 1"]
    assert len(compared) == 5
    failed = runs[2].state
    assert (failed.trained, failed.finished, failed.error) == (
        False, False, "training ended with exit code 1; read train.log",
    )  # fmt: skip
    broken.clear()
    work.work(shop(Console(quiet=True)), runs, {}, lambda: None)
    assert all(run.state.finished and run.state.error is None for run in runs)


def test_a_state_with_more_fields_is_read_and_one_of_another_form_is_one_line(tmp_path):
    run = Run(values={}, seed=1, model="m", folder=tmp_path)
    (tmp_path / STATE).write_text('{"trained": true, "since": 3}')
    assert (run.state.trained, run.state.finished) == (True, False)
    (tmp_path / STATE).write_text('{"trained": "yes"}')
    with pytest.raises(UserError, match=r"state\.json is not readable \(.*trained.*\); delete it"):
        _ = run.state


def test_a_training_that_ended_is_not_repeated_for_its_score(tmp_path, monkeypatch):
    run = Run(values={}, seed=1, model="m", folder=tmp_path / "run")
    run.note(trained=True)
    scored = []
    monkeypatch.setattr(work, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(work, "score", lambda _, flags, folder: scored.append((flags, folder)))
    work.one(shop(Console(quiet=True)), run)
    assert scored == [(["--model", "m", "--adapter", str(run.train / "adapter")], run.folder)]
    (run.train / "base").mkdir(parents=True)  # the base with another adapter in its weights
    assert work.trained_flags(run)[:2] == ["--model", str(run.train / "base")]
    (run.train / "model").mkdir()
    assert work.trained_flags(run) == ["--model", str(run.train / "model")]


@pytest.mark.slow
def test_a_base_is_scored_greedily_too_where_a_row_has_no_completion(tmp_path, capsys):
    """One after the other, as on an accelerator: perl/eval.py ends with exit code 3 each time."""
    model = save_tiny(tmp_path / "model", scale=8.0)
    rows = [{"question": "1 + 1 " * count, "answer": "#### 2"} for count in (1, 5000)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--dataset", str(tmp_path / "test.jsonl"), "--max_new_tokens", "4"]
    work.score(shop(Console(width=200), "cuda", words), ["--model", str(model)], tmp_path / "base")
    for kind, samples in (("sampled", 4), ("greedy", 2)):
        summary = json.loads((tmp_path / "base" / kind / "test" / "summary.json").read_text())
        assert (summary["samples"], summary["not_generated"]) == (samples, samples // 2)
    assert capsys.readouterr().out.count("rows without a completion count as wrong; read") == 2


def test_the_last_lines_of_a_failed_stage_are_shown_without_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    code = "print('first'); [print(i) for i in range(9)]; print('hf_abcdefghijklmnop'); raise SystemExit(3)"
    log = tmp_path / "stage.log"
    with (
        pytest.raises(StageError, match="training ended with exit code 3"),
        work.explained(shop(Console(width=200)), log),
    ):
        run_stage([sys.executable, "-c", code], log, "training")
    shown = capsys.readouterr().out.split()
    assert shown == ["5", "6", "7", "8", "<secret>"]


def test_one_sweep_at_a_time_works_in_a_folder_and_waits_for_a_stage_that_was_left(tmp_path):
    with alone(tmp_path, "--output", Console(quiet=True)) as kept_open:
        with pytest.raises(UserError, match=r"another command works in it; wait until it has ended$"):
            alone(tmp_path, "--output", Console(quiet=True)).__enter__()
        # As a stage that outlives its sweep: it holds a lock for as long as it runs.
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(kept_open,))
    said, turns = io.StringIO(), []

    def follow() -> None:
        with alone(tmp_path, "--output", Console(file=said)):
            turns.append("taken")

    follower = threading.Thread(target=follow)
    follower.start()
    while "waiting for what an interrupted command has left running" not in said.getvalue():
        assert follower.is_alive()
        time.sleep(0.01)
    assert turns == []
    left.communicate(b"\n")
    follower.join()
    assert turns == ["taken"]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_ends_as_an_undisturbed_training(tmp_path):
    """Everything is killed at once, so that no process can save anything, after the first checkpoint of the first run.
    The second value's reward raises in the first step."""
    (tmp_path / "broken.py").write_text("def broken(completions, **kwargs):\n    raise RuntimeError('no such luck')\n")
    flags = ["--config.training.max_steps", "4", "--config.training.save_strategy", "steps"]
    flags += ["--config.training.save_steps", "1", "--config.training.per_device_train_batch_size", "16"]
    (tmp_path / "test.jsonl").write_text(
        "".join((ROOT / "assets/quickstart-data/test.jsonl").open().readlines()[:8]), encoding="utf-8"
    )
    output = tmp_path / "with a space"
    command = [sys.executable, "-m", "perl", "sweep", RECIPE, *flags, "--output", str(output), "--n", "2", "--json"]
    command += ["--vary", f'reward.functions=["accuracy"],["{tmp_path}/broken.py:broken"]']
    command += ["--evaluate", str(tmp_path / "test.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT}
    killed = subprocess.Popen(command, **pipes)
    train = output / "runs" / folder_of({"reward.functions": '["accuracy"]'}) / "seed_1" / "train"
    while killed.poll() is None and not list(train.glob("checkpoint-*/process_state_0.pt")):
        time.sleep(0.05)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: nothing is left that could note the others' end
        for pid in [killed.pid, *descendants(killed.pid)]:
            os.kill(pid, number)
    killed.wait()
    assert not (train / "adapter").exists()
    second = subprocess.Popen(command, **pipes)
    printed, told = second.communicate(timeout=1200)
    assert second.returncode == 1, printed + told
    assert "no such luck" in told
    assert "failed: reward.functions=" in told
    result = json.loads(printed)
    assert result == json.loads((output / COMPARISON).read_text())
    assert [run["finished"] for run in result["runs"]] == [True, False]
    assert json.loads((train.parent / STATE).read_text()) == {"trained": True, "finished": True}
    assert 0 <= result["settings"][0]["scores"]["test"]["sampled"]["value"] <= 1
    assert result["base"]["assets/quickstart-base"]["test"].keys() == {"sampled", "greedy"}
    assert (output / PAGE).is_file()
    steps = [json.loads(line)["step"] for line in (train / "metrics.jsonl").open() if '"reward"' in line]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    straight = tmp_path / "straight"
    alone = [sys.executable, "-m", "perl.train", "--recipe", RECIPE, *flags, "--config.common.seed", "1"]
    alone += ["--config.reward.functions", '["accuracy"]', "--config.training.output_dir", str(straight)]
    subprocess.run(alone, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, capture_output=True)
    mine, other = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (train, straight))
    assert mine.keys() == other.keys()
    assert all(mine[name].equal(other[name]) for name in mine)


@pytest.mark.slow
def test_a_sweep_that_gets_a_signal_ends_with_one_line_and_goes_on(tmp_path):
    """SIGTERM while the base is scored, Ctrl-C while a run is trained: no process is left and no file half-written."""
    problems, output = tmp_path / "test.jsonl", tmp_path / "out"
    lines = (ROOT / "assets/quickstart-data/test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    problems.write_text("".join(lines[:8]), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "perl",
        "sweep",
        RECIPE,
        "--config.training.max_steps",
        "4",
        "--output",
        str(output),
    ]
    command += ["--config.training.save_strategy", "steps", "--config.training.save_steps", "1", "--n", "4"]
    command += ["--config.training.per_device_train_batch_size", "16", "--evaluate", str(problems), "--json"]
    rows = output / "base" / slug("assets/quickstart-base") / "sampled" / "test" / "samples.jsonl"
    train = output / "runs" / "recipe" / "seed_1" / "train"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a script's background
        )

    def stop(ready: Callable[[], object], number: signal.Signals) -> None:
        running = start()
        while running.poll() is None and not ready():
            time.sleep(0.05)
        started = descendants(running.pid)
        assert started
        running.send_signal(number)
        errors = running.communicate(timeout=300)[1]
        said = [line for line in errors.splitlines() if line.startswith("stopped: ")]
        assert said == [f"stopped: {number.name}; the same command goes on from here"], errors
        assert running.returncode == 128 + number
        assert errors.endswith(f"{said[0]}\n")
        assert "Traceback" not in errors
        # multiprocessing's resource tracker ignores SIGTERM, and ends after the evaluator whose pipe it reads.
        assert wait_for(lambda: not any(map(alive, started)))
        assert not [each for each in output.rglob("*") if each.name.endswith(".partial") or each.name == SAVING]

    stop(lambda: rows.is_file() and rows.stat().st_size, signal.SIGTERM)
    scored = rows.read_text().splitlines()
    assert scored
    stop(lambda: list(train.glob("checkpoint-*/process_state_0.pt")), signal.SIGINT)
    assert set(scored) <= set(rows.read_text().splitlines())
    trained, of_base = (train / "metrics.jsonl").read_text().splitlines(), (rows.parent / "summary.json").stat()
    last = start()
    printed, errors = last.communicate(timeout=600)
    assert last.returncode == 0, printed + errors
    assert [run["finished"] for run in json.loads(printed)["runs"]] == [True]
    assert (rows.parent / "summary.json").stat().st_mtime_ns == of_base.st_mtime_ns
    steps = [line for line in (train / "metrics.jsonl").read_text().splitlines() if '"reward"' in line]
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0] in trained


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that these started, by Linux's /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, []))
    for child in found:
        found += children.get(child, [])
    return found


def test_the_trainings_of_a_sweep_start_with_the_launch_scripts_variables(monkeypatch):
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    where = work.surroundings("npu", 2, 3)
    assert where.variables["HCCL_CONNECT_TIMEOUT"] == "1200"
    assert where.variables["PERL_NUM_PROCESSES"] == "2"


def test_one_device_is_shown_to_a_training_of_one_process_and_all_to_the_evaluator(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(device, "detect", lambda: device.Devices("cuda", 3))
    where = work.surroundings("cuda", 1, 3)
    assert "CUDA_VISIBLE_DEVICES" not in where.variables
    variables = shop(Console(quiet=True), "cuda", where=where).where_trained.variables
    assert (variables["CUDA_VISIBLE_DEVICES"], variables[device.HIDDEN_DEVICES]) == ("4", "5,6")
