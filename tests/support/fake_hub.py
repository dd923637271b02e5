"""A model hub on this machine: creates repositories and takes commits, as huggingface_hub sends them."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TOKEN = "a-secret-of-the-test"
COMMIT = "0" * 40


@dataclass
class Hub:
    """What was sent."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, bytes]] = field(default_factory=list)


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, tree: Any, status: int = 200) -> None:
            body = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if "/tree/" in self.path:
                self.answer([])
                return
            self.answer({"id": "me/mill", "sha": COMMIT, "private": True, "tags": [], "downloads": 0, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer({"error": "no valid token"}, 401)
            elif self.path == "/api/repos/create":
                status = 409 if hub.created else 200
                hub.created.append(json.loads(body))
                self.answer({"url": f"{hub.url}/me/mill", "id": "me/mill"}, status)
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                hub.commits.append(
                    {
                        line["value"]["path"]: base64.b64decode(line["value"]["content"])
                        for line in lines
                        if line["key"] == "file"
                    }
                )
                self.answer({"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.url}/me/mill/commit/{COMMIT}"})
            else:
                self.answer({"error": f"unknown: {self.path}"}, 404)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
