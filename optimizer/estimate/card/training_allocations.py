"""Lists a training plan's allocations, one by one in order, for the model of the allocator. Torch-free."""

from optimizer.estimate.card.allocations import Allocations, list_allocations
from optimizer.estimate.card.on_cuda import CudaMoves
from optimizer.estimate.kernels.cuda_kernels import CudaKernels
from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.estimate.step.setting import LaidOut, lay_out
from optimizer.hardware.cuda_facts import read_card
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def list_training_allocations(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> Allocations:
    """A plan as single allocations in order: loading and two steps. Raises as ``estimate_training`` does."""
    laid = lay_out(profile, plan=plan, workload=workload, machine=machine)
    return list_laid_out(laid, plan=plan, workload=workload, machine=machine, torch_version=profile.torch_version)


def list_laid_out(
    laid: LaidOut, *, plan: Plan, workload: TrainingWorkload, machine: Machine, torch_version: str
) -> Allocations:
    """The same of what ``lay_out`` made of the same arguments."""
    kernels = None
    if machine.device.kind == "cuda":
        kernels = find_kernels(read_card(machine.device, torch_version=torch_version))
    return list_allocations(
        laid.schedule,
        resident=laid.resident,
        tensors=laid.tensors,
        plan=plan,
        kept=workload.kept_state,
        on_cuda=_cuda_moves(laid, plan, workload, kernels) if kernels is not None else None,
    )


def _cuda_moves(laid: LaidOut, plan: Plan, workload: TrainingWorkload, kernels: CudaKernels) -> CudaMoves:
    # Consumed gradients are gone before all norms could be taken at once.
    takes_norms = plan.gradients.choice != "consume"
    return CudaMoves(
        kernels,
        num_tokens=plan.batch.micro_batch_size * workload.sequence_length,
        norm_elements=[tensor.num_elements for tensor in laid.tensors.sizes] if takes_norms else (),
    )
