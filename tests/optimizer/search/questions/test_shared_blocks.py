"""Devices that share each block: offered where a batch cannot be shared and a part is profiled, and chosen by their price."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.api.shared_needs import list_sharing
from optimizer.base.errors import InvalidPlan
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.plan.pins.training import read_pins
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.profiles import trace
from tests.optimizer.runtime.ranks.cases import MODELS
from tests.optimizer.search.questions.test_layouts import FORBID, pair

ONE = TrainingWorkload(sequence_length=128, global_batch_size=1, num_steps=100)
"""One sequence, which no two devices can share but within blocks."""
SPEC = read_model_spec(MODELS["decoder"])


@pytest.fixture(scope="module")
def profile() -> Profile:
    extent = Extent(representations=("fp32",), shapes=((1, 128),))
    return replace(trace(SPEC, extent=extent), narrower=(trace(SPEC, extent=extent, num_sharing=2),))


def goal_of(*pins: str, num_devices: int = 2, **goal: Any) -> Goal:
    values = {"device_budget_bytes": 2**40, "num_devices": num_devices, "pins": read_pins(pins), "forbid": FORBID, **goal}
    return Goal(**values)


def ask(profile: Profile, *pins: str, bytes_per_s: float = 1e12, **goal: Any) -> ObjectiveAnswer:
    machine = pair(bytes_per_s=bytes_per_s)
    return plan_profiled(profile, machine=machine, workload=ONE, goal=goal_of(*pins, **goal), with_ways_out=False)


def test_a_fast_link_lets_two_devices_share_the_blocks_of_one_sequence(profile: Profile) -> None:
    found = ask(profile)
    chosen = found.result.chosen
    assert chosen.plan.layout.tensor == chosen.plan.layout.num_devices == 2
    alone, shared = found.layouts
    assert shared.least_step_ms <= chosen.prediction.step_ms < alone.least_step_ms
    assert any("2 devices share each block" in sentence for sentence in found.result.explanation)
    assert shared.sentence.startswith("2 devices that share each block: chosen")


def test_a_slow_link_leaves_one_device_and_the_answer_says_why(profile: Profile) -> None:
    found = ask(profile, bytes_per_s=1e6)
    assert found.result.chosen.plan.layout.num_devices == 1
    (sentence,) = (option.sentence for option in found.layouts if option.layout.shares_blocks)
    assert sentence.startswith("2 devices that share each block: not searched, since no plan of it takes less than")


def test_a_pin_decides_it_and_other_pins_may_leave_it_no_room(profile: Profile) -> None:
    pinned = ask(profile, "layout.tensor=2", bytes_per_s=1e6)
    assert [option.layout.tensor for option in pinned.layouts] == [2]
    assert all(option.layout.tensor == 1 for option in ask(profile, "layout.tensor=1").layouts)
    assert all(option.layout.tensor == 1 for option in ask(profile, forbid=(*FORBID, "share_blocks")).layouts)
    with pytest.raises(InvalidPlan, match="goal.pins.layout.tensor is 2; allowed: like devices of one machine"):
        ask(profile, "layout.tensor=2", "layout.sync_every=1", "layout.data=zero1")
    with pytest.raises(InvalidPlan, match="goal.pins.layout.tensor is 2; allowed: like devices of one machine"):
        ask(replace(profile, narrower=()), "layout.tensor=2")


def test_the_smallest_budget_is_lower_where_blocks_are_shared(profile: Profile) -> None:
    shared, alone = (ask(profile, f"layout.tensor={number}").result.frontier[0] for number in (2, 1))
    assert shared.prediction.device_peak_bytes < alone.prediction.device_peak_bytes


@pytest.mark.parametrize(
    ("goal", "workload", "numbers"),
    [
        ({}, {}, (2,)),
        ({"num_devices": 5}, {}, (2,)),
        ({}, {"global_batch_size": 2}, ()),
        ({"num_devices": 1}, {}, ()),
        ({"forbid": ("share_blocks",)}, {}, ()),
        ({}, {"optimizer": "adafactor"}, ()),
        ({}, {"adapter": Adapter(dropout=0.5)}, ()),
    ],
)
def test_parts_are_profiled_where_a_batch_has_fewer_sequences_than_devices(
    goal: dict[str, Any], workload: dict[str, Any], numbers: tuple[int, ...]
) -> None:
    assert list_sharing(SPEC, replace(ONE, **workload), goal_of(**goal)) == numbers


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (4, "goal.pins.layout.tensor is 4; goal.num_devices is 2"),
        (3, "plan.layout.tensor is 3; the model has 4 heads"),
        (2, ""),
        (1, ""),
    ],
)
def test_a_pinned_number_that_cannot_be_is_refused_before_anything_is_traced(pin: int, message: str) -> None:
    goal = goal_of(f"layout.tensor={pin}", num_devices=3 if pin == 3 else 2)
    if not message:
        assert list_sharing(SPEC, replace(ONE, global_batch_size=8), goal) == ((2,) if pin == 2 else ())
        return
    with pytest.raises(InvalidPlan) as caught:
        list_sharing(SPEC, ONE, goal)
    assert str(caught.value).startswith(message)
