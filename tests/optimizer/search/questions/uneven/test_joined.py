"""Machines that a network joins: what crosses it is priced by its rate and its delay, and it is said when not to use it."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.joined import join_machines
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import network_link
from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.search.core import find_chosen
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.uneven import answer
from tests.optimizer.search.questions.uneven.test_answer import FAST, FORBID, SLOW, WORKLOAD, three_cards

INSIDE = PeerLink(kind="host", bytes_per_s=1e12, latency_s=1e-7, source="measured")


def joined(*, bits_per_s: float, delay_s: float, **cards: Any) -> Machine:
    """Two slow cards in the office, and a fast one here."""
    both = three_cards(**cards)
    office = replace(both.with_kind(SLOW), name="office", peers=INSIDE)
    here = replace(both.with_kind(FAST), name="here", peers=None)
    return join_machines([here, office], link=network_link(bits_per_s=bits_per_s, delay_s=delay_s))


def ask(profile: Profile, machine: Machine, *pins: str, **goal: Any) -> ObjectiveAnswer:
    values = {"device_budget_bytes": UNLIMITED_BYTES, "num_devices": 3, "forbid": FORBID, "pins": read_pins(pins), **goal}
    return plan_profiled(profile, machine=machine, workload=WORKLOAD, goal=Goal(**values), with_ways_out=False)


def test_machines_share_a_step_over_a_link_that_is_fast_enough(llama_profile: Profile) -> None:
    found = ask(llama_profile, joined(bits_per_s=1e12, delay_s=0.0))
    chosen = found.result.chosen
    assert [rank.device for rank in chosen.prediction.ranks] == [f"{FAST}@here", f"{SLOW}@office", f"{SLOW}@office"]
    assert chosen.plan.rank_sequences[0] > chosen.plan.rank_sequences[1]
    said = " ".join(found.result.explanation)
    assert f"rank 0 on {FAST}@here takes" in said
    assert f"rank 2 on {SLOW}@office takes" in said


@pytest.mark.parametrize(("ratio", "alone"), [(3.0, f"{FAST}@here alone"), (1.0, f"2x {SLOW}@office alone")])
def test_one_device_or_one_machine_is_chosen_over_a_slow_link(llama_profile: Profile, ratio: float, alone: str) -> None:
    found = ask(llama_profile, joined(bits_per_s=1e6, delay_s=0.02, ratio=ratio))
    chosen = next(option.sentence for option in found.layouts if ": chosen" in option.sentence)
    assert chosen.startswith(alone)
    assert "would wait for each other for longer than they save" in chosen
    shared = next(option.sentence for option in found.layouts if option.sentence.startswith(f"1x {FAST}@here and 2x"))
    assert "not searched" in shared
    assert shared.endswith("ms of it for the network")


def test_like_machines_are_searched_once_and_take_the_same_under_their_own_names(
    llama_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is too slow for both together."""
    searched: list[str] = []

    def search(problem: SearchProblem, **limit: float) -> PricedPlan:
        searched.append(problem.layout.data)
        return find_chosen(problem, **limit)

    monkeypatch.setattr(answer, "find_chosen", search)
    both = three_cards(ratio=1.0)
    sites = [replace(both.with_kind(SLOW), name=name, peers=INSIDE) for name in ("here", "office")]
    machine = join_machines(sites, link=network_link(bits_per_s=1e6, delay_s=0.02))
    found = ask(llama_profile, machine, num_devices=4)
    here, office = (
        [option.best for option in found.layouts if f"{SLOW}@{name} alone" in option.sentence and option.best is not None]
        for name in ("here", "office")
    )
    assert len(here) == len(office) == len(searched) > 0
    for one, other in zip(here, office, strict=True):
        assert one.prediction.step_ms == other.prediction.step_ms
        assert {rank.device for rank in one.plan.layout.ranks} == {f"{SLOW}@here"}
        assert {rank.device for rank in other.plan.layout.ranks} == {f"{SLOW}@office"}
        assert {rank.device for rank in other.prediction.ranks} == {f"{SLOW}@office"}


def test_ranks_of_one_machine_exchange_over_its_own_link(llama_profile: Profile) -> None:
    steps_ms = [
        ask(llama_profile, joined(bits_per_s=bits_per_s, delay_s=0.02), "layout.num_devices=2").result.chosen.prediction.step_ms
        for bits_per_s in (1e6, 1e12)
    ]
    assert steps_ms[0] == steps_ms[1] > 0


@pytest.mark.parametrize("data", ["replicated", "zero1", "zero2"])
def test_gradients_cross_at_the_networks_rate_and_with_its_delay(llama_profile: Profile, data: str) -> None:
    bits_per_s, delay_s = 1e8, 0.02
    link = network_link(bits_per_s=bits_per_s, delay_s=delay_s)
    pins = ("layout.num_devices=3", f"layout.data={data}", "batch.accumulation_steps=1")
    forbid = tuple(name for name in FORBID if name != "shard_state")
    found = ask(llama_profile, joined(bits_per_s=bits_per_s, delay_s=delay_s), *pins, forbid=forbid).result.chosen
    assert found.plan.layout.data == data
    sizes = list_tensors(llama_profile).num_elements
    # A ring's sum of each tensor, or a chain's and then that of its new weights (NCCL).
    least_s = (4 / 3 if data == "replicated" else 2.0) * 4 * sum(sizes) / link.bytes_per_s + 4 * len(sizes) * link.latency_s
    busy_s = found.prediction.lane_busy_ms["network"] / 1000
    assert least_s < busy_s < least_s + 64 * link.latency_s
    assert found.prediction.step_ms > 1000 * least_s
