"""A service that is a table of answers behind real HTTP calls, for the tests of commands."""

import json
from typing import Any

import httpx

from headroom.client import HeadroomClient


class AnsweringService:
    """Answers by (method, path), each a status and a document or bytes; keeps the bodies it was sent."""

    def __init__(self, answers: dict[tuple[str, str], Any] | tuple[Any, ...] = ()) -> None:
        self.answers = dict(answers)
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1")
        self.bodies.append((path, request.read()))
        status, document = self.answers[request.method, path]
        if isinstance(document, bytes):
            return httpx.Response(status, content=document)
        return httpx.Response(status, json=document)

    def connect(self, **_: Any) -> HeadroomClient:
        """Stand in for the command's own ``connect``."""
        return HeadroomClient("http://headroom", token="t", transport=httpx.MockTransport(self))

    def sent_bytes(self, path: str) -> list[bytes]:
        return [body for asked, body in self.bodies if asked == path]

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.sent_bytes(path)]
