"""The CPU device's side of the seam. Behind it stands ``estimate/cpu``, which is frozen: it proves the schedule. Torch-free.

The arithmetic was measured with one version of torch. Another version's numbers are the same ones, and the interval says so.
"""

from collections.abc import Sequence

from optimizer.base.intervals import ByteInterval
from optimizer.estimate.cpu.cpu_scratch import RANDOM_STATE_BYTES, made_product_bytes, scratch_of
from optimizer.estimate.kernels.held import NO_BYTES, Held
from optimizer.hardware.machine import Processor
from optimizer.profile.ops import Op
from optimizer.profile.sizes import Shape

MEASURED_TORCH = "2.13"
_SOURCE = f"torch's profiler and ONEDNN_VERBOSE, torch {MEASURED_TORCH} (estimate/cpu)"


class CpuKernels:
    """Memory that oneDNN's and torch's own kernels hold for a processor."""

    random_state_bytes = RANDOM_STATE_BYTES

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def hold(self, op: Op, shape: Shape, *, compute_dtype: str, torch_version: str = MEASURED_TORCH) -> Held:
        """Memory that one op holds. torch_version: whose kernels run; another than the measured one makes a bound of
        the number.
        """
        num_bytes = scratch_of(op, shape, is_half=compute_dtype != "fp32", processor=self._processor)
        above = unmeasured_bytes(num_bytes, torch_version=torch_version)
        low = 0 if above else num_bytes
        scratch = ByteInterval(low=low, value=num_bytes, high=num_bytes + above)
        return Held(scratch, NO_BYTES, "bound" if above else "exact", _SOURCE)

    def hold_product(self, sides: Sequence[int], form: str, *, dtype: str, is_added: bool) -> int:
        """Bytes of a product that the runtime makes outside the trace, as ``cpu_scratch.made_product_bytes``."""
        return made_product_bytes(sides, form, dtype=dtype, is_added=is_added, processor=self._processor)


def unmeasured_bytes(num_bytes: int, *, torch_version: str) -> int:
    """Bytes that another version of torch may hold more than a measured scratch: as much again, an assumption."""
    return 0 if torch_version.startswith(f"{MEASURED_TORCH}.") or torch_version == MEASURED_TORCH else num_bytes
