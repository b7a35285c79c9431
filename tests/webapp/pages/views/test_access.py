"""Pages show only what a person may see: a page asks for a log-in, a stranger's row is not there."""

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from tests.webapp.pages import rows
from webapp.accounts.access import project_for_new
from webapp.accounts.models import ApiToken
from webapp.accounts.projects import create_project, set_account_role, set_member
from webapp.accounts.tokens import create_token
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db
PAGES = ("jobs", "job_new", "models", "datasets", "machines", "tokens")
JOB_READS = (
    ("job", ()),
    ("job_head", ()),
    ("job_ranks", ()),
    ("job_tab", ("plan",)),
    ("job_table", ("memory",)),
    ("job_csv", ("memory",)),
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_sends_a_stranger_to_the_login(client: Client, name: str) -> None:
    answer = client.get(reverse(name))
    assert answer.status_code == 302
    assert answer["Location"] == f"/login/?next={reverse(name)}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_for_a_person(browser: Client, name: str) -> None:
    assert browser.get(reverse(name)).status_code == 200


def test_the_service_opens_on_the_demo_until_there_is_a_job_of_ones_own(browser: Client, ada: User) -> None:
    assert "Headroom works out" in browser.get("/").content.decode()
    rows.make_job(ada, name="chat-demo")
    assert browser.get("/").status_code == 200
    rows.make_job(ada, name="mine")
    assert browser.get("/")["Location"] == "/jobs/"


@pytest.mark.parametrize(("name", "rest"), JOB_READS)
def test_anothers_job_is_not_there(browser: Client, eve: User, name: str, rest: tuple[str, ...]) -> None:
    job = rows.make_job(eve)
    answer = browser.get(reverse(name, args=[job.pk, *rest]), headers={"HX-Request": "true"})
    assert answer.status_code == 404


@pytest.mark.parametrize("name", ["job_cancel", "job_pause", "job_resume", "job_retry"])
def test_anothers_job_is_not_moved(browser: Client, eve: User, name: str) -> None:
    job = rows.make_job(eve)
    assert browser.post(reverse(name, args=[job.pk])).status_code == 404
    job.refresh_from_db()
    assert (job.state, job.event_seq) == ("queued", 1)


@pytest.mark.parametrize("name", ["job_cancel", "job_pause", "job_resume", "job_retry"])
def test_a_job_is_not_moved_by_reading(browser: Client, ada: User, name: str) -> None:
    job = rows.make_job(ada)
    assert browser.get(reverse(name, args=[job.pk])).status_code == 405


def test_anothers_job_is_not_cloned(browser: Client, eve: User) -> None:
    job = rows.make_job(eve, name="secret plans")
    answer = browser.get(f"/jobs/new/?from={job.pk}")
    assert b"secret plans" not in answer.content
    assert b"not there" in answer.content


def test_anothers_token_is_not_revoked(browser: Client, eve: User) -> None:
    token, _ = create_token(user=eve, name="hers")
    assert browser.post(reverse("token_revoke", args=[token.pk])).status_code == 404
    assert ApiToken.objects.get(pk=token.pk).revoked_at is None


def test_a_write_needs_the_token_against_forgery(ada: User, settings: Settings) -> None:
    from django.test import Client

    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ada)
    job = rows.make_job(ada)
    assert strict.post(reverse("job_cancel", args=[job.pk])).status_code == 403
    assert Job.objects.get(pk=job.pk).state == "queued"


@pytest.mark.parametrize("name", PAGES)
def test_no_page_carries_inline_scripts_styles_or_other_hosts(browser: Client, name: str) -> None:
    text = browser.get(reverse(name)).content.decode()
    assert " style=" not in text
    assert "<style" not in text
    assert " onclick=" not in text
    assert "https://" not in text
    for script in text.split("<script")[1:]:
        opening, _, rest = script.partition(">")
        assert "src=" in opening or 'type="application/json"' in opening
        assert "src=" not in opening or rest.startswith("</script>")


@pytest.fixture
def watcher(client: Client, ada: User, eve: User) -> Client:
    """Somebody whose account only looks, signed in; ada's project lets them in."""
    set_account_role(eve, role="viewer")
    set_member(project_for_new(ada), username="eve", role="viewer")
    client.force_login(eve)
    return client


@pytest.mark.parametrize("name", ["models", "datasets"])
def test_who_may_only_look_reads_why_instead_of_a_form_to_upload(watcher: Client, name: str) -> None:
    text = watcher.get(reverse(name)).content.decode()
    assert "Nothing can be uploaded here." in text
    assert "multipart/form-data" not in text


def test_people_who_may_only_look_see_before_the_form_that_they_cannot_start(watcher: Client) -> None:
    text = watcher.get(reverse("job_new")).content.decode()
    assert "This needs the role member in a project. Ask an administrator of one to give it to you." in text
    assert 'name="submit" value="yes" disabled aria-describedby="start-refused"><span id="start-label">Start the job' in text


def test_who_may_only_look_reads_who_can_help_in_the_place_of_buttons(watcher: Client, ada: User) -> None:
    job = rows.make_job(ada)
    model, dataset = rows.make_model(ada, name="own"), rows.make_dataset(ada, name="own")
    assert {job.project_id, model.project_id, dataset.project_id} == {project_for_new(ada).pk}
    for path in (reverse("jobs"), reverse("model", args=[model.pk]), reverse("dataset", args=[dataset.pk])):
        text = watcher.get(path).content.decode()
        assert "you are a viewer. Ask ada." in text
        assert not re.search("<button[^>]*>(Delete|Later|Pause)</button>", text)


def test_who_cannot_be_removed_has_no_button_for_it(browser: Client, ada: User, eve: User) -> None:
    project = create_project(ada, name="alone")
    text = browser.get(reverse("project", args=[project.pk])).content.decode()
    assert 'aria-label="Remove ada"' not in text
    assert "Nobody else belongs to it yet" in text
    set_member(project, username="eve", role="admin")
    text = browser.get(reverse("project", args=[project.pk])).content.decode()
    assert 'aria-label="Remove ada"' in text
    assert 'aria-label="Remove eve"' in text
    assert "Nobody else belongs to it yet" not in text


def test_a_generate_jobs_page_opens_where_its_prompts_cannot_be_read_any_more(browser: Client, ada: User) -> None:
    job = rows.make_generate_job(ada)  # whose files were never there
    answer = browser.get(reverse("job", args=[job.pk]), {"tab": "plan"})
    assert answer.status_code == 200
    assert answer.context["explanation"] == []
