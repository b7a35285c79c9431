"""Devices of several kinds: who takes part, how much each takes, its own decisions, and when it is better not to share."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.base.errors import InvalidInput, NoFeasiblePlan
from optimizer.base.units import GIB
from optimizer.estimate.training import estimate_training
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import DeviceKind, Machine, PeerLink
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=8)
FORBID = ("offload", "offload_gradients", "offload_optimizer", "stream_weights", "disk", "shard_state", "chunked_loss")
LEFT_OUT = (
    "not searched, since no plan of it takes less than",
    "not searched to the end, since others are faster than its first cut",
    ": no such shares fit",
)
FAST, SLOW = "RTX 4090", "RTX 3060 12GB"


def kind_of(name: str, *, flops_per_s: float, memory_bytes: int, num_devices: int = 1) -> DeviceKind:
    """A card that is slow enough for a small model to keep busy."""
    card = table_machine(name)
    slow = dict.fromkeys(card.rates.matmul_flops_per_s, flops_per_s)
    rates = replace(card.rates, matmul_flops_per_s=slow, memory_bytes_per_s=flops_per_s, op_overhead_s=1e-6)
    return DeviceKind(device=replace(card.device, memory_bytes=memory_bytes), rates=rates, num_devices=num_devices)


def three_cards(
    *, bytes_per_s: float = 1e12, latency_s: float = 1e-7, slow_memory_bytes: int = 8 * GIB, ratio: float = 3.0
) -> Machine:
    """Two slow cards, and one that is so many times as fast."""
    slow = kind_of(SLOW, flops_per_s=1e10, memory_bytes=slow_memory_bytes, num_devices=2)
    fast = kind_of(FAST, flops_per_s=ratio * 1e10, memory_bytes=16 * GIB)
    return replace(
        table_machine(SLOW, host_memory_bytes=64 * GIB),
        device=slow.device,
        rates=slow.rates,
        num_devices=slow.num_devices,
        others=(fast,),
        peers=PeerLink(kind="host", bytes_per_s=bytes_per_s, latency_s=latency_s, source="measured"),
    )


def ask(profile: Profile, machine: Machine, *, forbid: Any = FORBID, pins: Pins | None = None, **goal: Any) -> ObjectiveAnswer:
    values = {"device_budget_bytes": UNLIMITED_BYTES, "num_devices": 3, "pins": pins or Pins(), "forbid": forbid, **goal}
    return plan_profiled(profile, machine=machine, workload=WORKLOAD, goal=Goal(**values), with_ways_out=False)


def test_a_device_takes_of_a_step_what_its_speed_allows(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards())
    chosen = found.result.chosen
    shares = dict(zip([share.device for share in chosen.plan.layout.ranks], chosen.plan.rank_sequences, strict=True))
    assert shares[FAST] > shares[SLOW]
    assert sum(chosen.plan.rank_sequences) == WORKLOAD.global_batch_size
    assert [rank.device for rank in chosen.prediction.ranks] == [FAST, SLOW, SLOW]
    assert found.workload == WORKLOAD
    assert chosen.verdict == "fits"


def test_what_is_chosen_is_no_slower_than_any_baseline(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards())
    chosen_ms = found.result.chosen.prediction.step_ms
    assert "shares_by_speed" in found.result.baselines
    for option in found.layouts:
        assert option.best is None or option.best.prediction.step_ms >= chosen_ms * (1 - 0.005), option.sentence
        assert option.best is not None or any(why in option.sentence for why in LEFT_OUT), option.sentence


def test_the_fastest_card_alone_is_chosen_over_a_slow_link(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards(bytes_per_s=1e6, latency_s=1e-3))
    assert found.result.chosen.plan.layout == DeviceLayout(ranks=(RankShare(device=FAST),))
    sentences = [option.sentence for option in found.layouts]
    assert f"{FAST} alone: chosen; more devices would wait for each other for longer than they save" in sentences
    shared = next(sentence for sentence in sentences if "shares by speed" in sentence)
    assert "not searched, since no plan of it takes less than" in shared
    assert "ms of it for the network" in shared


def test_a_card_that_is_short_of_memory_recomputes_while_another_keeps(llama_profile: Profile) -> None:
    machine, pins = three_cards(), read_pins(["batch.micro_batch_size=2", "layout.num_devices=3"])
    plain = ask(llama_profile, machine, pins=pins).result.chosen.prediction
    held_bytes = next(rank.peak_high_bytes for rank in plain.ranks if rank.device == SLOW)
    short = three_cards(slow_memory_bytes=int(0.97 * held_bytes))
    chosen = ask(llama_profile, short, pins=pins).result.chosen
    blocks = {share.device: set(share.per_block or ()) for share in chosen.plan.layout.ranks}
    assert blocks[FAST] == {"keep"}
    assert blocks[SLOW] & {"recompute", "selective"}
    assert all(rank.peak_high_bytes <= rank.memory_bytes for rank in chosen.prediction.ranks)
    assert "recompute" in chosen.plan.techniques


def test_the_explanation_names_the_fullest_and_the_slowest_rank(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards(), pins=read_pins(["layout.num_devices=3"])).result
    prediction = found.chosen.prediction
    fullest, slowest = prediction.fullest_rank, prediction.slowest_rank
    said = " ".join(found.explanation)
    assert f"rank {fullest} ({prediction.ranks[fullest].device}) has the least room left" in said
    assert f"rank {slowest} ({prediction.ranks[slowest].device}) is the slowest, and all wait for it" in said
    assert "3 devices take a part of the batch each" in said
    assert prediction.step_ms >= max(rank.step_ms for rank in prediction.ranks)


def test_a_plan_does_not_fit_where_one_of_its_ranks_does_not(llama_profile: Profile) -> None:
    plan = ask(llama_profile, three_cards(), pins=read_pins(["layout.num_devices=3"])).result.chosen.plan
    wide = estimate_training(llama_profile, plan=plan, workload=WORKLOAD, machine=three_cards())
    tight = min(rank.peak_bytes for rank in wide.ranks if rank.device == SLOW) - 1
    narrow = estimate_training(llama_profile, plan=plan, workload=WORKLOAD, machine=three_cards(slow_memory_bytes=tight))
    assert (wide.verdict(UNLIMITED_BYTES), narrow.verdict(UNLIMITED_BYTES)) == ("fits", "does_not_fit")
    assert not narrow.fits_within(UNLIMITED_BYTES)
    assert narrow.ranks[narrow.fullest_rank].device == SLOW


def test_devices_that_must_not_share_are_asked_one_by_one(llama_profile: Profile) -> None:
    found = ask(llama_profile, three_cards(), forbid=(*FORBID, "data_parallel", "cut_model"))
    assert found.result.chosen.plan.layout.ranks == (RankShare(device=FAST),)
    assert {option.layout.num_devices for option in found.layouts} == {1}


def test_other_objectives_are_refused_in_words(llama_profile: Profile) -> None:
    with pytest.raises(InvalidInput, match="objective largest_batch is asked of devices of several kinds; allowed: fastest_step"):
        ask(llama_profile, three_cards(), objective="largest_batch")


def test_where_nothing_fits_the_largest_card_says_what_is_missing(llama_profile: Profile) -> None:
    with pytest.raises(NoFeasiblePlan, match="memory budget 1.00 MiB is under the smallest feasible peak"):
        ask(llama_profile, three_cards(), device_budget_bytes=2**20)


def test_more_devices_of_a_kind_than_there_are_are_refused(llama_profile: Profile) -> None:
    plan = ask(llama_profile, three_cards(), pins=read_pins(["layout.num_devices=3"])).result.chosen.plan
    ranks = tuple(replace(share, device=FAST) for share in plan.layout.ranks)
    with pytest.raises(InvalidInput, match=f"asks for 2 or more of {FAST}; the machine has 1"):
        estimate_training(
            llama_profile,
            plan=replace(plan, layout=replace(plan.layout, ranks=ranks)),
            workload=WORKLOAD,
            machine=three_cards(),
        )
