"""A hub on this machine: the API and the files of one model, with the faults that a test asks for."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Answers ``/api/models/{id}/revision/{revision}`` and ``/{id}/resolve/{commit}/{name}``; large files are redirected."""

    def __init__(self, files: dict[str, bytes], *, large: tuple[str, ...]) -> None:
        self.files, self.large = dict(files), large
        self.sizes: dict[str, int] = {}
        """Sizes that the API names in place of the true ones."""
        self.linked_sizes: dict[str, int] = {}
        self.cut_after: list[int] = []
        """Bytes after which the next answers to requests for large files are cut."""
        self.redirect_to = ""
        self.ignores_ranges = False
        self.status = 200
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Host, path and headers of each."""
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._servers[0].server_port}"

    @property
    def file_host(self) -> str:
        return f"127.0.0.1:{self._servers[1].server_port}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def asked_for(self, name: str) -> list[str]:
        """The ranges in which a file was asked for of the host that sends files."""
        mine = [(path, headers) for host, path, headers in self.requests if host == self.file_host]
        return [headers.get("range", "") for path, headers in mine if path.endswith(name)]

    def describe(self) -> dict[str, Any]:
        return {"sha": COMMIT, "siblings": [self._sibling(name, content) for name, content in self.files.items()]}

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        num_bytes = self.sizes.get(name, len(content))
        entry: dict[str, Any] = {"rfilename": name, "size": num_bytes}
        entry["blobId"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
        if name in self.large:
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": num_bytes, "pointerSize": 134}
        return entry

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                host = str(self.headers["Host"])
                hub.requests.append((host, path, {name.lower(): value for name, value in self.headers.items()}))
                if hub.status != 200:
                    self.answer(hub.status, b"")
                elif host == hub.file_host:
                    self.send_part(path.removeprefix("/files/"), may_cut=True)
                elif re.fullmatch(r"/api/models/acme/small/revision/(main|v1)", path):
                    self.answer(200, json.dumps(hub.describe()).encode())
                elif path.startswith(f"/acme/small/resolve/{COMMIT}/"):
                    self.resolve(path.removeprefix(f"/acme/small/resolve/{COMMIT}/"))
                else:
                    self.answer(404, b"")

            def resolve(self, name: str) -> None:
                if name not in hub.large:
                    self.send_part(name, may_cut=False)
                    return
                address = hub.redirect_to or f"http://{hub.file_host}/files/{name}"
                size = hub.linked_sizes.get(name, len(hub.files[name]))
                self.answer(302, b"", Location=address, **{"X-Linked-Size": str(size), "X-Repo-Commit": COMMIT})

            def send_part(self, name: str, *, may_cut: bool) -> None:
                content = hub.files[name]
                match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                begin = int(match[1]) if match and not hub.ignores_ranges else 0
                part, headers = content[begin:], {}
                if begin:
                    headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
                if may_cut and hub.cut_after:
                    self.close_connection = True
                    self.answer(206 if begin else 200, part, cut=hub.cut_after.pop(0), **headers)
                else:
                    self.answer(206 if begin else 200, part, **headers)

            def answer(self, status: int, body: bytes, *, cut: int | None = None, **headers: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body if cut is None else body[:cut])

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
