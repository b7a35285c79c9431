"""Training and generation give the CPU's bits on the hostile device.

``python -m benchmarks.waits seeds`` does it for all plans and many orders.
"""

import dataclasses
from pathlib import Path

import pytest

from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.profile.extent import Extent
from optimizer.profile.trace.trace import profile_model
from tests.hostile_device.backend import hostile_device
from tests.hostile_device.cases import (
    SCHEDULES,
    Case,
    generate,
    list_generation_cases,
    list_technique_cases,
    list_training_cases,
    train_tiny,
)
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import make_plan
from tests.optimizer.techniques.plans import LLAMA
from tests.valkey import Valkey

TECHNIQUES = list_technique_cases(num_pairs=5, seed=7)
TRAINING = list_training_cases()[::4]
GENERATION = list_generation_cases()[::3]


def _numbered(cases: list[Case]) -> list[object]:
    return [pytest.param(index, case, id=case.name) for index, case in enumerate(cases)]


@pytest.mark.breadth
@pytest.mark.parametrize(("index", "case"), _numbered([*TECHNIQUES, *TRAINING]))
def test_training_gives_the_bits_of_the_plain_device(index: int, case: Case) -> None:
    assert case.on_hostile_device(schedule=SCHEDULES[index % len(SCHEDULES)], seed=index) == case.expected


@pytest.mark.breadth
@pytest.mark.parametrize(("index", "case"), _numbered(GENERATION))
def test_generation_gives_the_tokens_of_the_plain_device(index: int, case: Case) -> None:
    assert case.on_hostile_device(schedule=SCHEDULES[index % len(SCHEDULES)], seed=index) == case.expected


def test_a_remote_store_gives_the_bits_of_the_plain_device(remote: Valkey) -> None:
    plan = make_plan("offload_remote", "keep", "offload", gradients="host", state_place="remote", weights_place="remote")
    case = Case("remote", lambda scratch: train_tiny("llama", plan, scratch, max_grad_norm=None))
    assert case.on_hostile_device(schedule="late") == case.expected
    cache = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place="remote"))
    case = Case("remote cache", lambda scratch: generate(SMALL_CONFIGS["llama"], cache, scratch))
    assert case.on_hostile_device(schedule="late") == case.expected


def test_a_profile_traced_there_is_that_of_the_plain_device() -> None:
    spec, extent = read_model_spec(LLAMA), Extent(representations=("fp32",), shapes=((2, 24),))
    with hostile_device():
        found = profile_model(spec, extent=extent)
    assert found.to_json() == profile_model(spec, extent=extent).to_json()


def test_a_case_is_another_than_its_neighbours(tmp_path: Path) -> None:
    first, second = (dataclasses.replace(case) for case in TECHNIQUES if case.name in ("accumulate", "chunked loss"))
    assert first.expected != second.expected
