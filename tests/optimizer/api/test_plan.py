"""Answers to goals: the most that fits with the limit that binds, plans side by side, cards ranked, a plan after one edit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan import compare_profiled, plan_profiled, rank_cards_profiled, reprice_profiled
from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.serialize import from_json
from optimizer.base.units import MIB
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.rental import PriceList, Rental
from optimizer.models.spec import read_model_spec
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.profile.deeper import depth_period, with_depth
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.problem import OuterPlan
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.search import search_plans
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload
from tests import llama

MACHINE = make_cpu_machine()
WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=4)
FORBIDDEN = ("offload", "offload_optimizer", "offload_gradients", "stream_weights")
"""Left out so that a search is short."""


def goal_of(budget_mib: float, objective: str = "fastest_step", **more: Any) -> Goal:
    return Goal(device_budget_bytes=round(budget_mib * MIB), objective=objective, forbid=FORBIDDEN, **more)


def answer(profile: Profile, goal: Goal, workload: TrainingWorkload = WORKLOAD) -> ObjectiveAnswer:
    return plan_profiled(profile, machine=MACHINE, workload=workload, goal=goal)


def is_possible(profile: Profile, goal: Goal, workload: TrainingWorkload) -> bool:
    try:
        search_plans(profile, workload=workload, goal=replace(goal, objective="fastest_step"), machine=MACHINE)
    except NoFeasiblePlan:
        return False
    return True


def test_the_longest_sequence_fits_and_the_next_does_not(llama_profile: Profile) -> None:
    goal = goal_of(4.5, "longest_sequence")
    found = answer(llama_profile, goal)
    assert found.limit.unit == "tokens"
    assert found.workload.sequence_length == found.limit.largest
    assert found.limit.next == found.limit.largest + 128
    assert found.result.chosen.prediction.device_peak_high_bytes == found.limit.peak_bytes <= goal.device_budget_bytes
    assert found.limit.next_peak_bytes > goal.device_budget_bytes
    assert not is_possible(llama_profile, goal, replace(WORKLOAD, sequence_length=found.limit.next))
    assert f"at {found.limit.next:,} nothing fits, the smallest peak is" in found.limit.reason


def test_where_positions_end_before_memory_the_limit_says_so(llama_profile: Profile) -> None:
    found = answer(llama_profile, goal_of(4000, "longest_sequence"))
    assert found.limit.largest == llama_profile.max_sequence_length
    assert found.limit.next is None
    assert "memory does not end it: the model has positions for" in found.limit.reason


def test_the_largest_batch_runs_at_once_and_one_more_does_not(llama_profile: Profile) -> None:
    goal = goal_of(8, "largest_batch")
    found = answer(llama_profile, goal)
    batch = found.result.chosen.plan.batch
    assert (batch.micro_batch_size, batch.accumulation_steps) == (found.limit.largest, 1)
    assert found.limit.next == found.limit.largest + 1
    unsplit = replace(goal, forbid=(*FORBIDDEN, "accumulate"))
    assert not is_possible(llama_profile, unsplit, replace(WORKLOAD, global_batch_size=found.limit.next))


def test_the_largest_model_is_the_deepest_that_fits(llama_profile: Profile) -> None:
    goal = goal_of(12, "largest_model")
    found = answer(llama_profile, goal)
    assert found.limit.unit == "blocks"
    assert found.num_blocks == found.limit.largest == len(found.result.chosen.plan.activations.per_block)
    assert not is_possible(with_depth(llama_profile, found.limit.next), goal, WORKLOAD)


def test_a_deeper_profile_prices_as_the_trace_of_the_deeper_model(llama_profile: Profile) -> None:
    spec = read_model_spec({**llama.CONFIG, "num_hidden_layers": llama.CONFIG["num_hidden_layers"] + 3})
    extent = Extent(representations=("fp32",), choices=("keep", "recompute", "offload"), shapes=((4, 128),))
    deep = profile_model(spec, extent=extent)
    assert depth_period(llama_profile) == 1
    made = with_depth(llama_profile, deep.num_blocks)
    assert made.num_parameters == deep.num_parameters
    for traced, repeated in zip(*(problem_of(profile) for profile in (deep, made)), strict=True):
        assert repeated == traced


def problem_of(profile: Profile) -> Iterator[Prediction]:
    problem = training_problem(profile, workload=WORKLOAD, goal=goal_of(1000), machine=MACHINE)
    setting = OuterPlan(micro_batch_size=4, accumulation_steps=1)
    for choice in ("keep", "recompute", "offload"):
        yield problem.price(setting.plan((choice,) * profile.num_blocks))


def test_a_pin_on_what_is_looked_for_is_refused(llama_profile: Profile) -> None:
    pins = read_pins(["batch.micro_batch_size=2"])
    with pytest.raises(InvalidWorkload) as caught:
        answer(llama_profile, goal_of(8, "largest_batch", pins=pins))
    assert "largest_batch looks for just that" in caught.value.message


def test_where_nothing_fits_each_way_out_is_one_that_fits(llama_profile: Profile) -> None:
    workload = TrainingWorkload(sequence_length=256, global_batch_size=4)
    goal = goal_of(4.2)
    with pytest.raises(NoFeasiblePlan) as caught:
        answer(llama_profile, goal, workload)
    fields = caught.value.fields
    ways = {way["kind"]: way for way in fields["ways_out"]}
    assert fields["largest_part"] == max(fields["bytes_by_category"], key=fields["bytes_by_category"].get)
    assert {"shorter_sequence", "bf16", "budget", "smaller_batch"} <= set(ways)
    for way in ways.values():
        change = way["change"]
        if "gpu" not in change:
            pins = from_json(Pins, change.get("goal", {}).pop("pins", {}), path="pins", error=InvalidWorkload)
            changed = replace(goal, pins=pins, **change.get("goal", {}))
            assert is_possible(llama_profile, changed, replace(workload, **change.get("workload", {}))), way["sentence"]
    assert all(way["sentence"] in caught.value.hint for way in ways.values())


def test_where_the_budget_is_far_too_small_each_way_out_names_the_lesser_budget_that_it_needs(
    llama_profile: Profile,
) -> None:
    """A larger budget was all that was said, where nothing else helped by itself."""
    workload = TrainingWorkload(sequence_length=256, global_batch_size=4)
    goal = goal_of(0.1)
    with pytest.raises(NoFeasiblePlan) as caught:
        answer(llama_profile, goal, workload)
    fields = caught.value.fields
    ways = {way["kind"]: way for way in fields["ways_out"]}
    assert {"budget", "bf16_8bit", "shorter_sequence"} <= set(ways)
    for kind in ("bf16_8bit", "shorter_sequence"):
        change = ways[kind]["change"]
        assert change["goal"]["device_budget_bytes"] < 0.9 * fields["smallest_feasible_bytes"]
        pins = from_json(Pins, change["goal"].pop("pins", {}), path="pins", error=InvalidWorkload)
        changed = replace(goal, pins=pins, **change["goal"])
        assert is_possible(llama_profile, changed, replace(workload, **change.get("workload", {}))), ways[kind]["sentence"]
    assert "bf16 weights and 8-bit optimizer state and a budget of" in ways["bf16_8bit"]["sentence"]


def test_plans_side_by_side_show_only_what_differs(llama_profile: Profile) -> None:
    names = {"keep_all": "keep_all", "recompute_all": "recompute_all"}
    found = compare_profiled(llama_profile, names, machine=MACHINE, workload=WORKLOAD, goal=goal_of(1000))
    assert [(cell.category, cell.aspect, cell.values) for cell in found.cells] == [
        ("activations", "lifetime", ("keep 4", "recompute 4"))
    ]
    rows = {row.category: row.values for row in found.bytes_at_peak}
    kept, rebuilt = (priced.prediction.device_bytes_by_category["activations"] for priced in found.plans)
    assert rows["activations"] == (kept, rebuilt)
    assert all(len(set(values)) > 1 for values in rows.values())


def test_one_plan_alone_is_not_compared(llama_profile: Profile) -> None:
    with pytest.raises(InvalidInput) as caught:
        compare_profiled(llama_profile, {"best": "best"}, machine=MACHINE, workload=WORKLOAD, goal=goal_of(1000))
    assert "allowed: 2 to 6 different ones" in caught.value.message


def rent(device: str, price: float) -> Rental:
    return Rental(device=device, provider="P", price_per_hour=price, currency="USD", date="2025-06-01", source="here")


def test_cards_are_ranked_by_speed_and_by_money(llama_profile: Profile) -> None:
    prices = PriceList(rentals=(rent("T4", 0.1), rent("L4", 5.0)))
    asked = {"workload": WORKLOAD, "goal": goal_of(4000), "prices": prices}
    told = []
    by_speed = rank_cards_profiled(
        llama_profile, ["T4", "RTX 4090", "L4"], progress=lambda *found: told.append(found), **asked
    )
    assert told == [(0, 3, "T4"), (1, 3, "RTX 4090"), (2, 3, "L4")]
    assert by_speed[0].card == "RTX 4090"
    here = plan_profiled(llama_profile, machine=table_machine("RTX 4090"), workload=WORKLOAD, goal=goal_of(4000))
    assert by_speed[0].chosen == here.result.chosen
    speeds = [found.tokens_per_s for found in by_speed]
    assert speeds == sorted(speeds, reverse=True)
    by_money = rank_cards_profiled(llama_profile, ["RTX 4090", "L4", "T4"], order="money", **asked)
    assert [found.card for found in by_money] == ["T4", "L4", "RTX 4090"]
    money = by_money[0].rented_per_million_tokens
    seconds = 1e6 / by_money[0].tokens_per_s
    assert money == pytest.approx(0.1 * seconds / 3600)  # the same product in another order


def test_a_card_on_which_nothing_fits_comes_last_and_says_what_it_would_take(llama_profile: Profile) -> None:
    goal = goal_of(3)
    (found,) = rank_cards_profiled(llama_profile, ["T4"], workload=WORKLOAD, goal=goal)
    assert found.chosen is None
    assert found.what.startswith("needs ")


def test_an_edited_plan_is_priced_against_what_it_was(llama_profile: Profile) -> None:
    goal = goal_of(1000, allow_lossy=True)
    plan = answer(llama_profile, goal_of(1000)).result.chosen.plan
    asked = {"machine": MACHINE, "workload": WORKLOAD, "goal": goal}
    found = reprice_profiled(llama_profile, plan, change=["activations.per_block=recompute"], **asked)
    problem = training_problem(llama_profile, **asked)
    before, after = problem.price(plan), problem.price(found.priced.plan)
    assert found.device_change_bytes == after.device_peak_high_bytes - before.device_peak_high_bytes < 0
    assert found.step_change_ms == after.step_ms - before.step_ms > 0
    assert [difference.path for difference in found.differences] == ["activations.per_block[0:4]"]


def test_an_edit_of_the_micro_batch_takes_the_number_of_them_along(llama_profile: Profile) -> None:
    plan = answer(llama_profile, goal_of(1000)).result.chosen.plan
    asked = {"machine": MACHINE, "workload": WORKLOAD, "goal": goal_of(1000)}
    found = reprice_profiled(llama_profile, plan, change=["batch.micro_batch_size=2"], **asked)
    assert found.priced.plan.batch.accumulation_steps == 2
    with pytest.raises(InvalidPlan):
        reprice_profiled(llama_profile, plan, change=["batch.micro_batch_size=3"], **asked)
