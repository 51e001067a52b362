"""`python -m perl.train` and accelerate as a user runs them: what is left behind, and what each mistake says."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from perl.base.errors import UserError
from perl.device import detect
from perl.runs.checkpoints import CONTENTS
from perl.training.grpo import train
from tests.folders import adapter_of, metrics, write_sums
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.training.small_run import SETTINGS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny_model"), scale=4.0)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Eight problems in GSM8K's schema."""
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture(scope="session")
def digits_reward(tmp_path_factory):
    """A random model is never right; the share of digits differs from completion to completion."""
    file = tmp_path_factory.mktemp("reward") / "digits.py"
    file.write_text(
        "def digits(completions, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
    )
    return f"{file}:digits"


@pytest.fixture(scope="session")
def flags(model, data, digits_reward):
    """`flags(training__max_steps=3)`: flags of a run of two steps but for these."""
    settings = SETTINGS | {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": data,
        "reward.functions": json.dumps(["accuracy", digits_reward]),
    }

    def make(**changes):
        both = settings | {name.replace("__", "."): value for name, value in changes.items()}
        return [word for name, value in both.items() for word in (f"--config.{name}", str(value))]

    return make


def environment(**extra):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "RANK", "WORLD"))}
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | extra


def run(command, cwd, timeout=300, **env):
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )


def python_train(argv, cwd, **env):
    return run([sys.executable, "-m", "perl.train", *argv], cwd, **env)


def launched_train(processes, argv, cwd, config="cpu.yaml", **env):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    config_file = str(ROOT / "scripts" / "accelerate" / config)  # an absolute path stays itself
    command = [*launcher, config_file, "--num_processes", str(processes), "-m", "perl.train", *argv]
    return run(command, cwd, **env)


def require_same(folder, other):
    one, two = adapter_of(folder), adapter_of(other)
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, flags):
    """A run of three steps with a checkpoint after each, as a user starts it: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    argv = flags(
        training__hub_token="hf_not_a_real_one",
        training__save_steps=1,
        training__max_steps=3,
        training__report_to="tensorboard",
    )
    done = python_train(argv, folder, WANDB_API_KEY="local-0123secret")
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (folder / "outputs").glob("grpo_lora_tiny_model*_cpu_*")
    return done, run


def test_a_run_leaves_all_that_it_promises(whole):
    done, folder = whole
    assert "num_processes: 1\n" in done.stdout
    assert "progress: step 3/3" in done.stdout

    rows = [row for row in metrics(folder) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("aqn/stage") for row in metrics(folder)] == [0, 3, 6, None]  # of a whole run there is none
    assert {"aqn/sigma", "aqn/num_modules", "loss", "rewards/accuracy/mean", "rewards/digits/mean"} <= rows[0].keys()

    adapter = adapter_of(folder)
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert not (folder / "adapter" / "training_args.bin").exists()
    applied = json.loads((folder / "peft.json").read_text())
    assert (applied["type"], applied["method"], applied["tensors"].keys()) == ("lora", "LORA", {"lora_A", "lora_B"})
    assert 0 < applied["trained"] < applied["parameters"]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["trl"] == "1.16.0"
    assert environment["num_processes"] == 1
    for file in [f for f in folder.rglob("*") if f.is_file()]:
        assert b"hf_not_a_real_one" not in file.read_bytes(), file
        assert b"local-0123secret" not in file.read_bytes(), file
    assert "hf_not_a_real_one" not in done.stdout + done.stderr
    assert list(folder.rglob("events.out.tfevents.*"))  # report_to tensorboard


def test_a_runs_configuration_repeats_it(whole, tmp_path):
    _, folder = whole
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["training"]["learning_rate"] == 0.01
    again = tmp_path / "again"
    train(["--recipe", str(folder / "config.yaml"), "--config.training.output_dir", str(again)])
    require_same(again, folder)


def test_resume_in_another_process_is_exact(whole, tmp_path, flags):
    _, folder = whole
    changes = {"training__save_steps": 1, "training__max_steps": 3, "training__output_dir": tmp_path / "part"}
    train(flags(training__resume_from_checkpoint=folder / "checkpoint-1", **changes))
    require_same(tmp_path / "part", folder)


class Code:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "process_state_0.pt"])
def test_code_in_a_checkpoint_is_not_run(whole, tmp_path, flags, name):
    checkpoint = shutil.copytree(whole[1] / "checkpoint-1", tmp_path / "checkpoint-1")
    for file in (name, "training_args.bin"):
        torch.save(Code(tmp_path / "ran"), checkpoint / file)
    contents = json.loads((checkpoint / CONTENTS).read_text())
    contents["files"] = {each: (checkpoint / each).stat().st_size for each in contents["files"]}  # which would tell
    (checkpoint / CONTENTS).write_text(json.dumps(contents))
    argv = flags(training__resume_from_checkpoint=checkpoint, training__output_dir=tmp_path / "on")
    assert "more than tensors and plain values, which is not read" in message(argv)
    assert not (tmp_path / "ran").exists()


def test_two_cpu_processes_train_together(tmp_path, flags):
    argv = flags(training__output_dir="out", training__per_device_train_batch_size=2)
    done = launched_train(2, argv, tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("num_processes: 2\n") == 1
    adapter = adapter_of(tmp_path / "out")
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("said", "variables"), [("2", {"PERL_NUM_PROCESSES": "2"}), ("several", {})])
def test_fewer_processes_than_asked_for_is_an_error(tmp_path, flags, said, variables):
    """What accelerate makes of MULTI_CPU without mpirun: one process, and nobody says so."""
    config = tmp_path / "multi_cpu.yaml"
    config.write_text((ROOT / "scripts" / "accelerate" / "cpu.yaml").read_text().replace("MULTI_GPU", "MULTI_CPU"))
    done = launched_train(2, flags(), tmp_path, config=config, **variables)
    assert done.returncode != 0
    assert f"{said} processes were asked for but 1 train together" in done.stderr


@pytest.mark.slow
def test_rank_0_alone_says_what_is_wrong(tmp_path, flags):
    done = launched_train(2, [*flags(), "--config.training.max_stepz", "1"], tmp_path)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("error: unknown flag --config.training.max_stepz") == 1


@pytest.mark.slow
def test_two_cpu_processes_resume_exactly_and_another_number_of_them_is_refused(tmp_path, flags):
    """The review's: on several CPU processes it always failed, and another number hung until the collectives timed
    out. Step 1 is in the middle of a window: its rollout serves two updates."""
    settings = {
        "training__per_device_train_batch_size": 2,
        "training__gradient_accumulation_steps": 1,
        "training__steps_per_generation": 2,
        "training__save_steps": 1,
        "training__max_steps": 3,
    }
    whole = launched_train(2, flags(training__output_dir="whole", **settings), tmp_path)
    assert whole.returncode == 0, (whole.stdout + whole.stderr)[-3000:]
    settings["training__resume_from_checkpoint"] = tmp_path / "whole" / "checkpoint-1"
    part = launched_train(2, flags(training__output_dir="part", **settings), tmp_path)
    assert part.returncode == 0, (part.stdout + part.stderr)[-3000:]
    require_same(tmp_path / "part", tmp_path / "whole")
    settings["training__per_device_train_batch_size"] = 4
    alone = python_train(flags(training__output_dir="alone", **settings), tmp_path)
    assert alone.returncode != 0
    (line,) = [line for line in alone.stderr.splitlines() if "error: " in line]
    assert "in the middle of a generation window, with 2 processes, now 1" in line
    assert "Traceback" not in alone.stderr


def test_save_total_limit_keeps_the_last(tmp_path, flags):
    save = {"training__save_steps": 1, "training__save_total_limit": 1, "training__max_steps": 3}
    train(flags(training__output_dir=tmp_path / "out", **save))
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]


def test_wandb_offline_without_a_key(tmp_path, flags):
    secret = {"training__model_init_kwargs": '{"token": "hf_not_a_real_one"}'}
    argv = flags(training__report_to="wandb", training__max_steps=1, training__output_dir="offline", **secret)
    done = python_train(argv, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "offline" / "wandb").glob("offline-run-*"))
    assert "WARNING W&B is offline, project grpo-lora-" in done.stdout  # the script shows warnings on the screen
    assert "wandb sync" in done.stdout
    for file in [f for f in (tmp_path / "offline").rglob("*") if f.is_file()]:
        assert b"hf_not_a_real_one" not in file.read_bytes(), file


def test_wandb_off_when_disabled(tmp_path, flags, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_DISABLED", "true")
    train(flags(training__report_to="wandb", training__max_steps=1, training__output_dir=tmp_path / "off"))
    assert not (tmp_path / "off" / "wandb").exists()
    assert "WANDB_DISABLED" in caplog.text


def message(argv, capsys=None):
    with pytest.raises(UserError) as caught:
        train(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_are_one_line_before_a_model_is_loaded(tmp_path, flags, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perl.training.grpo.load_model", lambda config: pytest.fail("a model was loaded"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "./nowhere: no such folder" in message(flags(model__model_name_or_path="./nowhere"))
    assert "did you mean 'lora'" in message(flags(peft__type="lorra"))
    assert "rslora" in message(flags(peft__type="full"))
    assert "did you mean 'accuracy'" in message(flags(reward__functions='["acuracy"]'))
    assert "nowhere.jsonl" in message(flags(dataset__dataset_name_or_path="nowhere.jsonl"))
    assert "num_generations" in message(flags(training__num_generations=3))
    assert "8 prompts, but a generation batch takes 16" in message(flags(training__gradient_accumulation_steps=16))
    assert "no whole checkpoint" in message(
        flags(training__resume_from_checkpoint="true", training__output_dir=tmp_path / "new")
    )
    assert "no_checkpoint_here" in message(flags(training__resume_from_checkpoint="no_checkpoint_here"))
    overlong = message(
        flags(dataset__max_prompt_length=3, dataset__filter_overlong_prompts="false", dataset__truncation="error")
    )
    assert "truncation left" in overlong
    assert "sums.jsonl" in overlong
    assert "no row" in message(flags(dataset__max_prompt_length=3))


def test_a_model_without_chat_template_is_an_error(tmp_path, flags):
    tiny_model().save_pretrained(tmp_path / "plain")
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path / "plain")
    assert "chat template" in message(flags(model__model_name_or_path=tmp_path / "plain"))


def test_a_folder_that_holds_a_run_is_not_mixed_with_another(tmp_path, flags):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "already holds a run" in message(flags(training__output_dir=tmp_path))


def test_a_bad_flag_of_python_m_perl_train_is_exit_code_2_and_one_line(tmp_path):
    done = python_train(["--config.training.learning_rate", "fast"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --config.training.learning_rate: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.skipif(detect().kind != "cpu", reason="what a CPU can't do")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            ["--config.training.vllm_mode", "server"],
            r"^--config\.training\.vllm_mode: unknown vllm_mode 'server'; known: colocate",
        ),
        (
            ["--config.peft.type", "dora"],
            r"on a cpu device vLLM takes the adapter alone, but vLLM does not serve DoRA; use [^\n]*$",
        ),
    ],
)
def test_vllm_that_can_not_be_given_the_policy_is_refused_before_anything_is_loaded(setting, said):
    with pytest.raises(UserError, match=said):
        train(["--config.rollout.engine", "vllm", *setting])


@pytest.mark.parametrize("flag", ["--config.rollout.engine vllm", "--config.training.use_vllm true"])
def test_vllm_that_is_not_installed_is_one_line(monkeypatch, flag):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "vllm" else find(name, *args))
    with pytest.raises(UserError, match=rf"^[^:\n]*{flag}[^:\n]*: vllm is not installed; pip install [^\n]*$"):
        train([*flag.split(), "--config.training.vllm_mode", "colocate"])


def test_an_unknown_loss_is_refused_before_anything_is_loaded():
    with pytest.raises(UserError, match=r"^--config.training.loss_type: unknown loss 'dap'; did you mean 'dapo'\?"):
        train(["--config.training.loss_type", "dap"])


def test_a_finished_run_that_goes_on_trains_nothing_and_says_so(whole, tmp_path, flags, capsys):
    _, folder = whole
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shutil.rmtree(run / "adapter")  # killed between its last checkpoint and its adapter
    more = {"training__output_dir": run, "training__resume_from_checkpoint": "true"}
    train(flags(training__max_steps=3, **more))
    assert "progress: step 3/3  nothing is left to train" in capsys.readouterr().out
    require_same(run, folder)
    assert max(row["step"] for row in metrics(run)) == 3
