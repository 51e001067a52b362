"""scripts/trl/openr1/dapo_lora_npu.sh, run from another folder as a user would."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from perl import device
from perl.runs import rundir
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
QUICKSTART_BASE = ROOT / "assets" / "quickstart-base"
QUICKSTART_PROBLEMS = ROOT / "assets" / "quickstart-data" / "train.jsonl"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("Qwen2.5-Tiny"), scale=4.0)


@pytest.fixture
def sums(tmp_path):
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def flags(model, data, **changes):
    settings = {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": data,
        "training.max_steps": 2,
        "training.gradient_accumulation_steps": 2,
        "training.max_completion_length": 8,
        "training.report_to": "none",
    } | changes
    return [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def plain_environment():
    """This one without what a run reads, and with the Python that runs these tests."""
    cleared = ("WANDB", "NUM_PROCESSES", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
    return kept | {"PYTHON": sys.executable}


def launch(argv, cwd, timeout=400, env=None, **variables):
    base = plain_environment() if env is None else env | {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), *argv]
    return subprocess.run(
        command, cwd=cwd, env=base | variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_folder(done):
    line = next(line for line in done.stdout.splitlines() if line.startswith("run folder: "))
    return Path(line.removeprefix("run folder: "))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_on_a_plain_cpu(tmp_path, model, sums, processes):
    done = launch(flags(model, sums), tmp_path, NUM_PROCESSES=str(processes))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(done)
    assert folder.parent == tmp_path / "outputs"
    assert folder.name.startswith("grpo_lora_qwen2_5_tiny")
    assert "_cpu_" in folder.name
    assert f"num_processes: {processes}\n" in (folder / "output.log").read_text()
    assert "step 2/2" in done.stdout
    assert {p.name for p in folder.iterdir()} >= {
        *("adapter", "metrics.jsonl", "config.yaml", "environment.json", "output.log")
    }
    assert json.loads((folder / "environment.json").read_text())["num_processes"] == processes


@pytest.mark.parametrize(
    ("active", "chosen"),
    [
        ({}, ".venv"),
        ({"VIRTUAL_ENV": "other"}, "other"),
        ({"CONDA_PREFIX": "other", "CONDA_DEFAULT_ENV": "npu"}, "other"),
        ({"CONDA_PREFIX": "other", "CONDA_DEFAULT_ENV": "base"}, ".venv"),
    ],
)
@pytest.mark.parametrize(("script", "flag"), [(SCRIPT, "--help"), (ROOT / "scripts" / "check_npu_env.sh", "--json")])
def test_the_active_environment_is_taken_before_the_repositorys(tmp_path, script, flag, active, chosen):
    """By the launch script and by what checks the machine for it."""
    copied = tmp_path / script.relative_to(ROOT)
    copied.parent.mkdir(parents=True)
    copied.write_bytes(script.read_bytes())
    for name in (".venv", "other"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {name}\n")
        python.chmod(0o755)
    path = f"{tmp_path / 'other' / 'bin'}{os.pathsep}{os.defpath}"
    done = subprocess.run(
        ["bash", str(copied), flag], env={"PATH": path} | active, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{chosen}\n"), done.stderr


@pytest.mark.parametrize(
    ("argv", "module", "recipe"),
    [
        (["--config.dataset.system_prompt", "Say -h or --help or --recipe now"], "perl.tools.launch", True),
        (["--recipe", "mine.yaml"], "perl.tools.launch", False),
        (["--recipe=mine.yaml"], "perl.tools.launch", False),
        (["--help", "peft"], "perl.train", False),
        (["-h"], "perl.train", False),
    ],
)
def test_help_and_the_recipe_are_whole_arguments(tmp_path, argv, module, recipe):
    """A text that held one of them was taken for it."""
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    done = launch(argv, tmp_path, PYTHON=str(tmp_path / "python"))
    default = ["--recipe", str(ROOT / "recipes" / "dapo_lora.yaml")] if recipe else []
    assert (done.returncode, done.stderr.splitlines()) == (3, ["-m", module, *default, *argv])


def test_nothing_that_a_library_prints_is_among_what_the_script_evaluates(tmp_path, model, sums):
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'touch pwned')\n")
    env = plain_environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "perl.tools.launch", *flags(model, sums)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True)
    names = [line.partition("=")[0] for line in done.stdout.splitlines()]
    exported = [f"export {name}" for name in device.START_VARIABLES["cpu"]]
    assert names == ["DEVICE", "NUM_PROCESSES", "ACCELERATE_CONFIG", "RUN_DIR", *exported]


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, model, sums):
    done = launch([*flags(model, sums), "--config.training.max_stepz", "3"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: unknown flag --config.training.max_stepz; did you mean --config.training.max_steps?\n"
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.model_name_or_path": "./nowhere"}, "./nowhere: no such folder"),
        ({"dataset.dataset_name_or_path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"training.num_generations": 3}, "does not divide the 16 completions"),
        ({"peft.type": "lorra"}, "did you mean 'lora'"),
        ({"reward.functions": '["acuracy"]'}, "did you mean 'accuracy'"),
        ({"training.num_generations": 1}, "algorithm grpo compares the completions of a prompt; write 2 or more"),
        ({"training.loss_type": "ppo"}, "unknown loss 'ppo'"),
        ({"training.importance_sampling_level": "row"}, "importance_sampling_level: unknown"),
        (
            {"training.use_vllm": "true", "training.vllm_mode": "server"},
            "vllm_mode: unknown vllm_mode 'server'; known: colocate",
        ),
        ({"training.max_steps": 0}, "max_steps 0: no step to train"),
        ({"training.sync_ref_model": "true"}, "the model that the run begins with, and never changes"),
        ({"training.gradient_accumulation_steps": 32}, "8 prompts, but a generation batch takes"),
        ({"training.resume_from_checkpoint": "true"}, "no whole checkpoint in outputs"),
        ({"training.output_dir": "/dev/null/run"}, "/dev/null is no folder"),
        ({"reward.functions": '["overlong"]', "reward.overlong_cache_length": 64}, "must be between 1 and"),
        (
            {"dataset.max_prompt_length": 3, "dataset.filter_overlong_prompts": "false"},
            "8 prompts are longer than 3 tokens",
        ),
    ],
)
def test_the_plan_finds_every_mistake_before_anything_starts(tmp_path, model, sums, monkeypatch, changes, said):
    from perl.base.errors import UserError
    from perl.tools.launch import plan

    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        plan(flags(model, sums, **changes))
    assert list(tmp_path.iterdir()) == [sums]


def test_the_plan_checks_the_batch_of_all_processes(model, sums, monkeypatch):
    from perl.base.errors import UserError
    from perl.tools.launch import plan

    monkeypatch.setenv("NUM_PROCESSES", "3")
    argv = flags(model, sums, **{"training.num_generations": 4, "training.gradient_accumulation_steps": 1})
    with pytest.raises(UserError, match="num_generations 5 does not divide the 24 completions"):
        plan([*argv, "--config.training.num_generations", "5"])
    plan(argv)  # 8 x 3 completions hold groups of 4


def test_one_device_needs_no_deepspeed_and_several_say_how_to_do_without(monkeypatch):
    from perl.base.errors import UserError
    from perl.tools import launch

    monkeypatch.delenv("ACCELERATE_CONFIG", raising=False)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    for kind in ("cuda", "npu", "cpu"):
        assert Path(launch.accelerate_config(kind, 1)).name == "single.yaml"
    assert Path(launch.accelerate_config("cpu", 2)).name == "cpu.yaml"
    for kind in ("cuda", "npu"):
        with pytest.raises(UserError, match=f"needs DeepSpeed.*accelerate/{kind}_ddp.yaml"):
            launch.accelerate_config(kind, 2)
        monkeypatch.setenv("ACCELERATE_CONFIG", f"{launch.CONFIG_FOLDER}/{kind}_ddp.yaml")
        assert launch.accelerate_config(kind, 2) == f"{launch.CONFIG_FOLDER}/{kind}_ddp.yaml"
        monkeypatch.delenv("ACCELERATE_CONFIG")
    monkeypatch.setenv("ACCELERATE_CONFIG", "nowhere.yaml")
    with pytest.raises(UserError, match=r"ACCELERATE_CONFIG=nowhere.yaml: not a readable YAML file"):
        launch.accelerate_config("cuda", 2)


@pytest.mark.parametrize("content", ["", "- npu\n"])
def test_a_file_of_accelerate_without_settings_is_one_line(content, monkeypatch, tmp_path):
    from perl.base.errors import UserError
    from perl.tools import launch

    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setenv("ACCELERATE_CONFIG", str(tmp_path / "mine.yaml"))
    with pytest.raises(UserError, match=r"mine.yaml: holds no settings; take one of"):
        launch.accelerate_config("cuda", 2)


@pytest.mark.slow
def test_a_failure_while_training_ends_with_the_log_and_its_exit_code(tmp_path, model, sums):
    reward = tmp_path / "broken.py"
    reward.write_text("def broken(**kwargs):\n    raise RuntimeError('no reward today')\n")
    done = launch(flags(model, sums, **{"reward.functions": json.dumps([f"{reward}:broken"])}), tmp_path)
    assert done.returncode == 1
    assert "no reward today" in done.stdout
    assert str(run_folder(done) / "output.log") in done.stderr


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_the_exit_code_is_the_training_processs_and_nothing_is_said_of_the_launcher(tmp_path, model, sums, processes):
    reward = tmp_path / "broken.py"
    reward.write_text(
        "import os\n"
        "def broken(trainer_state, completions, **kwargs):\n"
        "    if trainer_state.max_steps == 2:  # not before it is trained\n"
        "        os._exit(7)\n"
        "    return [0.0] * len(completions)\n"
    )
    changes = {"reward.functions": json.dumps([f"{reward}:broken"]), "training.output_dir": "run"}
    done = launch(flags(model, sums, **changes), tmp_path, NUM_PROCESSES=str(processes))
    assert done.returncode == 7
    assert done.stderr == f"training ended with exit code 7; the whole log is in {tmp_path}/run/output.log\n"
    assert "Error" not in done.stdout
    assert "CalledProcessError" not in (tmp_path / "run" / "output.log").read_text()


@pytest.mark.slow
def test_a_disk_that_takes_no_more_of_the_log_ends_the_log_alone(tmp_path, model, sums):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "output.log").symlink_to("/dev/full")
    done = launch(flags(model, sums, **{"training.output_dir": "run"}), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = f"error: {tmp_path}/run/output.log: No space left on device; the training goes on, and its log ends here\n"
    assert done.stdout.count(told) == 1
    assert "step 2/2" in done.stdout
    assert (tmp_path / "run" / "adapter").is_dir()
    assert left_over(tmp_path / "run") == []


def test_a_log_that_cannot_be_made_is_one_line_and_nothing_is_started(tmp_path):
    (tmp_path / "output.log").mkdir()
    command = [sys.executable, "-m", "perl.tools.supervise", str(tmp_path), "--num_processes", "1", "-m", "perl.train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}/output.log: Is a directory; give another folder after --config.training.output_dir\n"
    )
    assert left_over(tmp_path) == []


SLOW = """import time
def slow(completions, **kwargs):
    print("grading now", flush=True)
    time.sleep({seconds})
    return [float(len(c[0]["content"]) % 7) for c in completions]
"""


@pytest.fixture
def start(tmp_path, model, sums):
    """`start(seconds, processes, **flags)`: the script in a folder `run`, each of whose steps takes so long."""
    started = []
    (temporary := tmp_path / "temporary").mkdir()

    def begin(seconds, processes=1, **changes):
        (tmp_path / "slow.py").write_text(SLOW.format(seconds=seconds))
        rewards = {"reward.functions": json.dumps([f"{tmp_path}/slow.py:slow"]), "training.output_dir": "run"}
        steps = {"training.max_steps": 200, "training.logging_steps": 1}
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *flags(model, sums, **(rewards | steps | changes))],
            cwd=tmp_path,
            env=plain_environment() | {"NUM_PROCESSES": str(processes), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


def wait_for(text, log, script, seconds=120):
    deadline = time.monotonic() + seconds
    while not (log.exists() and text in log.read_text(errors="replace")):
        assert script.poll() is None, f"ended before {text!r}: {script.stdout.read()}"
        assert time.monotonic() < deadline, f"{text!r} did not come: {log.read_text() if log.exists() else 'no log'}"
        time.sleep(0.1)


def left_over(folder):
    """Command lines of processes that were started for the run in `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if str(folder) in words and int(file.parent.name) != os.getpid():
                found.append(words)
    return found


@pytest.mark.parametrize(
    ("processes", "sent", "to_all"),
    [
        slow(1, signal.SIGTERM, False),
        slow(1, signal.SIGTERM, True),
        (2, signal.SIGTERM, False),
        slow(2, signal.SIGTERM, True),
        slow(2, signal.SIGINT, False),
    ],
)
def test_a_signal_saves_a_checkpoint_and_ends_every_process(tmp_path, start, processes, sent, to_all):
    """To the script, or as a scheduler may send it, to every process of the job."""
    script = start(0.3, processes)
    folder = tmp_path / "run"
    wait_for("progress: step 2/", folder / "output.log", script)
    for process in psutil.Process(script.pid).children(recursive=True) if to_all else ():
        process.send_signal(sent)
    script.send_signal(sent)
    shown, _ = script.communicate(timeout=60)
    assert script.returncode == 128 + sent
    (checkpoint,) = folder.glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    line = next(line for line in shown.splitlines() if line.startswith("stopped: "))
    assert f"{sent.name} after step {step} of 200" in line
    assert f"--config.training.output_dir {folder} --config.training.resume_from_checkpoint auto" in line
    assert {f"process_state_{rank}.pt" for rank in range(processes)} <= {file.name for file in checkpoint.iterdir()}
    assert not (folder / "adapter").exists()
    assert left_over(folder) == []
    assert list((tmp_path / "temporary").iterdir()) == []

    again = start(0, processes, **{"training.resume_from_checkpoint": "auto", "training.max_steps": step + 1})
    assert again.wait(timeout=120) == 0, again.stdout.read()
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [*range(1, step + 2)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["rank", "launcher", "supervisor"])
def test_sigkill_of_any_process_ends_all_and_frees_the_folder(tmp_path, start, killed):
    script = start(0.3, processes=2)
    folder = tmp_path / "run"
    wait_for("progress: step 2/", folder / "output.log", script)
    supervisor = psutil.Process(script.pid)
    (launcher,) = supervisor.children()
    ranks = launcher.children()
    assert len(ranks) == 2
    {"rank": ranks[1], "launcher": launcher, "supervisor": supervisor}[killed].kill()
    shown, _ = script.communicate(timeout=60)
    assert script.returncode == (-9 if killed == "supervisor" else 137)
    assert "Traceback" not in shown
    if killed != "supervisor":
        who = "the process of rank 1" if killed == "rank" else "the launcher"
        assert next(line for line in shown.splitlines() if "SIGKILL" in line).startswith(f"error: {who} was ended by")
        assert left_over(folder) == []
    psutil.wait_procs([launcher, *ranks], timeout=30)
    assert left_over(folder) == []
    rundir.require_free(folder, resuming=True)


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_one_line_while_the_first_works(tmp_path, start):
    first = start(0.3)
    wait_for("progress: step 2/", tmp_path / "run" / "output.log", first)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    second = start(0.3, **{"common.seed": 7})
    shown, _ = second.communicate(timeout=100)
    assert second.returncode == 2
    assert re.fullmatch(
        r"error: --config.training.output_dir run: another training works in it \(process \d+\);.*\n", shown
    )
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 143


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_step(tmp_path, start):
    script = start(1000, processes=2)
    wait_for("grading now", tmp_path / "run" / "output.log", script)
    script.send_signal(signal.SIGTERM)
    wait_for("stopping: SIGTERM", tmp_path / "run" / "output.log", script)
    time.sleep(1.2)
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=20)
    assert script.returncode == 143
    assert left_over(tmp_path / "run") == []


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path, start):
    script = start(1000, processes=2)
    wait_for("num_processes: 2", tmp_path / "run" / "output.log", script)
    script.send_signal(signal.SIGTERM)
    script.communicate(timeout=30)
    assert script.returncode == 143
    assert left_over(tmp_path / "run") == []


@pytest.mark.npu
def test_more_processes_than_npus(tmp_path, model, sums, npu_env):
    done = launch(flags(model, sums), tmp_path, env=npu_env(2), NUM_PROCESSES="3")
    assert done.returncode == 2
    assert "only 2 npu device(s) are visible" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"no real GSM8K rows at {GSM8K}")
def test_on_two_npus_with_zero2_and_real_gsm8k_rows(tmp_path, model, npu_env):
    argv = flags(model, GSM8K, **{"dataset.example_numbers": 32, "dataset.max_prompt_length": 256})
    done = launch(argv, tmp_path, env=npu_env(2))
    assert done.returncode == 0, done.stdout + done.stderr + (run_folder(done) / "output.log").read_text()[-3000:]
    folder = run_folder(done)
    assert "_npu_" in folder.name
    log = (folder / "output.log").read_text()
    assert "num_processes: 2\n" in log
    assert "2 process(es) on npu, npu_4.yaml" in done.stdout
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["device"] == "npu"
    assert environment["variables"]["HCCL_BUFFSIZE"] == "512"
    assert environment["variables"]["VLLM_ASCEND_ENABLE_NZ"] == "0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["aqn/num_modules"] for row in rows if "reward" in row] == [2, 2]


@pytest.mark.npu
def test_on_two_npus_the_adapter_learns_the_quickstarts_problems(tmp_path, npu_env):
    """A tiny random model earns nothing on GSM8K; the quickstart's base does on its own problems."""
    argv = flags(
        QUICKSTART_BASE,
        QUICKSTART_PROBLEMS,
        **{
            "training.num_generations": 4,
            "training.gradient_accumulation_steps": 4,
            "training.per_device_train_batch_size": 4,
            "training.max_completion_length": 32,
            "training.learning_rate": 1e-3,
        },
    )
    done = launch(argv, tmp_path, env=npu_env(2), HCCL_BUFFSIZE="300")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(done)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    moved = [tensor.abs().max().item() for name, tensor in adapter.items() if "lora_B" in name]
    assert moved
    assert all(value > 0 for value in moved)
    assert json.loads((folder / "environment.json").read_text())["variables"]["HCCL_BUFFSIZE"] == "300"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["reward"] > 0 for row in rows if "reward" in row)
