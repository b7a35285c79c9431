"""A search chooses no plan whose process the card has no room for, whatever the budget allows its tensors."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import GIB
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPins
from optimizer.plan.allocator import AllocatorPins
from optimizer.plan.pins.training import Pins
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.result import SearchResult
from optimizer.search.search import search_plans
from optimizer.workload import TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=4)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(read_model_spec(SMALL_CONFIGS["llama"]))


def search_on(
    profile: Profile, total_bytes: int, budget_bytes: int = GIB, pins: Any = None, workload: TrainingWorkload = WORKLOAD
) -> SearchResult | None:
    card = table_machine("T4")
    machine = replace(card, device=replace(card.device, total_bytes=total_bytes))
    goal = Goal(device_budget_bytes=budget_bytes, pins=pins or Pins())
    return search_plans(profile, workload=workload, goal=goal, machine=machine)


def test_what_is_chosen_fits_with_all_that_a_process_takes(profile: Profile) -> None:
    chosen = search_on(profile, 2 * GIB).chosen
    assert chosen.verdict == "fits"
    assert chosen.prediction.memory.process.high <= 2 * GIB


def test_where_gaps_leave_no_room_segments_grow_unless_they_are_pinned(profile: Profile) -> None:
    total_bytes = search_on(profile, 2 * GIB).chosen.prediction.memory.process.high - 1
    growing = search_on(profile, total_bytes).chosen
    as_usual = search_on(profile, total_bytes, pins=Pins(allocator=AllocatorPins(expandable_segments=False))).chosen
    assert growing.verdict == as_usual.verdict == "fits"
    assert growing.plan.allocator.expandable_segments
    assert not as_usual.plan.allocator.expandable_segments
    assert growing.prediction.step_ms <= as_usual.prediction.step_ms


def test_a_card_that_the_context_fills_has_room_for_no_plan(profile: Profile) -> None:
    with pytest.raises(NoFeasiblePlan):
        search_on(profile, GIB // 8)


def test_the_smallest_budget_that_is_named_is_enough(profile: Profile) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        search_on(profile, 2 * GIB, budget_bytes=1)
    budget_bytes = caught.value.fields["smallest_feasible_bytes"]
    assert search_on(profile, 2 * GIB, budget_bytes=budget_bytes).chosen.verdict == "fits"


def test_scores_that_attention_keeps_in_each_block_that_is_not_rebuilt_are_counted_in_the_search() -> None:
    """No kernel for fp32 with fewer key heads than query heads rebuilds the scores; they are many times a block's tensors."""
    profile = profile_model(read_model_spec(SMALL_CONFIGS["llama"] | {"num_hidden_layers": 8, "max_position_embeddings": 1024}))
    long = replace(WORKLOAD, sequence_length=1024)
    pins = Pins(activations=ActivationsPins(per_block=("recompute",)))
    for budget_bytes in (GIB // 4, GIB // 2, GIB):
        found = search_on(profile, 2 * GIB, budget_bytes, workload=long)
        rebuilt = search_on(profile, 2 * GIB, budget_bytes, pins, workload=long)
        assert found.chosen.verdict == "fits"
        assert found.chosen.prediction.step_ms <= rebuilt.chosen.prediction.step_ms * 1.005
        shown_ms = [point.prediction.step_ms for point in found.frontier if point.verdict == "fits"]
        assert found.chosen.prediction.step_ms <= min(shown_ms) * 1.05
