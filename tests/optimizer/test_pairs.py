"""Every technique alone and with every other: the bits of plain training, and the predicted bytes on each tier and link.

Each plan runs two steps of one tiny model with gradients clipped (not where they are consumed, which cannot be). Plain means the
same micro-batches and the same chunks of the loss, since those change the order of sums, and nothing else.
"""

import dataclasses
import functools
import itertools

import pytest
import torch

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.workload import TrainingWorkload
from tests.optimizer.profiles import trace

NUM_BLOCKS = 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXTENT = Extent(representations=("fp32", "bf16"), shapes=((2, 24), (4, 24)))
"""Extent of the profile for all plans here, and for those of SGD (test_sgd.py)."""
ON_HOST = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}
TECHNIQUES = {
    **{choice: {"activations": choice} for choice in ("recompute", "selective", "offload", "offload_disk")},
    "accumulate": {"batch": BatchPlan(micro_batch_size=2, accumulation_steps=2)},
    "chunked loss": {"logits_and_loss": LogitsAndLossPlan(num_chunks=3)},
    "consume": {"gradients": GradientsPlan(choice="consume")},
    "gradients on host": {"gradients": GradientsPlan(choice="host")},
    "state on host": ON_HOST,
    "half the state on host": {**ON_HOST, "optimizer_state": OptimizerStatePlan(place="host", fraction=0.5)},
    "state on disk": {**ON_HOST, "optimizer_state": OptimizerStatePlan(place="disk")},
    "weights on host": {**ON_HOST, "weights": WeightsPlan(place="host")},
    "weights on disk": {**ON_HOST, "weights": WeightsPlan(place="disk", prefetch=0)},
}


def make_plan(*names):
    """Make a plan; of two choices for blocks, the first holds for the outer ones and the second for those between."""
    columns = {"batch": BatchPlan(micro_batch_size=4, accumulation_steps=1)}
    for name in names:
        columns |= TECHNIQUES[name]
    choices = [TECHNIQUES[name]["activations"] for name in names if "activations" in TECHNIQUES[name]] or ["keep"]
    per_block = (choices[0], choices[-1], choices[0])
    return Plan(**columns | {"activations": ActivationsPlan(per_block=per_block)})


def make_workload(plan):
    clip = None if plan.gradients.choice == "consume" else 1.0
    return TrainingWorkload(sequence_length=24, global_batch_size=4, max_grad_norm=clip)


def list_cases():
    """All that can be carried out, each plan once: some pairs are the same as one of the two."""
    seen = set()
    for names in [*((name,) for name in TECHNIQUES), *itertools.combinations(TECHNIQUES, 2)]:
        plan = make_plan(*names)
        if plan.fingerprint not in seen and plan.find_conflict(make_workload(plan)) is None:
            seen.add(plan.fingerprint)
            yield pytest.param(names, id=" and ".join(names))


CASES = list(list_cases())


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
def machine():
    rates = Rates(
        matmul_flops_per_s={"fp32": 5e10},
        attention_flops_per_s={"fp32": 3e10},
        memory_bytes_per_s=8e9,
        op_overhead_s=5e-6,
        device_to_host_bytes_per_s=5e9,
        host_to_device_bytes_per_s=5e9,
        optimizer_elements_per_s={"adamw_32": 3e8},
        source="measured",
    )
    device = Device(kind="cpu", name="test", memory_bytes=2**34)
    return Machine(name="test", device=device, host_memory_bytes=2**34, rates=rates)


@pytest.fixture(scope="module")
def measure(spec, tmp_path_factory):
    """The weights' hash of two steps of a plan, and their bytes."""
    from optimizer.runtime.job.measure import measure_step

    scratch = tmp_path_factory.mktemp("scratch")

    @functools.cache
    def run(plan):
        workload = make_workload(plan)
        return measure_step(spec, plan=plan, workload=workload, scratch=scratch, with_weights_hash=True)

    return run


@pytest.fixture(scope="module")
def plain(spec):
    """The weights' hash of two steps of keeping everything, in the batch and the chunks of a plan."""
    from optimizer.runtime.job.measure import measure_step

    @functools.cache
    def run(batch, logits_and_loss, workload):
        plan = dataclasses.replace(make_plan(), batch=batch, logits_and_loss=logits_and_loss)
        return measure_step(spec, plan=plan, workload=workload, with_weights_hash=True).weights_sha256

    return run


@pytest.mark.parametrize("names", CASES)
def test_the_weights_are_those_of_plain_training(measure, plain, names):
    plan = make_plan(*names)
    assert plan.is_lossless
    assert measure(plan).weights_sha256 == plain(plan.batch, plan.logits_and_loss, make_workload(plan))


@pytest.mark.parametrize("names", CASES)
def test_bytes_on_each_tier_and_over_each_link_are_those_predicted(profile, machine, measure, names):
    plan = make_plan(*names)
    measured = measure(plan)
    predicted = estimate_training(profile, plan=plan, workload=make_workload(plan), machine=machine)
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.disk_peak_bytes == measured.disk_peak_bytes
    assert predicted.copied_bytes == measured.copied_bytes


def test_different_seeds_give_different_weights(measure, spec):
    from optimizer.runtime.job.measure import measure_step

    plan = make_plan()
    other = dataclasses.replace(make_workload(plan), seed=1)
    assert (
        measure_step(spec, plan=plan, workload=other, with_weights_hash=True).weights_sha256
        != measure(plan).weights_sha256
    )
