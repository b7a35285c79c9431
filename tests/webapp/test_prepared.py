"""Prepared queries find what the ordinary ones find, for whoever asks, and refuse to be written wrongly."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from webapp.accounts.access import Acting, act_as, project_for_new
from webapp.accounts.models import Project
from webapp.catalog.models import Model
from webapp.catalog.queries import find_dataset, find_model, models_visible_to
from webapp.jobs.models import Job
from webapp.prepared import Prepared, number_mark, text_mark

pytestmark = pytest.mark.django_db


def sights(user: User, project_id: str) -> list[User]:
    """The same person in every way of coming: in all of their projects, in one, in one that is not theirs."""
    found = []
    for acting in (Acting(), Acting(project_id=project_id), Acting(project_id="project_none")):
        person = User.objects.get(pk=user.pk)
        act_as(person, acting)
        found.append(person)
    return found


def test_a_model_is_found_by_whom_it_is_visible_to_and_by_nobody_else(
    ada: User, eve: User, admin: User, model: Model, make_job: Callable[..., Job]
) -> None:
    project = project_for_new(ada)
    Model.objects.filter(pk=model.pk).update(owner=ada, project=project)
    seen = []
    for person in (*sights(ada, project.pk), *sights(eve, project.pk), *sights(admin, project.pk)):
        ordinary = models_visible_to(person).filter(pk=model.pk).first()
        assert find_model(person, model.pk) == ordinary
        seen.append(ordinary is not None)
    assert seen == [True, True, False, False, False, False, True, True, False]
    Model.objects.filter(pk=model.pk).update(deleted_at="2026-01-01T00:00:00Z")
    assert find_model(ada, model.pk) is None


def test_a_row_that_is_not_there_is_none(ada: User) -> None:
    assert find_model(ada, "model_none") is None
    assert find_dataset(ada, "dataset_none") is None


def test_json_and_times_come_as_they_do_by_the_ordinary_query(ada: User, model: Model) -> None:
    found = find_model(ada, model.pk)
    for field in Model._meta.concrete_fields:
        assert getattr(found, field.attname) == getattr(model, field.attname)


def test_its_sql_is_written_once_and_asked_with_each_value(ada: User, eve: User) -> None:
    homes: Prepared[Project] = Prepared(lambda: Project.objects.filter(home_of=number_mark("user_id")), "user_id")
    with CaptureQueriesContext(connection) as asked:
        found = [homes.first(user_id=person.pk) for person in (ada, eve)]
    assert [each.home_of_id for each in found if each is not None] == [ada.pk, eve.pk]
    assert len(asked) == 2


def test_a_query_without_a_place_for_a_value_is_refused() -> None:
    rows: Prepared[Project] = Prepared(lambda: Project.objects.filter(pk=text_mark("project_id")), "project_id", "name")
    with pytest.raises(TypeError, match="no place for \\['name'\\]"):
        rows.rows(project_id="project_one", name="one")


def test_a_query_that_selects_related_rows_is_refused() -> None:
    rows: Prepared[Job] = Prepared(
        lambda: Job.objects.select_related("machine").filter(pk=text_mark("job_id")), "job_id"
    )
    with pytest.raises(TypeError, match="selects related rows"):
        rows.rows(job_id="job_one")
