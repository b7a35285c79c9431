"""A model cut over unequal devices: what fits nowhere else, where the blocks go, and when a slow link makes a cut worth it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import GIB
from optimizer.estimate.job.shortfalls import EVERY_STAGE, Shortfall
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.joined import join_machines
from optimizer.hardware.machine import Machine
from optimizer.hardware.mixed import play_devices
from optimizer.hardware.peers import network_link
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.pins.training import read_pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.cutting import shared_cut
from optimizer.search.problem import OuterPlan
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.uneven.answer import answer_uneven
from optimizer.search.questions.uneven.cuts import list_orders
from optimizer.search.training import training_problem
from optimizer.workload import Adapter
from tests.optimizer.search.questions.uneven.test_answer import kind_of
from tests.optimizer.search.test_cut_model import FORBID as ELSEWHERE
from tests.optimizer.search.test_cut_model import WORKLOAD, profile_of

NUM_BLOCKS = 6
FORBID: tuple[Any, ...] = (*ELSEWHERE, "shard_state", "chunked_loss")
CUT_ALONE = (*FORBID, "data_parallel")
ONE_BY_ONE = "batch.micro_batch_size=1"


def played(*sizes: int) -> Machine:
    return replace(play_devices(make_cpu_machine(), sizes), num_threads=len(sizes))


def names_of(machine: Machine) -> tuple[str, ...]:
    return tuple(kind.device.name for kind in machine.kinds for _ in range(kind.num_devices))


def ask(machine: Machine, *pins: str, profile: Profile | None = None, **goal: Any) -> ObjectiveAnswer:
    values = {"device_budget_bytes": UNLIMITED_BYTES, "num_devices": machine.total_devices, "forbid": FORBID, **goal}
    asked = Goal(**values, pins=read_pins(pins))
    return plan_profiled(profile or profile_of(), machine=machine, workload=WORKLOAD, goal=asked, with_ways_out=False)


def price(machine: Machine, cut: tuple[int, ...], names: tuple[str, ...] = ()) -> Prediction:
    """The smallest plan of a cut: one sequence at a time, and every block runs again."""
    layout = DeviceLayout(num_devices=len(cut), stage_blocks=cut, ranks=tuple(RankShare(device=name) for name in names))
    plan = OuterPlan(micro_batch_size=1, accumulation_steps=8, layout=layout).plan(("recompute",) * NUM_BLOCKS)
    return estimate_training(profile_of(), plan=plan, workload=WORKLOAD, machine=machine)


def sizes_that_need(cut: tuple[int, int]) -> tuple[int, int]:
    """Memory with which the smallest plan of this cut just fits."""
    found = price(replace(make_cpu_machine(), num_devices=2), cut)
    low, high = (round(num_bytes * 1.02) for num_bytes in found.rank_peak_bytes)
    return low, high


def test_a_cut_fits_where_no_equal_cut_and_no_device_alone_does() -> None:
    machine = played(*sizes_that_need((1, 5)))
    small, large = (kind.device.memory_bytes for kind in machine.kinds)
    alone = price(replace(make_cpu_machine(), num_devices=2), (3, 3))
    assert min(alone.rank_peak_bytes) > small
    found = ask(machine, ONE_BY_ONE)
    chosen = found.result.chosen
    assert chosen.plan.layout.stage_blocks in ((1, 5), (5, 1))
    assert chosen.verdict == "fits"
    assert all(rank.peak_high_bytes <= rank.memory_bytes for rank in chosen.prediction.ranks)
    assert {rank.memory_bytes for rank in chosen.prediction.ranks} == {small, large}
    singles = [option for option in found.layouts if option.layout.num_devices == 1]
    assert len(singles) == 2
    assert all("nothing fits" in option.sentence for option in singles)
    (sentence,) = (option.sentence for option in found.layouts if option.layout.is_cut)
    assert "the model cut into" in sentence
    assert ": chosen" in sentence
    said = " ".join(found.result.explanation)
    assert f"rank 0 on {chosen.prediction.ranks[0].device} has block" in said
    assert f"rank 1 on {chosen.prediction.ranks[1].device} has block" in said


def test_where_even_a_cut_does_not_fit_nothing_does() -> None:
    low, high = sizes_that_need((1, 5))
    with pytest.raises(NoFeasiblePlan):
        ask(played(low * 9 // 10, high * 9 // 10), ONE_BY_ONE)


def test_what_is_forbidden_is_not_cut() -> None:
    with pytest.raises(NoFeasiblePlan):
        ask(played(*sizes_that_need((1, 5))), ONE_BY_ONE, forbid=(*FORBID, "cut_model"))


def test_a_faster_device_has_more_blocks() -> None:
    chosen = ask(two_cards(ratio=3.0), ONE_BY_ONE, forbid=CUT_ALONE).result.chosen
    layout = chosen.plan.layout
    assert layout.is_cut
    blocks = {share.device: number for share, number in zip(layout.ranks, layout.stage_blocks, strict=True)}
    assert blocks["fast"] > 2 * blocks["slow"] - 1 > 0


def two_cards(*, ratio: float, slow_memory_bytes: int = 8 * GIB) -> Machine:
    slow = kind_of("RTX 3060 12GB", flops_per_s=1e9, memory_bytes=slow_memory_bytes)
    fast = kind_of("RTX 4090", flops_per_s=ratio * 1e9, memory_bytes=16 * GIB)
    fast, slow = (replace(kind, device=replace(kind.device, name=name)) for kind, name in ((fast, "fast"), (slow, "slow")))
    base = replace(make_cpu_machine(), device=slow.device, rates=slow.rates, others=(fast,), num_devices=1)
    return replace(base, peers=network_link(bits_per_s=1e12, delay_s=0.0), host_memory_bytes=64 * GIB)


@pytest.mark.parametrize(("share", "bits_per_s"), [(1.0, 1e12), (0.7, 1e12), (1.0, 1e7)])
def test_no_cut_is_faster_and_the_bound_is_below_all(share: float, bits_per_s: float) -> None:
    """Every cut in both orders, as many recomputed blocks in front of each stage as one may want."""
    roomy = two_cards(ratio=1.2)
    widest = ask(roomy, "batch.micro_batch_size=2", forbid=CUT_ALONE).result.chosen
    used = max(rank.peak_high_bytes for rank in widest.prediction.ranks if rank.device == "slow")
    machine = two_cards(ratio=1.2, slow_memory_bytes=int(share * used))
    chosen = ask(machine, "batch.micro_batch_size=2", forbid=CUT_ALONE).result.chosen
    if bits_per_s < 1e12:
        # Over so slow a link one device is chosen; what the cut costs there, and its bound, is still asked.
        machine = replace(machine, peers=network_link(bits_per_s=bits_per_s, delay_s=0.001))
    priced = [
        estimate_training(profile_of(), plan=plan, workload=WORKLOAD, machine=machine) for plan in every_plan(chosen.plan)
    ]
    best_ms = min(found.step_ms for found in priced if found.fits_within(UNLIMITED_BYTES))
    assert estimate_training(profile_of(), plan=chosen.plan, workload=WORKLOAD, machine=machine).step_ms <= best_ms * 1.01
    problem = training_problem(
        profile_of(),
        workload=WORKLOAD,
        goal=Goal(device_budget_bytes=UNLIMITED_BYTES),
        machine=machine,
        layout=chosen.plan.layout,
    )
    assert problem.rank_prices is not None
    crossing_ms = 0.0 if bits_per_s == 1e12 else 4 * (1000 * 2 * 64 * 64 * 4 * 8 / bits_per_s + 1)
    assert crossing_ms < problem.rank_prices.least_ms(chosen.plan) <= best_ms


def every_plan(plan: Plan) -> Iterator[Plan]:
    for ranks in (plan.layout.ranks, plan.layout.ranks[::-1]):
        for first in range(1, NUM_BLOCKS):
            for again in range(first + 1):
                for later in range(NUM_BLOCKS - first + 1):
                    blocks: tuple[Any, ...] = (
                        *("recompute",) * again,
                        *("keep",) * (first - again),
                        *("recompute",) * later,
                        *("keep",) * (NUM_BLOCKS - first - later),
                    )
                    layout = replace(plan.layout, ranks=ranks, stage_blocks=(first, NUM_BLOCKS - first))
                    yield replace(plan, layout=layout, activations=replace(plan.activations, per_block=blocks))


def test_a_stage_on_a_small_device_recomputes_while_the_other_keeps() -> None:
    pins = ("layout.num_devices=2", "batch.micro_batch_size=2", "layout.stage_blocks=3,3")
    machine = played(GIB, 2 * GIB)
    plain = ask(machine, *pins).result.chosen
    assert set(plain.plan.activations.per_block) == {"keep"}
    needed = [rank.peak_high_bytes for rank in plain.prediction.ranks]
    short = played(int(0.9 * min(needed)), 2 * GIB)
    layout = ask(short, *pins).result.chosen
    by_device = {
        share.device: set(layout.plan.activations.per_block[3 * rank : 3 * rank + 3])
        for rank, share in enumerate(layout.plan.layout.ranks)
    }
    small, large = names_of(short)
    assert by_device[large] == {"keep"}
    assert by_device[small] & {"recompute", "selective"}


def test_a_pinned_cut_is_kept_on_either_order_of_devices() -> None:
    found = ask(played(GIB, 2 * GIB), "layout.stage_blocks=2,4")
    assert found.result.chosen.plan.layout.stage_blocks == (2, 4)
    assert all(option.layout.is_cut for option in found.layouts)


def test_a_kind_that_ran_out_leaves_more_of_itself_free() -> None:
    machine = played(GIB, 2 * GIB)
    goal = Goal(device_budget_bytes=UNLIMITED_BYTES, num_devices=2, forbid=FORBID, pins=read_pins(["layout.stage_blocks=3,3"]))
    small, _ = names_of(machine)
    asked: dict[str, Any] = {"machine": machine, "make_problem": training_problem}
    plain = answer_uneven(profile_of(), WORKLOAD, goal, **asked).result.chosen
    spared_bytes = GIB - max(rank.peak_high_bytes for rank in plain.prediction.ranks if rank.device == small) + 1
    short = Shortfall(stage=EVERY_STAGE, tier="device", device=small, num_bytes=spared_bytes)
    again = answer_uneven(profile_of(), WORKLOAD, goal, **asked, shortfalls=[short]).result.chosen
    assert again.plan != plain.plan
    assert all(rank.peak_high_bytes <= GIB - spared_bytes for rank in again.prediction.ranks if rank.device == small)


@pytest.mark.parametrize(("bits_per_s", "delay_s", "is_cut"), [(2e7, 0.01, True), (1e13, 0.0, False)])
def test_over_a_slow_link_hidden_states_cross_in_place_of_larger_gradients(
    bits_per_s: float, delay_s: float, *, is_cut: bool
) -> None:
    adapter = Adapter(rank=32)
    profile = profile_of(adapter)
    both = two_cards(ratio=1.0)
    machines = [replace(both.with_kind(name), name=place, peers=None) for name, place in (("slow", "here"), ("fast", "office"))]
    machine = join_machines(machines, link=network_link(bits_per_s=bits_per_s, delay_s=delay_s))
    goal = Goal(
        device_budget_bytes=UNLIMITED_BYTES,
        num_devices=2,
        forbid=FORBID,
        pins=read_pins(["layout.num_devices=2", "batch.micro_batch_size=4"]),
    )
    workload = replace(WORKLOAD, mode="finetune", adapter=adapter)
    found = plan_profiled(profile, machine=machine, workload=workload, goal=goal, with_ways_out=False)
    hidden_bytes = 2 * 4 * WORKLOAD.tokens_per_step * 64
    assert 4 * profile.num_parameters > hidden_bytes
    chosen = found.result.chosen
    assert chosen.plan.layout.is_cut == is_cut
    assert {rank.device for rank in chosen.prediction.ranks} == {"slow@here", "fast@office"}


def test_kinds_of_one_machine_stand_beside_each_other() -> None:
    names = ("x@a", "y@b", "z@a")
    played_kinds = zip(played(1, 2, 3).kinds, names, strict=True)
    kinds = [replace(kind, device=replace(kind.device, name=name)) for kind, name in played_kinds]
    orders = [[kind.device.name for kind in order] for order in list_orders(kinds)]
    assert sorted(orders) == [["x@a", "z@a", "y@b"], ["y@b", "x@a", "z@a"], ["y@b", "z@a", "x@a"], ["z@a", "x@a", "y@b"]]


@pytest.mark.parametrize(("weights", "cut"), [((1, 1), (3, 3)), ((1, 5), (1, 5)), ((1, 100), (1, 5)), ((2, 1, 3), (2, 1, 3))])
def test_blocks_are_dealt_out_by_weight_and_none_goes_without(weights: tuple[float, ...], cut: tuple[int, ...]) -> None:
    assert shared_cut(NUM_BLOCKS, weights) == cut
