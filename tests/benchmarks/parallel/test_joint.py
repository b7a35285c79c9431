"""Scenarios of joint plans, and what they are held against."""

from benchmarks.parallel.joint import SCENARIOS, summarize
from optimizer.base.units import GIB
from optimizer.hardware.joined import cards_of

ROW = {
    "what": "joint",
    "work": "a model",
    "devices": "2x a card",
    "joint_step_ms": 100.0,
    "best_policy": "x",
    "best_recipe": "y",
    "over_recipe": 1.3,
}


def test_every_scenario_can_be_shared_evenly() -> None:
    assert len(SCENARIOS) == 16
    for devices, work in SCENARIOS:
        machine = cards_of(devices.cards, links=devices.links, host_memory_bytes=devices.host_gib * GIB)
        assert work.workload.global_batch_size % machine.total_devices == 0


def test_a_joint_plan_that_is_slower_than_another_is_named() -> None:
    found = summarize([ROW | {"over_policy": 1.2}, ROW | {"over_policy": 0.9}])
    assert found["joint plans slower than another"]["value"] == ["a model on 2x a card"]
    assert found["scenarios in which it is 1.10 or more"]["value"] == "1 of 2"


def test_a_scenario_in_which_only_the_joint_plan_fits_has_no_ratio() -> None:
    alone = ROW | {"best_policy": None, "over_policy": None, "best_recipe": None, "over_recipe": None}
    found = summarize([alone, ROW | {"over_policy": 1.2}])
    assert found["scenarios in which only the joint plan fits"]["value"] == 1
    assert found["joint over the best fixed policy, median"]["value"] == 1.2
    assert not found["joint plans slower than another"]["value"]
