"""Bounds request bodies before Django sees them: by their real bytes, by time, and by who sends them.

Most bodies end at 1 MiB. Uploads may be as large as the settings say, but only from someone whose token or session is valid,
which is looked up before the first byte is taken. Content-Length is believed only when it says too much.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from importlib import import_module
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest

from webapp.accounts.access import acting_of, has_scope
from webapp.accounts.models import Scope
from webapp.accounts.tokens import find_token_user
from webapp.catalog.files.room import upload_limit_bytes
from webapp.catalog.uploads import MAX_PIECE_BYTES
from webapp.live.record import from_database

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SMALL_BODY_BYTES = 1024 * 1024
_FORM_OVERHEAD_BYTES = 64 * 1024
"""Part headers and fields around an uploaded file."""
UPLOAD_PATHS = frozenset(
    {
        "/api/v1/models",
        "/api/v1/datasets",
        "/v1/files",
        "/models/",
        "/datasets/",
        "/jobs/new/model/",
        "/jobs/new/dataset/",
        "/jobs/new/generate/prompts/",
    }
)
UPLOAD_PIECES = "/api/v1/uploads/"
"""Below it, by PUT, pieces of an upload (``webapp/catalog/uploads.py``)."""
PIECE_DEADLINE_S = 30.0
"""A sender that stays silent this long in mid-body is cut off."""
BODY_DEADLINE_S = 60.0
"""For a whole body, which is extended by what arrives at the slowest rate."""
SLOWEST_BYTES_PER_S = 16 * 1024
"""An upload may take hours; one that is drawn out byte by byte may not."""


class BodyGuard:
    """ASGI middleware around the whole of Django."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        limit_bytes = _limit_bytes(scope)
        declared = _declared_bytes(scope)
        if declared is not None and declared > limit_bytes:
            await _refuse(scope, send, status=413, limit_bytes=limit_bytes)
            return
        may_be_large = limit_bytes > SMALL_BODY_BYTES and (declared is None or declared > SMALL_BODY_BYTES)
        if may_be_large and not await from_database(lambda: _is_known(scope)):
            await _refuse(scope, send, status=401, limit_bytes=limit_bytes)
            return
        body = _CountedBody(receive, limit_bytes=limit_bytes)
        answer = _WatchedSend(send, body)
        await self._application(scope, body.receive, answer.send)
        if body.refusal and not answer.has_started:
            await _refuse(scope, send, status=body.refusal, limit_bytes=limit_bytes)


class _CountedBody:
    def __init__(self, receive: Receive, *, limit_bytes: int) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._began_at = time.monotonic()
        self._is_complete = False
        self.is_gone = False
        """True once the sender has gone."""
        self.refusal = 0
        """Status that the body is refused with; 0 while it is not."""

    async def receive(self) -> Message:
        if self._is_complete:
            message = await self._receive()  # waits for the disconnect, for as long as the answer takes
            self.is_gone = message["type"] == "http.disconnect"
            return message
        try:
            # not wait_for: before Python 3.12 it swallows a cancellation that meets a result (cpython #86296)
            async with asyncio.timeout(min(PIECE_DEADLINE_S, self._left_s())):
                message = await self._receive()
        except TimeoutError:
            return self._refused(408)
        if message["type"] != "http.request":
            return message
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit_bytes:
            return self._refused(413)
        self._is_complete = not message.get("more_body", False)
        return message


    def _refused(self, status: int) -> Message:
        """Django stops reading, and throws away what it has, as if the sender had gone."""
        self.refusal = status
        return {"type": "http.disconnect"}

    def _left_s(self) -> float:
        allowed_s = BODY_DEADLINE_S + self._num_bytes / SLOWEST_BYTES_PER_S
        return self._began_at + allowed_s - time.monotonic()


class _WatchedSend:
    """Ends an answer whose reader has gone, as Django does by cancelling it; the server itself takes such bytes in silence."""

    def __init__(self, send: Send, body: _CountedBody) -> None:
        self._send = send
        self._body = body
        self.has_started = False

    async def send(self, message: Message) -> None:
        if self._body.is_gone:
            raise asyncio.CancelledError
        self.has_started = True
        await self._send(message)


def _limit_bytes(scope: MutableMapping[str, Any]) -> int:
    if scope["method"] == "POST" and scope["path"] in UPLOAD_PATHS:
        return upload_limit_bytes() + _FORM_OVERHEAD_BYTES
    if scope["method"] == "PUT" and scope["path"].startswith(UPLOAD_PIECES):
        return MAX_PIECE_BYTES
    return SMALL_BODY_BYTES


def _header(scope: MutableMapping[str, Any], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _declared_bytes(scope: MutableMapping[str, Any]) -> int | None:
    text = _header(scope, b"content-length")
    return int(text) if text.isascii() and text.isdigit() else None


def _is_known(scope: MutableMapping[str, Any]) -> bool:
    """Report whether a token that may write or, without one, a session names an active user. The API checks the rest."""
    authorization = _header(scope, b"authorization")
    if authorization:
        scheme, _, token = authorization.partition(" ")
        user = find_token_user(token.strip()) if scheme.lower() == "bearer" else None
        return user is not None and has_scope(acting_of(user).scope, Scope.WRITE)
    request = HttpRequest()
    try:
        morsel = SimpleCookie(_header(scope, b"cookie")).get(settings.SESSION_COOKIE_NAME)
    except CookieError:
        return False
    if morsel is None:
        return False
    engine = import_module(settings.SESSION_ENGINE)
    request.session = engine.SessionStore(morsel.value)
    return bool(get_user(request).is_authenticated)


_TEXTS = {
    401: ("Not signed in", "unauthorized", "this needs a valid API token or a session before it is read"),
    408: (
        "The body came too slowly",
        "body_too_slow",
        f"nothing came for {PIECE_DEADLINE_S:.0f} s, or under {SLOWEST_BYTES_PER_S // 1024} KiB/s; send it over a faster line",
    ),
    413: ("The body is too large", "body_too_large", "the body is over {limit_bytes:,} bytes; allowed: at most {limit_bytes:,}"),
}


async def _refuse(scope: MutableMapping[str, Any], send: Send, *, status: int, limit_bytes: int) -> None:
    title, code, detail = _TEXTS[status]
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail.format(limit_bytes=limit_bytes),
        "code": code,
        "fields": [],
        "hint": "",
    }
    content_type = b"application/problem+json"
    if scope["path"].startswith("/v1/"):
        document = {"error": {"message": document["detail"], "type": "invalid_request_error", "param": None, "code": code}}
        content_type = b"application/json"
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
