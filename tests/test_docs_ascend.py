"""docs/ascend.md and its translation: their commands exist, their variables are the launch script's, two nodes meet."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from perl.config.load import build_parser
from perl.tools.doctor.versions import SETS, TABLE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "ascend.md", ROOT / "docs" / "ascend_zh.md"]
LAUNCH = ROOT / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"


def blocks(page):
    return re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands():
    """Every command line of the English page, continued lines joined."""
    for block in blocks(PAGES[0]):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def test_the_translation_has_the_same_commands():
    assert blocks(PAGES[0]) == blocks(PAGES[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_bash(page):
    for block in blocks(page):
        assert subprocess.run(["bash", "-n", "-c", block]).returncode == 0, block


def test_files_named_in_commands_exist():
    for words in commands():
        for word in words:
            word = word.split("=", 1)[-1]
            if re.fullmatch(r"(scripts|recipes|perl)/[\w/.-]+|requirements\w*\.txt", word):
                assert (ROOT / word).exists(), word


def test_training_flags_exist():
    """Parsed by perl.train's own parser, which refuses an unknown flag and a wrong type."""
    checked = 0
    for words in commands():
        if str(LAUNCH.relative_to(ROOT)) in words:
            flags = words[words.index(str(LAUNCH.relative_to(ROOT))) + 1 :]
        elif "perl.train" in words:
            flags = words[words.index("perl.train") + 1 :]
        else:
            continue
        build_parser().parse_args(flags, defaults=False)
        checked += len(flags)
    assert checked > 20


def test_evaluation_flags_exist():
    (words,) = [words for words in commands() if "perl/eval.py" in words]
    usage = subprocess.run([sys.executable, "perl/eval.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert usage.returncode == 0, usage.stderr
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"{flag}\b", usage.stdout), flag


def test_script_arguments_are_accepted():
    for words in commands():
        if words[:2] == ["bash", "scripts/install_npu.sh"]:
            done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_the_table_of_variables_is_the_launch_scripts():
    """Its first rows are what the script sets, with the script's values."""
    script = LAUNCH.read_text(encoding="utf-8")
    exported = dict(re.findall(r"export (HCCL_\w+|VLLM_\w+|OMP_NUM_THREADS)=\$\{\w+:-([^}]*)\}", script))
    for page in PAGES:
        rows = dict(re.findall(r"^\| ([A-Z][A-Z0-9_]+) \| ([^|]+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert exported.items() <= rows.items()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_versions_are_the_doctors(page):
    text = page.read_text(encoding="utf-8")
    for entry in SETS[:2]:
        for name, version in entry.packages.items():
            if name != "numpy":
                assert version in text, (entry.name, name)
        least = TABLE["driver"][".".join(entry.cann.split(".")[:2])]
        assert re.search(rf"\b{re.escape(least)} (or newer|及以上)", text), least


WORKER = """
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
mine = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
total = accelerator.reduce(mine, "sum").item()
print(f"RESULT {accelerator.process_index}/{accelerator.num_processes} {dist.get_backend()} {total}", flush=True)
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.npu
def test_two_nodes_meet_on_loopback(npu_env, tmp_path):
    """The page's command for several nodes, as two launchers on this machine with two emulated NPUs each."""
    (words,) = [words for words in commands() if "--machine_rank" in words]
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
