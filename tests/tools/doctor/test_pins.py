"""scripts/pins.py against a tiny package index on this machine."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perl.base.errors import UserError
from scripts import pins

REPOSITORY = Path(__file__).parents[3]
FILES = {
    "alpha": ["alpha-1.0-py3-none-any.whl", "alpha-1.4-py3-none-any.whl", "alpha-2.0-py3-none-any.whl"],
    "beta": ["beta-3.0-py3-none-any.whl", "beta-3.1rc1-py3-none-any.whl"],
    "gamma": ["gamma-1.0-py3-none-any.whl", "gamma-1.1.tar.gz"],
    "torch-npu": [
        f"torch_npu-{version}-cp311-cp311-manylinux_2_28_aarch64.whl"
        for version in ("2.10.0.post4", "2.10.0.post7", "2.14.0")
    ],
    "torch": [
        "torch-2.10.0-cp311-cp311-manylinux_2_28_aarch64.whl",
        "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    ],
    "old-style": ["old-style-0.3.tar.gz", "old_style-0.1.dev1-py3-none-any.whl"],
}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A simple index (PEP 503) with the files' names alone: nothing is downloaded."""
    root = tmp_path_factory.mktemp("index")
    for name, files in FILES.items():
        page = root / "simple" / name / "index.html"
        page.parent.mkdir(parents=True)
        links = "".join(f'<a href="/files/{file}">{file}</a>' for file in files)
        page.write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()


def settings(url):
    """pip's configuration: this index and nothing else."""
    empty = dict.fromkeys(("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"), "")
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "NO_PROXY": "127.0.0.1", **empty}


@pytest.fixture
def configured(index, monkeypatch):
    for name, value in settings(index).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "requirements_cpu.txt").write_text("alpha==1.0  # a comment\nbeta==3.0\ngamma==1.1\nlost==1.0\n")
    (tmp_path / "requirements_npu.txt").write_text(
        "# Ascend\ntorch==2.10.0\ntorch-npu==2.10.0.post4\ngamma==1.1\nold-style==0.3\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["alpha>=1,<2"]\noptional-dependencies.more = ["beta>=3"]\n'
    )
    return tmp_path


def test_what_has_moved(configured, checkout, capsys):
    assert pins.show_versions(checkout) == 0
    *lines, count = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert cells[0] == ["package", "where", "pinned", "newest", "within", "bounds", "newest"]
    assert cells[1:] == [
        ["alpha", "requirements_cpu.txt", "1.0", "1.4", "2.0"],  # pyproject.toml takes 1.x
        ["lost", "requirements_cpu.txt", "1.0", "(not", "offered)", "none", "none"],
        ["torch-npu", "requirements_npu.txt", "2.10.0.post4", "2.10.0.post4", "2.14.0"],  # vllm-ascend wants this one
        ["gamma", "requirements_npu.txt", "1.1", "(not", "offered)", "1.0", "1.0"],  # there, a wheel goes first
        ["alpha", "pyproject.toml", "<2,>=1", "1.4", "2.0"],
    ]
    assert count == "5 of 10 pins and bounds have moved; 2 name a version that is not offered"


def test_as_json(configured, checkout, capsys):
    (checkout / "requirements_cpu.txt").write_text("beta==3.1rc1\n")
    (checkout / "requirements_npu.txt").unlink()
    (checkout / "pyproject.toml").unlink()
    pins.show_versions(checkout, as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {
            "package": "beta",
            "where": "requirements_cpu.txt",
            "pinned": "3.1rc1",
            "bounds": "",
            "newest_within_bounds": "3.1rc1",
            "newest": "3.1rc1",
            "offered": True,
            "moved": False,
        }
    ]


def test_an_unknown_flag_is_one_line():
    with pytest.raises(UserError, match=r"^unknown flag --jsno; did you mean --json\?$"):
        pins.make_parser().parse_args(["--jsno"])


def test_every_pin_of_this_repository_is_read():
    found = {(pin.where, pin.name): pin for pin in pins.pins_of(REPOSITORY)}
    assert {where for where, _ in found} >= {
        *(file.name for file in REPOSITORY.glob("requirements_*.txt")),
        "pyproject.toml",
        "pyproject.toml [deepspeed]",
        "docs/ascend.md",
    }
    assert found["requirements_npu.txt", "torch-npu"].version == "2.10.0.post4"
    # One environment: vllm-ascend wants this very release, and bounds what stands in the other file too.
    assert "2.10.0.post7" not in found["requirements_npu.txt", "torch-npu"].bounds
    assert "5.6.0" not in found["requirements_npu.txt", "transformers"].bounds
    assert found["requirements_vllm_cpu.txt", "transformers"].version is None


def test_a_folder_without_pins_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no requirements_\*\.txt in"):
        pins.show_versions(tmp_path)


def test_without_a_network_it_is_one_line():
    """Port 9 of this machine: nobody listens."""
    command = [sys.executable, "-m", "scripts.pins"]
    environment = os.environ | settings("http://127.0.0.1:9/simple")
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: pip's package registry does not answer (")
    assert "Connection refused" in error
    assert len(done.stderr.splitlines()) == 2  # before it, that the registry is asked


def test_the_platform_that_is_asked_for_is_ascends(configured):
    assert list(map(str, pins.offered("torch", ascend=True))) == ["2.10.0"]
    assert "0.3" in map(str, pins.offered("old-style", ascend=True))  # its wheel is no release


def test_bounds_that_name_a_pre_release_take_one(configured, checkout, capsys):
    (checkout / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["beta>=3.1rc1"]\n')
    pins.show_versions(checkout, as_json=True)
    row = next(row for row in json.loads(capsys.readouterr().out) if row["where"] == "pyproject.toml")
    assert (row["newest_within_bounds"], row["offered"], row["moved"]) == ("3.1rc1", True, False)
