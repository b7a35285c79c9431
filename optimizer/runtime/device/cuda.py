"""CUDA as a device, and ROCm, whose build of torch answers to the same names.

What torch has under one name for all makers (``torch.accelerator``: waiting for the device, the allocator's counters) is asked
there; streams, pinned memory where it lies, limits and settings of the allocator have only their own names.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from optimizer.runtime.device.backend import Stream

_BF16_CAPABILITY = (8, 0)


class CudaMemory:
    """Torch's caching allocator on one card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    @property
    def allocated_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    @property
    def reserved_bytes(self) -> int:
        return torch.accelerator.memory_reserved(self._device)

    @property
    def peak_allocated_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device)

    @property
    def peak_reserved_bytes(self) -> int:
        return torch.accelerator.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def limit(self, share: float) -> None:
        # What earlier work left cached counts towards it.
        self.release_cached()
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)

    def release_cached(self) -> None:
        torch.accelerator.empty_cache()

    def set_expandable_segments(self, *, is_on: bool) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # The older name warns in torch 2.13; the newer one need not be in the oldest torch that is allowed.
        settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (settings or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{is_on}")

    def clear_workspaces(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()


class CudaBackend:
    """One card."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = CudaMemory(device)

    def make_stream(self) -> Stream:
        return cast(Stream, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return cast(Stream, torch.cuda.current_stream(self.device))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        own: Any = stream
        return torch.cuda.stream(own)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def current(self) -> AbstractContextManager[object]:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.device(self.device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def register(self, data: torch.Tensor) -> int:
        return int(_cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0))

    def unregister(self, data: torch.Tensor) -> None:
        _cudart().cudaHostUnregister(data.data_ptr())

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def exchange_versions(self) -> Mapping[str, str]:
        return {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    @property
    def computes_bf16(self) -> bool:
        # Asked of the card: torch also says yes where it would emulate (T4).
        return self.capability >= _BF16_CAPABILITY

    def random_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
