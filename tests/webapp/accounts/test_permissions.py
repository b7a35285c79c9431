"""Every address of the service as a stranger, as someone else, in every role, with tokens of every kind.

An address that is not in the permission table fails here, and opens for nobody.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.utils import timezone

from tests.webapp.accounts.table import KNOWN_KWARGS, Address, addresses, make_owned, operations, routes
from tests.webapp.conftest import make_person
from webapp.accounts.models import ApiToken, Membership, Project, Role, Scope
from webapp.accounts.permissions import PLAIN, TABLE, Rule, methods_of
from webapp.accounts.projects import create_project, set_account_role, set_member
from webapp.accounts.tokens import create_token

ADDRESSES = addresses()
REFUSALS = (401, 403, 404)
NOTHING_HERE = ("api/v1/jobs/<job_id>/events", "plans/cards/", "plans/knobs/", "plans/step/")
"""404 for whom they let in: the stream's own connection sees nothing that a test has not committed; the others are parts of a
page that have their question in the address. Whom they keep out is asked of them too.
"""


@pytest.fixture
def project(ada: User) -> Project:
    return create_project(ada, name="summaries")


@pytest.fixture
def ids(ada: User, project: Project, headroom_home: Path) -> dict[str, str]:
    return make_owned(ada, project, headroom_home)


@pytest.fixture
def join(project: Project) -> Callable[..., User]:
    def make(name: str, role: Role) -> User:
        person = make_person(name)
        set_member(project, username=name, role=role)
        return person

    return make


def session(person: User) -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(person)
    return client


def bearer(person: User, **limits: Any) -> Client:
    _, text = create_token(user=person, name="test", **limits)
    return Client(headers={"Authorization": f"Bearer {text}"}, raise_request_exception=False)


def clients(person: User) -> Callable[..., Any]:
    """Clients by what an address takes: a token of every right, or a session."""
    token, page = bearer(person, scope=Scope.ADMIN), session(person)
    return lambda address: token if address.route.startswith("v1/") else page


def statuses(
    ids: dict[str, str], client_for: Callable[..., Any], wanted: Callable[..., Any] = lambda address: True
) -> dict[Address, int]:
    """Each address that is wanted, and its status; nothing that was asked stays done."""
    found = {}
    for address in filter(wanted, ADDRESSES):
        with transaction.atomic():
            response = address.ask(client_for(address), ids)
            transaction.set_rollback(True)
        is_login = response.headers.get("Location", "").startswith("/login/?next=")
        found[address] = 401 if is_login else response.status_code
    return found


def differing(found: dict[Address, int], expected: Callable[..., Any]) -> dict[str, Any]:
    """List answers that differ; expected: a status, or None for any answer but a refusal."""
    return {
        str(address): status
        for address, status in found.items()
        if (status in REFUSALS if expected(address) is None else status != expected(address))
        and not (expected(address) is None and address.route in NOTHING_HERE)
    }


def is_closed(address: Address) -> bool:
    return address.rule.who != "anyone"


def as_role(role: Role) -> Callable[..., int | None]:
    """Answers to somebody with a role in ada's project, whose own project they may only look at."""

    def expected(address: Address) -> int | None:
        rule: Rule = address.rule
        if rule.who == "service_admin" or (rule.who == "account" and role == Role.VIEWER):
            return 403
        if address.names_personal:
            return 404
        order = list(Role)
        return 403 if rule.who == "role" and order.index(role) < order.index(rule.role) else None

    return expected


def test_every_address_is_in_the_table() -> None:
    missing = [route for route in routes() if not methods_of(route)] + sorted(operations() - set(TABLE))
    assert not missing, "say in webapp/accounts/permissions.py what these need"


def test_the_table_names_no_address_that_is_not_there() -> None:
    known = set(routes())
    assert [key for key in TABLE if key.partition(" ")[2] not in known] == []
    api = {key for key in TABLE if key.partition(" ")[2].startswith(("api/v1/", "v1/")) and TABLE[key].who != "anyone"}
    assert sorted(api - operations()) == []


def test_every_part_of_an_address_is_known_to_name_a_projects_row_a_persons_or_none() -> None:
    assert {kwarg for address in ADDRESSES for kwarg in address.kwargs} <= KNOWN_KWARGS


def test_what_changes_something_needs_more_than_looking_and_is_audited() -> None:
    asks = ("plans", "estimates", "price/", "cards", "work-in/", "theme/", "login/", "logout/", "files/<number>")
    changing = [one for one in ADDRESSES if one.method != "GET" and not any(word in one.route for word in asks)]
    # a question to a model is no act of its own: the job that it may start is recorded with who started it
    questions = [one for one in changing if one.route.endswith("completions")]
    assert len(questions) == 3
    assert [str(one) for one in changing if one.rule.scope == Scope.READ] == []
    assert [str(one) for one in changing if not one.rule.action and one not in questions] == []


def test_a_stranger_gets_in_nowhere(ids: dict[str, str]) -> None:
    nobody = Client(raise_request_exception=False)
    assert differing(statuses(ids, lambda _: nobody, is_closed), lambda _: 401) == {}


def test_an_expired_token_is_nobody_even_beside_a_good_session(ids: dict[str, str], ada: User) -> None:
    client = bearer(ada)
    ApiToken.objects.update(expires_at=timezone.now())
    client.force_login(ada)
    found = statuses(ids, lambda _: client, lambda address: address.is_api and is_closed(address))
    assert differing(found, lambda _: 401) == {}


def test_for_someone_else_what_a_project_owns_is_not_there(ids: dict[str, str], eve: User) -> None:
    def expected(address: Address) -> int | None:
        if address.rule.who == "service_admin":
            return 403
        return 404 if address.names_owned or address.names_personal else None

    assert differing(statuses(ids, clients(eve), is_closed), expected) == {}


@pytest.mark.parametrize("role", [Role.VIEWER, Role.MEMBER, Role.ADMIN])
def test_a_role_opens_what_the_table_says(ids: dict[str, str], join: Callable[..., User], role: Role) -> None:
    person = join("mia", role)
    if role == Role.VIEWER:
        set_account_role(person, "viewer")
    found = statuses(ids, clients(person), is_closed)
    # their own project is theirs to run jobs in, whatever they are elsewhere
    assert differing(found, as_role(role)) == {}


def test_an_administrator_of_the_service_is_refused_nothing(ids: dict[str, str], admin: User) -> None:
    def expected(address: Address) -> int | None:
        return 404 if address.names_personal else None

    assert differing(statuses(ids, clients(admin), is_closed), expected) == {}


@pytest.mark.parametrize("scope", [Scope.READ, Scope.WRITE])
def test_a_token_opens_no_more_than_its_scope(ids: dict[str, str], admin: User, scope: Scope) -> None:
    client = bearer(admin, scope=scope)
    order = list(Scope)

    def expected(address: Address) -> int | None:
        too_small = order.index(scope) < order.index(address.rule.scope) or address.rule.session_only
        return 403 if too_small else 404 if address.names_personal else None

    found = statuses(ids, lambda _: client, lambda address: address.is_api and is_closed(address))
    assert differing(found, expected) == {}


def test_for_a_token_of_another_project_nothing_else_is_there(ids: dict[str, str], ada: User) -> None:
    client = bearer(ada, scope=Scope.ADMIN, project=create_project(ada, name="other"))
    found = statuses(ids, lambda _: client, lambda address: address.is_api and address.names_owned)
    assert differing(found, lambda _: 404) == {}


def test_a_token_of_one_project_makes_no_other(ada: User, project: Project) -> None:
    client = bearer(ada, scope=Scope.ADMIN, project=project)
    answer = client.post("/api/v1/projects", {"name": "x"}, content_type="application/json")
    assert (answer.status_code, answer.json()["detail"]) == (403, "this token opens one project only")


def actors(ada: User, admin: User, project: Project, join: Callable[..., User]) -> dict[str, Client]:
    """Who may ask, by name: everybody whom the table tells apart."""
    viewer, member, leads = join("vera", Role.VIEWER), join("mia", Role.MEMBER), join("lea", Role.ADMIN)
    stranger, gone = make_person("sven"), join("gus", Role.ADMIN)
    was_active = session(gone), bearer(gone, scope=Scope.ADMIN)
    gone.is_active = False
    gone.save(update_fields=["is_active"])
    elsewhere = create_project(ada, name="elsewhere")
    return {
        "nobody": Client(raise_request_exception=False),
        "a made-up token": Client(headers={"Authorization": "Bearer hr_" + "a" * 40}, raise_request_exception=False),
        "a deactivated account's session": was_active[0],
        "a deactivated account's token": was_active[1],
        "a stranger": session(stranger),
        "a stranger's token": bearer(stranger, scope=Scope.ADMIN),
        "a viewer": session(viewer),
        "a member": session(member),
        "a member's token to read": bearer(member, scope=Scope.READ),
        "a member's token to write": bearer(member, scope=Scope.WRITE),
        "a project's administrator": session(leads),
        "a token of another project": bearer(ada, scope=Scope.ADMIN, project=elsewhere),
        "an administrator": session(admin),
    }


def _always(client: Client, _: Address) -> Client:
    return client


NOT_SIGNED_IN = ("nobody", "a made-up token", "a deactivated account's session", "a deactivated account's token")
OUTSIDE = ("a stranger", "a stranger's token", "a token of another project")


def may_not(actor: str, address: Address) -> bool:
    """Report whether an actor must be refused, said once more in few words and not read from the code that refuses."""
    rule: Rule = address.rule
    if actor in NOT_SIGNED_IN:
        return True
    if actor in OUTSIDE and address.names_owned:
        return True
    if actor != "an administrator" and rule.who == "service_admin":
        return True
    is_token = "token" in actor
    if is_token and rule.session_only:
        return True
    reads_alone = actor in ("a viewer", "a member's token to read")
    if reads_alone and address.names_owned and rule.who == "role" and (rule.role != Role.VIEWER or rule.scope != Scope.READ):
        return True
    leads = actor in ("a project's administrator", "an administrator")
    return rule.who == "role" and rule.role == Role.ADMIN and address.names_owned and not leads


def test_nobody_gets_in_who_may_not_at_any_address(
    ids: dict[str, str], ada: User, admin: User, project: Project, join: Callable[..., User]
) -> None:
    wrong, num_asked = {}, 0
    for actor, client in actors(ada, admin, project, join).items():
        answers = statuses(ids, partial(_always, client), is_closed)
        num_asked += len(answers)
        for address, status in answers.items():
            if status >= 500 or (may_not(actor, address) and status not in REFUSALS):
                wrong[f"{actor}: {address}"] = status
    assert wrong == {}
    assert num_asked == 13 * len([address for address in ADDRESSES if is_closed(address)])


def test_an_id_of_another_project_and_one_of_nothing_are_answered_alike(
    ids: dict[str, str], eve: User, headroom_home: Path
) -> None:
    """Else a stranger could find out which ids there are."""
    client, differing_answers = bearer(eve, scope=Scope.ADMIN), {}
    nothing = {name: value if name in PLAIN else value[:-4] + "zzzz" for name, value in ids.items()}
    for address in ADDRESSES:
        if not (address.is_api and address.names_owned and is_closed(address)) or address.rule.session_only:
            continue
        with transaction.atomic():
            theirs, none = address.ask(client, ids), address.ask(client, nothing)
            transaction.set_rollback(True)
        if (theirs.status_code, theirs.content) != (none.status_code, none.content):
            differing_answers[str(address)] = (theirs.status_code, none.status_code)
    assert differing_answers == {}


def test_a_method_that_the_table_does_not_know_is_not_allowed(ids: dict[str, str], ada: User) -> None:
    answer = session(ada).put("/tokens/")
    assert (answer.status_code, answer["Allow"]) == (405, "GET, POST")


def test_a_refusal_says_what_is_missing_and_who_can_allow_it(ids: dict[str, str], join: Callable[..., User]) -> None:
    client = session(join("vera", Role.VIEWER))
    answer = client.post(f"/api/v1/jobs/{ids['job_id']}/cancel", content_type="application/json")
    assert answer.json()["code"] == "forbidden"
    assert answer.json()["detail"] == "this needs the role member in project summaries; you are a viewer"
    assert answer.json()["hint"] == "Ask ada."
    page = client.post(f"/jobs/{ids['job_id']}/cancel/").content.decode()
    assert "This needs the role member in project summaries; you are a viewer." in page
    assert "Ask ada." in page


def test_a_session_needs_its_csrf_token_to_change_anything_and_none_to_read(ids: dict[str, str], ada: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(ada)
    assert client.get(f"/api/v1/jobs/{ids['job_id']}").status_code == 200
    address, json_type = f"/api/v1/jobs/{ids['job_id']}/cancel", "application/json"
    response = client.post(address, content_type=json_type)
    assert (response.status_code, response.json()["code"]) == (403, "csrf_failed")
    client.cookies["csrftoken"] = "a" * 32
    response = client.post(address, content_type=json_type, headers={"X-CSRFToken": "a" * 32})
    assert response.status_code == 202


def test_who_leaves_a_project_sees_it_no_longer(
    ids: dict[str, str], join: Callable[..., User], project: Project
) -> None:
    client = session(join("mia", Role.MEMBER))
    assert client.get(f"/jobs/{ids['job_id']}/").status_code == 200
    Membership.objects.filter(project=project, user__username="mia").delete()
    assert client.get(f"/jobs/{ids['job_id']}/").status_code == 404
