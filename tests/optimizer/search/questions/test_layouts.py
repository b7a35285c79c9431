"""Layouts of several devices: which are searched, which is chosen, and what the answer says of the others."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.api.plan import plan_profiled
from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import GIB, MIB
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import with_devices
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.by_hand.setups import SETUPS
from optimizer.search.questions.layout_list import list_layouts
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=8)
FORBID = ("offload", "offload_gradients", "offload_optimizer", "stream_weights", "disk")
"""Left out unless a test is about them: the search of each layout is shorter."""


def pair(*, bytes_per_s: float = 1e12, latency_s: float = 1e-7, num_devices: int = 2) -> Machine:
    """Cards that are slow enough for a small model to keep busy."""
    link = PeerLink(kind="nvlink", bytes_per_s=bytes_per_s, latency_s=latency_s, source="measured")
    machine = table_machine("RTX 3090", num_devices=num_devices, host_memory_bytes=64 * GIB)
    slow = dict.fromkeys(machine.rates.matmul_flops_per_s, 1e10)
    rates = replace(machine.rates, matmul_flops_per_s=slow, memory_bytes_per_s=1e10, op_overhead_s=1e-6)
    return replace(machine, peers=link, peers_within=None, num_within=1, rates=rates)


def ask(profile: Profile, machine: Machine, *, num_devices: int = 2, pins: Pins | None = None, **goal: Any) -> ObjectiveAnswer:
    budget_bytes, forbid = goal.pop("device_budget_bytes", UNLIMITED_BYTES), goal.pop("forbid", FORBID)
    asked = Goal(device_budget_bytes=budget_bytes, num_devices=num_devices, pins=pins or Pins(), forbid=forbid, **goal)
    return plan_profiled(profile, machine=machine, workload=WORKLOAD, goal=asked, with_ways_out=False)


def names(layouts: list[DeviceLayout]) -> list[str]:
    return [f"{layout.num_devices} {layout.data}" for layout in layouts]


def test_layouts_are_those_that_deal_the_batch_out_evenly() -> None:
    goal = Goal(device_budget_bytes=1, num_devices=4)
    shared = ["replicated", "zero1", "zero2", "zero3"]
    two, four = ([f"{number} {data}" for data in shared] for number in (2, 4))
    assert names(list_layouts(goal, WORKLOAD)) == ["1 replicated", *two, *four]
    assert names(list_layouts(goal, replace(WORKLOAD, global_batch_size=6))) == ["1 replicated", *two, *(
        f"3 {data}" for data in shared
    )]
    assert names(list_layouts(replace(goal, num_devices=1), WORKLOAD)) == ["1 replicated"]


def test_pairs_of_cards_that_a_bridge_joins_are_replicas(llama_profile: Profile) -> None:
    goal = Goal(device_budget_bytes=1, num_devices=4)

    def hybrids(goal: Goal) -> list[tuple[int, str, int]]:
        listed = list_layouts(goal, WORKLOAD, num_within=2)
        return [(layout.num_devices, layout.data, layout.replicas) for layout in listed if layout.replicas > 1]

    assert hybrids(goal) == [(4, "zero2", 2), (4, "zero3", 2)]
    assert hybrids(replace(goal, num_devices=3)) == hybrids(replace(goal, forbid=("hybrid_shard",))) == []
    # Between the pairs a small part of the rate.
    bridged = replace(pair(bytes_per_s=1e8, num_devices=4), peers_within=pair().peers, num_within=2)
    state_bytes = 16 * sum(list_tensors(llama_profile).num_elements)
    forbid = (*FORBID, "cut_model", "local_steps")
    found = ask(llama_profile, bridged, num_devices=4, forbid=forbid, device_budget_bytes=state_bytes)
    layout = found.result.chosen.plan.layout
    assert (layout.num_devices, layout.replicas) == (4, 2)
    assert any("neighbouring devices (hybrid sharding)" in sentence for sentence in found.result.explanation)


@pytest.mark.parametrize(
    ("pins", "forbid", "left"),
    [
        ([], ("data_parallel",), ["1 replicated"]),
        ([], ("shard_state",), ["1 replicated", "2 replicated"]),
        ([], ("shard_gradients",), ["1 replicated", "2 replicated", "2 zero1"]),
        ([], ("shard_weights",), ["1 replicated", "2 replicated", "2 zero1", "2 zero2"]),
        (["layout.data=zero1"], (), ["2 zero1"]),
        (["layout.num_devices=2"], (), ["2 replicated", "2 zero1", "2 zero2", "2 zero3"]),
        (["layout.num_devices=1"], (), ["1 replicated"]),
    ],
)
def test_pins_and_forbidden_techniques_leave_layouts_out(pins: list[str], forbid: Any, left: list[str]) -> None:
    goal = Goal(device_budget_bytes=1, num_devices=2, pins=read_pins(pins), forbid=forbid)
    assert names(list_layouts(goal, WORKLOAD)) == left


def test_pins_that_no_layout_keeps_are_refused() -> None:
    goal = Goal(device_budget_bytes=1, num_devices=2, pins=read_pins(["layout.num_devices=2"]))
    with pytest.raises(InvalidPlan, match="no layout of up to 2 devices"):
        list_layouts(goal, replace(WORKLOAD, global_batch_size=3))
    with pytest.raises(InvalidWorkload, match="data_parallel|goal.forbid"):
        Goal(device_budget_bytes=1, num_devices=2, pins=goal.pins, forbid=("data_parallel",))


def test_two_devices_with_a_fast_link_are_chosen_and_count_all_tokens(llama_profile: Profile) -> None:
    alone = ask(llama_profile, pair(), num_devices=1)
    found = ask(llama_profile, pair())
    chosen = found.result.chosen
    assert chosen.plan.layout == DeviceLayout(num_devices=2)
    assert chosen.prediction.step_ms < alone.result.chosen.prediction.step_ms
    assert chosen.prediction.tokens_per_s == pytest.approx(WORKLOAD.tokens_per_step / chosen.prediction.step_ms * 1000)
    assert found.workload == WORKLOAD
    assert alone.layouts == ()
    shared = ("ddp", "zero1", "zero2", "fsdp")
    assert {*shared, *(f"{label}_recompute" for label in shared)} <= set(found.result.baselines)
    assert {setup.setup for setup in found.setups} == {setup.label for setup in SETUPS if not setup.is_hybrid}
    assert [option.layout.num_devices for option in found.layouts] == [1, 2, 2, 2, 2, 2]
    assert [option.layout.is_cut for option in found.layouts] == [False] * 5 + [True]
    assert len(set(chosen.prediction.rank_peak_bytes)) == 1


def test_one_device_is_faster_than_two_over_a_slow_link(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair(bytes_per_s=1e6, latency_s=1e-3))
    assert found.result.chosen.plan.layout == DeviceLayout()
    sentences = [option.sentence for option in found.layouts]
    assert sentences[0] == "one device: chosen; more devices would wait for each other for longer than they save"
    assert all("times as long" in sentence or "not searched" in sentence for sentence in sentences[1:])


def test_what_shares_less_is_chosen_where_memory_is_plenty(llama_profile: Profile) -> None:
    """No layout that is left out, or listed as slower, is faster."""
    found = ask(llama_profile, pair(latency_s=1e-5), num_devices=2)
    chosen = found.result.chosen.prediction
    assert found.result.chosen.plan.layout.data == "replicated"
    for option in found.layouts:
        if option.best is not None:
            assert option.best.prediction.step_ms >= chosen.step_ms * (1 - 0.005)
        else:
            assert option.least_step_ms >= chosen.step_ms or "gradients need no sharing" in option.sentence


def test_state_is_shared_out_where_each_device_is_short_of_memory(llama_profile: Profile) -> None:
    """Below what every replicated plan takes, with nothing that moves or rounds allowed."""
    forbid = (*FORBID, "recompute", "chunked_loss", "accumulate", "consume_gradients")
    plain = ask(llama_profile, pair(), forbid=(*forbid, "shard_state"), pins=read_pins(["layout.num_devices=2"]))
    needed_bytes = plain.result.chosen.prediction.device_peak_high_bytes
    found = ask(llama_profile, pair(), forbid=forbid, device_budget_bytes=needed_bytes - 64 * 1024)
    assert found.result.chosen.plan.layout.shares_state
    assert found.result.chosen.prediction.device_peak_high_bytes < needed_bytes
    replicated = next(option for option in found.layouts if option.layout == DeviceLayout(num_devices=2))
    assert replicated.best is None
    assert "nothing fits; the smallest peak is" in replicated.sentence


def test_weights_are_shared_out_where_each_device_is_short_of_memory_with_all_else_shared(llama_profile: Profile) -> None:
    forbid = (*FORBID, "recompute", "chunked_loss", "accumulate", "consume_gradients")
    shared = ask(llama_profile, pair(), forbid=forbid, pins=read_pins(["layout.data=zero2"]))
    needed_bytes = shared.result.chosen.prediction.device_peak_high_bytes
    found = ask(llama_profile, pair(), forbid=forbid, device_budget_bytes=needed_bytes - 64 * 1024)
    chosen = found.result.chosen
    assert chosen.plan.layout == DeviceLayout(num_devices=2, data="zero3")
    assert chosen.prediction.device_peak_high_bytes < needed_bytes
    assert [option.best is None for option in found.layouts] == [True, True, True, True, False, True]
    in_blocks = 4 * sum(size.num_elements for block, size in llama_profile.tensors.placed() if 0 <= block < 4)
    # Twice in the one micro-batch, of which the mean of two ranks sends half, in place of once after the update.
    less_bytes = shared.result.chosen.prediction.network_bytes
    assert chosen.prediction.network_bytes - less_bytes == in_blocks // 2
    with pytest.raises(NoFeasiblePlan):
        ask(llama_profile, pair(), forbid=(*forbid, "shard_weights"), device_budget_bytes=needed_bytes - 64 * 1024)


def test_weights_that_stream_to_two_devices_take_the_hosts_memory_once(llama_profile: Profile) -> None:
    """A host with room for one copy of the weights and of the optimizer's state is enough for two devices."""
    forbid = ("recompute", "chunked_loss", "offload", "disk", "shard_gradients", "cut_model")
    two, one = (read_pins(["weights.place=host", f"layout.num_devices={number}"]) for number in (2, 1))
    machine = with_devices(make_cpu_machine(), 2)
    each_bytes = {}
    for pin in ("layout.data=replicated", "layout.data=zero1", "layout.stage_blocks=2,2"):
        pins = read_pins(["weights.place=host", "layout.num_devices=2", pin])
        allowed = [name for name in forbid if name != "cut_model" or "stage_blocks" not in pin]
        each_bytes[pin] = host_bytes_of(ask(llama_profile, machine, forbid=tuple(allowed), pins=pins).result.chosen)
    replicated_bytes, shared_bytes, cut_bytes = each_bytes.values()
    alone_bytes = host_bytes_of(ask(llama_profile, machine, forbid=forbid, pins=one).result.chosen)
    assert replicated_bytes == alone_bytes
    assert 2 * shared_bytes < 1.3 * alone_bytes
    assert cut_bytes < 0.7 * alone_bytes
    found = ask(llama_profile, machine, host_budget_bytes=2 * shared_bytes, forbid=forbid, pins=two)
    assert found.result.chosen.plan.layout.data == "zero1"
    assert found.result.chosen.plan.weights.place == "host"
    assert [option.best is None for option in found.layouts] == [True, False]
    assert "needs more than" in found.layouts[0].sentence
    with pytest.raises(InvalidPlan, match=r"what is pinned \(.*\) needs more than 1000 B on the host"):
        ask(llama_profile, machine, num_devices=1, host_budget_bytes=1000, forbid=forbid, pins=read_pins(["weights.place=host"]))


def host_bytes_of(priced: PricedPlan) -> int:
    """The most that one device takes of the host, in any stage."""
    return max(priced.prediction.host_peak_bytes, *(stage.host_peak_bytes for stage in priced.prediction.stages))


def test_more_sequences_run_at_once_on_two_devices(llama_profile: Profile) -> None:
    forbid = (*FORBID, "recompute", "chunked_loss", "consume_gradients", "shard_state")
    asked: dict[str, Any] = {"objective": "largest_batch", "device_budget_bytes": 24 * MIB, "forbid": forbid}
    alone = ask(llama_profile, pair(), num_devices=1, **asked)
    found = ask(llama_profile, pair(), **asked)
    assert found.workload.global_batch_size == 2 * alone.workload.global_batch_size
    assert found.result.chosen.plan.layout == DeviceLayout(num_devices=2)
    assert len(found.layouts) == 2


def test_more_devices_than_the_machine_has_are_refused(llama_profile: Profile) -> None:
    with pytest.raises(InvalidInput, match="goal.num_devices is 4; the machine has 2"):
        ask(llama_profile, pair(), num_devices=4)


def test_an_answer_of_several_devices_is_written_as_json(llama_profile: Profile) -> None:
    document = ask(llama_profile, pair()).to_json()
    assert [option["layout"]["data"] for option in document["layouts"]] == ["replicated", *get_args(DataParallel), "replicated"]
    assert [bool(option["layout"]["stage_blocks"]) for option in document["layouts"]] == [False] * 5 + [True]
    assert document["result"]["chosen"]["prediction"]["network_bytes"] > 0


@pytest.mark.breadth
@pytest.mark.parametrize("pin", ["layout.data=replicated", "layout.data=zero1", "layout.stage_blocks=2,2"])
def test_a_jobs_files_are_on_the_disk_once_for_all_devices(llama_profile: Profile, pin: str) -> None:
    pins = read_pins(["layout.num_devices=2", pin])
    roomy = ask(llama_profile, replace(pair(), disk_free_bytes=64 * GIB), pins=pins).result.chosen
    most_bytes = max(stage.file_bytes for stage in roomy.prediction.stages)
    assert most_bytes > 0
    enough = ask(llama_profile, replace(pair(), disk_free_bytes=most_bytes + 1), pins=pins).result.chosen
    assert enough.plan == roomy.plan
    with pytest.raises(NoFeasiblePlan, match="of the disk; .* may be used"):
        ask(llama_profile, replace(pair(), disk_free_bytes=most_bytes - 2), pins=pins)
