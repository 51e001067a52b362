"""Data sets of ModelScope: through the release of its package that requirements_npu.txt pins, from a server on this
machine, and by name."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pandas
import pytest

from perl.base.errors import UserError
from perl.tasks import load_problems
from perl.tasks.registry import HUBS
from tests.test_ascend_pins import install, pinned

ROOT = Path(__file__).parents[2]


def rows(answer: str) -> pandas.DataFrame:
    return pandas.DataFrame([{"question": "How many eggs?", "answer": f"so many\n#### {answer}"}])


@pytest.fixture
def repository(tmp_path) -> Path:
    """GSM8K's repository as ModelScope holds it: a folder a configuration, and a script that nobody runs."""
    folder = tmp_path / "repository"
    for number, name in enumerate(("main", "socratic")):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            answer = f"{number}{'12'[split == 'test']}"
            rows(answer).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
    (folder / "gsm8k.py").write_text("raise SystemExit('was run')\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nGSM8K\n")
    return folder


@pytest.fixture
def stub(monkeypatch, repository, tmp_path):
    """modelscope's one function that is used; returns what it is asked for."""
    asked = []

    def snapshot_download(name, repo_type, allow_patterns):
        asked.append((name, repo_type))
        return str(repository)

    find = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "modelscope" or find(name))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("PERL_USE_MODELSCOPE", "1")
    return asked


def test_a_configuration_is_a_folder_of_the_repository(stub):
    assert [problem.gold for problem in load_problems("gsm8k")] == ["2"]
    assert [problem.gold for problem in load_problems("gsm8k", "train")] == ["1"]
    assert [problem.gold for problem in load_problems("openai/gsm8k:socratic")] == ["12"]
    assert set(stub) == {("AI-ModelScope/gsm8k", "dataset")}


def test_a_configuration_may_stand_in_the_readme(stub, repository):
    rows("7").to_json(repository / "cn.jsonl", orient="records", lines=True)
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: cn\n  data_files:\n  - split: train\n    path: cn.jsonl\n---\n"
    )
    assert [problem.gold for problem in load_problems("open-r1/DAPO-Math-17k-Processed:cn", "train", task="gsm8k")]
    with pytest.raises(
        UserError, match=r"^open-r1/DAPO.*: ModelScope did not give the data \(.*path/to/.*train\.jsonl$"
    ):
        load_problems("open-r1/DAPO-Math-17k-Processed:fr", "train")


def test_a_set_without_a_known_copy_is_one_line(stub):
    with pytest.raises(UserError, match=r"^math-ai/amc23: ModelScope has no copy that is known here; unset PERL_USE"):
        load_problems("amc23")
    assert [hub.repo for _, hub in HUBS.values() if not hub.modelscope] == ["math-ai/amc23"]
    assert stub == []


@pytest.mark.parametrize("variable", ["PERL_USE_MODELSCOPE", "VERL_USE_MODELSCOPE"])
def test_modelscope_must_be_installed(monkeypatch, variable):
    monkeypatch.setenv(variable, "True")
    with pytest.raises(UserError, match=f"{variable} is set, but modelscope is not installed; pip install modelscope"):
        load_problems("gsm8k")


def server_of(folder: Path) -> ThreadingHTTPServer:
    """The two requests of ModelScope's API that fetch a data set's repository."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            status, body = 404, b"{}"
            if url.path == "/api/v1/datasets/AI-ModelScope/gsm8k/repo/tree":
                files = [file for file in folder.rglob("*") if file.is_file()]
                entries = [
                    {"Path": str(f.relative_to(folder)), "Name": f.name, "Type": "blob", "Size": f.stat().st_size}
                    for f in files
                ]
                data = {"Files": entries, "TotalCount": len(entries)}
                status, body = 200, json.dumps({"Code": 200, "Success": True, "Data": data}).encode()
            elif url.path == "/api/v1/datasets/AI-ModelScope/gsm8k/repo":
                status, body = 200, (folder / parse_qs(url.query)["FilePath"][0]).read_bytes()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.slow
def test_the_pinned_release_loads_from_a_server(repository, tmp_path):
    packages = install(tmp_path / "packages", pinned("requirements_npu.txt", "modelscope"), "modelscope-hub")
    server = server_of(repository)
    places = {"HOME": tmp_path / "home", "MODELSCOPE_CACHE": tmp_path / "modelscope", "HF_HOME": tmp_path / "hf"}
    environment = os.environ | {name: str(path) for name, path in places.items()}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{packages}",
        "PERL_USE_MODELSCOPE": "1",
        "MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    code = "from perl.tasks import load_problems\nprint('gold', load_problems('gsm8k')[0].gold)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    server.shutdown()
    assert done.stdout.splitlines()[-1:] == ["gold 2"], done.stderr[-3000:]
    assert not list((tmp_path / "modelscope").rglob("*.py"))  # the script is not even fetched
