"""The audit trail: who did what, on what, when, from where. Only written here, only added to.

Every request that changes something is recorded once it is done (``middleware.py``), as the permission table names it; so are
log-ins, and what somebody who is known was refused. Secrets are never in it.
"""

from typing import Any

from django.contrib.auth.models import User
from django.core.cache import cache
from django.db.models import QuerySet
from django.http import HttpRequest

from webapp.accounts.access import acting_of
from webapp.accounts.models import AuditRecord

FAILED_LOGINS_PER_MINUTE = 60
"""Recorded at most, of all people together: strangers must not fill the table."""


def record(
    request: HttpRequest | None,
    *,
    actor: str,
    action: str,
    outcome: str = "done",
    target: str = "",
    project_id: str = "",
    token_id: str = "",
    detail: str = "",
) -> AuditRecord:
    return AuditRecord.objects.create(
        actor=_plain(actor, 150),
        token_id=token_id,
        address=str(request.META.get("REMOTE_ADDR", ""))[:45] if request is not None else "",
        action=action,
        outcome=outcome,
        target=_plain(target, 150),
        project_id=project_id,
        detail=_plain(detail, 300),
    )


def note_target(request: HttpRequest, target: str, *, detail: str = "", project_id: str = "") -> None:
    """Note the target of a request whose address does not name it: something new, a name in a form. project_id: the target's,
    where it is at hand."""
    request.audit_target = target  # type: ignore[attr-defined]
    if project_id:
        request.audit_project_id = project_id  # type: ignore[attr-defined]
    request.audit_detail = detail  # type: ignore[attr-defined]


def records_visible_to(user: Any, *, project_id: str = "") -> QuerySet[AuditRecord]:
    """Entries of one project, or of all; the permission table has checked who asks."""
    if not user.is_authenticated:
        return AuditRecord.objects.none()
    rows = AuditRecord.objects.all()
    return rows.filter(project_id=project_id) if project_id else rows


def record_login(*, request: HttpRequest, user: User, **_: Any) -> None:
    record(request, actor=user.get_username(), action="login", target=user.get_username())


def record_failed_login(*, credentials: dict[str, Any], request: HttpRequest | None = None, **_: Any) -> None:
    cache.add("audit-failed-logins", 0, 60)
    if cache.incr("audit-failed-logins") > FAILED_LOGINS_PER_MINUTE:
        return
    name = str(credentials.get("username") or "")
    why = "wrong name or password, or too many tries"
    record(request, actor=name, action="login", outcome="refused", target=name, detail=why)


def record_logout(*, request: HttpRequest, user: User | None, **_: Any) -> None:
    if user is not None:
        record(request, actor=user.get_username(), action="logout", target=user.get_username())


def record_with_row(request: HttpRequest) -> None:
    """Record a request in the transaction of what it makes, so that one commit does for both. ``note_target`` comes before."""
    record_request(request, outcome="done")
    request.is_recorded = True  # type: ignore[attr-defined]


def record_request(request: HttpRequest, *, outcome: str, detail: str = "") -> None:
    """One request that the permission table has a name for."""
    user: Any = request.user
    acting = acting_of(user)
    kwargs = request.resolver_match.kwargs or {} if request.resolver_match else {}
    named = " ".join(str(value) for value in kwargs.values())
    record(
        request,
        actor=user.get_username(),
        action=request.permission_rule.action,  # type: ignore[attr-defined]
        outcome=outcome,
        target=getattr(request, "audit_target", "") or named,
        project_id=str(getattr(request, "audit_project_id", "") or acting.project_id),
        token_id=acting.token_id,
        detail=detail or getattr(request, "audit_detail", ""),
    )


def _plain(text: str, max_characters: int) -> str:
    """One line, whatever was sent: a name must not forge a second record in a log that is made of these."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)[:max_characters]
