"""One small model, its profile, and real steps of it, for all tests of techniques; steps are measured once for each plan."""

import functools

import pytest
import torch

from optimizer.models.spec import read_model_spec
from tests.optimizer.profiles import trace
from tests.optimizer.techniques.plans import EXTENT, LLAMA


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def spec():
    return read_model_spec(LLAMA)


@pytest.fixture(scope="module")
def profile(spec):
    return trace(spec, extent=EXTENT)


@pytest.fixture(scope="module")
def measure(spec, tmp_path_factory):
    from optimizer.runtime.job.measure import measure_step

    scratch = tmp_path_factory.mktemp("scratch")

    @functools.cache
    def run(plan, workload):
        return measure_step(spec, plan=plan, workload=workload, scratch=scratch, with_weights_hash=True)

    return run
