"""Idempotency-Key on POST: the same key with the same request replays the stored answer for a day, with another is refused.

The answer is stored in the transaction that makes the row (``remember``), so that a crash between the two cannot make a second
one. An error leaves no trace: the same key may then be tried again, and so it may once the process that answered is dead.
"""

import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, IntegrityError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone

from webapp.accounts.access import acting_of
from webapp.http.auth import owner_of
from webapp.http.problems import problem
from webapp.http.process_lock import is_dead, this_process
from webapp.jobs.models import IdempotencyKey

KEPT = timedelta(hours=24)
ABANDONED = timedelta(minutes=10)
"""A request that has not answered for so long died with its process, wherever that ran."""
TRIED_AGAIN_S = 1.0
_MAX_KEY_CHARACTERS = 200


def idempotent(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """For a view that answers with an HttpResponse and calls ``remember`` beside what it writes."""

    @functools.wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        key = request.headers.get("Idempotency-Key", "")
        if not key:
            return view(request, *args, **kwargs)
        if len(key) > _MAX_KEY_CHARACTERS:
            return problem(
                422,
                code="invalid_input",
                detail=f"Idempotency-Key has {len(key)} characters; allowed: at most {_MAX_KEY_CHARACTERS}",
            )
        row, earlier = _begin(request, key)
        if earlier is not None:
            return earlier
        request.idempotency_row = row  # type: ignore[attr-defined]
        is_answered = False
        try:
            response = view(request, *args, **kwargs)
            is_answered = row.status is not None
        finally:
            if not is_answered:  # it failed, and may be tried again
                _set_free(row.pk)
        return response

    guarded.is_idempotent = True  # type: ignore[attr-defined]  # the description of the API says so
    return guarded


def remember(request: HttpRequest, *, status: int, body: dict[str, Any], location: str = "") -> HttpResponse:
    """The response, stored under the request's key where it has one. Call it inside the transaction of the write."""
    row: IdempotencyKey | None = getattr(request, "idempotency_row", None)
    if row is not None:
        row.status, row.body, row.location = status, body, location
        row.save(update_fields=["status", "body", "location"])
    return _answer(status, body, location)


class _Unfreed:
    """Keys of failed requests whose rows could not be deleted, since the database was away: deleted once it is back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[int] = set()

    def add(self, row_id: int) -> None:
        with self._lock:
            self._ids.add(row_id)
            if len(self._ids) == 1:
                threading.Thread(target=self._try_until_done, name="idempotency keys", daemon=True).start()

    def _try_until_done(self) -> None:
        while self._ids:
            time.sleep(TRIED_AGAIN_S)
            with self._lock:
                known = set(self._ids)
            with contextlib.suppress(DatabaseError):
                _delete(known)
                with self._lock:
                    self._ids -= known
            connection.close()


_unfreed = _Unfreed()


def _set_free(row_id: int) -> None:
    try:
        _delete({row_id})
    except DatabaseError:
        _unfreed.add(row_id)


def _delete(row_ids: set[int]) -> None:
    """All but those that were answered after all: a commit whose confirmation was lost."""
    IdempotencyKey.objects.filter(pk__in=row_ids, status__isnull=True).delete()


def _begin(request: HttpRequest, key: str) -> tuple[IdempotencyKey, HttpResponse | None]:
    """The key's row, new, or with the answer of the request that took the key before."""
    sha256, owner = _request_sha256(request), owner_of(request)
    while True:
        new = IdempotencyKey(user=owner, key=key, request_sha256=sha256, holder=this_process())
        try:
            with transaction.atomic():
                new.save()
        except IntegrityError:
            row = IdempotencyKey.objects.filter(user=owner, key=key).first()
            if row is not None and not _is_free(row):
                return row, _earlier(row, sha256)
            if row is not None:
                IdempotencyKey.objects.filter(pk=row.pk).delete()
        else:
            return new, None


def _is_free(row: IdempotencyKey) -> bool:
    age = timezone.now() - row.created_at
    if row.status is not None:
        return age > KEPT
    return age > ABANDONED or is_dead(row.holder)


def _earlier(row: IdempotencyKey, sha256: str) -> HttpResponse:
    if row.request_sha256 != sha256:
        return problem(
            422,
            code="idempotency_key_reused",
            detail="this Idempotency-Key was used for another request",
            hint="Use a new key for a new request.",
        )
    if row.status is None:
        return problem(
            409,
            code="idempotency_in_progress",
            detail="the first request with this Idempotency-Key is still running",
            headers={"Retry-After": "1"},
        )
    response = _answer(row.status, row.body, row.location)
    response["Idempotent-Replayed"] = "true"
    return response


def _answer(status: int, body: Any, location: str) -> HttpResponse:
    return JsonResponse(body, status=status, headers={"Location": location} if location else {})


def _request_sha256(request: HttpRequest) -> str:
    project_id = acting_of(request.user).project_id
    digest = hashlib.sha256(f"{request.method} {request.get_full_path()} {project_id}\n".encode())
    if request.content_type != "multipart/form-data":
        digest.update(request.body)
        return digest.hexdigest()
    # the boundary differs between two sendings of the same form, so its parts are hashed
    digest.update(json.dumps(sorted(request.POST.lists())).encode())
    for field, files in sorted(request.FILES.lists()):
        for file in files:
            digest.update(f"{field} {file.name} {file.size}\n".encode())
            for chunk in file.chunks():
                digest.update(chunk)
            file.seek(0)
    return digest.hexdigest()
