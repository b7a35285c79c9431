"""The one seam for what kernels hold beside their tensors: a table for each kind of device, chosen here. Torch-free.

``cpu_kernels.py`` stands before the CPU's arithmetic, which is frozen; ``cuda_kernels.py`` is CUDA's table. What no source
states is an interval, and a kernel of which nobody states anything is *unknown*, which a verdict may not pass over.
"""

from typing import Protocol, overload

from optimizer.estimate.kernels.cpu_kernels import CpuKernels
from optimizer.estimate.kernels.cuda_kernels import CudaKernels
from optimizer.estimate.kernels.held import Held
from optimizer.hardware.device_spec import Card
from optimizer.hardware.machine import Processor
from optimizer.profile.ops import Op
from optimizer.profile.sizes import Shape


class KernelScratch(Protocol):
    """Memory that the kernels of one device hold."""

    @property
    def random_state_bytes(self) -> int:
        """Bytes of random state kept on the device by a block that will run forward again."""

    def hold(self, op: Op, shape: Shape, *, compute_dtype: str) -> Held:
        """Memory that one op holds. compute_dtype: ``fp32``, ``bf16`` or ``fp16``, which a profile has as ``bf16``."""


@overload
def find_kernels(facts: Processor) -> CpuKernels: ...
@overload
def find_kernels(facts: Card) -> CudaKernels: ...
def find_kernels(facts: Processor | Card) -> CpuKernels | CudaKernels:
    """The table for a device. facts: what decides there which kernels run."""
    return CudaKernels(facts) if isinstance(facts, Card) else CpuKernels(facts)
