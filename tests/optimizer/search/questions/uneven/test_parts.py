"""Searches of one kind of device: each begins near the plans that others of the same kind have found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import table_machine
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.logits_and_loss import LogitsAndLossPins
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.core import find_best
from optimizer.search.problem import SearchProblem
from optimizer.search.questions.uneven import answer, parts
from optimizer.search.questions.uneven.parts import carry_over
from optimizer.search.training import training_problem
from tests.optimizer.search.questions.uneven.test_answer import FORBID, WORKLOAD, ask, three_cards


def pose(profile: Profile, num_sequences: int, *pins: str, num_devices: int = 1) -> SearchProblem:
    return training_problem(
        profile,
        workload=replace(WORKLOAD, global_batch_size=num_devices * num_sequences),
        goal=Goal(device_budget_bytes=UNLIMITED_BYTES, num_devices=num_devices, pins=read_pins(pins)),
        machine=replace(table_machine("RTX 4090"), num_devices=num_devices),
        layout=DeviceLayout(num_devices=num_devices),
    )


@pytest.mark.parametrize(("num_sequences", "size"), [(4, 4), (6, 2), (3, 1)])
def test_a_plan_is_carried_over_to_another_number_of_sequences_and_other_ranks(
    llama_profile: Profile, num_sequences: int, size: int
) -> None:
    whole = pose(llama_profile, 8)
    plan = next(setting for setting in whole.settings() if setting.micro_batch_size == 4).plan(("recompute",) * 4)
    carried = carry_over(plan, pose(llama_profile, num_sequences, num_devices=2))
    assert carried is not None
    assert (carried.batch.micro_batch_size, carried.batch.accumulation_steps) == (size, num_sequences // size)
    assert carried.layout.num_devices == 2
    assert carried.activations == plan.activations


def test_a_plan_that_breaks_a_pin_is_not_carried_over(llama_profile: Profile) -> None:
    plan = pose(llama_profile, 8).settings()[0].plan(("keep",) * 4)
    assert carry_over(plan, pose(llama_profile, 8, "gradients.choice=host")) is None


def test_a_search_knows_what_those_of_the_same_kind_before_it_found(
    llama_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[Plan, ...]] = []

    def recording(book: Any, *, likely: Sequence[Plan], **options: Any) -> bool:
        known.append(tuple(likely))
        return find_best(book, likely=likely, **options)

    monkeypatch.setattr(answer, "find_best", recording)
    ask(llama_profile, three_cards())
    assert known[0] == ()
    assert any(known)
    assert max(map(len, known)) <= 3


def test_what_all_ranks_do_alike_is_decided_again_for_the_shares_that_they_got(
    llama_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid = tuple(name for name in FORBID if name != "chunked_loss")
    expected = ask(llama_profile, three_cards(), forbid=forbid).result.chosen
    guess = parts._common_decisions

    def guess_badly(*asked: Any) -> list[Pins]:
        return [replace(pins, logits_and_loss=LogitsAndLossPins(num_chunks=8)) for pins in guess(*asked)]

    monkeypatch.setattr(parts, "_common_decisions", guess_badly)
    found = ask(llama_profile, three_cards(), forbid=forbid).result.chosen
    assert found.plan.logits_and_loss == expected.plan.logits_and_loss
    assert found.prediction.step_ms == pytest.approx(expected.prediction.step_ms, rel=0.01)
