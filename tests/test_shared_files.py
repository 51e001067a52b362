"""perl.base.files.shared_files: files of several processes at the same time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perl.base.files import passing_folder, shared_files

PROGRAM = """
import os, sys, time
from pathlib import Path
from perl.base.files import shared_files

def make(folder):
    (folder / "weights").write_text("whole")
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    time.sleep(0.2)  # the others come meanwhile

with shared_files(Path(sys.argv[1]), make) as files:
    assert (files / "weights").read_text() == "whole"
    print("reads", flush=True)
    sys.stdin.readline()
"""


def start(folder, made):
    command = [sys.executable, "-c", PROGRAM, str(folder), str(made)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_first_makes_them_for_all_and_the_last_removes_them(tmp_path):
    folder, made = tmp_path / "shared", tmp_path / "log"
    several = [start(folder, made) for _ in range(3)]
    assert [each.stdout.readline() for each in several] == ["reads\n"] * 3
    assert made.read_text() == "made\n"
    for place, each in enumerate(several):
        assert folder.exists()
        each.communicate("\n")
        assert (each.returncode, folder.exists()) == (0, place < 2)


def test_what_a_killed_one_has_left_the_next_one_takes(tmp_path):
    folder, made = tmp_path / "shared", tmp_path / "log"
    killed = start(folder, made)
    killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (folder / "files" / "weights").exists()
    again = start(folder, made)
    again.communicate("\n")
    assert (again.returncode, made.read_text(), folder.exists()) == (0, "made\n", False)


STAYS = """
import sys
from pathlib import Path
from perl.base.files import passing_folder

with passing_folder(Path(sys.argv[1]), "adapter") as folder:
    (folder / "weights").touch()
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_the_folder_of_a_killed_process_goes_with_the_next_one_and_those_of_others_stay(tmp_path):
    """vLLM's adapters, in /dev/shm, stayed in memory where a worker was killed."""

    def start():
        command = [sys.executable, "-c", STAYS, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return process, Path(process.stdout.readline().strip()).parent

    (other, stays), (killed, goes) = start(), start()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {stays, goes} == set(tmp_path.iterdir())
    with passing_folder(tmp_path, "adapter") as own:
        assert {stays, own.parent} == set(tmp_path.iterdir())
        assert list(own.iterdir()) == []
    other.communicate("\n")
    assert (other.returncode, list(tmp_path.iterdir())) == (0, [])


def test_what_was_not_made_whole_is_made_anew(tmp_path):
    folder = tmp_path / "shared"

    def half(files):
        (files / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), shared_files(folder, half):
        pass
    assert not folder.exists()
    (folder / "files").mkdir(parents=True)  # of one that was killed while it wrote
    (folder / "files" / "weights").write_text("half")
    with shared_files(folder, lambda files: (files / "weights").write_text("whole")) as files:
        assert (files / "weights").read_text() == "whole"


def test_somebody_elses_folder_is_not_read(tmp_path):
    folder = tmp_path / "shared"
    (tmp_path / "other").mkdir()
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="belongs to somebody else"), shared_files(folder, os.listdir):
        pass
