"""scripts/audit.py: the real pip-audit asks a server of ours that answers as OSV does."""

import json
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / "scripts" / "audit.py"
ADVISORY = {
    "id": "PYSEC-2026-1",
    "aliases": ["CVE-2026-1"],
    "summary": "It breaks.",
    "details": "It breaks.",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "broken"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
            "versions": ["1.0"],
        }
    ],
}


class Osv(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"vulns": [ADVISORY]} if asked["package"]["name"] == "broken" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def osv():
    server = HTTPServer(("127.0.0.1", 0), Osv)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()


def packages(folder: Path, *names: str) -> Path:
    for name in names:
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return folder


def audit(path: Path, url: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(AUDIT), "--path", str(path), "--osv_url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_vulnerable_package_fails(tmp_path, osv):
    code, lines = audit(packages(tmp_path, "broken", "whole"), osv)
    assert code == 1
    assert lines == [
        "broken 1.0: PYSEC-2026-1, fixed in 1.1",
        "audit: 2 packages, 1 advisories, 1 not accepted",
    ]


def test_without_one_it_passes(tmp_path, osv):
    assert audit(packages(tmp_path, "whole"), osv) == (0, ["audit: 1 packages, 0 advisories, 0 not accepted"])


def test_no_service_is_one_line_and_no_failure(tmp_path):
    code, (line,) = audit(packages(tmp_path, "whole"), "http://127.0.0.1:9/v1/query")
    assert code == 0
    assert line.startswith("audit: not done, http://127.0.0.1:9/v1/query can't be asked: ")


def test_an_accepted_one_passes_with_its_reason(capsys):
    module = runpy.run_path(str(AUDIT))
    module["ACCEPTED"]["CVE-2026-1"] = "perl does not call it"
    found = {"id": "PYSEC-2026-1", "aliases": ["CVE-2026-1"], "fix_versions": []}
    other = {"name": "own", "skip_reason": "not found"}
    assert module["judge"]([{"name": "broken", "version": "1.0", "vulns": [found]}, other]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "broken 1.0: PYSEC-2026-1, accepted: perl does not call it",
        "audit: 1 packages, 1 advisories, 0 not accepted",
        "audit: not known to the service: own",
    ]
