"""Streams answers that end with their readers, and files below HEADROOM_HOME, whatever a link inside says."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import Http404, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header

_CHUNK_BYTES = 64 * 1024


class ClosedStream(StreamingHttpResponse):
    """A streamed answer whose source is closed in the moment that its reader has gone.

    Django leaves that to the garbage collector, which may come minutes later; what the source holds is held until then.
    """

    _iterator: Any

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with aclosing(self._iterator) as source:
            async for part in source:
                yield self.make_bytes(part)


async def finish(leaving: Coroutine[Any, Any, None]) -> None:
    """Give back what a stream holds, to the end: a reader that goes cancels this wait, and not what is waited for."""
    task = asyncio.create_task(leaving)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)
    await asyncio.shield(task)


_leaving: set[asyncio.Task[None]] = set()
"""Held here, since the loop holds tasks weakly."""


def stream_file(file: str, *, name: str, sha256: str) -> HttpResponseBase:
    """A row's file below HEADROOM_HOME, as an attachment. Raises Http404 where it is gone."""
    path = find_inside_home(Path(settings.HEADROOM_HOME) / file)
    if path is None:
        raise Http404
    # an asynchronous iterator: Django reads a synchronous one, FileResponse's too, into memory before it sends a byte
    response = ClosedStream(read_in_chunks([path]), content_type="application/octet-stream")
    response["Content-Length"] = str(path.stat().st_size)
    response["Content-Disposition"] = content_disposition_header(as_attachment=True, filename=name) or "attachment"
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    response["ETag"] = f'"{sha256}"'
    return response


async def read_in_chunks(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        with await asyncio.to_thread(path.open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk


def find_inside_home(path: Path) -> Path | None:
    real = path.resolve()
    is_inside = real.is_relative_to(Path(settings.HEADROOM_HOME).resolve())
    return real if is_inside and real.is_file() else None
