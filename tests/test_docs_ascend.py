"""docs/ascend.md and its translation: their variables are the launch script's, their versions the doctor's, and two
nodes meet. Commands, files and flags are tested with the other pages (tests/test_docs.py)."""

import re
import socket
import subprocess
import sys

import pytest

from perl.config.load import parse
from perl.device import START_VARIABLES
from perl.tools.doctor.versions import SET, TABLE
from tests.docs_commands import LAUNCH, ROOT, commands

PAGES = [ROOT / "docs" / "ascend.md", ROOT / "docs" / "ascend_zh.md"]


def test_the_table_of_variables_is_the_launch_scripts():
    """Its first rows are what the script sets, with the script's values."""
    script = (ROOT / LAUNCH).read_text(encoding="utf-8")
    exported = dict(re.findall(r"export (OMP_NUM_THREADS)=\$\{\w+:-([^}]*)\}", script)) | START_VARIABLES["npu"]
    assert len(exported) == 7
    for page in PAGES:
        rows = dict(re.findall(r"^\| ([A-Z][A-Z0-9_]+) \| ([^|]+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert exported.items() <= rows.items()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_table_of_releases_is_the_doctors(page):
    """What each release of vllm-ascend wants, as versions.json has it."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| 0\.\d+\.\d+", line)
    ]
    shown = {row[0].split()[-1]: row[1:] for row in rows}
    wanted = TABLE["requires"]["vllm-ascend"]
    assert {"0.23.0", "0.24.0rc1", "0.26.0rc1", "0.30.0rc2"} <= shown.keys() & wanted.keys()
    for release in ("0.23.0", "0.24.0rc1", "0.26.0rc1", "0.30.0rc2"):
        exact = {name: spec.removeprefix("==") for name, spec in wanted[release].items()}
        _, torch, transformers, triton, _ = shown[release]
        assert re.split("[,、] ?", torch) == [exact["torch"], exact["torch-npu"]]
        assert (transformers, triton) == (exact["transformers"], exact["triton-ascend"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_versions_are_the_doctors(page):
    text = page.read_text(encoding="utf-8")
    for name, version in SET.packages.items():
        assert version in text, name
    least = TABLE["driver"][".".join(SET.cann.split(".")[:2])]
    assert re.search(rf"\b{re.escape(least)} (or newer|及以上)", text), least
    assert SET.cann in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_answer_to_out_of_memory_is_a_smaller_forward_of_the_same_update(page):
    program = ("bash", LAUNCH, "--recipe")
    (flags,) = [
        command.words[2:]
        for command in commands(page)
        if command.words[:3] == program and "--config.training.gradient_accumulation_steps" in command.words
    ]
    before, after = (parse([*words]).values.training for words in (flags[:2], flags))
    assert after.per_device_train_batch_size < before.per_device_train_batch_size
    updates = {one.per_device_train_batch_size * one.gradient_accumulation_steps for one in (before, after)}
    assert updates == {16}


WORKER = r"""
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
mine = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
total = accelerator.reduce(mine, "sum").item()
# One write a line: four ranks share the pipe, and print may write the text and its newline apart.
os.write(1, f"RESULT {accelerator.process_index}/{accelerator.num_processes} {dist.get_backend()} {total}\n".encode())
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.npu
def test_two_nodes_meet_on_loopback(npu_env, tmp_path):
    """The page's command for several nodes, as two launchers on this machine with two emulated NPUs each."""
    (words,) = [list(command.words) for command in commands(PAGES[0]) if "--machine_rank" in command.words]
    words = words[: words.index("-m")]
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    changes = {"--num_processes": "4", "--main_process_ip": "127.0.0.1", "--main_process_port": str(port)}
    running = []
    for rank in ("0", "1"):
        for flag, value in {**changes, "--machine_rank": rank}.items():
            words[words.index(flag) + 1] = value
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *words[2:], str(tmp_path / "worker.py")]
        running.append(
            subprocess.Popen(
                launcher, cwd=ROOT, env=npu_env(2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        output = "".join(process.communicate(timeout=240)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    results = sorted(line for line in output.splitlines() if line.startswith("RESULT"))
    assert results == [f"RESULT {rank}/4 hccl 10.0" for rank in range(4)], output[-4000:]
