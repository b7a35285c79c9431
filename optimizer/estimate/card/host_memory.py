"""Host memory of a plan, as it is really taken: pinned memory in whole slabs and pages, and memory that can be swapped.

Follows ``runtime/tiers/host_memory.py``: what is offloaded and comes back is cut from pinned slabs, buffers that stay are pinned
where they lie, in whole pages, and what never meets the device is not pinned at all. torch itself would round each pinned buffer
up to a power of two; slabs and staging are powers of two already. On the CPU device nothing is pinned. Torch-free.

*Not modelled*: the interpreter and its libraries (1 to 3 GB with torch and CUDA), batches read ahead, the page cache.
"""

from optimizer.base.intervals import ByteInterval, exact_interval
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.prediction import HostMemory, Prediction
from optimizer.estimate.step.simulate import Resident
from optimizer.formats.transfer_sizes import ARENA_SLAB_BYTES
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload

PAGE_BYTES = 4096
_FP32_BYTES = 4
_NORM_BYTES = 4


def estimate_host_memory(
    prediction: Prediction,
    *,
    resident: Resident,
    tensors: TensorList,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
) -> HostMemory:
    """Memory of the host, pinned and pageable: together at least ``prediction.host_peak_bytes``."""
    total_bytes = prediction.host_peak_bytes
    if machine.device.kind == "cpu":
        return HostMemory(exact_interval(0), exact_interval(total_bytes))
    pageable_bytes = _pageable_bytes(tensors, plan, workload)
    staying_bytes = max(0, resident.host - pageable_bytes)
    passing_bytes = max(0, total_bytes - resident.host)
    slabs_bytes = -(-passing_bytes // ARENA_SLAB_BYTES) * ARENA_SLAB_BYTES
    num_buffers = 2 * len(tensors.sizes)
    pinned = ByteInterval(
        low=staying_bytes + passing_bytes,
        value=staying_bytes + slabs_bytes,
        # A page for the end of each buffer; and slabs of which buffers of other sizes use the rest again only by exact size.
        high=staying_bytes + num_buffers * PAGE_BYTES * bool(staying_bytes) + 2 * slabs_bytes,
    )
    return HostMemory(pinned, exact_interval(pageable_bytes))


def _pageable_bytes(tensors: TensorList, plan: Plan, workload: TrainingWorkload) -> int:
    """Bytes on the host that only the host reads: norms, moments, masters of weights below fp32."""
    norms_bytes = _NORM_BYTES * len(tensors.sizes) if plan.gradients.choice == "host" else 0
    if plan.optimizer_state.place != "host":
        return norms_bytes
    leaves = tensors.list_leaving(plan.optimizer_state)
    num_away = sum(n for n, is_away in zip(tensors.num_elements, leaves, strict=True) if is_away)
    each_bytes = _FP32_BYTES * workload.num_moments + plan.weights.master_bytes_per_element
    return norms_bytes + each_bytes * num_away
