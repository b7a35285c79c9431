"""``/v1/chat/completions`` and ``/v1/completions``, answered while one waits, from models held on a device.

The same routes stand under ``/api/v1/chat`` for pages, where a session counts and errors have the API's own form.
https://platform.openai.com/docs/api-reference/chat/create, .../completions/create
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse, RawPostDataException
from django.http.response import HttpResponseBase
from ninja import Router

from webapp.batches.answers import RequestRefused, error_answer
from webapp.http.auth import AsyncTokenOrSession
from webapp.http.streaming import ClosedStream, finish
from webapp.live.hub import Hub, hub_of_this_loop
from webapp.live.record import from_database
from webapp.live.slots import Slot, full_words
from webapp.live.stream import full_limit
from webapp.serving.answers import Answer
from webapp.serving.asking import AskedFor, read_chat, read_completion
from webapp.serving.conversation import Conversation, Event
from webapp.serving.holding import NobodyServes, ServerLost
from webapp.serving.names import find_target

FIRST_WORD_S = 2.0
"""A stream whose answer is refused within so long is refused as a plain request is."""
MAX_SILENT_WAIT_S = 100.0
"""For a model to come up, where nothing can be sent meanwhile."""
RETRY_AFTER_S = 5
_TOO_MANY = "too_many_streams"
_BUSY_CODES = frozenset({_TOO_MANY, "no_worker", "server_lost", "server_failed", "server_stopping", "not_ready"})
_REFUSED_CODES = {"internal": 500, "out_of_device_memory": 507}

Opened = tuple[Conversation, AskedFor, Answer]


class AsyncTokenOnly(AsyncTokenOrSession):
    """A browser's session does not count here."""

    async def __call__(self, request: HttpRequest) -> Any:
        return await super().__call__(request) if request.headers.get("Authorization") else None


router = Router(auth=AsyncTokenOnly())
session_router = Router(auth=AsyncTokenOrSession())


@router.post("/chat/completions", openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create_chat_completion(request: HttpRequest) -> HttpResponseBase:
    """Answer a conversation; with ``stream`` token by token."""
    return await answer_request(request, read_chat)


@router.post("/completions", openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create_completion(request: HttpRequest) -> HttpResponseBase:
    """Continue a text; with ``stream`` token by token."""
    return await answer_request(request, read_completion)


@session_router.post("/chat/completions", tags=["chat"], openapi_extra={"requestBody": {"content": {"application/json": {}}}})
async def create_chat_here(request: HttpRequest) -> HttpResponseBase:
    """Answer like ``POST /v1/chat/completions``, whose errors and chunks these are; a session counts, too."""
    return await answer_request(request, read_chat)


async def answer_request(request: HttpRequest, read: Callable[[Any], AskedFor]) -> HttpResponseBase:
    """Raises RequestRefused, InvalidInput, Forbidden and Http404 before anything is sent."""
    user: Any = request.auth  # type: ignore[attr-defined]
    asked = read(_body(request))
    if asked.stream and (full := await full_limit(user, project_id="")):
        return _busy(full_words(full), code=_TOO_MANY)
    target = await from_database(lambda: find_target(user, asked.model))
    conversation = Conversation(user, target, asked)
    answer = Answer(asked, model_name=asked.model)
    try:
        await conversation.begin()
    except (NobodyServes, ServerLost) as error:
        await conversation.close()
        return _busy(f"{error.message}. {error.hint}", code=error.code)
    except BaseException:
        await conversation.close()
        raise
    opened = (conversation, asked, answer)
    return await _stream(opened, Slot(user_id=user.pk)) if asked.stream else await _whole(opened)


async def _whole(opened: Opened) -> HttpResponseBase:
    conversation, _, answer = opened
    waited_s = 0.0
    begun_s = asyncio.get_running_loop().time()
    is_begun = False
    try:
        async for event in conversation.events():
            is_begun |= event["type"] in ("started", "delta")
            waited_s = asyncio.get_running_loop().time() - begun_s
            if event["type"] == "error":
                return _refusal(event)
            if event["type"] == "waiting" and not is_begun and waited_s > MAX_SILENT_WAIT_S:
                return _busy(f"{event['message']}; ask again", code="not_ready")
            answer.add(event)
    finally:
        await conversation.close()
    return JsonResponse(answer.document())


async def _stream(opened: Opened, slot: Slot) -> HttpResponseBase:
    conversation, _, _ = opened
    events = conversation.events()
    first = asyncio.ensure_future(anext(events))
    await asyncio.wait({first}, timeout=FIRST_WORD_S)
    if first.done() and first.result()["type"] == "error":
        await conversation.close()
        return _refusal(first.result())
    response = ClosedStream(_lines(opened, first, events, slot=slot), content_type="text/event-stream")
    response["Cache-Control"] = "no-store, no-transform"
    response["X-Accel-Buffering"] = "no"
    return response


async def _lines(
    opened: Opened, first: "asyncio.Future[Event]", events: AsyncIterator[Event], *, slot: Slot
) -> AsyncIterator[bytes]:
    """slot: taken as the stream begins, so that a client that leaves before holds none."""
    conversation, _, answer = opened
    hub, is_held = hub_of_this_loop(settings.REDIS_URL), False
    try:
        if full := await slot.take(hub):  # others began since it was looked at
            first.cancel()
            yield _data({"error": _error_of({"message": full_words(full), "code": _TOO_MANY})})
            return
        is_held, is_begun = True, False
        event = await first
        while True:
            if event["type"] == "error":
                yield _data({"error": _error_of(event)})
                return
            if event["type"] == "waiting":
                yield f": {event['message'] or 'waiting'}\n\n".encode()
            elif not is_begun:
                is_begun = True
                for chunk in answer.first_chunks():
                    yield _data(chunk)
            for chunk in answer.chunks(event):
                yield _data(chunk)
            if event["type"] == "end":
                yield b"data: [DONE]\n\n"
                return
            await slot.renew(hub)
            event = await anext(events)
    finally:
        await finish(_leave(conversation, hub, slot if is_held else None))


async def _leave(conversation: Conversation, hub: Hub, slot: Slot | None) -> None:
    if slot is not None:
        await slot.give_back(hub)
    await conversation.close()


def _body(request: HttpRequest) -> Any:
    try:
        return json.loads(request.body)
    except (ValueError, RecursionError, RawPostDataException) as error:
        raise RequestRefused(f"the body cannot be read as JSON: {str(error)[:200]}", code="invalid_json") from error


def _refusal(event: Event) -> HttpResponse:
    if event["code"] in _BUSY_CODES:
        return _busy(event["message"], code=event["code"])
    status = _REFUSED_CODES.get(event["code"], 400)
    return error_answer(status, event["message"], param=event.get("param"), code=event["code"])


def _busy(message: str, *, code: str) -> HttpResponse:
    return error_answer(503, message.rstrip(". "), code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def _error_of(event: Event) -> dict[str, Any]:
    kind = "server_error" if event["code"] in (*_BUSY_CODES, *_REFUSED_CODES) else "invalid_request_error"
    return {"message": event["message"], "type": kind, "param": event.get("param"), "code": event["code"]}


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
