"""As much of the Hugging Face Hub on loopback as a push needs: HF_ENDPOINT for a real training."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalHub(ThreadingHTTPServer):
    """Takes every repository and every commit; `commits` are {path: content}, in their order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.commits: list[dict[str, bytes]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: LocalHub

    def do_POST(self) -> None:
        body, hub = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.server
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            answer = {"url": f"{hub.endpoint}/{asked['organization']}/{asked['name']}"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            repository = self.path.removeprefix("/api/models").partition("/commit/")[0]
            answer = {"commitUrl": f"{hub.endpoint}{repository}/commit/{'0' * 40}", "commitOid": "0" * 40}
            answer["hookOutput"] = ""
        else:
            self.send_error(404)
            return
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.send_error(404)

    do_HEAD = do_GET  # TRL's telemetry

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@contextlib.contextmanager
def local_hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
