"""How every entry point ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perl.base.errors import UserError, lookup, lost_a_peer

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [["bash", "scripts/check_npu_env.sh"], [sys.executable, "-m", "perl"], [sys.executable, "-u", "-m", "perl"]],
)
def test_a_reader_that_goes_away_ends_the_command_quietly(command):
    """`| head -1`, with the reader gone before the first line."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert said == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "command",
    [
        "-m perl compare --help",
        "-m perl doctor --help",
        "-m perl grade --help",
        "-m perl merge --help",
        "-m perl prepare --help",
        "-m perl report --help",
        "-m perl.train --help",
        "perl/eval.py --help",
    ],
)
def test_the_first_line_of_every_command_is_enough(command):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {command} | head -1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""


def test_a_table_whose_reader_goes_away_ends_quietly():
    """rich answers a closed pipe with exit code 1; the evaluator and `compare` print through it."""
    code = (
        "from rich.console import Console\n"
        "from perl.base.errors import report_errors\n"
        "with report_errors():\n"
        "    Console().print('a table')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (141, "")


def test_another_broken_pipe_is_no_reason_to_be_quiet():
    code = "from perl.base.errors import report_errors\nwith report_errors():\n    "
    code += "raise BrokenPipeError('a worker is gone')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a worker is gone" in done.stderr


def test_control_characters_of_a_message_do_not_reach_the_terminal():
    error = UserError("no column \x1b]0;title\x07\x1b[2J of a\tb\nc, \u202eabc, π")
    assert str(error) == r"no column \x1b]0;title\x07\x1b[2J of a b c, \u202eabc, π"


def test_a_name_in_another_case_is_found():
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        lookup({"gsm8k": 1, "math": 2}, "GSM8K", "task")


@pytest.mark.parametrize(
    "command",
    [["perl/eval.py", "--help"], ["-m", "perl", "grade", "--help"], ["-m", "perl.train"], ["-m", "perl.tools.launch"]],
)
def test_a_python_without_the_packages_is_one_line(command):
    """-S leaves site-packages out: a clone before anything was installed."""
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=ROOT, env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: \w+ is not installed for .*python\S*; run make quickstart", line)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("errors.UserError('on this rank alone')", "error: on this rank alone\n"),
        ("RuntimeError('[pair.cc:537] Connection closed by peer [::1]:1')", "Connection closed by peer"),
        ("RuntimeError('shapes differ')", "shapes differ"),
    ],
)
def test_what_one_of_several_processes_raises_is_shown_at_last(error, shown):
    """It waits for the launcher, as the error of another process is the one to see; a defect of its own does not."""
    program = f"""if True:
        import time
        from perl.base import errors
        waited = []
        time.sleep = waited.append
        try:
            with errors.report_errors():
                raise {error}
        finally:
            print(waited, flush=True)
    """
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == ("[]\n" if "shapes" in error else "[30.0]\n")
    assert shown in done.stderr


@pytest.mark.parametrize(
    "said",
    [
        "InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6"
        " [ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed. EI0006: [PID:"
        " 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the data in"
        " time. Please check the reason for the rank being stuck",
        "aclnnNotifyDispatch failed, EI0006 Communication_Error_Get_Socket: Getting socket times out."
        " srcRank[192.168.0.125/0] connect destRank[192.168.0.192/0] fail.",
        "npuSynchronizeDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:479 NPU function error:"
        " AclrtSynchronizeDeviceWithTimeout, error code is 507048 [ERROR] 2025-06-25-10:45:23 (PID:13075, Device:0,"
        " RankID:8) ERR00100 PTA call acl api failed [Error]: The execution of the internal task times out. EI0002:"
        " [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: The"
        " Notify register has not received the Notify record from remote rank: [unknown].",
        "ACL stream synchronize failed. EI9999: Inner Error! EI9999: 2024-10-21-10:42:00.358.410  The error from"
        " device(chipId:3, dieId:0), serial number is 9, hccl fftsplus task timeout occurred during task execution,"
        " stream_id:5, sq_id:5, task_id:38827, stuck notify num:1, timeout:30min(default).",
        "EI0013: An error CQE occurred during operator execution. Local information: server 10.0.0.1, device ID 0.",
    ],
)
def test_what_hccl_says_where_another_process_has_ended(monkeypatch, said):
    """From reports of users of torch_npu; each waits for the launcher, as the other's error is the one to see."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_a_peer(RuntimeError(said))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not lost_a_peer(RuntimeError(said))


def test_what_hccl_says_of_this_process_alone_is_shown_at_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = "HCCL function error: HcclGetRootInfo(&hcclID), error code is 11 ERR02200 DIST call hccl api failed. EJ0003:"
    assert not lost_a_peer(RuntimeError(f"{said} Failed to bind the IP port. The IP address and port have been bound"))


@pytest.mark.parametrize("library", ["libhccl.so", "libatb.so"])
@pytest.mark.parametrize(
    "command", [["-m", "perl.tools.launch", "--recipe", "recipes/quickstart.yaml"], ["perl/eval.py"]]
)
def test_cann_that_was_not_sourced_is_one_line(tmp_path, library, command):
    """torch loads torch_npu by itself, and its error told how to do without."""
    (tmp_path / "torch_npu").mkdir()
    missing = f"{library}: cannot open shared object file: No such file or directory"
    (tmp_path / "torch_npu" / "__init__.py").write_text(f"raise ImportError({missing!r})")
    info = tmp_path / "torch_npu-2.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.10.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    flags = [] if len(command) > 1 else ["--model", str(tmp_path), "--dataset", "gsm8k"]
    done = subprocess.run(
        [sys.executable, *command, *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: {library} is not found, which torch_npu needs: source /usr/local/Ascend/cann/set_env"
    )
    assert done.returncode == 2


def test_another_missing_library_keeps_its_traceback(tmp_path):
    """Where torch_npu is installed it is not what needs every library."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("")
    code = (
        "from perl.base.errors import report_errors\n"
        "with report_errors():\n"
        "    try:\n"
        "        raise ImportError('libGL.so.1: cannot open shared object file')\n"
        "    except ImportError:\n"
        "        {}['a defect of ours']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.splitlines()[-1] == "KeyError: 'a defect of ours'"
    assert done.returncode == 1


@pytest.mark.parametrize(("raised", "code"), [("", 0), ("raise UserError('wrong')", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_changes_no_exit_code(closed, raised, code):
    """A run was made and saved, and ended with a traceback."""
    script = (
        f"from perl.base.errors import UserError, report_errors\nwith report_errors():\n    print('ok')\n    {raised}"
    )
    words = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, script]
    assert subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120).returncode == code
