"""Projects: where rows go, who sees them, who decides."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.test import Client

from optimizer.base.errors import InvalidInput
from tests.webapp.conftest import make_person, make_spec, make_text, make_tiny_model
from webapp.accounts.access import Acting, act_as, act_in, acting_of, project_of_job
from webapp.accounts.errors import Forbidden
from webapp.accounts.models import Project, Role, Scope
from webapp.accounts.projects import (
    account_role,
    create_account,
    create_project,
    remove_member,
    set_account_role,
    set_active,
    set_member,
)
from webapp.accounts.tokens import create_token, find_token_user, revoke_token
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import models_visible_to
from webapp.jobs.models import Job
from webapp.jobs.queries import jobs_visible_to
from webapp.live.record import may_still_watch


@pytest.fixture
def project(ada: User, eve: User) -> Project:
    """Ada administers it, eve belongs to it."""
    row = create_project(ada, name="summaries")
    set_member(row, username="eve", role="member")
    return row


def session(person: User) -> Client:
    client = Client()
    client.force_login(person)
    return client


def test_everyone_has_a_project_of_their_own_which_they_administer(ada: User) -> None:
    assert ada.home_project.name == "ada"
    assert list(ada.home_project.memberships.values_list("user__username", "role")) == [("ada", "admin")]


def test_what_somebody_makes_goes_to_their_own_project_or_where_they_work(ada: User, project: Project) -> None:
    assert make_tiny_model(ada).project == ada.home_project
    assert make_tiny_model(act_in(ada, project)).project == project


def test_what_ships_with_the_program_is_nobodys_and_everyones(model: Model, ada: User, eve: User, admin: User) -> None:
    assert model.project is None
    for person in (ada, eve, admin, act_in(User.objects.get(pk=ada.pk), ada.home_project)):
        assert list(models_visible_to(person)) == [model]


def test_a_projects_people_see_its_rows_and_nobody_else_does(
    ada: User, eve: User, project: Project, make_job: Callable[..., Job]
) -> None:
    own, shared = make_job(), make_job(project=project)
    assert set(jobs_visible_to(ada)) == {own, shared}
    assert set(jobs_visible_to(eve)) == {shared}
    assert set(jobs_visible_to(act_in(ada, project))) == {shared}


def test_a_retry_stays_in_the_project_of_its_job(eve: User, project: Project, make_job: Callable[..., Job]) -> None:
    from webapp.jobs.actions import cancel_job, retry_job

    job = make_job(project=project)
    cancel_job(job, mode="save", actor="user:ada")
    assert retry_job(job, actor="user:eve").project == project


def test_a_retry_takes_the_turns_and_limits_of_who_asks_for_it(
    eve: User, project: Project, make_job: Callable[..., Job]
) -> None:
    """They were its first owner's, so that a colleague's loop of retries put off and shut out somebody who had done nothing."""
    from webapp.jobs.actions import cancel_job

    job = make_job(project=project)
    cancel_job(job, mode="save", actor="user:ada")
    answer = session(eve).post(f"/api/v1/jobs/{job.pk}/retry")
    again = Job.objects.get(pk=answer.json()["id"])
    assert (again.owner, again.project) == (eve, project)


def test_a_job_belongs_to_the_project_of_what_it_is_made_of(ada: User, project: Project, dataset: Dataset) -> None:
    shared = make_tiny_model(act_in(ada, project))
    assert project_of_job(User.objects.get(pk=ada.pk), (shared, dataset)) == project


def test_a_job_is_not_made_of_two_projects_rows(ada: User, project: Project) -> None:
    shared, own = make_tiny_model(act_in(ada, project)), make_text(User.objects.get(pk=ada.pk))
    with pytest.raises(InvalidInput, match="tiny belongs to project summaries, text to project ada"):
        project_of_job(ada, (shared, own))


def test_a_viewer_may_not_run_jobs_on_what_they_see(ada: User, eve: User, project: Project) -> None:
    set_member(project, username="eve", role="viewer")
    with pytest.raises(Forbidden, match="this needs the role member in project summaries; you are a viewer"):
        project_of_job(eve, (make_tiny_model(act_in(ada, project)),))


def test_the_header_switches_what_the_pages_show(
    ada: User, project: Project, make_job: Callable[..., Job], model: Model, dataset: Dataset
) -> None:
    make_job(), make_job(project=project, spec=make_spec(model, dataset, name="shared one"))
    client = session(ada)
    assert b"test job" in client.get("/jobs/").content
    assert client.post("/projects/work-in/", {"project": project.pk, "next": "/jobs/"})["Location"] == "/jobs/"
    page = client.get("/jobs/").content
    assert b"shared one" in page
    assert b"test job" not in page
    client.post("/projects/work-in/", {"project": ""})
    assert b"test job" in client.get("/jobs/").content


def test_opening_a_job_of_another_of_ones_projects_works_there(
    ada: User, project: Project, make_job: Callable[..., Job]
) -> None:
    own = make_job()
    client = session(ada)
    client.post("/projects/work-in/", {"project": project.pk})
    assert client.get(f"/jobs/{own.pk}/").status_code == 200
    assert b"test job" not in client.get("/jobs/").content


def test_a_switch_leads_nowhere_but_here(ada: User, project: Project) -> None:
    answer = session(ada).post("/projects/work-in/", {"project": project.pk, "next": "//elsewhere.example/"})
    assert answer["Location"] == "/jobs/"


def test_a_project_that_somebody_left_is_no_longer_worked_in(
    eve: User, project: Project, make_job: Callable[..., Job]
) -> None:
    client = session(eve)
    client.post("/projects/work-in/", {"project": project.pk})
    remove_member(project, username="eve")
    assert client.get("/jobs/").status_code == 200
    assert "project" not in client.session


def test_the_api_works_in_the_project_that_the_header_names(
    ada: User, project: Project, make_job: Callable[..., Job]
) -> None:
    make_job(), make_job(project=project)
    _, text = create_token(user=ada, name="t")
    client = Client(headers={"Authorization": f"Bearer {text}"})
    assert len(client.get("/api/v1/jobs").json()["results"]) == 2
    for wanted in (project.pk, "summaries"):
        [job] = client.get("/api/v1/jobs", headers={"Headroom-Project": wanted}).json()["results"]
        assert job["project"] == project.pk
    answer = client.get("/api/v1/jobs", headers={"Headroom-Project": "other"})
    assert (answer.status_code, answer.json()["detail"]) == (403, "project 'other' is not one of yours: ada, summaries")


def test_a_token_of_one_project_sees_it_alone(ada: User, project: Project, make_job: Callable[..., Job]) -> None:
    make_job(), make_job(project=project)
    _, text = create_token(user=ada, name="t", scope=Scope.READ, project=project)
    assert acting_of(find_token_user(text)) == Acting(
        scope=Scope.READ, token_id=text.split("_")[1], project_id=project.pk, is_bound=True
    )
    client = Client(headers={"Authorization": f"Bearer {text}"})
    assert [job["project"] for job in client.get("/api/v1/jobs").json()["results"]] == [project.pk]
    assert [row["name"] for row in client.get("/api/v1/projects").json()["results"]] == ["summaries"]


def test_the_last_administrator_stays(ada: User, project: Project) -> None:
    with pytest.raises(InvalidInput, match="ada is the only administrator of summaries"):
        set_member(project, username="ada", role="viewer")
    with pytest.raises(InvalidInput, match="ada is the only administrator of summaries"):
        remove_member(project, username="ada")
    set_member(project, username="eve", role="admin")
    assert remove_member(project, username="ada")


def test_nobody_is_put_out_of_their_own_project(ada: User) -> None:
    with pytest.raises(InvalidInput, match="ada is ada's own project"):
        remove_member(ada.home_project, username="ada")


def test_a_viewers_account_runs_nothing_until_somebody_lets_it(db: None) -> None:
    user, password = create_account(username="vera", role="viewer")
    assert user.check_password(password)
    assert account_role(user) == "viewer"
    with pytest.raises(Forbidden, match="you are a viewer"):
        project_of_job(user, ())
    set_account_role(user, "member")
    assert project_of_job(user, ()) == user.home_project


def test_a_viewers_account_makes_no_project_to_run_jobs_in(db: None) -> None:
    user, _ = create_account(username="vera", role="viewer")
    client = session(user)
    page = client.get("/projects/").content.decode()
    assert "You cannot make a project. Your account is a viewer&#x27;s" in page
    assert "Make a project</button>" not in page
    assert client.post("/projects/", {"name": "mine"}).status_code == 403
    set_account_role(user, "member")
    assert client.post("/projects/", {"name": "mine"}).status_code == 302


def test_the_service_keeps_an_administrator(admin: User) -> None:
    for change in (lambda: set_account_role(admin, "member"), lambda: set_active(admin, is_active=False)):
        with pytest.raises(InvalidInput, match="root is the only administrator of the service"):
            change()


@pytest.mark.parametrize("name", ["", "a b", "ada", "x" * 61])
def test_an_account_needs_a_name_that_is_free(ada: User, name: str) -> None:
    with pytest.raises(InvalidInput, match="username"):
        create_account(username=name, role="member")


def test_an_account_made_on_the_page_can_log_in_with_the_password_shown_once(admin: User) -> None:
    client = session(admin)
    answer = client.post("/people/", {"username": "mia", "role": "member"})
    password = answer.content.decode().split('id="new-password" class="mono">')[1].split("<")[0]
    assert answer["Cache-Control"] == "no-store"
    assert Client().login(username="mia", password=password)


def test_the_right_to_overtake_needs_a_token_that_administers(admin: User, make_job: Callable[..., Job]) -> None:
    job = make_job()
    for scope, status in ((Scope.WRITE, 422), (Scope.ADMIN, 200)):
        _, text = create_token(user=admin, name="t", scope=scope)
        client = Client(headers={"Authorization": f"Bearer {text}"})
        answer = client.post(f"/api/v1/jobs/{job.pk}/priority", {"priority": 5}, content_type="application/json")
        assert answer.status_code == status


def test_a_role_of_another_kind_is_not_known(ada: User, project: Project) -> None:
    with pytest.raises(InvalidInput, match="role is 'owner'; allowed: viewer, member, admin"):
        set_member(project, username="ada", role="owner")
    with pytest.raises(InvalidInput, match="nobody here is called 'zoe'"):
        set_member(project, username="zoe", role=Role.VIEWER)


def test_what_was_there_before_projects_goes_to_its_owners_own(transactional_db: None) -> None:
    """The migrations themselves, on rows of a version without projects."""
    before = [("accounts", "0001_initial"), ("catalog", "0002_prompts"), ("jobs", "0003_generate"), ("batches", "0001_initial")]
    executor = MigrationExecutor(connection)
    latest = executor.loader.graph.leaf_nodes()
    old = executor.migrate([*before, ("webhooks", None)]).apps
    try:
        user = old.get_model("auth", "User").objects.create(username="ada")
        values = {"model_type": "gpt2", "config": {}, "fingerprint": "f", "folder": "models/x"}
        old.get_model("catalog", "Model").objects.create(id="model_1", owner=user, name="hers", **values)
        old.get_model("catalog", "Model").objects.create(id="model_2", owner=None, name="ships", preset="p", **values)
    finally:
        executor = MigrationExecutor(connection)
        executor.migrate(latest)
    person = User.objects.get(username="ada")
    assert person.home_project.memberships.get().role == "admin"
    rows = models_visible_to(person).order_by("pk")
    assert [(row.name, row.project and row.project.name) for row in rows] == [("hers", "ada"), ("ships", None)]


def test_acting_is_of_one_object_of_a_user(ada: User, project: Project) -> None:
    act_as(ada, Acting(project_id=project.pk))
    assert acting_of(User.objects.get(pk=ada.pk)) == Acting()


def test_people_of_a_page_are_named_with_their_roles(ada: User, project: Project) -> None:
    make_person("zoe")
    client = session(ada)
    client.post(f"/projects/{project.pk}/members/", {"username": "zoe", "role": "viewer"})
    page = client.get(f"/projects/{project.pk}/").content.decode()
    assert page.index(">ada<") < page.index(">eve<") < page.index(">zoe<")
    client.post(f"/projects/{project.pk}/members/remove/", {"username": "zoe"})
    assert ">zoe<" not in client.get(f"/projects/{project.pk}/").content.decode()


def test_a_password_is_changed_by_who_knows_it_and_other_sessions_end(ada: User) -> None:
    here, elsewhere = session(ada), session(ada)
    new = {"old_password": "correct horse battery", "new_password1": "a quite new one 7", "new_password2": "a quite new one 7"}
    assert here.post("/password/", {**new, "old_password": "wrong"}).status_code == 200
    assert here.post("/password/", new)["Location"] == "/jobs/"
    assert here.get("/jobs/").status_code == 200
    assert elsewhere.get("/jobs/").status_code == 302
    assert Client().login(username="ada", password="a quite new one 7")


def test_a_stream_goes_on_only_while_its_token_and_the_role_last(
    ada: User, eve: User, project: Project, make_job: Callable[..., Job]
) -> None:
    job = make_job(project=project)
    row, text = create_token(user=ada, name="t")
    watcher = find_token_user(text)
    assert may_still_watch(watcher, job.pk)
    revoke_token(row)
    assert not may_still_watch(watcher, job.pk)
    assert may_still_watch(eve, job.pk)
    remove_member(project, username="eve")
    assert not may_still_watch(eve, job.pk)


def test_a_key_makes_one_project_and_is_not_replayed_in_another(ada: User, project: Project) -> None:
    _, text = create_token(user=ada, name="t", scope=Scope.ADMIN)
    client = Client(headers={"Authorization": f"Bearer {text}", "Idempotency-Key": "k"})
    answers = [client.post("/api/v1/projects", {"name": "new"}, content_type="application/json") for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert ada.memberships.count() == 3  # her own, the shared one, the new one
    elsewhere = client.post(
        "/api/v1/projects", {"name": "new"}, content_type="application/json", headers={"Headroom-Project": project.pk}
    )
    assert (elsewhere.status_code, elsewhere.json()["code"]) == (422, "idempotency_key_reused")
