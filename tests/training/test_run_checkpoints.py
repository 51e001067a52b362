"""Which checkpoint a run goes on from: torn ones, other processes, and what it leaves behind."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from perl.base.errors import UserError
from perl.base.files import SAVING
from perl.config.schema import CriticConfig, DatasetConfig, ModelConfig, NoiseConfig, PeftConfig, RolloutConfig
from perl.runs.checkpoints import (
    BEFORE,
    CONTENTS,
    CRITIC,
    check_made,
    find_checkpoint,
    kept_of,
    last_whole_checkpoint,
    leave_behind,
    made_by,
    put_in_place,
    replace_best,
    rotate,
    torn,
)
from perl.training.validation import Validation

MADE = {"processes": 2, "rows of an optimizer step": 8}


def checkpoint(run, step, made=MADE, kept=None):
    folder = run / SAVING / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"lora_A": torch.ones(4)}, folder / "adapter_model.safetensors")
    torch.save({"step": step}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "README.md").write_text("# A card")
    put_in_place(folder, run / folder.name, {"made": made} if kept is None else {"made": made, "kept": kept})
    return run / folder.name


def cut(file):
    file.write_bytes(file.read_bytes()[:-3])


TEARS = {
    "missing": (lambda c: (c / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "safetensors": (lambda c: cut(c / "adapter_model.safetensors"), "adapter_model.safetensors has 85 bytes of 88"),
    "pt": (lambda c: cut(c / "optimizer.pt"), "optimizer.pt has "),
    "state": (lambda c: (c / "trainer_state.json").write_text(""), "trainer_state.json has 0 bytes of 19"),
    "contents": (lambda c: cut(c / CONTENTS), "checkpoint.json is not readable"),
    "a list": (lambda c: (c / CONTENTS).write_text("[1]"), "checkpoint.json is not readable (ValidationError)"),
    "brackets": (lambda c: (c / CONTENTS).write_text("[" * 100_000), "checkpoint.json is not readable (RecursionErr"),
    "sizes": (lambda c: (c / CONTENTS).write_text('{"made": {}, "files": {"a": "b"}}'), "checkpoint.json is not read"),
    "processes": (lambda c: (c / CONTENTS).write_text('{"made": {}, "files": {}}'), "checkpoint.json does not say how"),
    "names": (
        lambda c: (c / CONTENTS).write_text(json.dumps({"made": {"processes": 1}, "files": {"a" * 5000: 1}})),
        "aaaa",
    ),
    "no contents": (lambda c: (c / CONTENTS).unlink(), "no checkpoint.json, which is written last"),
}


@pytest.mark.parametrize("kind", TEARS)
def test_a_torn_checkpoint_is_passed_over_with_its_reason(tmp_path, caplog, kind):
    whole, later = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    assert last_whole_checkpoint(tmp_path) == later
    tear, why = TEARS[kind]
    tear(later)
    for word in ("true", "auto"):
        caplog.clear()
        assert find_checkpoint(word, tmp_path) == str(whole)
        (said,) = caplog.messages
        assert f"checkpoint-10 is not whole: {why}" in said.replace("it has no", "no")
    with pytest.raises(UserError, match=r"it is not whole: .*; name an earlier one"):
        find_checkpoint(str(later), tmp_path)


@pytest.mark.parametrize("damaged", ["[1]", '{"step": "a", "global_step": null}', "[" * 100_000, "9" * 5000, "{"])
def test_a_damaged_state_is_one_line(tmp_path, damaged):
    folder = checkpoint(tmp_path, 9)
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text(damaged)
    with pytest.raises(UserError, match=r"best/best\.json is not readable \(.*\); remove .*/best$"):
        leave_behind(tmp_path, str(folder))
    (folder / "trainer_state.json").write_text(damaged)
    with pytest.raises(UserError, match=r"trainer_state\.json is not readable \(.*\); name an earlier checkpoint$"):
        leave_behind(tmp_path, str(folder))


def test_where_there_is_none(tmp_path):
    assert find_checkpoint("auto", tmp_path / "new") is None
    with pytest.raises(UserError, match=r"true: no whole checkpoint in .*/new; .* or write auto to begin"):
        find_checkpoint("true", tmp_path / "new")
    with pytest.raises(UserError, match="has no trainer_state"):
        find_checkpoint(str(tmp_path), tmp_path)


def test_a_card_with_scores_tears_nothing(tmp_path):
    folder = checkpoint(tmp_path, 1)
    (folder / "README.md").write_text("# A card with scores")
    assert torn(folder) is None


def test_what_another_attempt_left_is_not_in_the_way(tmp_path, caplog):
    """Killed while checkpoint-12 was written, and while best/ was replaced; checkpoint-10 has lost a file."""
    checkpoint(tmp_path, 9)
    (checkpoint(tmp_path, 10) / "optimizer.pt").unlink()
    for name in ("checkpoint-12", f"{BEFORE}best"):
        (tmp_path / SAVING / name).mkdir(parents=True)
        (tmp_path / SAVING / name / "adapter_model.safetensors").touch()
    leave_behind(tmp_path, find_checkpoint("auto", tmp_path))
    assert f"{SAVING}/checkpoint-12: the run was ended while it was written: removed" in caplog.text
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*") if path.is_dir()}
    assert found == {"_left_behind/checkpoint-10"}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-9", "best", "_left_behind"}


def test_scores_of_later_steps_are_left_behind(tmp_path):
    """The best adapter too: its score would never be reached by the run that goes on, nor stand in its metrics."""
    checkpoint(tmp_path, 9)
    for name in ("best", "validation/step-9/gsm8k", "validation/step-12/gsm8k"):
        (tmp_path / name).mkdir(parents=True)
    for step in (9, 12):
        (tmp_path / "best" / "best.json").write_text(json.dumps({"step": step, "value": 0.5}))
        leave_behind(tmp_path, find_checkpoint("auto", tmp_path))
        assert (tmp_path / "best").is_dir() == (step == 9)
    left = tmp_path / "_left_behind"
    assert sorted(str(path.relative_to(left)) for path in left.rglob("*")) == [
        "best", "best/best.json", "validation", "validation/step-12", "validation/step-12/gsm8k"
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["step-9"]


def test_a_checkpoint_takes_the_place_of_another_attempts(tmp_path):
    checkpoint(tmp_path, 9)
    again = checkpoint(tmp_path, 9, MADE | {"processes": 3})
    assert json.loads((again / CONTENTS).read_text())["made"]["processes"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-9"]


def training(processes, rows, **more):
    sizes = {"world_size": processes, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    others = {"learning_rate": 1e-3, "weight_decay": 0.0, "optim": "adamw", "adam_beta2": 0.999, "seed": 1}
    return SimpleNamespace(**sizes, **(others | more))


def of_run(processes, rows, peft=None, model="m", **more):
    groups = {
        "peft": PeftConfig(**peft or {}),
        "model": ModelConfig(model_name_or_path=model),
        "critic": CriticConfig(),
    }
    return SimpleNamespace(training=training(processes, rows, **more), dataset=DatasetConfig(), **groups)


NODE = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from accelerate import Accelerator
from perl.runs.adapter_trainer import AdapterTrainer

accelerator, made, folder = Accelerator(cpu=True), Path(sys.argv[1]), Path(sys.argv[2])
rank = accelerator.process_index
made.mkdir(parents=True, exist_ok=True)
(made / f"state_{rank}.pt").touch()
if rank:  # its cache of a shared disk still has what was moved
    is_dir = Path.is_dir
    Path.is_dir = lambda self, **flags: self == made or is_dir(self, **flags)
args = SimpleNamespace(process_index=rank, local_process_index=0, world_size=2)
AdapterTrainer.put_in_place(SimpleNamespace(args=args, accelerator=accelerator), made, folder, {})
"""


@pytest.mark.parametrize("shared", [True, False])
def test_of_several_nodes_one_puts_a_checkpoint_in_place_on_a_shared_disk_and_each_on_its_own(tmp_path, shared):
    """The second took what the first had put there away again."""
    disks = [tmp_path / ("shared" if shared else str(rank)) for rank in range(2)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(disk / SAVING / "checkpoint-3"), str(disk / "checkpoint-3")],
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"},
        )
        for rank, disk in enumerate(disks)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    files = [sorted(file.name for file in (disk / "checkpoint-3").iterdir()) for disk in disks]
    both = [CONTENTS, "state_0.pt", "state_1.pt"]
    assert files == ([both, both] if shared else [[CONTENTS, "state_0.pt"], [CONTENTS, "state_1.pt"]])
    assert not any((disk / SAVING).exists() for disk in disks)


def test_another_number_of_processes_is_said_or_refused(tmp_path, caplog):
    folder = checkpoint(tmp_path, 9)
    check_made(str(folder), of_run(2, 4))
    assert not caplog.messages
    check_made(str(folder), of_run(1, 8))
    (said,) = caplog.messages
    assert "was written by 2 processes, now there are 1: prompts and seeds are the same" in said
    with pytest.raises(UserError, match="processes 2, now 1; rows of an optimizer step 8, now 4: the place"):
        check_made(str(folder), of_run(1, 4))
    (folder / "global_step9").mkdir()
    with pytest.raises(UserError, match="by 2 processes with DeepSpeed, now there are 1; start as many as then"):
        check_made(str(folder), of_run(1, 8))
    caplog.clear()
    check_made(str(folder), of_run(2, 8))
    assert "rows of an optimizer step 8, now 16: the place in the data is counted in batches" in caplog.text


@pytest.mark.parametrize(
    ("of_training", "peft", "said"),
    [
        ({"learning_rate": 1e-6}, {}, "--config.training.learning_rate 0.001, not 1e-06; write the former, or begin"),
        ({"weight_decay": 0.1}, {}, "--config.training.weight_decay 0.0, not 0.1"),
        ({}, {"r": 8}, "--config.peft.r 16, not 8"),
        ({}, {"lora_alpha": 64}, "--config.peft.lora_alpha 32, not 64"),
        ({}, {"type": "dora"}, "--config.peft.type lora, not dora"),
        ({}, {"exclude_modules": ["v_proj"]}, "--config.peft.exclude_modules None, not ['v_proj']"),
        ({}, {"adapter_mode": "merge"}, "--config.peft.adapter_mode continue, not merge"),
        ({"adam_beta2": 0.5}, {}, "--config.training.adam_beta2 0.999, not 0.5"),
        (
            {"num_generations": 8, "generation_batch_size": 8, "num_iterations": 1},
            {},
            "it is of perl.sft; to begin",
        ),
    ],
)
def test_what_a_checkpoint_decides_is_not_silently_another(tmp_path, of_training, peft, said):
    """The optimizer's rates went on, and config.yaml told the new ones; another alpha was another policy."""
    folder = checkpoint(tmp_path, 9, kept=kept_of(of_run(2, 4)))
    check_made(str(folder), of_run(2, 4, {"lora_dropout": 0.1}))
    with pytest.raises(UserError, match=re.escape(said)):
        check_made(str(folder), of_run(2, 4, peft, **of_training))


def test_a_run_goes_on_with_the_adapter_that_it_was_begun_with(tmp_path):
    """Without the flag it went on above the bare base, or against another reference. The adapter may have moved, and be
    gone when a checkpoint is written."""
    folders = [tmp_path / name for name in ("first", "moved", "other")]
    for adapter, text in zip(folders, ("1", "1", "2"), strict=True):
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(text)
    first, moved, other = ({"adapter": str(adapter)} for adapter in folders)
    check_made(None, begun := of_run(2, 4, first))
    shutil.rmtree(folders[0])
    folder = checkpoint(tmp_path, 9, kept=kept_of(begun))
    check_made(str(folder), of_run(2, 4, moved))
    for peft, said in (
        (other, f"another adapter by --config.peft.adapter, not with {folders[2]};"),
        ({}, "an adapter"),
    ):
        with pytest.raises(UserError, match=f"the run was begun with {said}"):
            check_made(str(folder), of_run(2, 4, peft))
    bare = checkpoint(tmp_path, 10, kept=kept_of(of_run(2, 4)))
    with pytest.raises(UserError, match=r"the run was begun with no adapter by --config.peft.adapter, not with"):
        check_made(str(bare), of_run(2, 4, moved))


def test_another_piece_size_is_said(tmp_path, caplog):
    before, now = of_run(2, 4), of_run(2, 4)
    before.rollout, now.rollout = RolloutConfig(piece_size=4), RolloutConfig(piece_size=8)
    check_made(str(checkpoint(tmp_path, 9, kept=kept_of(before))), now)
    assert "was written with --config.rollout.piece_size 4: the run goes on with 8" in caplog.text


def test_a_critics_rate_is_its_checkpoints_where_there_is_a_critic(tmp_path):
    before, now = of_run(2, 4), of_run(2, 4)
    now.critic.lr = 1e-5
    folder = checkpoint(tmp_path, 9, kept=kept_of(before))
    check_made(str(folder), now)
    (folder / CRITIC).parent.mkdir()
    (folder / CRITIC).touch()
    with pytest.raises(UserError, match=r"goes on with --config\.critic\.lr 0\.0001, not 1e-05"):
        check_made(str(folder), now)


def test_the_layers_that_have_noise_stay(tmp_path):
    """Relative noise is scaled by their weights as the run began, which the checkpoint has: other layers got the sizes
    of these, or a traceback."""

    def run(**noise):
        config = of_run(2, 4)
        config.noise_injection = NoiseConfig(**noise)
        return config

    folder = str(checkpoint(tmp_path, 9, kept=kept_of(run(enabled=True, target_modules=["input_layernorm"]))))
    check_made(folder, run(enabled=True, target_modules=["input_layernorm"], sigma_start=0.01))
    check_made(folder, run(enabled=False))
    with pytest.raises(UserError, match=r"noise_injection\.target_modules \['input_layernorm'\], not \['norm'\]"):
        check_made(folder, run(enabled=True, target_modules=["norm"]))
    without = str(checkpoint(tmp_path, 10, kept=kept_of(run(enabled=False))))
    check_made(without, run(enabled=True, target_modules=["norm"]))


def test_another_model_or_data_set_by_name_is_said(tmp_path, caplog):
    """The adapter went on above other weights, without a line."""
    folder = checkpoint(tmp_path, 9, kept=kept_of(of_run(2, 4, model="/disk/m")))
    check_made(str(folder), now := of_run(2, 4, model="/mnt/m"))
    assert "with --config.model.model_name_or_path /disk/m: the run goes on with /mnt/m" in caplog.text
    caplog.clear()
    now.model.model_name_or_path, now.dataset.dataset_name_or_path = "/disk/m", "gsm8k"
    check_made(str(folder), now)
    (said,) = caplog.messages
    assert "--config.dataset.dataset_name_or_path open-r1/DAPO-Math-17k-Processed: the run goes on with gsm8k" in said


def test_another_seed_is_said(tmp_path, caplog):
    folder = checkpoint(tmp_path, 9, made_by(training(2, 4)))
    check_made(str(folder), of_run(2, 4, seed=2))
    assert "was written with seed 1, now 2: the place in the data is counted in batches" in caplog.text


def test_what_an_epochs_rows_follow_from_in_sft_is_said_where_it_is_another(tmp_path, caplog):
    sft = {"packing": False, "packing_strategy": "bfd", "max_length": None, "truncation_mode": "keep_start"}
    folder = checkpoint(tmp_path, 9, made_by(training(2, 4, **sft)))
    check_made(str(folder), of_run(2, 4, **sft))
    assert not caplog.messages
    check_made(str(folder), of_run(2, 4, **sft | {"max_length": 64}))  # rows are cut, and are as many
    assert not caplog.messages
    check_made(str(folder), of_run(2, 4, **sft | {"packing": True, "max_length": 64}))
    (said,) = caplog.messages
    assert "packing False, now bfd: the place in the data is counted in batches" in said


@pytest.mark.parametrize(("limit", "best", "kept"), [(1, None, "4"), (2, "2", "24"), (1, "2", "24"), (9, None, "1234")])
def test_only_checkpoints_are_counted_and_removed(tmp_path, limit, best, kept):
    copies = {"checkpoint-1-keep", "checkpoint-4-merged"}
    for name in {*copies, *(f"checkpoint-{step}" for step in range(1, 5))}:
        (tmp_path / name).mkdir()
    rotate(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert {path.name for path in tmp_path.iterdir()} == {*copies, *(f"checkpoint-{step}" for step in kept)}


def test_the_result_of_an_attempt_is_left_behind_by_one_that_goes_on(tmp_path):
    """It was scored and told as the result of a run that was stopped before."""
    checkpoint(tmp_path, 9)
    for name in ("adapter", "critic"):
        (tmp_path / name).mkdir()
    leave_behind(tmp_path, find_checkpoint("auto", tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_left_behind", "checkpoint-9"]
    assert sorted(path.name for path in (tmp_path / "_left_behind").iterdir()) == ["adapter", "critic"]


def test_a_checkpoint_of_another_run_leaves_all_of_this_one_behind(tmp_path):
    """Its rows, checkpoints and best adapter up to that step became the other run's."""
    there, here = tmp_path / "there", tmp_path / "here"
    folder = checkpoint(there, 9)
    make_best(there / "best", 5)
    checkpoint(here, 8)
    make_best(here / "best", 8)
    (here / "validation" / "step-0").mkdir(parents=True)
    (here / "metrics.jsonl").write_text('{"step": 0}\n{"step": 8}\n')
    (here / "wandb_run.json").write_text("{}")
    leave_behind(here, str(folder))
    assert (here / "metrics.jsonl").read_text() == ""
    assert step_of_best(here / "best") == 5
    assert not any((here / "validation").iterdir())
    assert not (here / "checkpoint-8").exists()
    left = here / "_left_behind"
    assert step_of_best(left / "best") == 8
    assert (left / "checkpoint-8").is_dir()
    assert (left / "validation" / "step-0").is_dir()
    assert not (here / "wandb_run.json").exists()
    with pytest.raises(UserError, match="lies in what the run has left behind"):
        leave_behind(here, str(left / "checkpoint-8"))
    assert (left / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 8}\n'


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_to_a_checkpoint_of_the_run_is_one_of_the_run(tmp_path, inside):
    run, away = tmp_path / "run", tmp_path / "away"
    checkpoint(run, 10)
    make_best(run / "best", 5)
    link, folder = (run, away) if inside else (away, run)
    checkpoint(folder, 20)
    link.mkdir(exist_ok=True)
    (link / "checkpoint-20").symlink_to(folder / "checkpoint-20")
    leave_behind(run, str(link / "checkpoint-20"))
    assert {path.name for path in run.iterdir()} == {"checkpoint-10", "checkpoint-20", "best"}


def make_best(folder, step):
    folder.mkdir(parents=True)
    (folder / "best.json").write_text(json.dumps({"step": step}))


def step_of_best(folder):
    return json.loads((folder / "best.json").read_text())["step"] if folder.is_dir() else None


@pytest.mark.parametrize(
    ("best", "before", "kept"),
    [
        (5, 1, 1),  # killed behind checkpoint-3 and behind a better validation than those up to it
        (None, 1, 1),  # while the better one was put in its place
        (2, None, 2),
        (2, 1, 2),  # killed between a checkpoint and the removal of what it makes needless
        (5, None, None),  # nothing was validated up to the checkpoint
        (6, 5, None),  # an earlier checkpoint than the last
    ],
)
def test_the_best_adapter_is_that_up_to_the_checkpoint(tmp_path, best, before, kept):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    for name, step in (("best", best), ("_best_before", before)):
        if step is not None:
            make_best(tmp_path / name, step)
    leave_behind(tmp_path, str(checkpoint))
    assert step_of_best(tmp_path / "best") == kept
    assert not (tmp_path / "_best_before").exists()
    if best is not None and best > 3:
        assert step_of_best(tmp_path / "_left_behind" / "best") == best


def test_a_better_adapter_leaves_the_best_up_to_each_checkpoint(tmp_path):
    validation: Any = Validation.__new__(Validation)
    validation.run_dir, validation.rank, validation.chosen_by, validation.best = tmp_path, 0, "val-core/acc", None
    validation.setup = SimpleNamespace(trained="adapter")

    def found():
        return {path.name for path in tmp_path.glob("*best*")}

    def better(*steps):
        for step in steps:
            validation.keep_best(step, {"val-core/acc": step / 10}, lambda folder: folder.mkdir(parents=True))

    better(1, 2)
    checkpoint(tmp_path, 3)
    better(4, 5)
    assert found() == {"best", "_best_before-2"}
    checkpoint(tmp_path, 6)
    validation.on_save(None, None, None)
    better(7)
    assert found() == {"best", "_best_before-2", "_best_before-5"}
    shutil.rmtree(tmp_path / "checkpoint-3")
    (tmp_path / "_best_before-4").mkdir()  # without best.json, as a kill can leave it
    validation.on_save(None, None, None)
    assert found() == {"best", "_best_before-5"}


def test_a_better_adapter_of_the_same_step_takes_its_place(tmp_path):
    """As where step 0 is validated again, on other data."""
    checkpoint(tmp_path, 3)
    for step in (0, 0, 5):
        make_best(tmp_path / "_saving" / "best", step)
        replace_best(tmp_path, tmp_path / "_saving" / "best")
    assert (step_of_best(tmp_path / "best"), step_of_best(tmp_path / "_best_before-0")) == (5, 0)


def test_the_best_up_to_an_earlier_checkpoint_is_gone_on_from(tmp_path):
    """Step 5, and better at 15; checkpoints 10 and 20. It was removed at the latter, and the next one was the best."""
    here, there = tmp_path / "here", tmp_path / "there"
    for step in (10, 20):
        checkpoint(here, step)
    (here / "validation" / "step-10 (copy)").mkdir(parents=True)
    make_best(here / "_best_before-5", 5)
    make_best(here / "best", 15)
    there.mkdir()
    for run in (there, here):
        leave_behind(run, str(here / "checkpoint-10"))
        assert step_of_best(run / "best") == 5
    assert step_of_best(here / "_left_behind" / "best") == 15
