"""The search by bounds against enumeration, where both can be had: models whose blocks differ in kind."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.profiles import TINY
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.core import list_likely
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.guided import solve_guided, turns
from optimizer.search.solver.nodes import Nodes
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

FORBIDDEN: tuple[Technique, ...] = (
    "accumulate",
    "chunked_loss",
    "consume_gradients",
    "offload_gradients",
    "offload_optimizer",
    "stream_weights",
    "disk",
    "remote",
)
NUM_BUDGETS = 9
WORKLOAD = TrainingWorkload(sequence_length=256, global_batch_size=4)


@cache
def _profile(*micro_batches: int) -> Profile:
    sizes = micro_batches or (WORKLOAD.global_batch_size,)
    extent = Extent(representations=("fp32",), shapes=tuple((size, WORKLOAD.sequence_length) for size in sizes))
    return profile_model(read_model_spec(TINY["gemma3_text"]), extent=extent)


@pytest.mark.parametrize("slowness", [1.0, 1e-3])
def test_the_bound_holds_for_blocks_of_two_kinds_and_the_answer_is_near_the_best(slowness: float) -> None:
    """It is the best but for rounding, also in four blocks, of which lines are coarse; such models are searched otherwise."""
    machine = table_machine("RTX 3060 12GB")
    rates = replace(machine.rates, memory_bytes_per_s=machine.rates.memory_bytes_per_s * slowness)
    problem = training_problem(
        _profile(),
        workload=WORKLOAD,
        goal=Goal(device_budget_bytes=1, forbid=FORBIDDEN),
        machine=replace(machine, rates=rates),
    )
    problem = replace(problem, price=cache(problem.price))
    assert problem.kinds[0] == problem.kinds[2] != problem.kinds[1]
    predictions = [problem.price(plan) for plan in every_plan(problem)]
    highs = sorted(prediction.device_peak_high_bytes for prediction in predictions)
    for part in range(NUM_BUDGETS):
        budgeted = problem.with_budget(highs[0] + (highs[-1] - highs[0]) * part // (NUM_BUDGETS - 1))
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        book = PriceBook(budgeted)
        solve_guided(book, problem.relax)
        assert book.floor_ms <= best_ms <= book.best_step_ms <= 1.001 * best_ms


@cache
def _free_problem() -> SearchProblem:
    """With homes and chunks to choose among, and much less memory than plain training takes."""
    machine = table_machine("RTX 3060 12GB")
    goal = Goal(device_budget_bytes=1, forbid=("accumulate",))
    problem = training_problem(_profile(), workload=WORKLOAD, goal=goal, machine=machine)
    problem = replace(problem, price=cache(problem.price))
    book = PriceBook(problem.with_budget(2**40))
    solve_guided(book, problem.relax)
    _, prediction = book.feasible()[0]
    return problem.with_budget(prediction.device_peak_high_bytes // 2)


def _solved(problem: SearchProblem, *, likely: list[Plan] | None = None, most_prices: int = 480) -> PriceBook:
    book = PriceBook(problem, most_prices=most_prices)
    solve_guided(book, problem.relax, likely=likely or [])
    return book


def test_nodes_of_likely_settings_come_first_and_once() -> None:
    problem = _free_problem()
    best = [OuterPlan.of(plan) for plan, _ in _solved(problem).feasible()[:40]]
    plain = Nodes(PriceBook(problem), problem.relax)
    all_nodes = [(node.setting, node.bound_ms) for node in plain.in_order()]
    nodes = Nodes(PriceBook(problem), problem.relax)
    first = [(node.setting, node.bound_ms) for node in nodes.holding(best)]
    rest = [(node.setting, node.bound_ms) for node in nodes.in_order()]
    assert first
    assert {setting.home for setting, _ in first} <= {setting.home for setting in best}
    assert len({*first}) == len(first)
    assert not {*first} & {*rest}
    assert sorted(bound for _, bound in [*first, *rest]) == sorted(bound for _, bound in all_nodes)
    assert nodes.floor_ms == plain.floor_ms


def test_a_search_that_knows_a_plan_is_never_worse_than_it_however_few_prices_it_has() -> None:
    problem = _free_problem()
    whole = _solved(problem)
    assert whole.best is not None
    plan, prediction = whole.best
    knowing = _solved(problem, likely=[plan], most_prices=5)
    assert knowing.best_step_ms <= prediction.step_ms
    assert knowing.floor_ms is not None
    assert knowing.floor_ms <= knowing.best_step_ms


@pytest.mark.parametrize("most_prices", [1, 20, 60])
def test_a_search_that_was_cut_off_knows_the_best_plan_whose_blocks_stay(most_prices: int) -> None:
    """Its prices may all have gone to plans that move blocks to the host, which promise more than they hold."""
    problem = _free_problem()
    plain = replace(problem, goal=replace(problem.goal, forbid=(*problem.goal.forbid, "offload")))
    assert plain.offloading == ()
    best = _solved(replace(plain, relax=problem.relax))
    assert best.best is not None
    assert _solved(problem, most_prices=most_prices).best_step_ms <= 1.001 * best.best_step_ms


def test_each_micro_batch_has_its_turn_before_a_second_home_of_any() -> None:
    goal = Goal(device_budget_bytes=_free_problem().goal.device_budget_bytes)
    problem = training_problem(_profile(1, 2, 4), workload=WORKLOAD, goal=goal, machine=table_machine("RTX 3060 12GB"))
    bases = [node.setting.base for node in Nodes(PriceBook(problem), problem.relax).in_order()]
    assert len({*bases}) > 1
    found = [node.setting.base for node in turns(PriceBook(problem), Nodes(PriceBook(problem), problem.relax))]
    assert {*found[: len({*bases})]} == {*bases}
    assert sorted(map(repr, found)) == sorted(map(repr, bases))


def test_likely_are_what_each_search_found_that_is_light_enough_and_the_best_settings_of_the_last() -> None:
    problem = _free_problem()
    roomy = _solved(problem.with_budget(2 * problem.goal.device_budget_bytes))
    tight = _solved(problem)
    budget_bytes = problem.goal.device_budget_bytes
    likely = list_likely([roomy, tight], budget_bytes=budget_bytes)
    lighter = likely[0]
    assert roomy.problem.price(lighter).device_peak_high_bytes <= budget_bytes
    assert tight.best is not None
    assert tight.best[0] in likely
    assert likely[2:] == tight.list_best(3)
    assert len({OuterPlan.of(plan).home for plan in likely[2:]}) == len(likely[2:])
