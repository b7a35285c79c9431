"""Prices of setups that people write by hand, beside the plan that a search chooses."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.base.units import GIB, MIB
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import DeviceKind, Machine, PeerLink
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.core import find_chosen
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.questions import layouts
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.by_hand.pricing import PricedSetup, SetupQuestion, Team, price_setup, price_setups
from optimizer.search.questions.by_hand.setups import PARTS, SETUPS, recomputing
from optimizer.search.questions.uneven import answer as uneven
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=8)
FORBID = ("offload", "offload_gradients", "offload_optimizer", "stream_weights", "disk")
BY_LABEL = {setup.label: setup for setup in SETUPS}
LINK = PeerLink(kind="nvlink", bytes_per_s=1e12, latency_s=1e-7, source="measured")


def pair(*, peers: PeerLink = LINK) -> Machine:
    """Cards that are slow enough for a small model to keep busy."""
    machine = table_machine("RTX 3090", num_devices=2, host_memory_bytes=64 * GIB)
    slow = dict.fromkeys(machine.rates.matmul_flops_per_s, 1e10)
    rates = replace(machine.rates, matmul_flops_per_s=slow, memory_bytes_per_s=1e10, op_overhead_s=1e-6)
    return replace(machine, peers=peers, rates=rates)


def three_cards() -> Machine:
    """Two cards, and another that is three times as fast."""
    machine, fast = pair(), table_machine("RTX 4090")
    rates = replace(machine.rates, matmul_flops_per_s=dict.fromkeys(machine.rates.matmul_flops_per_s, 3e10))
    return replace(machine, others=(DeviceKind(device=fast.device, rates=rates, num_devices=1),))


def ask(profile: Profile, machine: Machine, *, workload: TrainingWorkload = WORKLOAD, **goal: Any) -> ObjectiveAnswer:
    values = {"device_budget_bytes": UNLIMITED_BYTES, "num_devices": machine.total_devices, "forbid": FORBID, **goal}
    return plan_profiled(profile, machine=machine, workload=workload, goal=Goal(**values), with_ways_out=False)


def question_of(profile: Profile, *, budget_bytes: int = UNLIMITED_BYTES) -> SetupQuestion:
    goal = Goal(device_budget_bytes=budget_bytes, num_devices=2)

    def pose(layout: DeviceLayout) -> SearchProblem:
        return training_problem(profile, workload=WORKLOAD, goal=goal, machine=pair(), layout=layout)

    return SetupQuestion(
        num_blocks=profile.num_blocks,
        whole=Team(num_devices=2),
        dealing=Team(num_devices=2),
        formats=OuterPlan(micro_batch_size=1, accumulation_steps=1),
        pose=pose,
        num_sequences=WORKLOAD.global_batch_size,
    )


def by_label(found: list[PricedSetup]) -> dict[str, PricedSetup]:
    return {each.label: each for each in found}


def test_each_setup_takes_the_fastest_micro_batch_that_fits(llama_profile: Profile) -> None:
    """By all that there are, each priced in detail."""
    wide = by_label(price_setup(question_of(llama_profile), BY_LABEL["ddp"]))["ddp"]
    assert wide.priced is not None
    budget_bytes = wide.priced.prediction.device_peak_high_bytes - 1
    question = question_of(llama_profile, budget_bytes=budget_bytes)
    found = by_label(price_setup(question, BY_LABEL["ddp"]))
    layout = DeviceLayout(num_devices=2)
    problem = question.pose(layout)
    for label, numbers in (("ddp", (0,)), ("ddp_recompute", (PARTS,)), ("ddp_some_recompute", range(PARTS + 1))):
        priced = found[label].priced
        assert priced is not None
        settings = [
            BY_LABEL["ddp"].setting(question.formats, layout, size=size, count=4 // size, num_chunks=1)
            for size in (1, 2, 4)
        ]
        blocks = [recomputing((llama_profile.num_blocks,), number) for number in numbers]
        plans = [problem.priced("", setting.plan(each)) for setting in settings for each in blocks]
        best_ms = min(plan.prediction.step_ms for plan in plans if plan.verdict in ACCEPTED)
        assert priced.verdict in ACCEPTED
        assert priced.prediction.step_ms <= best_ms * (1 + 1e-9)
        assert priced.prediction.memory is not None


def test_what_does_not_fit_is_shown_with_the_least_that_it_takes(llama_profile: Profile) -> None:
    found = by_label(price_setups(question_of(llama_profile, budget_bytes=MIB)))
    kept, rebuilt = found["ddp"].priced, found["ddp_recompute"].priced
    assert kept is not None
    assert rebuilt is not None
    assert kept.verdict == rebuilt.verdict == "does_not_fit"
    assert kept.plan.batch.micro_batch_size == 1
    assert rebuilt.prediction.device_peak_bytes < kept.prediction.device_peak_bytes
    assert not found["ddp"].may_be_chosen


def test_tensors_alone_are_priced_of_what_is_much_slower_than_the_best(llama_profile: Profile) -> None:
    question = question_of(llama_profile)
    whole = price_setup(question, BY_LABEL["ddp"])
    quick = price_setup(question, BY_LABEL["ddp"], best_ms=1e-6)
    assert [each.priced.prediction.memory is None for each in quick if each.priced] == [True] * 3
    assert [each.step_ms for each in quick] == [each.step_ms for each in whole]
    assert not any(each.may_be_chosen for each in quick)


def test_setups_that_cannot_be_carried_out_say_why(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair())
    said = {setup.label: setup.sentence for setup in found.setups}
    assert "a device's part of each block was not traced; where layout.tensor is pinned to 2 it is" in said["tensor"]
    assert "tensor" not in found.result.baselines
    uneven_said = {setup.label: setup.sentence for setup in ask(llama_profile, three_cards()).setups}
    assert "8 sequences" not in uneven_said["ddp"]
    assert ", on 2x RTX 3090" in uneven_said["ddp"]
    assert "devices that share each block are alike" in uneven_said["tensor"]
    odd = replace(WORKLOAD, global_batch_size=7)
    odd_said = {setup.label: setup.sentence for setup in ask(llama_profile, three_cards(), workload=odd).setups}
    assert "7 sequences cannot be dealt out evenly to 3 devices" in odd_said["ddp"]


def test_the_answer_says_when_not_to_shard(llama_profile: Profile) -> None:
    roomy = ask(llama_profile, pair())
    assert any(each.startswith("do not shard: each device has room") for each in roomy.result.explanation)
    slow = replace(LINK, bytes_per_s=1e6, latency_s=1e-3)
    alone = ask(llama_profile, pair(peers=slow))
    assert any(each.startswith("do not share it among devices") for each in alone.result.explanation)
    sharded = ask(llama_profile, pair(), pins=read_pins(["layout.data=zero2"]))
    assert any(each.startswith("DDP, which keeps everything on each device,") for each in sharded.result.explanation)


@pytest.mark.parametrize("machine", [pair(), three_cards()], ids=["alike", "uneven"])
def test_the_answer_is_no_slower_than_a_setup_that_fits_and_is_allowed(llama_profile: Profile, machine: Machine) -> None:
    workload = replace(WORKLOAD, global_batch_size=12)
    found = ask(llama_profile, machine, workload=workload, forbid=())
    chosen_ms = found.result.chosen.prediction.step_ms
    fitting = [
        priced
        for setup in found.setups
        if (priced := found.result.baselines.get(setup.label)) is not None and priced.verdict in ACCEPTED
    ]
    assert fitting
    assert all(priced.prediction.step_ms >= chosen_ms * (1 - 0.005) for priced in fitting if priced.plan.is_lossless)


def test_a_faster_setup_is_taken_where_a_search_finds_a_slower_plan(
    llama_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is held to plans that recompute every block."""

    def hampered(problem: SearchProblem, **asked: Any) -> Any:
        pins = read_pins(["activations.per_block=recompute"])
        return find_chosen(replace(problem, goal=replace(problem.goal, pins=pins)), **asked)

    monkeypatch.setattr(layouts, "find_chosen", hampered)
    chosen = ask(llama_profile, pair(), forbid=(*FORBID, "cut_model")).result.chosen
    assert "recompute" not in chosen.plan.activations.per_block
    assert chosen.label == "chosen"


def test_a_setup_is_the_answer_on_uneven_devices_where_no_other_plan_is_found(
    llama_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uneven, "_accepted", lambda options: [each for each in options if each.likeness[0] == "setup"])
    found = ask(llama_profile, three_cards(), workload=replace(WORKLOAD, global_batch_size=12))
    assert found.result.chosen.plan.layout.num_devices == 3
    assert found.result.chosen.verdict in ACCEPTED
    assert found.layouts[-1].sentence.endswith("chosen")


def test_forbidden_setups_are_priced_and_never_chosen(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair(), forbid=(*FORBID, "data_parallel", "cut_model"))
    assert found.result.chosen.plan.layout == DeviceLayout()
    said = {setup.label: setup.sentence for setup in found.setups}
    assert "not allowed: share the batch among devices" in said["ddp"]
