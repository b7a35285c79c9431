"""Steps that ranks take alone: offered where they are allowed and a slow link makes them worth it, as few as gain as much."""

from typing import Any

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.goal import Goal
from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.layout_list import list_layouts, list_local
from optimizer.workload import TrainingWorkload
from tests.optimizer.search.questions.test_layouts import FORBID, pair
from tests.optimizer.search.questions.uneven.test_answer import WORKLOAD as UNEVEN_WORKLOAD
from tests.optimizer.search.questions.uneven.test_joined import joined

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=8, num_steps=100)
LOSSY = ("bf16", "fp16", "autocast", "8bit_optimizer", "no_master_weights", "compress", "quantize_frozen")
ONLY_LOCAL: dict[str, Any] = {"allow_lossy": True, "forbid": (*FORBID, *LOSSY, "cut_model")}
"""Nothing lossy but steps alone."""


def ask(profile: Profile, machine: Any, *pins: str, workload: TrainingWorkload = WORKLOAD, **goal: Any) -> ObjectiveAnswer:
    values = {"device_budget_bytes": 2**40, "num_devices": 2, "pins": read_pins(pins), "forbid": (*FORBID, "cut_model"), **goal}
    return plan_profiled(profile, machine=machine, workload=workload, goal=Goal(**values), with_ways_out=False)


def test_they_are_not_offered_where_no_loss_is_allowed_or_only_rounding(llama_profile: Profile) -> None:
    slow = pair(bytes_per_s=25e6, latency_s=0.02)
    for goal in ({}, {"allow_lossy": True, "most_loss": "rounding"}, {**ONLY_LOCAL, "forbid": (*FORBID, "local_steps")}):
        found = ask(llama_profile, slow, **goal)
        assert not any(option.layout.steps_alone for option in found.layouts)
    with pytest.raises(InvalidWorkload, match="layout.sync_every is 8, which changes the numbers, and goal.allow_lossy is false"):
        Goal(device_budget_bytes=1, num_devices=2, pins=read_pins(["layout.sync_every=8"]))


def test_a_slow_link_is_used_seldom_and_the_answer_says_what_that_is(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair(bytes_per_s=25e6, latency_s=0.002), **ONLY_LOCAL)
    chosen = found.result.chosen
    assert chosen.plan.layout.steps_alone
    assert chosen.plan.layout.num_devices == 2
    shared = next(option for option in found.layouts if option.layout.num_devices == 1)
    assert shared.best is None or chosen.prediction.step_ms <= 0.9 * shared.best.prediction.step_ms
    said = " ".join(found.result.explanation)
    assert f"train alone for {chosen.plan.layout.sync_every} steps" in said
    assert "another training" in said
    assert "local_steps" in chosen.plan.techniques
    assert not chosen.plan.is_lossless
    assert any("differences sent in" in option.sentence and ": chosen" in option.sentence for option in found.layouts)


def test_a_fast_link_leaves_every_step_shared(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair(bytes_per_s=1e12, latency_s=1e-7), **ONLY_LOCAL)
    assert found.result.chosen.plan.layout.num_devices == 2
    assert not found.result.chosen.plan.layout.steps_alone


def test_ranks_synchronize_as_often_as_costs_little(llama_profile: Profile) -> None:
    """The faster the link the fewer steps alone, and never more than the job has."""
    every = {}
    for bytes_per_s in (2e6, 25e6, 400e6):
        found = ask(llama_profile, pair(bytes_per_s=bytes_per_s, latency_s=0.0001), "layout.num_devices=2", **ONLY_LOCAL)
        local = next(option for option in found.layouts if option.layout.steps_alone)
        assert local.best is not None or "not searched" in local.sentence
        every[bytes_per_s] = local.layout.sync_every
    assert every[2e6] >= every[25e6]
    short = TrainingWorkload(sequence_length=128, global_batch_size=8, num_steps=20)
    found = ask(llama_profile, pair(bytes_per_s=2e6, latency_s=0.0001), "layout.num_devices=2", workload=short, **ONLY_LOCAL)
    assert {option.layout.sync_every for option in found.layouts} == {1, 8}


def test_pins_say_how_many_steps_and_in_which_format(llama_profile: Profile) -> None:
    pins = ("layout.sync_every=50", "layout.sync_format=bf16")
    found = ask(llama_profile, pair(bytes_per_s=1e12), *pins, **ONLY_LOCAL)
    layout = found.result.chosen.plan.layout
    assert (layout.num_devices, layout.sync_every, layout.sync_format) == (2, 50, "bf16")
    assert len(found.layouts) == 1
    goal = Goal(device_budget_bytes=1, num_devices=1, pins=read_pins(pins), allow_lossy=True)
    with pytest.raises(InvalidPlan, match="no layout of up to 1 devices"):
        list_layouts(goal, WORKLOAD, local=list_local(goal, WORKLOAD))


def test_every_step_shared_can_be_pinned(llama_profile: Profile) -> None:
    found = ask(llama_profile, pair(bytes_per_s=25e6, latency_s=0.02), "layout.sync_every=1", **ONLY_LOCAL)
    assert not any(option.layout.steps_alone for option in found.layouts)


def test_machines_that_a_slow_network_joins_take_steps_alone(llama_profile: Profile) -> None:
    machine, three = joined(bits_per_s=2e8, delay_s=0.02), "layout.num_devices=3"
    found = ask(llama_profile, machine, three, num_devices=3, workload=UNEVEN_WORKLOAD, **ONLY_LOCAL)
    local = [option for option in found.layouts if option.layout.steps_alone]
    shared = [option for option in found.layouts if not option.layout.steps_alone and option.layout.num_devices == 3]
    best_ms = min(option.best.prediction.step_ms for option in local if option.best is not None)
    assert best_ms < min(option.least_step_ms for option in shared) / 2
    assert "shares_by_speed_local" in found.result.baselines
