"""Curves read from what real libraries wrote: one training of a tiny model in three formats, verl's TensorBoard, and
verl's console log."""

from __future__ import annotations

import json
import re
import shutil
import sys
from math import isnan
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.reports.curves import NAMES, read_curves
from perl.runs.callbacks import MetricsWriter
from tests.reports.conftest import logged, write_training
from tests.trainers import make_trainer

DATA = Path(__file__).parent / "data"
SECRET = "hf_0123456789abcdef"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Five optimizer steps, four from each rollout of eight completions to two prompts' groups of four."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        trainer = make_trainer(
            folder, callbacks=[MetricsWriter(folder / "metrics.jsonl")], report_to=["tensorboard"],
            steps_per_generation=8, max_steps=5, save_strategy="steps", save_steps=5, hub_token=SECRET,
        )  # fmt: skip
        trainer.train()
    return folder


def test_one_run_reads_the_same_in_all_its_formats(run):
    found = {
        "perl": read_curves(run / "metrics.jsonl", "A"),
        "tensorboard": read_curves(run / "tensorboard", "A"),
        "trl": read_curves(run / "checkpoint-5", "A"),
    }
    assert {kind: curves.format for kind, curves in found.items()} == {kind: kind for kind in found}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = {row["step"]: row["reward"] for row in rows if "reward" in row}
    assert list(rewards) == [1, 5]  # where it sampled
    for kind, curves in found.items():
        assert curves.metrics["reward"] == pytest.approx(rewards)
        assert curves.metrics["loss"] == pytest.approx({row["step"]: row["loss"] for row in rows if "loss" in row})
        if kind != "trl":  # the trainer's own history keeps little of what metrics.jsonl holds
            assert curves.metrics["timing/rollout"].keys() == {1, 2, 3, 4, 5}
        assert curves.updates == 4
    assert read_curves(run, "A").metrics == found["perl"].metrics  # before the folders that it holds


def test_what_a_run_is_configured_with_tells_its_rollouts(tmp_path):
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    for name, more, updates in (
        ("plain", {"steps_per_generation": None, "generation_batch_size": None}, 1),
        ("four", {"steps_per_generation": 8}, 4),
        ("twice", {"steps_per_generation": 2, "num_iterations": 2}, 2),
        ("whole", {"generation_batch_size": 48}, 2),
        ("half", {"steps_per_generation": 1}, 1),
    ):
        write_training(tmp_path / name, [logged(1), logged(2)], {"training": training | more}, num_processes=3)
        curves = read_curves(tmp_path / name, "A")
        assert curves.updates == updates, name


def test_the_later_of_two_logs_of_a_step_counts_and_a_torn_line_does_not(tmp_path):
    write_training(
        tmp_path / "run", [logged(1), logged(2, reward=0.25), logged(2, reward=0.75), logged(3, reward=None)]
    )
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')
    rewards = read_curves(tmp_path / "run", "A").metrics["reward"]
    assert list(rewards) == [1, 2, 3]
    assert (rewards[1], rewards[2]) == (0.5, 0.75)
    assert isnan(rewards[3])  # null is what NaN becomes


def test_verls_tensorboard(tmp_path):
    """verl logs there under its own names (verl/utils/tracking.py)."""
    from torch.utils.tensorboard import SummaryWriter

    rows = {step: {"critic/score/mean": step / 8, "actor/pg_loss": -step / 16} for step in (1, 2)}
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step, row in rows.items():
            for name, value in row.items():
                writer.add_scalar(name, value, step)
    curves = read_curves(tmp_path / "tb", "A")
    assert curves.metrics == {"reward": {1: 0.125, 2: 0.25}, "loss": {1: -0.0625, 2: -0.125}}
    assert curves.updates == 1


def test_trls_own_state(run, tmp_path):
    """The last checkpoint of a folder, and a log whose interval hides the rollouts."""
    state = json.loads((run / "checkpoint-5" / "trainer_state.json").read_text())
    for step in (2, 10):
        shutil.copytree(run / "checkpoint-5", tmp_path / f"checkpoint-{step}")
    state["log_history"] = [{"step": step, "loss": 0.5, "reward": step / 100} for step in (10, 20)]
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(state))
    curves = read_curves(tmp_path, "A")
    assert curves.metrics["reward"] == {10: 0.1, 20: 0.2}
    assert curves.updates is None


def test_verls_console_log():
    """As Ray prints it: prefixes, colours, bars, the configuration, a validation at step 0."""
    curves = read_curves(DATA / "verl_console.log", "A")
    assert curves.format == "verl"
    assert curves.metrics["reward"] == {1: 0.25, 2: 0.3125, 3: 0.375, 4: 0.4375}
    assert curves.metrics["loss"] == {1: -0.0021, 2: 1.5e-05, 3: 0.0013, 4: -0.0008}
    assert curves.metrics["perf/throughput"] == {1: 800.5, 2: 810.0, 3: 790.25, 4: 805.0}
    assert curves.metrics["timing/rollout"] == {1: 12.5, 2: 12.25, 3: 12.0, 4: 11.75}
    assert curves.metrics["completions/mean_length"][4] == 241.0
    assert curves.scores == {"val-core/openai/gsm8k/acc/mean@1": {0: 0.3646702047005307}}
    assert SECRET not in repr(curves)


def test_verls_file_logger(tmp_path):
    rows = [{"step": 0, "data": {"val-core/gsm8k/acc/mean@1": 0.1}}, {"step": 1, "data": {"critic/score/mean": 0.5}}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = read_curves(tmp_path / "run.jsonl", "A")
    assert (curves.format, curves.metrics, curves.updates) == ("verl_file", {"reward": {1: 0.5}}, 1)
    assert curves.scores == {"val-core/gsm8k/acc/mean@1": {0: 0.1}}


def test_scores_of_validations_under_every_name_of_verls(tmp_path):
    """val/test_score to 0.2, …/reward/… where the reward function returns no acc. A first step 0 is the first rollout
    in older versions: what is validated with it stands after it."""
    (tmp_path / "new.log").write_text(
        "step:0 - val-core/openai/gsm8k/reward/mean@1:0.25\n"
        "step:1 - critic/score/mean:0.5 - actor/pg_loss:0.1\n"
        "step:2 - critic/score/mean:0.6 - actor/pg_loss:0.1 - val-core/openai/gsm8k/reward/mean@1:0.5\n"
    )
    core = "val-core/openai/gsm8k/acc/mean@1"
    assert read_curves(tmp_path / "new.log", "A").scores == {core: {0: 0.25, 2: 0.5}}
    (tmp_path / "old.log").write_text(
        "step:0 - critic/score/mean:0.5 - actor/pg_loss:0.1\n"
        "step:1 - critic/score/mean:0.6 - actor/pg_loss:0.1 - val/test_score/openai/gsm8k:0.5\n"
    )
    assert read_curves(tmp_path / "old.log", "A").scores == {core: {2: 0.5}}


def test_the_log_of_the_ppo_guide():
    """Steps from 0, lines broken between metrics (`../shared/guides`, whose numbers these are)."""
    curves = read_curves(DATA / "verl_ppo_guide.log", "A")
    assert curves.metrics["reward"] == {1: 0.004, 2: 0.0}
    assert curves.metrics["loss"] == {1: -0.005, 2: 0.0}
    assert curves.metrics["timing/rollout"] == {1: 21.47, 2: 23.02}
    assert curves.metrics["prompts/min_length"] == {1: 68.0, 2: 70.0}
    assert curves.metrics["learning_rate"] == pytest.approx({1: 1e-6, 2: 1e-6})  # actor/lr(1e-4):0.010
    assert curves.metrics["critic/vpred_mean"] == {1: -2.056, 2: 1.038}
    assert (curves.metrics["critic/values_max"][1], curves.metrics["critic/values_min"][1]) == (9.5, -14.0)
    assert curves.metrics["critic/returns_max"] == {1: 0.0, 2: 0.0}
    assert curves.metrics["reward/max"] == {1: 1.0, 2: 0.0}
    text = (DATA / "verl_ppo_guide.log").read_text()
    known = {name for verls in NAMES.values() for name in verls}
    assert set(re.findall(r"- ([\w/]+)", text)) - known == {
        "timing/values",  # in timing/old_logps here
        "timing/update_critic",  # policy and critic have one backward here
        "critic/lr",  # a constant
    }


def test_the_table_of_names_in_docs_verl_is_whole():
    """Cells such as `critic/advantages/mean, max` name what follows by its last part alone."""
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    page = page[page.index("## Metrics") :]

    def names(cell: str) -> set[str]:
        first, *others = cell.strip().split(", ")
        return {first, *(each if "/" in each else f"{first.rpartition('/')[0]}/{each}" for each in others)}

    rows = [tuple(map(names, line.strip("|").split(" | "))) for line in page.splitlines() if line.startswith("| ")]
    for ours, verls in NAMES.items():
        if ours in verls:
            assert f"`{ours}`" in page, ours
        elif verls:
            assert any(set(verls) <= left and ours in right for left, right in rows), ours


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("step:1 - critic/score/mean:0.5step:2 - critic/score/mean:0.25\n", {1: 0.5, 2: 0.25}),
        ("step:1 - critic/score/mean:np.float64(0.5)step:2 - critic/score/mean:.25", {1: 0.5, 2: 0.25}),
        ("".join(f"step:{i} - critic/score/mean:0.{n}\n" for n, i in enumerate([1, 2, 3, 1, 2])), {1: 0.3, 2: 0.4}),
        ("step:1 - critic/score/mean:1\nstep:0 - loaded:1\n", {1: 1.0}),
        ("step:7 - critic/score/mean:5e-1 - actor/grad_norm:nan\r\n", {7: 0.5}),
        ("global_step:3 - x:1 | step:4 - critic/score/mean:1\n", {4: 1.0}),
        ("Training Progress:  50%|█████     | 1/2 [00:01<00:01]step:1 - critic/score/mean:1", {1: 1.0}),
        (
            "step:1 - critic/score/mean:1Training Progress: 5%|▌ | 1/2 [00:01<00:01, 2it/s]\n"
            "step:2 - critic/score/mean:0",
            {1: 1.0, 2: 0.0},
        ),
        (
            "\x1b[36m(main_task pid=7, ip=10.0.0.1)\x1b[0m step:1 - actor/lr:0.0\n"
            "\x1b[36m(main_task pid=7, ip=10.0.0.1)\x1b[0m  - critic/score/mean:-1.0\n",
            {1: -1.0},
        ),
    ],
)
def test_forms_of_a_console_log(tmp_path, text, rewards):
    (tmp_path / "log.txt").write_text(text)
    assert read_curves(tmp_path / "log.txt", "A").metrics["reward"] == rewards


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.log", b"", "the file is empty"),
        ("program", b"\x7fELF\0\0 step:1 - critic/score/mean:1", "no log of a training that is known here"),
        ("words.log", b"step 1 of the recipe - stir\n", "known: verl_file, perl, tensorboard, trl, verl logs"),
        ("other.log", b"step:1 - score:0.5\n", "no step there logs a metric that is known here"),
        ("metrics.jsonl", b"{}\nnot json\n", "no step is logged in metrics.jsonl yet"),
        ("config.json", b'{"a": 1}', "is no trainer_state.json of transformers"),
        ("list.json", b"[1, 2]", "is no trainer_state.json of transformers"),
        ("state.json", b'{"log_history": []}', "no step is logged"),
        ("run.wandb", b":W&B\xe1\xbe\x00", "W&B has no reader of its .wandb files; write the run's metrics.jsonl"),
        ("events.out.tfevents.1.host", b"nothing", "no scalars are logged there"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        read_curves(tmp_path / name, "B")
    assert str(error.value).startswith(f"B {tmp_path / name}: ")


def test_a_folder_of_several_runs_is_refused(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for name in ("one", "two"):
        write_training(tmp_path / "ours" / name, [logged(1)])
        with SummaryWriter(str(tmp_path / "tb" / name)) as writer:
            writer.add_scalar("reward", 1, 1)
    for folder in ("ours", "tb"):
        with pytest.raises(UserError, match=r"holds 2 runs: .*one, .*two; write one of them"):
            read_curves(tmp_path / folder, "A")
    with pytest.raises(UserError, match="no such file"):
        read_curves(tmp_path / "nothing", "A")


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(b"nothing")
    for module in [module for module in sys.modules if module.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"the package tensorboard reads this format; pip install tensorboard$"):
        read_curves(file, "A")
