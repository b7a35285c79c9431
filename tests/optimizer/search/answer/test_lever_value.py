"""A lever's value is the plan's cost without it; levers that would not pay are named, and are not in the plan."""

from dataclasses import replace

from benchmarks.search.synthetic import MIB, synthetic_problem
from optimizer.search.answer.lever_value import list_left_out, price_without
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan


def test_a_plan_without_a_lever_is_the_same_plan_but_for_it() -> None:
    problem = synthetic_problem(budget_mib=10_000, allow_lossy=True)
    setting = OuterPlan(micro_batch_size=1, accumulation_steps=2, bits=8)
    plan = setting.plan(("recompute", "offload", "keep", "keep"))
    without = price_without(problem, plan)
    assert set(without) == set(plan.techniques) == {"recompute", "offload", "accumulate", "8bit_optimizer"}
    assert without["8bit_optimizer"] == problem.price(replace(setting, bits=32).plan(plan.activations.per_block))
    assert without["recompute"] == problem.price(setting.plan(("keep", "offload", "keep", "keep")))


def test_what_only_costs_is_named_and_stays_out() -> None:
    problem = synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4)
    found = search(problem)
    assert found.left_out
    for left_out in found.left_out:
        assert left_out.technique not in found.chosen.plan.techniques
        assert left_out.sentence in found.explanation
        assert left_out.device_change_bytes > 0 or left_out.step_change_ms > 0


def test_what_the_goal_rules_out_is_not_said_to_be_left_out() -> None:
    problem = synthetic_problem(budget_mib=10_000, forbid=("accumulate", "chunked_loss"))
    techniques = {left_out.technique for left_out in search(problem).left_out}
    assert not techniques & {"accumulate", "chunked_loss", "bf16", "8bit_optimizer"}


def test_what_would_save_memory_is_not_warned_of() -> None:
    problem = synthetic_problem(budget_mib=10_000)
    plan = OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("keep",) * 4)
    warned = {left_out.technique for left_out in list_left_out(problem, plan, problem.price(plan))}
    assert problem.price(OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("recompute",) * 4)).device_peak_bytes + MIB < (
        problem.price(plan).device_peak_bytes
    )
    assert "recompute" not in warned
