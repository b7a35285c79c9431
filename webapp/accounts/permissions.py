"""The permission table: each address and method, and what somebody needs for it. The only place that decides.

API, pages and streams ask ``admit`` before they do anything. An address that is not in the table opens for nobody. What an
address names decides which project counts: its kwarg (``job_id``, …) is looked up here, so that a row of a project that somebody
does not belong to answers 404, and one where their role is too small 403 with who can allow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from django.apps import apps
from django.http import Http404, HttpRequest
from django.urls import resolve

from webapp.accounts.access import (
    act_as,
    acting_of,
    has_scope,
    project_for_new,
    reachable_projects,
    require_place_for_new,
    require_role,
    require_role_somewhere,
    role_in,
)
from webapp.accounts.errors import Forbidden, NotSignedInError
from webapp.accounts.models import Role, Scope
from webapp.accounts.projects import account_role


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The permission that one method of one address needs."""

    who: Literal["anyone", "signed_in", "account", "role", "service_admin"]
    """``account``: a member or an administrator of the service; viewers only look where they are let in."""
    role: Role = Role.VIEWER
    """In the project of what the address names; where it names nothing, in the project where a new row goes."""
    scope: Scope = Scope.READ
    action: str = ""
    """Name in the audit trail; empty for what changes nothing."""
    anywhere: bool = False
    """Names nothing, and the project follows from the body: the role is needed somewhere, and what acts looks again."""
    session_only: bool = False
    """Not for tokens: a stolen one must not make itself others."""


OPEN: Final = Rule(who="anyone")
SIGNED_IN: Final = Rule(who="signed_in")
LOOK: Final = Rule(who="role")
ASK: Final = Rule(who="role", anywhere=True)
"""A question about plans: it changes nothing but what is worked out."""

CHAT: Final = Rule(who="role", role=Role.MEMBER, scope=Scope.WRITE, anywhere=True)
"""A question to a model; a job that it starts records itself, and asks for the role in its own project."""


def _runs(action: str, *, anywhere: bool = False) -> Rule:
    return Rule(who="role", role=Role.MEMBER, scope=Scope.WRITE, action=action, anywhere=anywhere)


def _own(action: str, *, session_only: bool = False) -> Rule:
    return Rule(who="signed_in", scope=Scope.ADMIN, action=action, session_only=session_only)


def _founds(action: str) -> Rule:
    return Rule(who="account", scope=Scope.ADMIN, action=action)


def _manages(action: str = "") -> Rule:
    return Rule(who="role", role=Role.ADMIN, scope=Scope.ADMIN, action=action)


def _serves(action: str = "") -> Rule:
    return Rule(who="service_admin", scope=Scope.ADMIN, action=action)


_JOB: Final = "api/v1/jobs/<job_id>"
_JOB_PAGE: Final = "jobs/<slug:job_id>/"

TABLE: Final[dict[str, Rule]] = {
    # the service itself
    "GET healthz": OPEN,
    "GET readyz": OPEN,
    "GET metrics": Rule(who="service_admin"),
    "GET api/v1/openapi.json": OPEN,
    "GET api/v1/docs": OPEN,
    "GET api/v1/": OPEN,
    "GET v1/": OPEN,
    "* api/v1/^(?P<rest>.*)$": OPEN,
    "* v1/^(?P<rest>.*)$": OPEN,
    "GET ": OPEN,
    "GET login/": OPEN,
    "POST login/": OPEN,
    "POST logout/": OPEN,
    # API: accounts
    "GET api/v1/me": SIGNED_IN,
    "GET api/v1/tokens": Rule(who="signed_in", scope=Scope.ADMIN),
    "POST api/v1/tokens": _own("token.create", session_only=True),
    "DELETE api/v1/tokens/<token_id>": _own("token.revoke"),
    "GET api/v1/projects": SIGNED_IN,
    "POST api/v1/projects": _founds("project.create"),
    "GET api/v1/projects/<project_id>": LOOK,
    "GET api/v1/projects/<project_id>/members": LOOK,
    "PUT api/v1/projects/<project_id>/members/<username>": _manages("member.set"),
    "DELETE api/v1/projects/<project_id>/members/<username>": _manages("member.remove"),
    "GET api/v1/projects/<project_id>/audit": _manages(),
    "GET api/v1/audit": _serves(),
    "GET api/v1/people": _serves(),
    "POST api/v1/people": _serves("account.create"),
    "PATCH api/v1/people/<username>": _serves("account.change"),
    # API: webhooks
    "GET api/v1/projects/<project_id>/webhooks": _manages(),
    "POST api/v1/projects/<project_id>/webhooks": _manages("webhook.create"),
    "GET api/v1/webhooks/<webhook_id>": _manages(),
    "PATCH api/v1/webhooks/<webhook_id>": _manages("webhook.change"),
    "DELETE api/v1/webhooks/<webhook_id>": _manages("webhook.delete"),
    "POST api/v1/webhooks/<webhook_id>/secret": _manages("webhook.secret"),
    "POST api/v1/webhooks/<webhook_id>/test": _manages("webhook.test"),
    "GET api/v1/webhooks/<webhook_id>/deliveries": _manages(),
    "POST api/v1/deliveries/<delivery_id>/replay": _manages("webhook.replay"),
    # API: what jobs are made of
    "GET api/v1/models": SIGNED_IN,
    "POST api/v1/models": _runs("model.create"),
    "GET api/v1/models/<model_id>": LOOK,
    "DELETE api/v1/models/<model_id>": _runs("model.delete"),
    "POST api/v1/models/<model_id>/restore": _runs("model.restore"),
    "GET api/v1/models/<model_id>/cards": LOOK,
    "POST api/v1/models/<model_id>/cards": LOOK,
    "GET api/v1/datasets": SIGNED_IN,
    "POST api/v1/datasets": _runs("dataset.create"),
    "GET api/v1/datasets/<dataset_id>": LOOK,
    "PATCH api/v1/datasets/<dataset_id>": _runs("dataset.correct"),
    "GET api/v1/datasets/<dataset_id>/preview": LOOK,
    "DELETE api/v1/datasets/<dataset_id>": _runs("dataset.delete"),
    "POST api/v1/datasets/<dataset_id>/restore": _runs("dataset.restore"),
    "GET api/v1/uploads": SIGNED_IN,
    "POST api/v1/uploads": _runs("upload.begin"),
    "GET api/v1/uploads/<upload_id>": SIGNED_IN,
    "PUT api/v1/uploads/<upload_id>/files/<number>": Rule(who="signed_in", scope=Scope.WRITE),
    "POST api/v1/uploads/<upload_id>/finish": Rule(who="signed_in", scope=Scope.WRITE, action="upload.finish"),
    "DELETE api/v1/uploads/<upload_id>": Rule(who="signed_in", scope=Scope.WRITE, action="upload.drop"),
    "GET api/v1/machines": SIGNED_IN,
    "GET api/v1/machines/<machine_id>": SIGNED_IN,
    "POST api/v1/machines/<machine_id>/links": _runs("machine.measure_links", anywhere=True),
    # API: questions
    "POST api/v1/plans": ASK,
    "POST api/v1/plans/best": ASK,
    "POST api/v1/plans/compare": ASK,
    "POST api/v1/plans/cards": ASK,
    "POST api/v1/plans/price": ASK,
    "POST api/v1/estimates": ASK,
    # API: jobs
    "GET api/v1/jobs": SIGNED_IN,
    "POST api/v1/jobs": _runs("job.create", anywhere=True),
    f"GET {_JOB}": LOOK,
    f"PATCH {_JOB}": _runs("job.describe"),
    f"DELETE {_JOB}": _runs("job.delete"),
    f"POST {_JOB}/restore": _runs("job.restore"),
    f"POST {_JOB}/share": _runs("job.share"),
    f"DELETE {_JOB}/share": _runs("job.unshare"),
    f"POST {_JOB}/cancel": _runs("job.cancel"),
    "POST api/v1/jobs/cancel": _runs("jobs.cancel", anywhere=True),
    f"POST {_JOB}/pause": _runs("job.pause"),
    f"POST {_JOB}/resume": _runs("job.resume"),
    f"POST {_JOB}/retry": _runs("job.retry"),
    f"POST {_JOB}/export": _runs("job.export"),
    f"POST {_JOB}/model": _runs("model.create"),
    f"POST {_JOB}/priority": _runs("job.move"),
    f"GET {_JOB}/metrics": LOOK,
    f"GET {_JOB}/artifacts": LOOK,
    f"GET {_JOB}/checkpoints": LOOK,
    f"GET {_JOB}/attempts": LOOK,
    f"GET {_JOB}/results": LOOK,
    f"GET {_JOB}/logs": LOOK,
    f"GET {_JOB}/events": LOOK,
    "GET api/v1/artifacts/<artifact_id>/download": LOOK,
    "GET api/v1/compare": SIGNED_IN,
    "GET api/v1/queue": SIGNED_IN,
    "POST api/v1/chat/completions": CHAT,
    # after OpenAI's API
    "POST v1/chat/completions": CHAT,
    "POST v1/completions": CHAT,
    "GET v1/models": SIGNED_IN,
    "GET v1/files": SIGNED_IN,
    "POST v1/files": _runs("file.create"),
    "GET v1/files/<file_id>": LOOK,
    "DELETE v1/files/<file_id>": _runs("file.delete"),
    "GET v1/files/<file_id>/content": LOOK,
    "GET v1/batches": SIGNED_IN,
    "POST v1/batches": _runs("batch.create", anywhere=True),
    "GET v1/batches/<batch_id>": LOOK,
    "POST v1/batches/<batch_id>/cancel": _runs("batch.cancel"),
    # pages: accounts
    "GET settings/": SIGNED_IN,
    "POST settings/theme/": OPEN,
    "GET tokens/": SIGNED_IN,
    "POST tokens/": _own("token.create", session_only=True),
    "POST tokens/<slug:token_id>/revoke/": _own("token.revoke"),
    "GET password/": SIGNED_IN,
    "POST password/": _own("password.change", session_only=True),
    "GET projects/": SIGNED_IN,
    "POST projects/": _founds("project.create"),
    "POST projects/work-in/": SIGNED_IN,
    "GET projects/<slug:project_id>/": LOOK,
    "POST projects/<slug:project_id>/members/": _manages("member.set"),
    "POST projects/<slug:project_id>/members/remove/": _manages("member.remove"),
    "GET projects/<slug:project_id>/audit/": _manages(),
    "GET audit/": _serves(),
    "GET people/": _serves(),
    "POST people/": _serves("account.create"),
    "POST people/change/": _serves("account.change"),
    "GET projects/<slug:project_id>/webhooks/": _manages(),
    "POST projects/<slug:project_id>/webhooks/": _manages("webhook.create"),
    "GET webhooks/<slug:webhook_id>/": _manages(),
    "POST webhooks/<slug:webhook_id>/secret/": _manages("webhook.secret"),
    "POST webhooks/<slug:webhook_id>/test/": _manages("webhook.test"),
    "POST webhooks/<slug:webhook_id>/switch/": _manages("webhook.change"),
    "POST webhooks/<slug:webhook_id>/delete/": _manages("webhook.delete"),
    "POST deliveries/<slug:delivery_id>/replay/": _manages("webhook.replay"),
    # pages: jobs
    "GET jobs/": SIGNED_IN,
    "POST jobs/bulk/": _runs("job.bulk", anywhere=True),
    "POST jobs/filters/": _own("filter.change"),
    "GET jobs/new/": SIGNED_IN,
    "POST jobs/new/": _runs("job.create", anywhere=True),
    "POST jobs/new/price/": ASK,
    "POST jobs/new/model/": _runs("model.create"),
    "POST jobs/new/dataset/": _runs("dataset.create"),
    "GET jobs/new/generate/": SIGNED_IN,
    "POST jobs/new/generate/": _runs("job.create", anywhere=True),
    "POST jobs/new/generate/price/": ASK,
    "POST jobs/new/generate/prompts/": _runs("dataset.create"),
    "GET jobs/compare/": SIGNED_IN,
    "GET plans/": SIGNED_IN,
    "GET plans/cards/": SIGNED_IN,
    "GET plans/knobs/": SIGNED_IN,
    "GET plans/step/": SIGNED_IN,
    f"GET {_JOB_PAGE}": LOOK,
    f"GET {_JOB_PAGE}head/": LOOK,
    f"GET {_JOB_PAGE}ranks/": LOOK,
    f"GET {_JOB_PAGE}tabs/<slug:tab>/": LOOK,
    f"GET {_JOB_PAGE}log/": LOOK,
    f"GET {_JOB_PAGE}tables/<slug:chart>/": LOOK,
    f"GET {_JOB_PAGE}tables/<slug:chart>.csv": LOOK,
    f"POST {_JOB_PAGE}about/": _runs("job.describe"),
    f"POST {_JOB_PAGE}delete/": _runs("job.delete"),
    f"POST {_JOB_PAGE}restore/": _runs("job.restore"),
    f"POST {_JOB_PAGE}share/": _runs("job.share"),
    "GET shared/<slug:job_id>/<slug:signature>/": OPEN,
    "GET shared/<slug:job_id>/<slug:signature>/metrics": OPEN,
    f"POST {_JOB_PAGE}cancel/": _runs("job.cancel"),
    f"POST {_JOB_PAGE}pause/": _runs("job.pause"),
    f"POST {_JOB_PAGE}resume/": _runs("job.resume"),
    f"POST {_JOB_PAGE}retry/": _runs("job.retry"),
    f"POST {_JOB_PAGE}export/": _runs("job.export"),
    f"POST {_JOB_PAGE}model/": _runs("model.create"),
    f"POST {_JOB_PAGE}move/": _runs("job.move"),
    "GET chat/": SIGNED_IN,
    "GET queue/": SIGNED_IN,
    # pages: what jobs are made of
    "GET models/": SIGNED_IN,
    "POST models/": _runs("model.create"),
    "GET models/<slug:model_id>/": LOOK,
    "GET models/<slug:model_id>/cards/": LOOK,
    "POST models/<slug:model_id>/cards/": LOOK,
    "POST models/<slug:model_id>/delete/": _runs("model.delete"),
    "POST models/<slug:model_id>/restore/": _runs("model.restore"),
    "GET datasets/": SIGNED_IN,
    "POST datasets/": _runs("dataset.create"),
    "GET datasets/<slug:dataset_id>/": LOOK,
    "GET datasets/<slug:dataset_id>/preview/": LOOK,
    "POST datasets/<slug:dataset_id>/read/": _runs("dataset.read"),
    "POST datasets/<slug:dataset_id>/columns/": _runs("dataset.correct"),
    "POST datasets/<slug:dataset_id>/delete/": _runs("dataset.delete"),
    "POST datasets/<slug:dataset_id>/restore/": _runs("dataset.restore"),
    "GET words/": SIGNED_IN,
    "GET welcome/": SIGNED_IN,
    "GET search/": SIGNED_IN,
    "GET machines/": SIGNED_IN,
    "GET machines/<slug:machine_id>/": SIGNED_IN,
    "POST machines/<slug:machine_id>/links/": _runs("machine.measure_links", anywhere=True),
}
"""``METHOD route`` as Django's resolver writes the route; HEAD is asked as GET."""

OWNED: Final = {
    "project_id": ("accounts.Project", "pk"),
    "job_id": ("jobs.Job", "project"),
    "artifact_id": ("jobs.Artifact", "job__project"),
    "model_id": ("catalog.Model", "project"),
    "dataset_id": ("catalog.Dataset", "project"),
    "file_id": ("batches.BatchFile", "project"),
    "batch_id": ("batches.Batch", "project"),
    "webhook_id": ("webhooks.Webhook", "project"),
    "delivery_id": ("webhooks.Delivery", "webhook__project"),
}
"""Kwargs of addresses that name what a project owns: the table of rows, and where it says whose they are."""
PERSONAL: Final = frozenset({"token_id", "upload_id"})
"""Kwargs that name what one person owns: only they may look, which the view's query sees to."""
PLAIN: Final = frozenset({"tab", "chart", "rest", "username", "number", "machine_id", "signature"})
"""Kwargs that name no row of anybody's."""


def route_of(request: HttpRequest) -> tuple[str, str]:
    """The method and route under which a request stands in the table."""
    match = request.resolver_match
    method = "GET" if request.method == "HEAD" else str(request.method)
    return method, match.route if match is not None else ""


def rule_of(method: str, route: str) -> Rule | None:
    return TABLE.get(f"{method} {route}") or TABLE.get(f"* {route}")


def methods_of(route: str) -> list[str]:
    """That the table knows of an address; empty for one that is not in it."""
    return sorted(key.partition(" ")[0] for key in TABLE if key.partition(" ")[2] == route)


def admit(request: HttpRequest, user: Any) -> Rule:
    """The rule that was met. Raises NotSignedInError, Forbidden, or Http404 for what is not there for this user.

    Opening something of another project of one's own works there, for this request.
    """
    method, route = route_of(request)
    rule = rule_of(method, route)
    if rule is None:
        raise Forbidden(f"{method} /{route} is not in the permission table (webapp/accounts/permissions.py)")
    request.permission_rule = rule  # type: ignore[attr-defined]
    kwargs = request.resolver_match.kwargs or {} if request.resolver_match else {}
    found = _counting(user, rule, kwargs)
    if found.project_id:
        request.audit_project_id = found.project_id  # type: ignore[attr-defined]
    _require(user, rule, found)
    acting = acting_of(user) if user.is_authenticated else None
    if found.is_named and acting is not None and acting.project_id and not acting.is_bound:
        act_as(user, replace(acting, project_id=found.project_id))
    return rule


def refusal_of(user: Any, method: str, path: str) -> Forbidden | None:
    """The error with which ``admit`` would refuse this request; None where it would admit it. Nothing is recorded."""
    match = resolve(path)
    rule = rule_of(method, match.route)
    if rule is None:
        return Forbidden(f"{method} /{match.route} is not in the permission table")
    try:
        _require(user, rule, _counting(user, rule, match.kwargs))
    except Forbidden as error:
        return error
    except (Http404, NotSignedInError):
        return Forbidden("this is not there for you")
    return None


@dataclass(frozen=True, kw_only=True)
class _Counting:
    """The project whose roles decide about a request."""

    project_id: str = ""
    """Empty where none does."""
    is_named: bool = False
    """By what the address names; else it is where a new row goes."""
    is_everyones: bool = False
    """The address names a row of no project."""


def _counting(user: Any, rule: Rule, kwargs: Mapping[str, Any]) -> _Counting:
    """Raises Http404 for a row that is not there, and for one of a project that they do not belong to."""
    if rule.who != "role" or not user.is_authenticated:
        return _Counting()
    named = next((name for name in kwargs if name in OWNED), None)
    if named is not None:
        return _named(user, named, str(kwargs[named]))
    if rule.anywhere:
        return _Counting()
    project = project_for_new(user)
    return _Counting() if project is None else _Counting(project_id=project.pk)


def _named(user: Any, kwarg: str, key: str) -> _Counting:
    table, path = OWNED[kwarg]
    found = apps.get_model(table).objects.filter(pk=key).values_list(path, flat=True)[:1]
    if not found:
        raise Http404
    if found[0] is None:
        return _Counting(is_everyones=True)
    if role_in(user, found[0]) is None:
        raise Http404
    return _Counting(project_id=found[0], is_named=True)


def _require(user: Any, rule: Rule, found: _Counting) -> None:
    """Raises NotSignedInError or Forbidden."""
    if rule.who == "anyone":
        return
    if not user.is_authenticated:
        raise NotSignedInError
    _check_scope(user, rule)
    if rule.who == "service_admin":
        _check_service_admin(user)
    elif rule.who == "account":
        _check_account(user)
    elif rule.who == "role" and found.is_everyones:
        # everyone's to look at, changed by who administers the service
        if rule.role != Role.VIEWER:
            _check_service_admin(user)
    elif rule.who == "role" and rule.anywhere:
        require_role_somewhere(user, rule.role)
    elif rule.who == "role" and found.is_named:
        require_role(user, found.project_id, rule.role)
    elif rule.who == "role":
        require_place_for_new(user, rule.role)


def _check_scope(user: Any, rule: Rule) -> None:
    acting = acting_of(user)
    if rule.session_only and acting.token_id:
        raise Forbidden("a token cannot do this", hint="Log in, and do it on the page API tokens.", needed="session")
    if not has_scope(acting.scope, rule.scope):
        raise Forbidden(
            f"this token's scope is {acting.scope}; this needs {rule.scope}",
            hint="Make a token with that scope on the page API tokens.",
            needed=str(rule.scope),
            scope=str(acting.scope),
        )


def _check_service_admin(user: Any) -> None:
    if not user.is_superuser or acting_of(user).is_bound:
        raise Forbidden(
            "this needs an administrator of the service", hint="Ask one of them, or use a token that is not one project's."
        )


def _check_account(user: Any) -> None:
    """Refuse viewers: the maker of a project administers it, and could run jobs that nobody allowed. Raises Forbidden."""
    if acting_of(user).is_bound:
        raise Forbidden("this token opens one project only", hint="Use a token that is not one project's.")
    if account_role(user) == "viewer":
        raise Forbidden(
            "your account is a viewer's, and only looks where a project lets it in",
            hint="Ask an administrator of the service to make you a member, on the page People.",
            needed="member",
            role="viewer",
        )


def project_of_row(key: str) -> str:
    """The project of the row with this id, whatever it is; empty where there is none."""
    kwarg = key.partition("-" if key.startswith("file-") else "_")[0] + "_id"
    if kwarg not in OWNED:
        return ""
    table, path = OWNED[kwarg]
    return str(apps.get_model(table).objects.filter(pk=key).values_list(path, flat=True).first() or "")


def choose_project(user: Any, wanted: str) -> None:
    """Work in a project, by id or by name, for this request. Raises Forbidden for one that is not theirs."""
    rows = reachable_projects(user)
    found = list(rows.filter(pk=wanted)[:1]) or list(rows.filter(name=wanted)[:2]) if wanted.isprintable() else []
    if len(found) != 1:
        names = ", ".join(sorted(set(rows.values_list("name", flat=True)[:20])))
        raise Forbidden(f"project {wanted[:80]!r} is not one of yours: {names}", hint="Name it by its id, or leave it out.")
    act_as(user, replace(acting_of(user), project_id=found[0].pk))
