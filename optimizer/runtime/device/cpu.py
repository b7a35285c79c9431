"""The CPU as a device: a copy or an op is done when it returns, and nothing is ever waited for."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch

from optimizer.runtime.device.backend import Stream


class CpuBackend:
    """Synchronous; its memory is the host's."""

    is_asynchronous = False
    memory = None
    name = "CPU"
    exchange_versions: Mapping[str, str] = MappingProxyType({})
    capability = None
    computes_bf16 = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_stream(self) -> Stream | None:
        return None

    def current_stream(self) -> Stream:
        raise NotImplementedError("the CPU device has no streams")

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        raise NotImplementedError("the CPU device has no streams")

    def synchronize(self) -> None:
        """Nothing is under way."""

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def enter_thread(self) -> None:
        """Nothing has to be chosen."""

    def empty_pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def register(self, data: torch.Tensor) -> int:
        return 0

    def unregister(self, data: torch.Tensor) -> None:
        """Nothing is pinned."""

    def random_state(self) -> torch.Tensor | None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        raise NotImplementedError("the CPU device draws the host's random numbers")
