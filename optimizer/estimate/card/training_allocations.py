"""Lists a training plan's allocations, one by one in order, for the model of the allocator. Torch-free."""

from optimizer.estimate.card.allocations import Allocations, list_allocations
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.step.setting import lay_out
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def list_training_allocations(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Allocations:
    """Loading and two steps of a plan. Raises what ``estimate_training`` raises."""
    prepared = lay_out(profile, plan=plan, workload=workload, machine=machine)
    return list_allocations(
        prepared.schedule,
        resident=prepared.resident,
        tensors=prepared.tensors,
        plan=plan,
        kept=workload.kept_state,
        on_cuda=_cuda_moves(plan, workload) if machine.device.kind == "cuda" else None,
    )


def _cuda_moves(plan: Plan, workload: TrainingWorkload) -> CudaMoves:
    computes_in_fp32 = plan.weights.dtype == "fp32" and plan.weights.autocast == "off"
    return CudaMoves(
        element_bytes=4 if computes_in_fp32 else 2,
        num_tokens=plan.batch.micro_batch_size * workload.sequence_length,
    )
