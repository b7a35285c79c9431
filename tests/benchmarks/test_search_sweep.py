"""The sweep's arithmetic, the policies that torch's integer programs come to, and one tiny sweep on real steps."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.common.alternatives import Job
from benchmarks.search.rivals.sac import (
    Moment,
    Statistics,
    Unit,
    collect_statistics,
    find_policy,
    fit_lines,
    policy_ladder,
    selective_contexts,
    solve_ops,
    solve_units,
)
from benchmarks.search.subjects import gpt2
from benchmarks.search.sweep_summary import (
    Rival,
    compare,
    group_races,
    is_near_goal,
    pick_rivals,
    spread_budgets,
    summarize,
    won_back,
)
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.workload import TrainingWorkload

MIB = 2**20
RIVALS = (
    Rival(name="plain", peak_bytes=100, over_plain=1.0),
    Rival(name="full recompute", peak_bytes=40, over_plain=1.3),
    Rival(name="every other", peak_bytes=70, over_plain=1.15),
    Rival(name="micro-batches", peak_bytes=50, over_plain=1.02, accumulates=True),
    Rival(name="compiled", peak_bytes=60, over_plain=0.9, is_fused=True),
)


def point(**changes: Any) -> dict[str, Any]:
    return {
        "what": "point",
        "levers": "blocks",
        "model": "a",
        "finished": True,
        "budget_bytes": 100,
        "peak_bytes": 90,
        "over_plain": 1.0,
        "full_over_plain": 1.2,
        "over_best": 1.0,
        **changes,
    }


def test_budgets_lie_evenly_between_their_ends() -> None:
    assert spread_budgets(10, 43, count=4) == [10, 21, 32, 43]


def test_rivals_are_the_fastest_that_fit_and_one_with_fused_kernels() -> None:
    assert pick_rivals(RIVALS, budget_bytes=75, accumulates=False) == ["every other", "full recompute", "compiled"]


def test_rivals_of_plans_that_accumulate_may_too() -> None:
    assert pick_rivals(RIVALS, budget_bytes=75, accumulates=True) == ["micro-batches", "every other", "compiled"]


def test_no_rival_where_none_fits() -> None:
    assert pick_rivals(RIVALS, budget_bytes=39, accumulates=True) == []


def test_a_plan_is_compared_with_the_fastest_of_its_race_that_fits() -> None:
    times = {
        "plain": [10.0, 20.0, 10.0],
        "full recompute": [13.0, 26.0, 13.0],
        "ours": [11.0, 22.0, 11.0],
        "every other": [12.0, 20.0, 10.0],
        "compiled": [9.0, 18.0, 9.0],
    }
    row = compare({"contender": "ours", "budget_bytes": 75}, times, RIVALS)
    assert (row["best"], row["over_best"]) == ("every other", 1.1)
    assert (row["fused"], row["over_fused"]) == ("compiled", round(11 / 9, 4))
    assert (row["over_plain"], row["full_over_plain"], row["ms"]) == (1.1, 1.3, 11.0)


def test_what_is_near_the_goal_on_either_side_runs_again() -> None:
    assert is_near_goal({"over_best": 1.012})
    assert is_near_goal({"over_best": 0.9, "over_fused": 1.049})
    assert not is_near_goal({"over_best": 1.06, "over_fused": 1.0})
    assert not is_near_goal({"best": None})


def test_races_run_as_one_while_there_is_room() -> None:
    races = {0: ("plain", "full", "a"), 2: ("plain", "full", "b"), 3: ("plain", "full", "a", "c", "d")}
    assert group_races(races, room=4) == [([0, 2], ["plain", "full", "a", "b"]), ([3], ["plain", "full", "a", "c", "d"])]
    assert group_races(races, room=9) == [([0, 2, 3], ["plain", "full", "a", "b", "c", "d"])]


def test_won_back_is_the_share_of_what_full_recompute_adds() -> None:
    assert won_back([point(over_plain=1.05), point(over_plain=1.15)]) == pytest.approx(0.5)


def test_faster_than_plain_wins_back_no_more_than_all() -> None:
    assert won_back([point(over_plain=0.8)]) == 1.0


def test_slower_than_full_recompute_counts_against() -> None:
    assert won_back([point(over_plain=1.3)]) == pytest.approx(-0.5)


def test_nothing_is_won_back_where_recomputing_costs_nothing() -> None:
    assert won_back([point(full_over_plain=0.99)]) is None


def test_a_peak_over_its_budget_misses_the_goal() -> None:
    summary = summarize([point(), point(peak_bytes=101)])
    entry = summary["sweep: measured peaks within the budget"]
    assert (entry["value"], entry["met"]) == ("1 of 2", False)


def test_one_point_behind_misses_the_goal() -> None:
    summary = summarize([point(), point(over_best=1.04)])
    entry = summary["sweep, blocks: step time over the fastest that fits, worst"]
    assert (entry["value"], entry["met"]) == ("1.04 (1 of 2 within)", False)


def test_budgets_below_full_recompute_are_not_judged_by_it() -> None:
    below = point(levers="all, below", over_plain=3.0)
    del below["over_best"]
    names = summarize([below])
    assert not any("won back" in name for name in names)


def test_won_back_is_averaged_over_models() -> None:
    summary = summarize([point(over_plain=1.02), point(model="b", over_plain=1.1, full_over_plain=1.4)])
    entry = summary["sweep, blocks: won back of what full recompute costs"]
    assert (entry["value"], entry["met"]) == (0.825, True)


def ops(**changes: Any) -> Any:
    """Three ops of 4, 8 and 2 MiB that take 8, 1 and 1 ms."""
    return SimpleNamespace(
        **{
            "func_names": ["mm", "mul", "mm"],
            "memory": [4 * MIB, 8 * MIB, 2 * MIB],
            "runtimes": [8.0, 1.0, 1.0],
            "view_like_ops": [],
            "rand_ops": [],
            "inplace_ops": [],
            "force_store_random": False,
            **changes,
        }
    )


def statistics_of(num_blocks: int) -> Statistics:
    """Blocks that save 10 MiB each, of 14 that their ops make, beside 16 MiB of weights and gradients."""
    unit = Unit(
        name="block", saved_bytes=10 * MIB, made_bytes=14 * MIB, forward_ms=10.0, lines=((1.0, 0.0),), ops=ops()
    )
    units = tuple(unit for _ in range(num_blocks))
    moments = tuple(
        Moment(live_bytes=16 * MIB + 10 * MIB * (index + 1), units_before=tuple(range(index)))
        for index in range(num_blocks + 1)
    )
    return Statistics(units=units, moments=moments)


def test_nothing_is_checkpointed_where_plain_training_fits() -> None:
    statistics = statistics_of(4)
    assert solve_units(statistics, budget_bytes=statistics.plain_bytes) == (0.0,) * 4


def test_no_more_is_discarded_than_the_budget_asks_for() -> None:
    statistics = statistics_of(4)
    discarded = solve_units(statistics, budget_bytes=statistics.plain_bytes - 5 * MIB)
    assert discarded is not None
    freed = sum(14 * MIB * share - 4 * MIB for share in discarded if share > 0)
    assert freed + 1e-3 * MIB >= 5 * MIB


def test_no_way_is_found_below_what_discarding_everything_leaves() -> None:
    assert solve_units(statistics_of(4), budget_bytes=20 * MIB) is None


def test_the_costliest_ops_for_their_bytes_are_kept() -> None:
    assert solve_ops(ops(), kept_share=0.45) == (True, False, True)


def test_views_are_never_kept_and_ops_in_place_go_with_what_they_change() -> None:
    assert solve_ops(ops(view_like_ops=[0]), kept_share=1.0) == (False, True, True)
    assert solve_ops(ops(inplace_ops=[(2, 1)]), kept_share=0.5) == (True, False, False)


def test_a_policy_names_the_ops_it_decides_about() -> None:
    statistics = statistics_of(3)
    policy = find_policy(statistics, budget_bytes=statistics.plain_bytes - 12 * MIB)
    assert policy is not None
    assert any(saves is not None for saves in policy.saves)
    assert policy.names == (("mm", "mul", "mm"),) * 3


def test_a_ladder_of_policies_goes_from_the_least_budget_up() -> None:
    shares = [share for share, _ in policy_ladder(statistics_of(3), count=4)]
    assert shares == sorted(shares)
    assert len(shares) > 1


def test_two_lines_are_found_where_a_curve_bends() -> None:
    shares = np.linspace(0.0, 1.0, 11)
    times = np.where(shares < 0.5, 0.2 * shares, 0.1 + 1.8 * (shares - 0.5))
    (slope, start), (steep, _) = fit_lines(shares, times)
    assert slope == pytest.approx(0.2, abs=0.02)
    assert start == pytest.approx(0.0, abs=0.01)
    assert steep == pytest.approx(1.8, abs=0.02)


def test_results_written_to_in_place_are_kept_and_gradients_stay_the_same() -> None:
    """GPT-2's attention with dropout adds its mask in place to a product whose result may be kept."""
    spec = read_model_spec({**gpt2(32, 2, 64), "n_positions": 32})
    workload = TrainingWorkload(sequence_length=16, global_batch_size=2)
    job = Job(spec=spec, workload=workload, device=torch.device("cpu"))
    gradients = []
    for policy in (None, *(policy for _, policy in policy_ladder(collect_statistics(job), count=3))):
        model = build_model(spec, seed=1)
        for index, block in enumerate(find_blocks(model)):
            if policy is not None and (saves := policy.saves[index]) is not None:
                contexts = functools.partial(selective_contexts, policy.names[index], saves)
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        torch.manual_seed(3)
        ids, labels = job.tokens()
        model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(gradients) > 2
    for other in gradients[1:]:
        for mine, plain in zip(other, gradients[0], strict=True):
            assert torch.equal(mine, plain)


def test_ops_in_place_belong_to_what_they_write_to_in_every_look() -> None:
    """torch's estimator took a freed result for the one that was written to, now and then."""
    spec = read_model_spec({**gpt2(32, 2, 64), "n_positions": 32})
    workload = TrainingWorkload(sequence_length=16, global_batch_size=2)
    job = Job(spec=spec, workload=workload, device=torch.device("cpu"))
    for _ in range(20):
        for unit in collect_statistics(job).units:
            written = {unit.ops.func_names[parent] for _, parent in unit.ops.inplace_ops}
            assert written == {"empty_like"}
