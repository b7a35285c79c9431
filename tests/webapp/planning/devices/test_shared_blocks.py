"""Devices that share each block in the service: a profile of their own where they are pinned, a price, and refusals in words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput
from optimizer.models.spec import read_model_spec
from optimizer.profile.profile import Profile
from tests.optimizer.profiles import trace
from tests.webapp.conftest import make_spec
from webapp.attempts.claiming import claim_job
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_spec
from webapp.pages.words.plan_names import layout_words
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db

PINS: dict[str, Any] = {"layout": {"tensor": 2}}
ONE_SEQUENCE = {"sequence_length": 128, "global_batch_size": 1, "num_steps": 10}


def shared(model: Model, dataset: Dataset, **goal: Any) -> dict[str, Any]:
    asked = {"device_budget_bytes": 2**30, "num_devices": 2, "pins": PINS, **goal}
    return make_spec(model, dataset, goal=asked, workload=ONE_SEQUENCE)


def test_a_pin_asks_for_a_profile_with_a_part_and_is_priced_and_run_with_it(
    ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset, llama_profile: Profile, tmp_path: Path
) -> None:
    spec = shared(profiled_llama, dataset)
    assert price_spec(ada, spec).to_json() == {"profile": "pending", "waiting_for": "profile"}
    assert Job.objects.get(kind="profile").spec["name"] == "profile of llama, shared by 2"
    brief = make_brief(claim_job(worker="w1", machine=pair), folder=tmp_path, home=tmp_path, devices=["cpu"])
    assert brief["sharing"] == 2
    part = trace(read_model_spec(profiled_llama.config), num_sharing=2)
    keep_profile(read_spec(ada, spec).profile_fingerprint, replace(llama_profile, narrower=(part,)).to_json())
    answer = price_spec(ada, spec)
    chosen = next(offer for offer in answer.offers if offer.is_chosen)
    assert chosen.row.plan["layout"]["tensor"] == 2
    assert layout_words(chosen.row.plan) == "on 2 devices that share each block"
    job = submit_job(ada, spec=spec, plan_id=chosen.row.pk, actor="user:ada")
    assert job.need_devices == 2
    assert len(set(job.prediction["rank_peak_bytes"])) == 1


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"num_devices": 1}, "goal.pins.layout.tensor is 2; goal.num_devices is 1"),
        ({"pins": {"layout": {"tensor": 3}}, "num_devices": 3}, "plan.layout.tensor is 3; the model has"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_as_the_spec_is_read(
    ada: User, pair: Machine, profiled_llama: Model, dataset: Dataset, goal: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_spec(ada, shared(profiled_llama, dataset, **goal))
    assert str(caught.value).startswith(words)
