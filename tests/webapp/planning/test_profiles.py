"""Asking for profiles: once, and again only when that can help."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.profile.profile import PROFILE_VERSION
from optimizer.workload import Adapter
from tests.webapp.conftest import make_tiny_model
from webapp.catalog.actions import keep_profile, keep_profile_error
from webapp.catalog.models import Model, Profile
from webapp.catalog.queries import profile_state
from webapp.jobs.models import Job
from webapp.planning.search.profile_requests import request_profile
from webapp.planning.search.profiles import ProfileNeed

pytestmark = pytest.mark.django_db


def num_profile_jobs() -> int:
    return Job.objects.filter(kind="profile").count()


def make_older(model: Model) -> None:
    Profile.objects.filter(fingerprint=model.fingerprint).update(updated_at=timezone.now() - timedelta(minutes=5))


def test_one_architecture_is_profiled_once(model: Model, ada: User) -> None:
    twin = make_tiny_model(ada)
    assert profile_state(model) == "pending"
    request_profile(ProfileNeed(model=model))
    request_profile(ProfileNeed(model=twin))
    assert num_profile_jobs() == 1
    keep_profile(model.fingerprint, {"version": PROFILE_VERSION})
    assert (profile_state(model), profile_state(twin)) == ("ready", "ready")
    request_profile(ProfileNeed(model=model))
    assert num_profile_jobs() == 1


def test_a_model_profiled_with_adapters_alone_is_profiled(model: Model) -> None:
    need = ProfileNeed(model=model, adapter=Adapter(rank=2))
    request_profile(need)
    assert profile_state(model) == "pending"
    keep_profile(need.fingerprint, {"version": PROFILE_VERSION})
    assert profile_state(model) == "ready"
    Profile.objects.update(model_fingerprint="")  # as in a database that is older than the column
    assert profile_state(model) == "pending"
    request_profile(need)
    assert (profile_state(model), num_profile_jobs()) == ("ready", 1)


def test_a_profile_of_an_older_version_is_made_again(model: Model) -> None:
    request_profile(ProfileNeed(model=model))
    keep_profile(model.fingerprint, {"version": PROFILE_VERSION - 1})
    profile = request_profile(ProfileNeed(model=model))
    assert (num_profile_jobs(), profile.document_sha256, profile_state(model)) == (2, "", "pending")
    request_profile(ProfileNeed(model=model))
    assert num_profile_jobs() == 2


def test_a_model_that_cannot_be_traced_is_not_traced_again(model: Model) -> None:
    request_profile(ProfileNeed(model=model))
    keep_profile_error(model.fingerprint, {"code": "bad_model", "message": "the model cannot be traced"})
    make_older(model)
    assert request_profile(ProfileNeed(model=model)).error["code"] == "bad_model"
    assert num_profile_jobs() == 1


def test_a_trace_that_failed_for_another_reason_is_tried_again_after_a_minute(model: Model) -> None:
    request_profile(ProfileNeed(model=model))
    keep_profile_error(model.fingerprint, {"code": "worker_lost", "message": "the worker was lost"})
    assert request_profile(ProfileNeed(model=model)).error["code"] == "worker_lost"
    make_older(model)
    assert request_profile(ProfileNeed(model=model)).error is None
    assert num_profile_jobs() == 2
