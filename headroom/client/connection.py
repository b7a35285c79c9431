"""The line to the service: requests, answers, errors and streams of ``/api/v1``, whatever is asked for."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import quote

import httpx

from optimizer.base.errors import HeadroomError

Row = dict[str, Any]

LONGEST_RETRY_S = 10.0
PRICE_LIMIT_S = 600.0
"""All cards of the table for a deep model take minutes."""


class ApiProblem(HeadroomError):
    """The service answered with an error; ``problem_code`` is stable, ``problem_fields`` name what was wrong."""

    code: ClassVar[str] = "api_problem"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        problem_code: str,
        hint: str = "",
        problem_fields: Sequence[Row] = (),
        extra: Row | None = None,
    ) -> None:
        super().__init__(message, hint=hint, status=status, problem_code=problem_code)
        self.status = status
        self.problem_code = problem_code
        self.problem_fields = list(problem_fields)
        self.extra = extra or {}


class ServiceUnreachable(HeadroomError):
    """Nothing answers at the address."""

    code: ClassVar[str] = "service_unreachable"


class JobTooSlow(HeadroomError):
    """Something was awaited longer than its limit."""

    code: ClassVar[str] = "wait_limit"


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """One message of a job's event stream."""

    kind: str
    """snapshot, sample, state, log, checkpoint, done; ``lost`` when the connection broke and is being resumed."""
    data: Row
    id: str = ""
    """Id to resume after; empty for messages that are not part of the stream."""


class Connection:
    """One user's line to one service. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        url: str,
        *,
        token: str,
        project: str = "",
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """project: id or name of the one to work in: only its rows are seen, and what is made goes there."""
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                **({"Headroom-Project": project} if project else {}),
            },
            timeout=timeout_s,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def post_files(self, path: str, named: Sequence[tuple[str, Path]], /, **fields: str) -> Row:
        """In one request, as a form; for what is small."""
        with ExitStack() as opened:
            files = [(field, (file.name, opened.enter_context(file.open("rb")))) for field, file in named]
            return _document_of(self._request("POST", path, data=fields, files=files, timeout=None))

    def _priced(self, path: str, question: Row, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Row:
        """Asked again while the model is being profiled, and while compiled blocks are, which may make a better plan."""
        deadline = time.monotonic() + wait_s
        while True:
            response = self._request("POST", path, json=question, timeout=PRICE_LIMIT_S)
            is_late = time.monotonic() > deadline
            if response.status_code != 202:
                document = _document_of(response)
                if is_late or document.get("compiled_blocks") != "pending":
                    return document
            elif is_late:
                raise JobTooSlow(
                    f"the model is still not profiled after {wait_s:.0f} s",
                    hint="Is a worker running? See: headroom machines list",
                )
            if on_wait:
                on_wait()
            time.sleep(_retry_after_s(response))

    def _all_rows(self, path: str, *, params: Row | None = None, limit: int | None = None) -> list[Any]:
        document = self._json("GET", path, params=params or {})
        rows: list[Any] = list(document["results"])
        while document.get("next") and (limit is None or len(rows) < limit):
            document = self._json("GET", document["next"])
            rows += document["results"]
        return rows[:limit]

    def _json(self, method: str, path: str, **arguments: Any) -> Row:
        return _document_of(self._request(method, path, **arguments))

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            headers = {**_write_headers(method), **arguments.pop("headers", {})}
            response = self._http.request(method, path, headers=headers, **arguments)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        if response.is_success:
            return response
        raise problem_of(response)

    def _stream(self, method: str, path: str, **arguments: Any) -> "_CheckedStream":
        return _CheckedStream(self._http.stream(method, path, **arguments))


class _CheckedStream:
    """A streamed answer whose error, if it is one, is read and raised on entry."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> httpx.Response:
        response: httpx.Response = self._stream.__enter__()
        if not response.is_success:
            response.read()
            self._stream.__exit__(None, None, None)
            raise problem_of(response)
        return response

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(*exc)


def parse_events(lines: Iterator[str]) -> Iterator[StreamEvent]:
    """Server-sent events, as far as this API uses them: event, id, and data that is JSON; comments are dropped."""
    kind, last_id = "", ""
    data: list[str] = []
    for line in lines:
        if line.startswith(":"):
            continue
        if not line:
            if data:
                yield _event_of(kind, last_id=last_id, data="\n".join(data))
            kind, last_id, data = "", "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "id":
            last_id = value
        elif field == "data":
            data.append(value)


def in_path(identifier: str) -> str:
    """One segment of an address, whatever was typed: no slash, no dots that lead elsewhere."""
    quoted = quote(identifier, safe="")
    return quoted if quoted.strip(".") else "-"


def problem_of(response: httpx.Response) -> ApiProblem:
    """The error an unsuccessful answer stands for, problem document or not."""
    try:
        document = response.json()
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    return ApiProblem(
        str(document.get("detail") or document.get("title") or f"the service answered {response.status_code}"),
        status=response.status_code,
        problem_code=str(document.get("code") or f"http_{response.status_code}"),
        hint=str(document.get("hint") or ""),
        problem_fields=document.get("fields") or [],
        extra=document.get("extra") or {},
    )


def _document_of(response: httpx.Response) -> Row:
    """A success's JSON object; what answers otherwise is not this service."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ApiProblem(
            f"{response.url} does not answer as Headroom does",
            status=response.status_code,
            problem_code="not_headroom",
            hint="Is the address that of a Headroom service?",
        )
    return document


def _event_of(kind: str, *, last_id: str, data: str) -> StreamEvent:
    document = json.loads(data)
    if not isinstance(document, dict):
        document = {"value": document}
    kind = kind or str(document.get("type", "message"))
    if set(document) == {"type", "data"}:  # an entry of the wire, sent on as it is
        document = document["data"]
    return StreamEvent(kind=kind, data=document, id=last_id)


def _retry_after_s(response: httpx.Response) -> float:
    given = response.headers.get("Retry-After", "")
    return min(LONGEST_RETRY_S, float(given)) if given.isdigit() and given != "0" else 1.0


def _write_headers(method: str) -> dict[str, str]:
    """A key of its own for each write, so that a repeat by a proxy or a retry makes nothing twice."""
    return {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}


def unreachable(url: str, error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(f"nothing answers at {url} ({error})", hint="Start it with: headroom up")
