"""``/tokens``, ``/projects``, ``/people``, ``/audit``. Who may ask each is in ``accounts/permissions.py``.

What answers with a secret takes no Idempotency-Key: the answer would be kept, and the secret with it.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field

from webapp.accounts.access import reachable_projects, role_in
from webapp.accounts.audit import note_target, records_visible_to
from webapp.accounts.models import ApiToken, AuditRecord, Membership, Project, Scope
from webapp.accounts.projects import (
    account_role,
    create_account,
    create_project,
    remove_member,
    set_account_role,
    set_active,
    set_member,
)
from webapp.accounts.queries import tokens_visible_to
from webapp.accounts.tokens import DEFAULT_DAYS, MAX_DAYS, create_token, revoke_token
from webapp.http.auth import owner_of
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import page_of

router = Router()
AccountRole = Literal["admin", "member", "viewer"]
RoleName = Literal["viewer", "member", "admin"]
ScopeName = Literal["read", "write", "admin"]


class TokenAnswer(Schema):
    """A token without its secret."""

    id: str
    name: str
    scope: ScopeName
    project: str | None
    created_at: datetime
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class NewTokenAnswer(TokenAnswer):
    """With its text, this once."""

    token: str


class TokensAnswer(Schema):
    """All of one's own: few, so there are no pages."""

    results: list[TokenAnswer]


class TokenBody(Schema, extra="forbid"):
    """The name, scope, project and lifetime of a new token."""

    name: str = Field(max_length=100)
    scope: ScopeName = "write"
    project: str | None = Field(default=None, max_length=60, description="the only project that it opens")
    days: int = Field(default=DEFAULT_DAYS, ge=1, le=MAX_DAYS)


class ProjectAnswer(Schema):
    """A project, and your role there."""

    id: str
    name: str
    role: RoleName
    is_own: bool
    created_at: datetime


class ProjectsAnswer(Schema):
    """A cursor page."""

    results: list[ProjectAnswer]
    next: str | None
    previous: str | None


class ProjectBody(Schema, extra="forbid"):
    """A new project; its maker administers it."""

    name: str = Field(max_length=100)


class MemberAnswer(Schema):
    """One person of a project."""

    username: str
    role: RoleName
    since: datetime


class MembersAnswer(Schema):
    """All of a project."""

    results: list[MemberAnswer]


class MemberBody(Schema, extra="forbid"):
    """Their role."""

    role: RoleName


class PersonAnswer(Schema):
    """One account."""

    username: str
    role: AccountRole
    is_active: bool
    created_at: datetime
    last_login_at: datetime | None


class NewPersonAnswer(PersonAnswer):
    """With the first password, this once."""

    password: str


class PeopleAnswer(Schema):
    """All accounts."""

    results: list[PersonAnswer]


class PersonBody(Schema, extra="forbid"):
    """A new account."""

    username: str = Field(max_length=60)
    role: AccountRole = "member"


class PersonChange(Schema, extra="forbid"):
    """Change fields of an account; fields left out stay."""

    role: AccountRole | None = None
    is_active: bool | None = None


class RecordAnswer(Schema):
    """One record of the audit trail."""

    id: str
    at: datetime
    actor: str
    token_id: str
    address: str
    action: str
    outcome: Literal["done", "refused"]
    target: str
    project: str
    detail: str


class AuditAnswer(Schema):
    """A cursor page, newest first."""

    results: list[RecordAnswer]
    next: str | None
    previous: str | None


Name = Annotated[str, Query(max_length=150)]


@router.get("/tokens", response=TokensAnswer, tags=["account"])
def list_tokens(request: HttpRequest) -> dict[str, Any]:
    """Your API tokens, newest first."""
    return {"results": [_token(row) for row in tokens_visible_to(request.user)]}


@router.post("/tokens", response={201: NewTokenAnswer}, tags=["account"])
def make_token(request: HttpRequest, body: TokenBody) -> Status[dict[str, Any]]:
    """A new token, its text shown this once. Not for tokens: only somebody who has logged in makes one."""
    project = _project(request, body.project) if body.project is not None else None
    row, text = create_token(
        user=owner_of(request), name=body.name, days=body.days, scope=Scope(body.scope), project=project
    )
    note_target(request, row.pk, detail=f"{row.name}, {row.scope}, {project.name if project else 'all projects'}")
    return Status(201, {**_token(row), "token": text})


@router.delete("/tokens/{token_id}", response={204: None}, tags=["account"])
def delete_token(request: HttpRequest, token_id: str) -> Status[None]:
    """Revoke one of your tokens; it opens nothing from then on."""
    row = tokens_visible_to(request.user).filter(pk=token_id).first()
    if row is None:
        raise Http404
    revoke_token(row)
    return Status(204, None)


@router.get("/projects", response=ProjectsAnswer, tags=["account"])
def list_projects(request: HttpRequest, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Projects you belong to, newest first; of an administrator all."""
    rows = reachable_projects(request.user)
    return page_of(request, rows, lambda found: [_project_document(request, row) for row in found])


@router.post("/projects", response={201: ProjectAnswer}, tags=["account"])
@idempotent
def make_project(request: HttpRequest, body: ProjectBody) -> HttpResponse:
    """A new project, which you administer."""
    with transaction.atomic():
        row = create_project(owner_of(request), name=body.name)
        note_target(request, row.pk, detail=row.name)
        document = ProjectAnswer(**_project_document(request, row)).model_dump(mode="json")
        return remember(request, status=201, body=document, location=f"/api/v1/projects/{row.pk}")


@router.get("/projects/{project_id}", response=ProjectAnswer, tags=["account"])
def get_project(request: HttpRequest, project_id: str) -> dict[str, Any]:
    return _project_document(request, _project(request, project_id))


@router.get("/projects/{project_id}/members", response=MembersAnswer, tags=["account"])
def list_members(request: HttpRequest, project_id: str) -> dict[str, Any]:
    """List the project's members by name."""
    rows = _project(request, project_id).memberships.select_related("user").order_by("user__username")
    return {"results": [_member(row) for row in rows]}


@router.put("/projects/{project_id}/members/{username}", response=MemberAnswer, tags=["account"])
def put_member(request: HttpRequest, project_id: str, username: str, body: MemberBody) -> dict[str, Any]:
    """Let somebody in, or give them another role."""
    row = set_member(_project(request, project_id), username=username, role=body.role)
    note_target(request, username, detail=body.role)
    return _member(row)


@router.delete("/projects/{project_id}/members/{username}", response={204: None}, tags=["account"])
def delete_member(request: HttpRequest, project_id: str, username: str) -> Status[None]:
    """They no longer belong to it; what they made there stays."""
    if not remove_member(_project(request, project_id), username=username):
        raise Http404
    note_target(request, username)
    return Status(204, None)


@router.get("/projects/{project_id}/audit", response=AuditAnswer, tags=["account"])
def list_project_audit(
    request: HttpRequest, project_id: str, actor: Name = "", action: Name = "", cursor: str = "", page_size: str = ""
) -> dict[str, Any]:
    """List the actions in a project, newest first. ``action`` is a prefix: ``job.``"""
    return _audit(request, project_id=project_id, actor=actor, action=action)


@router.get("/audit", response=AuditAnswer, tags=["account"])
def list_audit(
    request: HttpRequest, actor: Name = "", action: Name = "", cursor: str = "", page_size: str = ""
) -> dict[str, Any]:
    """List the actions in the whole service, log-ins too, newest first."""
    return _audit(request, project_id="", actor=actor, action=action)


@router.get("/people", response=PeopleAnswer, tags=["account"])
def list_people(request: HttpRequest) -> dict[str, Any]:
    """Accounts, by name."""
    return {"results": [_person(row) for row in User.objects.order_by("username")]}


@router.post("/people", response={201: NewPersonAnswer}, tags=["account"])
def make_person(request: HttpRequest, body: PersonBody) -> Status[dict[str, Any]]:
    """A new account with a first password, shown this once."""
    user, password = create_account(username=body.username, role=body.role)
    note_target(request, user.get_username(), detail=body.role)
    return Status(201, {**_person(user), "password": password})


@router.patch("/people/{username}", response=PersonAnswer, tags=["account"])
def change_person(request: HttpRequest, username: str, body: PersonChange) -> dict[str, Any]:
    """Another role, or opened and closed: a closed account opens nothing, what it made stays."""
    person = User.objects.filter(username=username).first()
    if person is None:
        raise Http404
    with transaction.atomic():
        if body.role is not None:
            set_account_role(person, body.role)
        if body.is_active is not None:
            set_active(person, is_active=body.is_active)
    changes = body.dict(exclude_none=True)
    note_target(request, username, detail=", ".join(f"{name}: {value}" for name, value in changes.items()))
    return _person(person)


def _project(request: HttpRequest, project_id: str) -> Project:
    row = reachable_projects(request.user).filter(pk=project_id).first()
    if row is None:
        raise Http404
    return row


def _audit(request: HttpRequest, *, project_id: str, actor: str, action: str) -> dict[str, Any]:
    rows = records_visible_to(request.user, project_id=project_id)
    if actor:
        rows = rows.filter(actor=actor)
    if action:
        rows = rows.filter(action__startswith=action)
    return page_of(request, rows, lambda found: [_record(row) for row in found])


def _token(row: ApiToken) -> dict[str, Any]:
    return {
        "id": row.pk,
        "name": row.name,
        "scope": row.scope,
        "project": row.project_id,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "last_used_at": row.last_used_at,
        "revoked_at": row.revoked_at,
    }


def _project_document(request: HttpRequest, row: Project) -> dict[str, Any]:
    return {
        "id": row.pk,
        "name": row.name,
        "role": role_in(request.user, row.pk),
        "is_own": row.home_of_id == owner_of(request).pk,
        "created_at": row.created_at,
    }


def _member(row: Membership) -> dict[str, Any]:
    return {"username": row.user.get_username(), "role": row.role, "since": row.created_at}


def _person(user: User) -> dict[str, Any]:
    return {
        "username": user.get_username(),
        "role": account_role(user),
        "is_active": user.is_active,
        "created_at": user.date_joined,
        "last_login_at": user.last_login,
    }


def _record(row: AuditRecord) -> dict[str, Any]:
    return {
        "id": row.pk,
        "at": row.at,
        "actor": row.actor,
        "token_id": row.token_id,
        "address": row.address,
        "action": row.action,
        "outcome": row.outcome,
        "target": row.target,
        "project": row.project_id,
        "detail": row.detail,
    }
