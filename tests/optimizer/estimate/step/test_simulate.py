"""Caching, summing up and postponing never change a plan's price; plans are drawn at random, the same in every run."""

import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from optimizer.base.categories import CATEGORIES
from optimizer.base.serialize import to_json
from optimizer.estimate.prediction import DETAILS, Prediction
from optimizer.estimate.step.runs import Schedule
from optimizer.estimate.step.setting import lay_out
from optimizer.estimate.step.simulate import Resident, Simulation, simulate
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import TrainingWorkload
from tests.optimizer.estimate import plain_simulation
from tests.optimizer.estimate.random_plans import draw_cases, machines
from tests.optimizer.models.small_configs import SMALL_CONFIGS

MODELS: dict[str, Any] = {
    "alike blocks": {**SMALL_CONFIGS["llama"], "num_hidden_layers": 9},
    "two kinds of block": {**SMALL_CONFIGS["gemma3_text"], "num_hidden_layers": 4},
    "shared parameters": {
        **SMALL_CONFIGS["headroom_decoder"],
        "layer_types": ["full", "local", "full"],
        "share_every": 2,
        "dropout": 0.1,
    },
    "sparse gradients": {
        **SMALL_CONFIGS["headroom_decoder"],
        "sparse_embedding_gradients": True,
        "tie_word_embeddings": False,
    },
}
NUM_PLANS = 14


@pytest.fixture(scope="module", params=MODELS)
def model_profile(request: pytest.FixtureRequest) -> Profile:
    return profile_model(read_model_spec(MODELS[request.param]))


def cases(profile: Profile) -> list[tuple[Plan, TrainingWorkload]]:
    return draw_cases(random.Random(profile.model_fingerprint), profile, NUM_PLANS)


def simulated(profile: Profile) -> Iterator[tuple[Schedule, Resident, str, Simulation]]:
    """Schedules of the drawn plans on each machine, what is there beside them, and their simulations."""
    for plan, workload in cases(profile):
        for machine in machines():
            laid = lay_out(profile, plan=plan, workload=workload, machine=machine)
            kind = machine.device.kind
            yield laid.schedule, laid.resident, kind, simulate(laid.schedule, resident=laid.resident, device_kind=kind)


@pytest.mark.breadth
def test_the_peak_is_that_of_a_plain_replay(model_profile: Profile) -> None:
    for schedule, resident, _, simulation in simulated(model_profile):
        by_category, task = plain_simulation.find_peak(schedule, resident)
        assert dict(zip(CATEGORIES, simulation.peak.tolist(), strict=True)) == by_category
        assert simulation.device_peak_bytes == sum(by_category.values())
        assert simulation.peak_task is task


@pytest.mark.breadth
def test_other_tiers_and_links_are_those_of_a_plain_replay(model_profile: Profile) -> None:
    for schedule, resident, _, simulation in simulated(model_profile):
        beyond = {tier: plain_simulation.find_peak_beyond(schedule, tier) for tier in ("host", "disk", "remote")}
        assert simulation.host_peak_bytes == resident.host + beyond["host"]
        assert simulation.disk_peak_bytes == resident.disk + beyond["disk"]
        assert simulation.remote_peak_bytes == resident.remote + beyond["remote"]
        copied = {link: num_bytes for link, num_bytes in simulation.copied_bytes.items() if num_bytes}
        assert copied == plain_simulation.count_copies(schedule)


@pytest.mark.breadth
def test_the_time_is_that_of_a_plain_clock(model_profile: Profile) -> None:
    for schedule, _, kind, simulation in simulated(model_profile):
        if schedule.num_later <= 1:
            assert (simulation.step_ms, simulation.exposed_ms) == plain_simulation.time_two_micro_batches(schedule, kind)


@pytest.mark.breadth
def test_a_plan_costs_the_same_whatever_was_priced_before(model_profile: Profile) -> None:
    known = [
        estimate_training(model_profile, plan=plan, workload=workload, machine=machine)
        for machine in machines()
        for plan, workload in cases(model_profile)
    ]
    document = to_json(model_profile)
    for index in range(0, len(known), NUM_PLANS - 1):
        machine, (plan, workload) = machines()[index // NUM_PLANS], cases(model_profile)[index % NUM_PLANS]
        unknown = Profile.from_json(document)
        assert estimate_training(unknown, plan=plan, workload=workload, machine=machine) == known[index]


def test_details_are_fields_of_a_prediction_without_plain_defaults() -> None:
    assert {field.name for field in fields(Prediction)} >= DETAILS
    assert not any(hasattr(Prediction, detail) for detail in DETAILS)


def test_each_detail_is_worked_out_when_it_is_read(profile: Profile, machine: Machine) -> None:
    plan, workload = draw_cases(random.Random(1), profile, 1)[0]
    prediction, again = (
        estimate_training(profile, plan=plan, workload=workload, machine=machine) for _ in range(2)
    )
    assert not DETAILS & vars(prediction).keys()
    assert max(sum(point.bytes_by_category.values()) for point in prediction.timeline) == prediction.device_peak_bytes
    assert DETAILS & vars(prediction).keys() == {"timeline"}
    assert prediction == again == Prediction.from_json(again.to_json())


def test_what_is_no_field_of_a_prediction_is_refused_by_name(profile: Profile, machine: Machine) -> None:
    plan, workload = draw_cases(random.Random(1), profile, 1)[0]
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    with pytest.raises(AttributeError, match="'Prediction' object has no attribute 'peak'"):
        prediction.peak  # type: ignore[attr-defined]  # noqa: B018
