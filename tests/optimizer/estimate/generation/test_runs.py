"""Passes that ran as planned are priced as the plan is, and passes that differ as they ran."""

from typing import Any

import pytest

from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.runs import price_run
from optimizer.formats.sampling import Sampling
from optimizer.hardware.calibration import TimedRun, learn_generation, of_generations, read_time_factors
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.arrange import passes_of
from optimizer.plan.passes.run import TimedPass
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.generation.run_requests import Finished, GenerationResult, Request, open_generator, run_requests
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

SPEC = read_model_spec(SMALL_CONFIGS["llama"])
LENGTHS = (9, 20, 5, 9, 30, 12)
PLANS = {
    "plain": GenerationPlan(batch_size=4),
    "all on the host": GenerationPlan(
        batch_size=2, num_micro_batches=2, weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(place="host")
    ),
}


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(SPEC, representations=["fp32"])


def run(
    plan: GenerationPlan, *, stop_token_ids: tuple[Any, ...] = (), **sampling: Any
) -> tuple[GenerationResult, list[Finished]]:
    requests = [
        Request(
            id=str(index),
            token_ids=tuple(range(1, length + 1)),
            sampling=Sampling(max_new_tokens=20, seed=index, stop_token_ids=stop_token_ids, **sampling),
        )
        for index, length in enumerate(LENGTHS)
    ]
    finished: list[Any] = []
    with open_generator(SPEC, plan=plan) as generator:
        result = run_requests(generator, requests, on_finished=finished.append)
    return result, finished


def price(result: GenerationResult, profile: GenerationProfile, machine: Machine, plan: GenerationPlan) -> TimedRun:
    return price_run(profile, plan=plan, passes=result.timed_passes, draws=result.draws, machine=machine)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("label", PLANS)
def test_a_run_that_went_as_planned_has_the_time_of_its_prediction(
    profile: GenerationProfile, machine: Machine, label: str, temperature: float
) -> None:
    plan = PLANS[label]
    result, _ = run(plan, temperature=temperature)
    workload = GenerationWorkload.of_prompts(LENGTHS, num_new_tokens=[20] * len(LENGTHS), draws=temperature > 0)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    timed = price(result, profile, machine, plan)
    assert timed.total_ms == pytest.approx(predicted.total_s * 1000, rel=1e-3)
    assert 0 < timed.measured_ms <= result.total_s * 1000


@pytest.mark.parametrize("label", PLANS)
def test_a_run_whose_sequences_stop_is_priced_by_the_steps_and_rows_that_ran(
    profile: GenerationProfile, machine: Machine, label: str
) -> None:
    plan = PLANS[label]
    whole, finished = run(plan)
    stops = tuple({each.token_ids[3] for each in finished})
    stopped, _ = run(plan, stop_token_ids=stops)
    assert stopped.num_steps < whole.num_steps
    assert sum(each.micro_batches[0].num_steps * each.count for each in stopped.timed_passes) <= stopped.num_steps
    assert price(stopped, profile, machine, plan).total_ms < 0.9 * price(whole, profile, machine, plan).total_ms


def test_passes_that_ran_are_reported_with_who_left_when() -> None:
    """Here as planned: the sequences that ask for 3 tokens leave the others."""
    asked = [(10, 3), (10, 3), (10, 24), (10, 20)]
    plan = PLANS["plain"]
    requests = [
        Request(id=str(index), token_ids=(1,) * length, sampling=Sampling(max_new_tokens=num_new))
        for index, (length, num_new) in enumerate(asked)
    ]
    with open_generator(SPEC, plan=plan) as generator:
        result = run_requests(generator, requests, on_finished=lambda finished: None)
    workload = GenerationWorkload.of_prompts(
        [length for length, _ in asked], num_new_tokens=[num_new for _, num_new in asked]
    )
    planned = passes_of(plan, workload)
    assert [(each.micro_batches, each.count) for each in result.timed_passes] == list(planned)
    assert planned[0][0][0].leaving == ((3, 2),)


def test_the_next_estimate_has_what_a_run_took(profile: GenerationProfile, machine: Machine) -> None:
    """A run that took three times as long as its price: all kinds are, and the next prediction is."""
    plan = PLANS["plain"]
    workload = GenerationWorkload(prompt_length=16, num_new_tokens=20, num_sequences=4)
    before = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    passes = [
        TimedPass(micro_batches=shape, count=count, total_ms=3000 * before.total_s)
        for shape, count in passes_of(plan, workload)
    ]
    training = {"version": 2, "step_time_factor": 0.5, "time_factors": {"matmul": 0.5}, "num_runs": 4, "runs": []}
    run = price_run(profile, plan=plan, passes=passes, draws=False, machine=machine)
    taught = learn_generation(training, run)
    after = estimate_generation(profile, plan=plan, workload=workload, machine=machine, calibration=taught)
    assert after.total_s == pytest.approx(3 * before.total_s, rel=0.12)
    assert after.device_peak_bytes == before.device_peak_bytes
    assert read_time_factors(taught)["matmul"] == 0.5
    assert read_time_factors(of_generations(taught))["matmul"] == pytest.approx(3, rel=0.12)
