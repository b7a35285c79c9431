"""Jobs that learn from pairs: the profile that prices them, from the spec to the process that traces it."""

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.profile.fingerprints import profile_fingerprint
from tests.webapp.conftest import make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_spec
from webapp.pages.forms.training import initial_from_spec
from webapp.planning.pricing import price_spec
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db

WORKLOAD: dict[str, Any] = {"sequence_length": 64, "global_batch_size": 2, "objective": "dpo", "adapter": {"rank": 4}}


@pytest.fixture
def pairs(dataset: Dataset) -> Dataset:
    dataset.facts = {**dataset.facts, "kind": "preference"}
    dataset.num_documents = 20
    dataset.save(update_fields=["facts", "num_documents"])
    return dataset


def test_pairs_are_profiled_for_their_objective(
    ada: User, machine: Machine, profiled_llama: Model, pairs: Dataset, tmp_path: Path
) -> None:
    spec = make_spec(profiled_llama, pairs, workload=WORKLOAD)
    assert price_spec(ada, spec).to_json()["profile"] == "pending"
    job = Job.objects.get(kind="profile")
    assert job.spec["name"] == "profile of llama with adapters, dpo"
    attempt = claim_job(worker="w1", machine=machine)
    assert make_brief(attempt, folder=tmp_path, home=tmp_path, devices=["cpu"])["objective"] == "dpo"


def test_a_trace_that_failed_is_kept_with_the_objective_it_was_of(
    ada: User, machine: Machine, profiled_llama: Model, pairs: Dataset
) -> None:
    spec = make_spec(profiled_llama, pairs, workload=WORKLOAD)
    price_spec(ada, spec)
    attempt = claim_job(worker="w1", machine=machine)
    error = {"code": "bad_model", "message": "no", "hint": "", "fields": {}}
    result = {"outcome": "failed", "reason": "bad_model", "message": "no", "error": error, "step": 0}
    finish_attempt(attempt, result=result, exit_code=1)
    adapter = read_spec(ada, spec).workload.adapter
    fingerprint = profile_fingerprint(profiled_llama.fingerprint, adapter, objective="dpo")
    assert Profile.objects.get(pk=fingerprint).error == error


def test_a_clone_shows_what_the_job_learns_from_and_what_is_best(ada: User, profiled_llama: Model, pairs: Dataset) -> None:
    goal = {"device_budget_bytes": 2**30, "objective": "cheapest_run"}
    read = read_spec(ada, make_spec(profiled_llama, pairs, workload={**WORKLOAD, "beta": 0.3}, goal=goal))
    shown = initial_from_spec(read.to_json())
    assert (shown["train_on"], shown["beta"], shown["objective"]) == ("dpo", 0.3, "cheapest_run")
    assert initial_from_spec({"workload": {"objective": "next_token"}})["train_on"] == ""
