"""Real runs that meet more memory than was predicted: the cause named, the next plan another one that fits, the bits the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from benchmarks.oom.inject import Injection
from optimizer.api.plan import plan_profiled
from optimizer.api.replan import Failure, list_shortfalls, replan_profiled
from optimizer.base.errors import NoFeasiblePlan, OutOfMemory
from optimizer.base.units import GIB, KIB
from optimizer.estimate.job.causes import Cause, name_cause
from optimizer.estimate.job.shortfalls import Shortfall
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.plan.pins.training import read_pins
from optimizer.profile.profile import Profile
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingResult, TrainingRun
from optimizer.search.problem import PricedPlan
from tests.optimizer.profiles import trace
from tests.optimizer.runtime.tiny import make_spec, make_workload, write_token_file, write_tokenizer

MACHINE = make_cpu_machine()
WORKLOAD = make_workload(num_steps=4, sample_tokens=0, eval_batches=1, eval_every_steps=2, checkpoint_every_steps=1)
MORE_BYTES = 300 * KIB
CAUSES: tuple[Cause, ...] = (
    "first_update", "longest_batch", "logits", "fragmentation", "another_process", "kernel_scratch", "step"
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trace(make_spec())


@pytest.fixture(scope="module")
def plain(profile: Profile) -> PricedPlan:
    """Everything kept on the device."""
    goal = Goal(device_budget_bytes=2**30, pins=read_pins(["gradients.choice=keep", "optimizer_state.place=device"]))
    return plan_profiled(profile, machine=MACHINE, workload=WORKLOAD, goal=goal).result.chosen


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    tokens, tokenizer = write_token_file(tmp_path / "tokens"), write_tokenizer(tmp_path / "tokenizer.json")

    def make(priced: PricedPlan, goal: Goal, *, attempt: int = 1, folder: str = "job") -> TrainingRun:
        return TrainingRun(
            spec=make_spec(),
            plan=priced.plan,
            workload=WORKLOAD,
            goal=goal,
            device="cpu",
            attempt=attempt,
            fence=attempt,
            job_folder=tmp_path / folder,
            weights_folder=None,
            token_file=tokens,
            tokenizer_file=tokenizer,
            resume_from="newest",
        )

    return make


def run_injected(run: TrainingRun, injection: Injection) -> TrainingResult:
    with injection.applied():
        return train(run, report=lambda message: None, should_stop=lambda: False)


def fail(run: TrainingRun, injection: Injection, priced: PricedPlan) -> Failure:
    with pytest.raises(OutOfMemory) as caught:
        run_injected(run, injection)
    # as a job keeps them
    fields = json.loads(json.dumps({**caught.value.fields, "allowed_bytes": run.goal.device_budget_bytes}))
    prediction = Prediction.from_json(json.loads(json.dumps(priced.prediction.to_json())))
    return Failure(
        plan=priced.plan, cause=name_cause(fields, prediction=prediction), fields=fields
    )


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_and_the_next_plan_fits(cause: Cause, profile: Profile, plain: PricedPlan, make_run: Any) -> None:
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes)
    injection = Injection(cause=cause, num_bytes=MORE_BYTES)
    failure = fail(make_run(plain, goal), injection, plain)
    assert failure.cause == cause
    again = replan_profiled(
        profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=[failure], checkpoint_of=plain.plan
    )
    assert again.plan != plain.plan
    assert run_injected(make_run(again, goal, attempt=2), injection).step == WORKLOAD.num_steps


def test_an_evaluation_that_takes_more_is_named_and_leaves_steps_their_room(
    profile: Profile, plain: PricedPlan, make_run: Any
) -> None:
    # a half of the state stays: with all of it away a step would take less than an evaluation
    pins = read_pins(["optimizer_state.fraction=0.5"])
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes, pins=pins)
    (evaluation,) = (peak for peak in plain.prediction.stages if peak.stage == "evaluation")
    over_bytes = goal.device_budget_bytes - evaluation.device_peak_bytes + MORE_BYTES
    injection = Injection(cause="evaluation", num_bytes=over_bytes)
    failure = fail(make_run(plain, goal), injection, plain)
    assert (failure.cause, failure.fields["stage"]) == ("evaluation", "evaluation")
    again = replan_profiled(
        profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=[failure], checkpoint_of=plain.plan
    )
    # on top of a step there would be no room for so many bytes
    assert again.prediction.device_peak_bytes + over_bytes > goal.device_budget_bytes
    assert run_injected(make_run(again, goal, attempt=2), injection).step == WORKLOAD.num_steps


def test_a_run_that_was_replanned_ends_with_the_weights_of_one_that_was_not(
    profile: Profile, plain: PricedPlan, make_run: Any
) -> None:
    whole = train(
        make_run(plain, Goal(device_budget_bytes=2**30), folder="whole"), report=lambda message: None, should_stop=lambda: False
    )
    # micro-batches stay whole: another split sums in another order
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes, forbid=("accumulate", "chunked_loss"))
    injection = Injection(cause="first_update", num_bytes=MORE_BYTES)
    failure = fail(make_run(plain, goal), injection, plain)
    again = replan_profiled(
        profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=[failure], checkpoint_of=plain.plan
    )
    assert again.plan.batch == plain.plan.batch
    result = run_injected(make_run(again, goal, attempt=2), injection)
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_an_earlier_failure_in_the_same_stage_doubles_what_is_likely(
    profile: Profile, plain: PricedPlan, make_run: Any
) -> None:
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes)
    failure = fail(make_run(plain, goal), Injection(cause="step", num_bytes=MORE_BYTES), plain)
    here: Any = {"machine": MACHINE, "workload": WORKLOAD, "goal": goal}
    ((once,),) = list_shortfalls([failure], profile, **here)
    _, (twice,) = list_shortfalls([failure, failure], profile, **here)
    assert (once.stage, once.tier) == ("steady_step", "device")
    assert once.num_bytes >= MORE_BYTES
    assert twice.likely_bytes == 2 * once.num_bytes > once.likely_bytes


def test_no_plan_is_taken_twice_even_where_nothing_was_learnt_of_it(profile: Profile, plain: PricedPlan) -> None:
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes)
    tried: list[PricedPlan] = [plain]
    for _ in range(3):
        failures = [
            Failure(plan=each.plan, cause="step", fields={"stage": "no such stage"}) for each in tried
        ]
        found = replan_profiled(
            profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=failures, checkpoint_of=None
        )
        assert found.plan not in [each.plan for each in tried]
        tried.append(found)


def test_a_miss_that_no_plan_has_room_for_is_refused(profile: Profile, plain: PricedPlan) -> None:
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes)
    known = [Shortfall(stage="steady_step", tier="device", num_bytes=goal.device_budget_bytes)]
    with pytest.raises(NoFeasiblePlan):
        replan_profiled(
            profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=[], checkpoint_of=None, known=known
        )


def test_a_plan_that_goes_on_from_a_checkpoint_keeps_the_form_of_weights_and_state(profile: Profile, plain: PricedPlan) -> None:
    goal = Goal(device_budget_bytes=plain.prediction.device_peak_high_bytes, allow_lossy=True)
    fields = {"stage": "steady_step", "in_use_bytes": goal.device_budget_bytes, "requested_bytes": 500 * KIB}
    failure = Failure(plan=plain.plan, cause="step", fields=fields)
    found = replan_profiled(
        profile, machine=MACHINE, workload=WORKLOAD, goal=goal, failures=[failure], checkpoint_of=plain.plan
    )
    assert found.plan.weights.dtype == plain.plan.weights.dtype
    assert found.plan.optimizer_state.bits == plain.plan.optimizer_state.bits


@pytest.mark.parametrize("num_devices", [1, 2])
def test_after_the_hosts_killer_a_plan_on_cards_has_less_on_the_host(profile: Profile, num_devices: int) -> None:
    machine = replace(table_machine("RTX 3060 12GB", host_memory_bytes=8 * GIB), num_devices=num_devices)
    here: Any = {"machine": machine, "workload": WORKLOAD}
    free = Goal(device_budget_bytes=GIB, num_devices=num_devices, pins=read_pins([f"layout.num_devices={num_devices}"]))
    pins = read_pins([f"layout.num_devices={num_devices}", "optimizer_state.place=host", "optimizer_state.fraction=1.0"])
    ran = plan_profiled(profile, goal=replace(free, pins=pins), with_ways_out=False, **here).result.chosen
    failure = Failure(plan=ran.plan, cause="host_killed", fields={"tier": "host"})
    ((shown,),) = list_shortfalls([failure], profile, goal=free, **here)
    # loading, saving and exporting keep the room that they had in this rank's part of the host
    left_bytes = machine.host_memory_bytes // num_devices - shown.likely_bytes
    passing_bytes = max(peak.host_peak_bytes for peak in ran.prediction.stages) - ran.prediction.host_peak_bytes
    assert shown.tier == "host"
    assert left_bytes > passing_bytes > 0
    again = replan_profiled(
        profile, goal=free, failures=[failure], checkpoint_of=None, layout=ran.plan.layout, **here
    )
    assert again.plan.layout.num_devices == num_devices
    assert again.prediction.host_peak_bytes < 0.97 * ran.prediction.host_peak_bytes


def test_a_plan_that_has_nothing_on_the_host_is_not_what_filled_it(profile: Profile, plain: PricedPlan) -> None:
    machine = table_machine("RTX 3060 12GB", host_memory_bytes=8 * GIB)
    failure = Failure(plan=plain.plan, cause="host_killed", fields={"tier": "host"})
    goal = Goal(device_budget_bytes=GIB)
    assert list_shortfalls([failure], profile, machine=machine, workload=WORKLOAD, goal=goal) == [()]
