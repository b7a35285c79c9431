"""A rank of unequal devices that runs out of memory: the next plan leaves its kind of device more room, and the others theirs."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.api.replan import Failure
from optimizer.api.replan_uneven import replan_uneven
from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import GIB, MIB
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan
from tests.optimizer.search.questions.uneven.test_answer import FAST, FORBID, SLOW, WORKLOAD, ask, three_cards

GOAL = Goal(
    device_budget_bytes=UNLIMITED_BYTES,
    num_devices=3,
    pins=read_pins(["batch.micro_batch_size=2", "layout.num_devices=3"]),
    forbid=FORBID,
)


@pytest.fixture
def machine(llama_profile: Profile) -> Machine:
    """Slow cards with hardly more memory than keeping everything takes there."""
    plain = ask(llama_profile, three_cards(), pins=GOAL.pins).result.chosen.prediction
    held_bytes = next(rank.peak_high_bytes for rank in plain.ranks if rank.device == SLOW)
    return three_cards(slow_memory_bytes=int(1.02 * held_bytes))


@pytest.fixture
def plain(llama_profile: Profile, machine: Machine) -> PricedPlan:
    return ask(llama_profile, machine, pins=GOAL.pins).result.chosen


def failed(priced: PricedPlan, *, rank: int, missing_bytes: int) -> Failure:
    """The attempt whose rank lacked so many bytes beyond what its device has."""
    found = priced.prediction.ranks[rank]
    fields: dict[str, Any] = {
        "rank": rank,
        "stage": "steady_step",
        "requested_bytes": found.memory_bytes - found.peak_bytes + missing_bytes,
        "in_use_bytes": found.peak_bytes,
        "budget_bytes": found.memory_bytes,
    }
    return Failure(plan=priced.plan, cause="step", fields=fields)


def replan(profile: Profile, machine: Machine, failures: list[Failure]) -> PricedPlan:
    return replan_uneven(failures, profile, WORKLOAD, GOAL, machine=machine, checkpoint_of=None)


def test_the_kind_of_device_that_ran_out_gets_a_plan_with_more_room(
    llama_profile: Profile, machine: Machine, plain: PricedPlan
) -> None:
    rank = next(number for number, each in enumerate(plain.prediction.ranks) if each.device == SLOW)
    chosen = replan(llama_profile, machine, [failed(plain, rank=rank, missing_bytes=MIB // 4)])
    assert chosen.plan != plain.plan
    slow = [each for each in chosen.prediction.ranks if each.device == SLOW]
    assert all(each.peak_high_bytes < plain.prediction.ranks[rank].peak_high_bytes for each in slow)
    fast = next(share for share in chosen.plan.layout.ranks if share.device == FAST)
    assert set(fast.per_block or ()) == {"keep"}


def test_no_plan_is_tried_twice(
    llama_profile: Profile, machine: Machine, plain: PricedPlan
) -> None:
    rank = next(number for number, each in enumerate(plain.prediction.ranks) if each.device == SLOW)
    failures = [failed(plain, rank=rank, missing_bytes=MIB // 4)]
    second = replan(llama_profile, machine, failures)
    ranks = [number for number, each in enumerate(second.prediction.ranks) if each.device == SLOW]
    failures.append(failed(second, rank=ranks[0], missing_bytes=MIB // 4))
    third = replan(llama_profile, machine, failures)
    assert len({repr(each.plan) for each in (plain, second, third)}) == 3


def test_where_nothing_else_fits_the_error_says_how_much_was_missing(
    llama_profile: Profile, machine: Machine, plain: PricedPlan
) -> None:
    with pytest.raises(NoFeasiblePlan) as raised:
        replan(llama_profile, machine, [failed(plain, rank=each, missing_bytes=64 * GIB) for each in range(3)])
    fields = raised.value.fields
    assert fields["smallest_feasible_bytes"] > fields["budget_bytes"]


def test_a_stage_that_ran_out_leaves_more_of_its_kind_of_device_free(llama_profile: Profile) -> None:
    goal = replace(GOAL, pins=read_pins(["batch.micro_batch_size=2", "layout.stage_blocks=1,1,2"]))
    plain = ask(llama_profile, three_cards(), pins=goal.pins).result.chosen
    rank = max(
        (number for number, each in enumerate(plain.prediction.ranks) if each.device == SLOW),
        key=lambda number: plain.prediction.ranks[number].peak_high_bytes,
    )
    held_bytes = plain.prediction.ranks[rank].peak_high_bytes
    machine = three_cards(slow_memory_bytes=int(1.02 * held_bytes))
    tight = ask(llama_profile, machine, pins=goal.pins).result.chosen
    failure = failed(tight, rank=rank, missing_bytes=MIB // 4)
    chosen = replan_uneven([failure], llama_profile, WORKLOAD, goal, machine=machine, checkpoint_of=None)
    assert chosen.plan.layout.stage_blocks == (1, 1, 2)
    assert chosen.plan != tight.plan
    slow = [each for each in chosen.prediction.ranks if each.device == SLOW]
    assert all(each.peak_high_bytes < held_bytes for each in slow)


def test_after_the_hosts_killer_every_rank_has_less_on_the_host_and_devices_may_have_more(llama_profile: Profile) -> None:
    machine = three_cards()
    forbid = tuple(name for name in FORBID if name not in ("offload_optimizer", "offload_gradients"))
    pins = ["batch.micro_batch_size=2", "layout.num_devices=3", "optimizer_state.place=host"]
    ran = ask(llama_profile, machine, pins=read_pins([*pins, "optimizer_state.fraction=1.0"]), forbid=forbid).result.chosen
    failure = Failure(plan=ran.plan, cause="host_killed", fields={"tier": "host"})
    goal = replace(GOAL, pins=read_pins(pins), forbid=forbid)
    again = replan_uneven([failure], llama_profile, WORKLOAD, goal, machine=machine, checkpoint_of=None)
    # the budget of the host is of all ranks together
    assert 0 < again.prediction.host_peak_bytes < 0.97 * ran.prediction.host_peak_bytes
    assert again.prediction.device_peak_bytes > ran.prediction.device_peak_bytes
