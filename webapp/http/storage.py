"""Finds a full or broken disk, or a busy or absent database, behind a failed request, and answers in words: 507, or 503.

On a full disk SQLite says "full" of the database and "I/O error" of the files beside it, so it is the disk that is asked then.
"""

import errno
import shutil
import sqlite3
import sys
from collections.abc import Iterator

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.views.defaults import server_error

from optimizer.base.errors import DiskFull, HeadroomError
from webapp.http.problems import DatabaseBusy, DatabaseLost, StorageFailed, problem_of

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EIO, errno.EROFS)
_SQLITE_BROKEN = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT)
"""The last is what a disk that loses blocks looks like to a connection that was open before."""
_POSTGRESQL_FULL, _POSTGRESQL_BROKEN = "53100", "58030"
_POSTGRESQL_BUSY = ("55P03", "57014", "40P01", "53300")
"""No lock in time, a statement over its time, a deadlock, too many connections."""
_NO_ROOM_BYTES = 1024 * 1024
"""Less than this free is a full disk to SQLite, which asks for room in pieces."""


def storage_trouble(error: BaseException | None) -> HeadroomError | None:
    """DiskFull, StorageFailed, DatabaseBusy or DatabaseLost where that is what lies behind the error; None for any other."""
    if isinstance(error, DiskFull):
        return error
    kinds = [kind for part in _chain(error) if (kind := _kind(part))]
    if not kinds:
        return _database_trouble(error)
    if "full" in kinds or _is_full():
        return DiskFull(
            "nothing was changed: the disk of the service is full",
            hint="Send it again once an administrator has freed some disk space; running jobs go on.",
        )
    return StorageFailed(
        "nothing was changed: the disk of the service cannot be read or written",
        hint="Send it again later; an administrator finds the reason in the log of the web process.",
    )


def answer_fault(request: HttpRequest) -> HttpResponse:
    """Django's handler of what no view caught. A disk's trouble is a page of its own, and a problem document for programs."""
    trouble = storage_trouble(sys.exc_info()[1])
    if trouble is None:
        return server_error(request)
    answer = problem_of(trouble)
    if request.path.startswith("/api/"):
        return answer
    if isinstance(trouble, DatabaseBusy | DatabaseLost):
        # drawn without asking who is signed in, since that may be the very question that failed
        page = HttpResponse(render_to_string("storage.html", {"error": trouble}), status=answer.status_code)
    else:
        page = render(request, "storage.html", {"error": trouble}, status=answer.status_code)
    if "Retry-After" in answer:
        page["Retry-After"] = answer["Retry-After"]
    return page


def _database_trouble(error: BaseException | None) -> HeadroomError | None:
    if not any(isinstance(part, OperationalError | InterfaceError) for part in _chain(error)):
        return None
    if connection.vendor == "sqlite":
        is_busy, is_lost = "locked" in str(error), False
    else:
        is_busy = any(getattr(part, "sqlstate", None) in _POSTGRESQL_BUSY for part in _chain(error))
        is_lost = not is_busy
    if is_busy:
        return DatabaseBusy(
            "the database was busy for longer than a request waits; nothing was changed",
            hint="Send it again after the seconds in Retry-After.",
        )
    if is_lost:
        return DatabaseLost(
            "the database does not answer at present; nothing was changed",
            hint=f"Send the request again in {DatabaseLost.retry_after_s} s; running jobs go on.",
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _kind(error: BaseException) -> str:
    """``full``, ``broken`` or empty."""
    if isinstance(error, OSError):
        return "full" if error.errno in _FULL else "broken" if error.errno in _BROKEN else ""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return "full" if code == sqlite3.SQLITE_FULL else "broken" if code in _SQLITE_BROKEN else ""
    state = getattr(error, "sqlstate", None)  # psycopg's errors, which are not imported where SQLite is used
    return "full" if state == _POSTGRESQL_FULL else "broken" if state == _POSTGRESQL_BROKEN else ""


def _is_full() -> bool:
    try:
        return shutil.disk_usage(settings.HEADROOM_HOME).free < _NO_ROOM_BYTES
    except OSError:
        return False
