"""Jobs that train adapters: what a spec may say, and that the model with adapters has a profile of its own."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.base.errors import InvalidWorkload
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.workload import Adapter, Export
from tests.webapp.conftest import make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_spec
from webapp.planning.pricing import price_spec
from webapp.planning.search.profile_requests import ProfileFailed
from webapp.planning.submitting import submit_job
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db

ADAPTER: dict[str, Any] = {"rank": 4, "targets": ["q_proj", "v_proj"]}
WORKLOAD: dict[str, Any] = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10, "adapter": ADAPTER}
GOAL = {"device_budget_bytes": 2**30}


def with_adapters(model: Model, dataset: Dataset, **changes: Any) -> dict[str, Any]:
    return make_spec(model, dataset, workload={**WORKLOAD, **changes}, goal=GOAL)


def test_adapters_and_how_to_save_are_read_with_their_defaults(ada: User, new_llama: Model, dataset: Dataset) -> None:
    read = read_spec(ada, with_adapters(new_llama, dataset, export={"dtype": "bf16"}))
    assert read.workload.adapter == Adapter(rank=4, targets=("q_proj", "v_proj"))
    assert read.workload.export == Export(dtype="bf16")
    assert read.to_json()["workload"]["adapter"] == {"rank": 4, "alpha": 16.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    assert read_spec(ada, read.to_json()) == read


def test_numbers_and_sizes_may_be_written_as_people_do(ada: User, new_llama: Model, dataset: Dataset) -> None:
    spec = with_adapters(new_llama, dataset, adapter={"alpha": "1e1"}, export={"max_shard_bytes": "2 GB"})
    read = read_spec(ada, spec)
    assert read.workload.adapter.alpha == 10.0
    assert read.workload.export.max_shard_bytes == 2_000_000_000


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"adapter": {"rank": 0}}, "workload.adapter.rank", "workload.adapter.rank is 0; allowed: an integer from 1"),
        ({"adapter": {"ranks": 4}}, "workload.adapter.ranks", "is not a known field; known: rank, alpha, dropout, targets"),
        ({"adapter": {"targets": ["c_attn"]}}, "workload.adapter.targets", "names 'c_attn'; the matrices in the blocks of llama"),
        ({"adapter": {"targets": "q_proj"}}, "workload.adapter.targets", "allowed: a list"),
        ({"export": {"dtype": "int8"}}, "workload.export.dtype", "allowed: same, fp32, bf16, fp16"),
        ({"export": {"max_shard_bytes": "big"}}, "workload.export.max_shard_bytes", "size 'big' is not understood"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(
    ada: User, new_llama: Model, dataset: Dataset, changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidWorkload, match=message) as caught:
        read_spec(ada, with_adapters(new_llama, dataset, **changes))
    assert caught.value.fields["field"] == field


def test_the_model_with_adapters_is_profiled_for_itself(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset, tmp_path: Path
) -> None:
    answer = price_spec(ada, with_adapters(profiled_llama, dataset))
    assert answer.to_json() == {"profile": "pending", "waiting_for": "profile"}
    job = Job.objects.get(kind="profile")
    assert job.spec["name"] == "profile of llama with adapters"
    attempt = claim_job(worker="w1", machine=machine)
    brief = make_brief(attempt, folder=tmp_path, home=tmp_path, devices=["cpu"])
    assert brief["adapter"] == {"rank": 4, "alpha": 16.0, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}


def test_what_the_profile_job_leaves_is_found_when_the_spec_is_priced_again(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset, llama_document: dict[str, Any]
) -> None:
    price_spec(ada, with_adapters(profiled_llama, dataset))
    adapter = read_spec(ada, with_adapters(profiled_llama, dataset)).workload.adapter
    fingerprint = profile_fingerprint(profiled_llama.fingerprint, adapter)
    assert Profile.objects.get(pk=fingerprint).document is None
    keep_profile(fingerprint, llama_document)
    answer = price_spec(ada, with_adapters(profiled_llama, dataset))
    assert answer.profile == "ready"
    job = submit_job(ada, spec=with_adapters(profiled_llama, dataset), plan_id=answer.offers[0].row.pk, actor="test")
    assert job.spec["workload"]["adapter"]["rank"] == 4


def test_a_trace_that_failed_is_kept_with_the_adapters_it_was_of(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    price_spec(ada, with_adapters(profiled_llama, dataset))
    attempt = claim_job(worker="w1", machine=machine)
    error = {"code": "bad_model", "message": "the model cannot be traced", "hint": "", "fields": {}}
    result = {"outcome": "failed", "reason": "bad_model", "message": "no", "error": error, "step": 0}
    finish_attempt(attempt, result=result, exit_code=1)
    row = Profile.objects.exclude(pk=profiled_llama.fingerprint).get()
    assert row.error["code"] == "bad_model"
    assert Profile.objects.get(pk=profiled_llama.fingerprint).error is None


def test_alpha_alone_asks_for_no_other_profile(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    for alpha in (8, 32):
        price_spec(ada, with_adapters(profiled_llama, dataset, adapter={**ADAPTER, "alpha": alpha}))
    assert Job.objects.filter(kind="profile").count() == 1


def test_adapters_that_a_model_cannot_have_are_not_traced_again(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    spec = with_adapters(profiled_llama, dataset)
    price_spec(ada, spec)
    rows = Profile.objects.exclude(pk=profiled_llama.fingerprint)
    error = {"code": "invalid_workload", "message": "blocks of this model share parameters", "hint": ""}
    rows.update(error=error, updated_at=timezone.now() - timedelta(minutes=5))
    with pytest.raises(ProfileFailed, match="blocks of this model share parameters"):
        price_spec(ada, spec)
    assert Job.objects.filter(kind="profile").count() == 1
