"""Specs for several devices: refused in words, priced by layout, planned again with the layout they ran on."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput
from tests.webapp.conftest import make_bench, make_spec
from webapp.attempts.claiming import claim_job
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import retry_job
from webapp.jobs.models import Job, State
from webapp.pages.forms.training import JobForm, initial_from_spec
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db

PINNED = {"layout": {"num_devices": 2, "data": "zero1"}}
WORKLOAD = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
Spec = Callable[..., dict[str, Any]]


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset) -> Spec:
    """A function: the spec with changes of its goal and workload."""

    def make(*, workload: dict[str, Any] | None = None, **goal: Any) -> dict[str, Any]:
        asked = {"device_budget_bytes": 2**30, **goal}
        return make_spec(profiled_llama, dataset, goal=asked, workload=WORKLOAD | (workload or {}))

    return make


@pytest.fixture
def on_two(ada: User, pair: Machine, spec: Spec) -> Job:
    return submit_job(ada, spec=spec(num_devices=2, pins=PINNED), actor="user:ada")


def test_more_devices_than_any_machine_has_are_refused_with_what_there_is(ada: User, pair: Machine, spec: Spec) -> None:
    with pytest.raises(InvalidInput, match="goal.num_devices is 3; the machines here have at most 2 devices") as caught:
        price_spec(ada, spec(num_devices=3))
    assert caught.value.fields["field"] == "goal.num_devices"
    pair.delete()
    make_bench()
    with pytest.raises(InvalidInput, match="goal.num_devices is 2; the machines here have one device"):
        price_spec(ada, spec(num_devices=2))


def test_a_batch_that_the_devices_cannot_share_is_refused(ada: User, pair: Machine, spec: Spec) -> None:
    with pytest.raises(InvalidInput, match="workload.global_batch_size is 3, which 2 devices cannot share evenly"):
        price_spec(ada, spec(num_devices=2, workload={"global_batch_size": 3}))


def test_a_job_of_two_devices_needs_two_and_each_ranks_bytes(on_two: Job) -> None:
    alone = {"sync_every": 1, "sync_format": "fp32", "sync_rule": "average"}
    whole = {"ranks": [], "replicas": 1, "stage_blocks": [], "schedule": "1f1b", "tensor": 1, **alone}
    assert on_two.plan["layout"] == {"num_devices": 2, "data": "zero1", **whole}
    assert on_two.need_devices == 2
    assert len(on_two.prediction["rank_peak_bytes"]) == 2
    assert on_two.need_device_bytes == on_two.prediction["device_peak_high_bytes"] < 2**30


def test_only_machines_with_so_many_devices_run_it(machine: Machine, on_two: Job, pair: Machine) -> None:
    assert claim_job(worker="w", machine=machine) is None
    attempt = claim_job(worker="w", machine=pair)
    assert attempt is not None
    assert attempt.devices == [0, 1]


def test_a_goal_of_several_devices_may_find_one_the_fastest_and_says_so(ada: User, pair: Machine, spec: Spec) -> None:
    answer = price_spec(ada, spec(num_devices=2))
    (chosen,) = [offer for offer in answer.offers if offer.is_chosen]
    assert any(sentence.startswith("2 devices, ") for sentence in chosen.explanation)
    assert any(sentence.startswith("one device: ") for sentence in chosen.explanation)


def test_a_machine_with_one_device_is_priced_beside_one_with_two(
    ada: User, machine: Machine, pair: Machine, spec: Spec
) -> None:
    answer = price_spec(ada, spec(num_devices=2))
    chosen = {offer.row.machine.name: offer.row.plan["layout"] for offer in answer.offers if offer.row.label == "chosen"}
    assert chosen["bench"]["num_devices"] == 1
    assert chosen.keys() == {"bench", "pair"}


def test_a_retry_needs_as_many_devices(on_two: Job) -> None:
    Job.objects.filter(pk=on_two.pk).update(state=State.FAILED, finished_at=on_two.created_at)
    assert retry_job(on_two, actor="user:ada").need_devices == 2


def test_the_form_asks_for_devices_where_a_machine_has_several_and_a_clone_keeps_the_number(
    profiled_llama: Model, dataset: Dataset, spec: Spec
) -> None:
    rows: dict[str, Any] = {"models": [profiled_llama], "datasets": [dataset]}
    assert "num_devices" not in JobForm(**rows).fields
    form = JobForm(most_devices=2, **rows)
    assert form.fields["num_devices"].label == "Devices, at most"
    assert initial_from_spec(spec(num_devices=2))["num_devices"] == 2
