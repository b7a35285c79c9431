"""One small model, its profile, and real steps of it, for all tests of techniques; steps are measured once for each plan."""

import functools
from collections.abc import Callable

import pytest
import torch

from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import TrainingWorkload
from tests.optimizer.profiles import trace
from tests.optimizer.techniques.plans import EXTENT, LLAMA


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model_spec(LLAMA)


@pytest.fixture(scope="module")
def profile(spec: ModelSpec) -> Profile:
    return trace(spec, extent=EXTENT)


@pytest.fixture(scope="module")
def measure(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., StepMeasurement]:
    from optimizer.runtime.job.measure import measure_step

    scratch = tmp_path_factory.mktemp("scratch")

    @functools.cache
    def run(plan: Plan, workload: TrainingWorkload) -> StepMeasurement:
        return measure_step(spec, plan=plan, workload=workload, scratch=scratch, with_weights_hash=True)

    return run
