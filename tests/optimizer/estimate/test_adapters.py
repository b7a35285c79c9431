"""Predicted bytes of training adapters, packed or not, equal what the runtime's meter counts."""

import dataclasses
from typing import Any

import pytest

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import measure_step
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.profiles import trace

ADAPTER = Adapter(rank=4)


@pytest.fixture(scope="module")
def llama() -> ModelSpec:
    return read_model_spec(SMALL_CONFIGS["llama"])


@pytest.fixture(scope="module")
def adapted(llama: ModelSpec) -> Profile:
    weights = [WeightsPlan(dtype=dtype, frozen=form) for dtype in ("fp32", "bf16") for form in ("same", "int8", "int4", "nf4")]
    extent = Extent(representations=tuple(each.representation for each in weights), shapes=((2, 40),))
    return trace(llama, adapter=ADAPTER, extent=extent)


def make_workload(plan: Plan) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=40, global_batch_size=plan.batch.global_batch_size, adapter=ADAPTER
    )


@pytest.mark.breadth
@pytest.mark.parametrize("per_block", [("keep",) * 3, ("offload", "recompute", "selective")], ids=["kept", "each"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("form", ["same", "int8", "int4", "nf4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_peak_is_what_the_meter_counts(
    llama: ModelSpec,
    adapted: Profile,
    machine: Machine,
    dtype: str,
    form: str,
    accumulation_steps: int,
    per_block: tuple[str, ...],
) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=accumulation_steps),
        weights=WeightsPlan(dtype=dtype, frozen=form),
        activations=ActivationsPlan(per_block=per_block),
    )
    predicted = estimate_training(adapted, plan=plan, workload=make_workload(plan), machine=machine)
    measured = measure_step(llama, plan=plan, workload=make_workload(plan))
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category


@pytest.mark.breadth
@pytest.mark.parametrize(
    "elsewhere",
    [{}, {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}],
    ids=["weights", "all"],
)
@pytest.mark.parametrize("weights", [{}, {"frozen": "nf4"}, {"frozen": "int8", "dtype": "bf16", "prefetch": 2}])
def test_streamed_frozen_weights_are_predicted_with_what_each_link_carries(
    llama: ModelSpec, adapted: Profile, machine: Machine, weights: dict[str, Any], elsewhere: dict[str, Any]
) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        weights=WeightsPlan(place="host", **weights),
        activations=ActivationsPlan(per_block=("offload", "recompute", "keep")),
        **elsewhere,
    )
    predicted = estimate_training(adapted, plan=plan, workload=make_workload(plan), machine=machine)
    measured = measure_step(llama, plan=plan, workload=make_workload(plan))
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.copied_bytes == measured.copied_bytes


def test_the_blocks_of_a_base_that_stream_are_what_other_jobs_can_share(adapted: Profile, machine: Machine) -> None:
    def shared_bytes(place: Any, *, mode: Any) -> int:
        plan = Plan(
            batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
            weights=WeightsPlan(place=place, frozen="int8"),
            activations=ActivationsPlan(per_block=("keep",) * 3),
        )
        workload = dataclasses.replace(make_workload(plan), mode=mode)
        return estimate_training(adapted, plan=plan, workload=workload, machine=machine).base_bytes

    blocks_bytes = 3 * adapted.frozen_bytes("fp32/int8").by_block[0]
    assert shared_bytes("host", mode="finetune") == blocks_bytes
    # A base of random numbers is the job's own, and what stays on the device is each job's.
    assert shared_bytes("host", mode="pretrain") == shared_bytes("device", mode="finetune") == 0


def test_eight_bit_state_of_adapters_is_predicted_too(llama: ModelSpec, adapted: Profile, machine: Machine) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        weights=WeightsPlan(frozen="nf4"),
        optimizer_state=OptimizerStatePlan(bits=8),
        activations=ActivationsPlan(per_block=("recompute",) * 3),
    )
    predicted = estimate_training(adapted, plan=plan, workload=make_workload(plan), machine=machine)
    measured = measure_step(llama, plan=plan, workload=make_workload(plan))
    assert predicted.device_peak_bytes == measured.device_peak_bytes


def test_a_profile_with_adapters_holds_them_alone_and_weighs_the_rest(llama: ModelSpec, adapted: Profile) -> None:
    num_adapters = 3 * 4 * (4 * 32 + 32 + 16 + 16 + 32 + 3 * (32 + 48))
    assert adapted.num_parameters == num_adapters
    assert adapted.total_frozen_bytes("fp32") == 4 * llama.num_parameters
    assert adapted.total_frozen_bytes("bf16") == adapted.total_frozen_bytes("fp16") == 2 * llama.num_parameters
    block, packed = (adapted.frozen_bytes(form).by_block[0] for form in ("bf16", "bf16/nf4"))
    norms_bytes = 2 * 2 * 32
    num_matrix_elements = (block - norms_bytes) // 2
    # Half a byte an element, and one fp32 scale for each 64.
    assert packed - norms_bytes == num_matrix_elements // 2 + num_matrix_elements // 64 * 4
    assert adapted.frozen_bytes("bf16/nf4").outside == adapted.frozen_bytes("bf16").outside


def test_the_profile_of_each_kind_of_adapter_has_its_own_name(llama: ModelSpec, adapted: Profile) -> None:
    assert adapted.model_fingerprint == profile_fingerprint(llama.fingerprint, ADAPTER)
    assert profile_fingerprint("f", None) == "f"
    kinds = [ADAPTER, Adapter(rank=8), Adapter(rank=4, dropout=0.1), Adapter(rank=4, targets=("q_proj",))]
    assert len({profile_fingerprint("f", kind) for kind in kinds}) == len(kinds)
    assert profile_fingerprint("f", Adapter(rank=4, alpha=1.0)) == profile_fingerprint("f", ADAPTER)
    same = Adapter(rank=4, targets=("v_proj", "q_proj")), Adapter(rank=4, targets=("q_proj", "v_proj"))
    assert profile_fingerprint("f", same[0]) == profile_fingerprint("f", same[1])


def test_a_profile_with_adapters_goes_through_json(adapted: Profile) -> None:
    assert Profile.from_json(adapted.to_json()) == adapted
