"""Lists a training plan's allocations, one by one in order, for the model of the allocator. Torch-free."""

from optimizer.estimate.card.allocations import Allocations, list_allocations
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.step.setting import LaidOut, lay_out
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def list_training_allocations(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Allocations:
    """A plan as single allocations in order: loading and two steps. Raises as ``estimate_training`` does."""
    laid = lay_out(profile, plan=plan, workload=workload, machine=machine)
    return list_laid_out(laid, plan=plan, workload=workload, machine=machine)


def list_laid_out(laid: LaidOut, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> Allocations:
    """The same of what ``lay_out`` made of the same arguments."""
    return list_allocations(
        laid.schedule,
        resident=laid.resident,
        tensors=laid.tensors,
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
