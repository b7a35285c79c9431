"""Replicas of what devices of several machines share: when they are made, what crosses the network, and what is refused."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import GIB
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.joined import cards_of, join_machines
from optimizer.hardware.machine import DeviceKind, Machine
from optimizer.hardware.peers import network_link
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.pins.training import read_pins
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.search.questions.layout_list import list_hybrid_modes, list_layouts
from optimizer.search.questions.uneven.question import UnevenQuestion
from optimizer.search.questions.uneven.replicas import count_replicas, list_together
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import make_case
from tests.optimizer.search.questions.uneven.test_answer import FORBID, SLOW, WORKLOAD, three_cards
from tests.optimizer.search.questions.uneven.test_joined import INSIDE, ask

SHARING = (*(name for name in FORBID if name != "shard_state"), "cut_model", "local_steps")


def two_sites(*, bits_per_s: float = 1e9, delay_s: float = 0.001, memory_bytes: int = 8 * GIB) -> Machine:
    """Two cards here and two in the office, all alike."""
    both = three_cards(slow_memory_bytes=memory_bytes)
    sites = [replace(both.with_kind(SLOW), name=name, peers=INSIDE) for name in ("here", "office")]
    return join_machines(sites, link=network_link(bits_per_s=bits_per_s, delay_s=delay_s))


def test_a_replica_is_as_large_as_each_machine_has_devices_for() -> None:
    def team(text: str) -> list[DeviceKind]:
        return list(cards_of(text, links={"office": "1Gbit,1ms"}).kinds)

    assert count_replicas(team("2x RTX 4090, 2x RTX 4090@office"), are_alike=False) == 2
    assert count_replicas(team("4x RTX 4090, 2x RTX 3090@office"), are_alike=True) == 3
    assert count_replicas(team("RTX 4090, RTX 3090, 2x RTX 3060@office"), are_alike=False) == 2
    assert count_replicas(team("RTX 4090, RTX 3090, 2x RTX 3060@office"), are_alike=True) == 4
    assert count_replicas(team("RTX 4090, 2x RTX 3060@office"), are_alike=False) == 3


@pytest.mark.parametrize("data", ["zero2", "zero3"])
def test_between_machines_gradients_are_summed_once_and_no_weights_cross(llama_profile: Profile, data: str) -> None:
    machine = two_sites(bits_per_s=1e8, delay_s=0.02)
    pins = ("layout.num_devices=4", f"layout.data={data}", "layout.replicas=2", "batch.accumulation_steps=1")
    chosen = ask(llama_profile, machine, *pins, num_devices=4, forbid=SHARING).result.chosen
    layout, link = chosen.plan.layout, machine.peers
    assert (layout.data, layout.replicas, link is not None) == (data, 2, True)
    assert [share.device for share in layout.ranks] == [f"{SLOW}@here"] * 2 + [f"{SLOW}@office"] * 2
    sizes = list_tensors(llama_profile).num_elements
    assert link is not None
    # A ring of two for each tensor over the network; within a machine everything is a thousand times as fast.
    least_s = 4 * sum(sizes) / link.bytes_per_s + 2 * len(sizes) * link.latency_s
    busy_s = chosen.prediction.lane_busy_ms["network"] / 1000
    assert least_s < busy_s < 1.02 * least_s + 64 * link.latency_s


def test_replicas_take_half_the_time_on_the_network_that_sharing_among_all_does(llama_profile: Profile) -> None:
    def network_ms(*pins: str) -> float:
        found = ask(llama_profile, two_sites(bits_per_s=1e8), "layout.num_devices=4", *pins, num_devices=4, forbid=SHARING)
        return found.result.chosen.prediction.lane_busy_ms["network"]

    flat, hybrid = (network_ms("layout.data=zero2", f"layout.replicas={number}") for number in (1, 2))
    # The delays of fewer messages, too.
    assert 0.4 * flat < hybrid < 0.5 * flat


def test_weights_are_shared_out_within_machines_where_they_have_no_room_on_a_device(llama_profile: Profile) -> None:
    roomy = ask(llama_profile, two_sites(bits_per_s=1e12, delay_s=0.0), num_devices=4, forbid=SHARING).result.chosen
    assert roomy.plan.layout.data == "replicated"
    state_bytes = 16 * sum(list_tensors(llama_profile).num_elements)
    machine = two_sites(bits_per_s=1e9, delay_s=0.0, memory_bytes=state_bytes)
    found = ask(llama_profile, machine, num_devices=4, forbid=SHARING)
    chosen = found.result.chosen
    assert (chosen.plan.layout.replicas, chosen.plan.layout.shares_state) == (2, True)
    assert any("within each of 2 replicas" in sentence for sentence in found.result.explanation)
    assert any("between these replicas each gradient is summed once a step" in said for said in found.result.explanation)
    assert {setup.setup for setup in found.setups} >= {"hsdp", "fsdp"}


def test_setups_of_one_machine_have_no_hybrid_one(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards(), forbid=SHARING)
    assert "hsdp" not in {setup.setup for setup in found.setups}


def test_a_shared_home_or_replica_in_two_machines_is_refused_in_words(llama_profile: Profile) -> None:
    machine = two_sites()
    names = [f"{SLOW}@here", f"{SLOW}@office"] * 2
    alternating = tuple(RankShare(device=name) for name in names)
    blocks: dict[str, Any] = {"activations": ("keep",) * llama_profile.num_blocks, "sequence_length": 128}
    case = make_case(model="llama", data="zero1", replicas=2, shares=alternating, **blocks)
    message = "ranks 0 to 1 are in here, office, and those of a replica must be in one machine"
    with pytest.raises(InvalidPlan, match=message):
        estimate_training(llama_profile, plan=case.plan, workload=case.workload, machine=machine)
    streamed: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}
    case = make_case(
        model="llama", data="zero1", shares=alternating, weights=WeightsPlan(place="host"), **blocks, **streamed
    )
    with pytest.raises(InvalidPlan, match="which has the weights that stream once for them"):
        estimate_training(llama_profile, plan=case.plan, workload=case.workload, machine=machine)


def test_layouts_that_are_tried_have_a_home_in_each_machine_of_weights_that_nobody_trains(llama_profile: Profile) -> None:
    def tried(machine: Machine, *pins: str, adapter: Adapter | None = None) -> list[tuple[str, int]]:
        goal = Goal(device_budget_bytes=UNLIMITED_BYTES, num_devices=4, pins=read_pins(pins))
        shared = {layout.data: None for layout in list_layouts(goal, None) if layout.num_devices > 1 and layout.replicas == 1}
        question = UnevenQuestion(
            profile=llama_profile,
            workload=replace(WORKLOAD, adapter=adapter),
            goal=goal,
            machine=machine,
            calibration=None,
            data_modes=tuple(data for data in shared if data != "zero3"),
            hybrid_modes=list_hybrid_modes(goal),
            make_problem=Mock(),
            price=Mock(),
            estimate=Mock(),
            settle=Mock(),
            find_best=Mock(),
        )
        return [(layout.data, layout.replicas) for layout in list_together(question, machine.kinds, [])]

    hybrids = [("zero2", 2), ("zero3", 2)]
    assert tried(two_sites()) == [("replicated", 1), ("zero2", 1), *hybrids]
    assert tried(two_sites(), adapter=Adapter()) == [("replicated", 2), ("zero2", 1), *hybrids]
    assert tried(two_sites(), "layout.replicas=1", adapter=Adapter()) == [("replicated", 1), ("zero1", 1), ("zero2", 1)]
    assert tried(two_sites(), "layout.replicas=2") == hybrids
    assert tried(two_sites(), "layout.data=zero1") == [("zero1", 1), ("zero1", 2)]
    assert tried(three_cards()) == [("replicated", 1), ("zero1", 1), ("zero2", 1)]


def test_pins_and_what_is_forbidden_decide_about_replicas(llama_profile: Profile) -> None:
    def modes(*pins: str, forbid: tuple[str, ...] = ()) -> tuple[str, ...]:
        return list_hybrid_modes(Goal(device_budget_bytes=1, num_devices=4, pins=read_pins(pins), forbid=forbid))

    assert modes() == ("zero2", "zero3")
    assert modes(forbid=("shard_gradients",)) == ("zero1",)
    assert modes("layout.data=zero1") == ("zero1",)
    assert modes("layout.data=replicated") == modes(forbid=("hybrid_shard",)) == modes("layout.replicas=1") == ()
    for replicas in (2, 0, -1):
        with pytest.raises(InvalidPlan, match="no layout of up to 3 devices"):
            ask(llama_profile, three_cards(), f"layout.replicas={replicas}", "layout.data=zero2", forbid=SHARING)
