"""Pinned decisions of generations: kept by every plan that is found, the best of those that keep them, refused where none can."""

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import HeadroomError, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.serialize import from_json, to_json
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.pins.generation import GenerationPins, KvCachePins
from optimizer.plan.pins.generation_knobs import (
    generation_knobs,
    knob_value,
    pins_of_generation_change,
    read_generation_pins,
    written_value,
)
from optimizer.plan.pins.table import kinds_of_pins
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.search.generation.levers import list_arrangements
from optimizer.search.generation.one_device import find_best_generation, generation_problem, search_generation
from optimizer.search.generation.pins import check_generation_pins
from optimizer.search.generation.problem import GenerationProblem
from optimizer.search.generation.solve import Book, solve, value_of
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.search.generation.synthetic import list_every_plan, make_problem

WITHOUT_END = 10**9
GIB = 2**30
TRIED = {
    "batch_size": (1, 3),
    "num_micro_batches": (1, 2, 4),
    "prefill_tokens": (None, 8, 2),
    "weights.dtype": ("fp32", "bf16"),
    "weights.place": ("device", "host", "disk"),
    "weights.prefetch": (0, 1, 2, 8),
    "weights.frozen": ("same", "int8"),
    "kv_cache.dtype": ("same", "int8", "int4"),
    "kv_cache.place": ("device", "host", "disk"),
    "kv_cache.prefetch": (0, 1),
    "kv_cache.attention": ("device", "host"),
    "kv_cache.prefix_tokens": (0,),
    "allocator.expandable_segments": (False,),
}
"""Some values of each knob that a search without pins tries."""


def pinned(problem: GenerationProblem, *pins: str) -> GenerationProblem | None:
    return replace(problem, goal=replace(problem.goal, pins=read_generation_pins(pins)))


def can_be_pinned(problem: GenerationProblem, path: str, value: bool | int | str | None) -> GenerationProblem | None:
    """The problem with the pin; None where it is refused, as a lossy one where nothing may be lost."""
    try:
        asked = pinned(problem, f"{path}={written_value(value)}")
        check_generation_pins(asked)
    except HeadroomError:
        return None
    return asked


def best_value(problem: GenerationProblem, plan: GenerationPlan) -> float:
    return value_of(problem, plan, problem.price(plan))[0]


def test_every_knob_of_a_plan_can_be_pinned() -> None:
    assert list(kinds_of_pins(GenerationPins)) == list(generation_knobs()) == list(TRIED)


@pytest.mark.breadth
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_in_small_problems_a_pinned_search_is_as_good_as_enumeration_and_no_better_than_a_free_one(start: int) -> None:
    num_same = 0
    for seed in range(start, start + 40):
        problem = make_problem(seed)
        free = solve(Book(problem=problem), patience=WITHOUT_END)
        if free is None:
            continue
        draw = random.Random(seed)
        for path in draw.sample(sorted(TRIED), k=4):
            for value in {knob_value(free.plan, path), draw.choice(TRIED[path])}:
                asked = can_be_pinned(problem, path, value)
                if asked is None:
                    continue
                plans = [plan for plan in list_every_plan(problem) if asked.goal.pins.broken_by(plan) is None]
                best = min((best_value(asked, plan) for plan in plans if asked.fits(asked.price(plan))), default=None)
                found = solve(Book(problem=asked), patience=WITHOUT_END)
                if found is None:
                    assert best is None, (seed, path, value)
                    continue
                assert asked.goal.pins.broken_by(found.plan) is None, (seed, path, value)
                is_tried = set(list_arrangements(asked)) <= set(list_arrangements(problem)) or path == "batch_size"
                if not is_tried:  # of weights that stay where they are, or ahead where no copies run beside compute
                    assert path in ("num_micro_batches", "prefill_tokens", "weights.prefetch", "kv_cache.prefetch")
                    assert best is None or best_value(asked, found.plan) <= best
                    continue
                assert best_value(asked, found.plan) == best, (seed, path, value)
                assert best >= free.bound, (seed, path, value)
                if value == knob_value(free.plan, path):
                    assert best == best_value(problem, free.plan), (seed, path, value)
                    num_same += 1
    assert num_same > 50


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def profile(request: pytest.FixtureRequest) -> GenerationProfile:
    forms = ("fp32", "bf16", "fp32/int8")
    return profile_generation(read_model_spec(SMALL_CONFIGS[request.param]), representations=forms)


WORKLOAD = GenerationWorkload(prompt_length=12, num_new_tokens=8, num_sequences=6)


def make_machine(kind: str) -> Machine:
    if kind == "cuda":
        return replace(table_machine("T4"), host_memory_bytes=64 * GIB)
    machine = make_cpu_machine()
    return replace(
        machine, rates=replace(machine.rates, disk_write_bytes_per_s=1e8, disk_read_bytes_per_s=2e8), disk_free_bytes=GIB
    )


def pose(profile: GenerationProfile, machine: Machine, budget_bytes: int, **goal: Any) -> GenerationProblem:
    asked = GenerationGoal(device_budget_bytes=budget_bytes, **goal)
    return generation_problem(profile, workload=WORKLOAD, goal=asked, machine=machine)


def a_tight_budget(profile: GenerationProfile, machine: Machine, **goal: Any) -> int:
    """Midway between the smallest peak and what the best plan would take."""
    with pytest.raises(NoFeasiblePlan) as caught:
        find_best_generation(pose(profile, machine, 1000, **goal))
    largest = find_best_generation(pose(profile, machine, 8 * GIB, **goal)).prediction.device_peak_high_bytes
    return (int(caught.value.fields["smallest_feasible_bytes"]) + largest) // 2


@pytest.mark.breadth
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("objective", ["throughput", "largest_batch"])
def test_a_pinned_search_of_real_models_is_no_better_than_a_free_one_and_as_good_where_that_chose_the_same(
    profile: GenerationProfile, kind: str, objective: str
) -> None:
    machine = make_machine(kind)
    goal = {"objective": objective, "allow_lossy": objective == "largest_batch", "forbid": ("fp16",)}
    problem = pose(profile, machine, a_tight_budget(profile, machine, **goal), **goal)
    free = solve(Book(problem=problem), patience=WITHOUT_END)
    least = best_value(problem, free.plan)
    for path, values in TRIED.items():
        for value in {*values, knob_value(free.plan, path)}:
            if can_be_pinned(problem, path, value) is None:
                continue
            text = f"{path}={written_value(value)}"
            goal["pins"] = read_generation_pins([text])
            asked = pose(profile, machine, problem.goal.device_budget_bytes, **goal)
            found = solve(Book(problem=asked), patience=WITHOUT_END)
            assert found is not None or value != knob_value(free.plan, path), text
            if found is not None:
                assert asked.goal.pins.broken_by(found.plan) is None, text
                assert best_value(asked, found.plan) >= least, text
                if value == knob_value(free.plan, path):
                    assert best_value(asked, found.plan) == least, text


UNTRIED = [
    ["batch_size=5", "num_micro_batches=1"],
    ["num_micro_batches=3"],
    ["prefill_tokens=5"],
    ["weights.place=host", "weights.prefetch=3"],
    ["kv_cache.place=host", "kv_cache.prefetch=2"],
    ["weights.place=host", "weights.prefetch=4", "kv_cache.place=host"],
    ["weights.place=host", "weights.prefetch=1", "kv_cache.place=host", "kv_cache.prefetch=0"],
    ["allocator.expandable_segments=true"],
    ["kv_cache.attention=host", "weights.dtype=bf16", "prefill_tokens=all"],
]
"""Decisions that no search would choose by itself."""


@pytest.mark.breadth
@pytest.mark.parametrize("pins", UNTRIED, ids=" ".join)
def test_what_is_shown_keeps_pins_that_no_search_would_choose(profile: GenerationProfile, pins: list[str]) -> None:
    machine = make_machine("cuda")
    held = read_generation_pins(pins)
    problem = pose(profile, machine, GIB, allow_lossy=True, pins=held)
    found = search_generation(problem, profile=profile, machine=machine)
    assert [held.broken_by(point.plan) for point in (found.chosen, *found.frontier)] == [None] * (1 + len(found.frontier))
    with pytest.raises(NoFeasiblePlan) as caught:
        find_best_generation(pose(profile, machine, 1000, allow_lossy=True, pins=held))
    smallest = int(caught.value.fields["smallest_feasible_bytes"])
    assert held.broken_by(GenerationPlan.from_json(caught.value.fields["smallest_plan"])) is None
    enough = find_best_generation(pose(profile, machine, smallest, allow_lossy=True, pins=held))
    assert held.broken_by(enough.plan) is None


def test_no_floor_of_a_held_prefix_is_above_its_price(profile: GenerationProfile) -> None:
    machine = make_machine("cuda")
    problem = pose(profile, machine, GIB, pins=read_generation_pins(["kv_cache.place=host", "kv_cache.prefix_tokens=7"]))
    if not problem.longest_prefix:
        with pytest.raises(InvalidPlan, match="kv_cache.prefix_tokens is 7"):
            check_generation_pins(problem)
        return
    plans = list_arrangements(problem)
    assert {plan.kv_cache.prefix_tokens for plan in plans} == {7}
    for plan in plans[::3]:
        floors: Any = problem.floors(plan, [2], [plan.num_micro_batches])
        priced = problem.price(replace(plan, batch_size=2))
        assert floors.prefix_tokens[0, 0] == 7
        assert floors.total_s[0, 0] <= priced.total_s * 1.001
        assert floors.host_bytes[0, 0] <= priced.host_peak_bytes


def test_where_nothing_fits_it_says_which_pin_to_leave_out(profile: GenerationProfile) -> None:
    machine = make_machine("cuda")
    held = {"allow_lossy": True, "pins": read_generation_pins(["weights.place=device", "batch_size=6"])}
    with pytest.raises(NoFeasiblePlan) as caught:
        find_best_generation(pose(profile, machine, 1000, **held))
    assert "leave out the pin of weights.place to device (smallest peak then" in caught.value.hint
    assert "leave out the pin of batch_size to 6" in caught.value.hint


def test_what_runs_beside_a_held_batch_is_not_said_to_be_no_better(profile: GenerationProfile) -> None:
    found = search_generation(pose(profile, make_machine("cuda"), GIB, pins=read_generation_pins(["batch_size=2"])))
    assert found.chosen.plan.batch_size == 2
    assert not any("would not be better" in sentence for sentence in found.explanation)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv_cache.plaice=host", "allowed: KNOB=VALUE with one of batch_size, num_micro_batches"),
        ("weights.autocast=bf16", "allowed: KNOB=VALUE"),
        ("kv_cache.place=moon", "goal.pins.kv_cache.place is 'moon'; allowed: device, host, disk"),
        ("batch_size=some", "goal.pins.batch_size is 'some'; allowed: an integer"),
        ("batch_size=0", "goal.pins.batch_size is 0; allowed: 1 or more"),
        ("weights.prefetch=9", "goal.pins.weights.prefetch is 9; allowed: 0 to 8"),
        ("kv_cache.prefix_tokens=1", "goal.pins.kv_cache.prefix_tokens is 1; allowed: 0, or 2 or more"),
    ],
)
def test_a_pin_that_no_plan_may_have_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidWorkload, match="^[^;]*") as caught:
        read_generation_pins([text])
    assert words in caught.value.message
    assert str(caught.value.fields["field"]).startswith("goal.pins")


@pytest.mark.parametrize(
    ("pin", "goal", "words"),
    [
        ("weights.dtype=bf16", {}, "goal.pins.weights.dtype is bf16, which changes the numbers, and goal.allow_lossy is false"),
        ("kv_cache.place=disk", {"forbid": ("disk",)}, "which needs 'disk', and goal.forbid names that"),
        ("kv_cache.attention=host", {"forbid": ("host_attention",)}, "which needs 'host_attention'"),
        ("kv_cache.prefix_tokens=4", {"forbid": ("rebuild_kv",)}, "which needs 'rebuild_kv'"),
    ],
)
def test_a_pin_against_the_rest_of_the_goal_is_refused_with_it(pin: str, goal: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        GenerationGoal(device_budget_bytes=1, pins=read_generation_pins([pin]), **goal)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("pins", "goal", "words"),
    [
        (["batch_size=7"], {}, "goal.pins.batch_size is 7; there are 6 to generate: allowed are 1 to 6"),
        (["batch_size=2"], {"objective": "largest_batch"}, "largest_batch looks for just that"),
        (["prefill_tokens=4"], {"objective": "first_token"}, "a prompt that runs whole: allowed is all"),
        (["batch_size=6", "num_micro_batches=2"], {}, "leaves the last one empty"),
        (["kv_cache.attention=host", "kv_cache.place=device"], {}, "their place is device"),
        (["kv_cache.prefix_tokens=4", "kv_cache.place=device"], {}, "choose another place for them, or 0"),
        (["kv_cache.place=disk"], {}, "disk is not to be had on this machine"),
        (["kv_cache.attention=host"], {"forbid": ("offload_kv",)}, "no plan keeps every pin (kv_cache.attention host)"),
    ],
)
def test_pins_that_no_plan_can_keep_are_refused_before_a_search(
    profile: GenerationProfile, pins: list[str], goal: dict[str, Any], words: str
) -> None:
    machine = table_machine("T4", host_memory_bytes=8 * GIB, disk_bytes=0)
    with pytest.raises(InvalidPlan) as caught:
        find_best_generation(pose(profile, machine, GIB, pins=read_generation_pins(pins), **goal))
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.fields["field"].startswith("goal.pins")


def test_where_pins_ask_for_more_of_another_tier_than_there_is_that_is_said(profile: GenerationProfile) -> None:
    held = {"host_budget_bytes": 100, "pins": read_generation_pins(["weights.place=host"])}
    with pytest.raises(InvalidPlan, match=r"what is pinned \(weights.place host\) needs more than 100 B on the host"):
        find_best_generation(pose(profile, make_machine("cuda"), GIB, **held))


def test_pins_come_back_from_json_and_none_is_free() -> None:
    pins = GenerationPins(prefill_tokens="all", kv_cache=KvCachePins(place="host", prefix_tokens=0))
    assert pins.to_json() == {"prefill_tokens": "all", "kv_cache": {"place": "host", "prefix_tokens": 0}}
    assert from_json(GenerationPins, pins.to_json()) == from_json(GenerationPins, to_json(pins)) == pins
    assert pins.held["prefill_tokens"] is None
    assert pins.without("kv_cache.place").without("prefill_tokens").to_json() == {"kv_cache": {"prefix_tokens": 0}}
    assert read_generation_pins([]).is_empty


def test_a_pin_of_what_comes_ahead_holds_where_nothing_comes() -> None:
    assert read_generation_pins(["weights.prefetch=4", "kv_cache.prefetch=3"]).broken_by(GenerationPlan()) is None
    there = GenerationPlan(weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(place="host"))
    assert read_generation_pins(["weights.prefetch=4"]).broken_by(there) == "weights.prefetch"
    assert read_generation_pins(["kv_cache.prefetch=3"]).broken_by(there) == "kv_cache.prefetch"


def test_the_pins_that_make_one_plan_another_are_their_differences() -> None:
    before = GenerationPlan(prefill_tokens=8, kv_cache=KvCachePlan(place="host"))
    after = GenerationPlan(batch_size=4)
    assert pins_of_generation_change(before, after).to_json() == {
        "batch_size": 4,
        "prefill_tokens": "all",
        "kv_cache": {"place": "device"},
    }


def test_plans_of_a_held_batch_are_priced_as_any(profile: GenerationProfile) -> None:
    machine = make_machine("cuda")
    found = find_best_generation(pose(profile, machine, GIB, pins=read_generation_pins(["batch_size=4"])))
    again = estimate_generation(profile, plan=found.plan, workload=WORKLOAD, machine=machine)
    assert again.total_s == found.prediction.total_s
