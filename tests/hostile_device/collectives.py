"""Stands in for NCCL, which needs cards: collectives beside compute, with another rank that has just what this one has.

As NCCL's they begin after what compute has queued, run on a stream of their own, and compute that is to find their results waits
for them. What the host exchanges is the real thing of one rank, twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optimizer.runtime.ranks.group import RankPlace, Ranks
from tests.hostile_device.backend import HostileBackend
from tests.hostile_device.streams import HostileEvent

_DEADLINE_S = 5.0


class TwinRanks(Ranks):
    """Rank 0 of two."""

    def __init__(
        self, backend: HostileBackend, *, folder: Path, timeout_s: float = _DEADLINE_S, ends_broadcasts: bool = True
    ) -> None:
        """ends_broadcasts: False has the other rank never take part in one to its end."""
        self.kept: dict[int, torch.Tensor] = {}
        """Bytes of tensors that the other rank keeps and never changes, by their storage."""
        super().__init__(RankPlace(rank=0, num_ranks=1, folder=folder, timeout_s=timeout_s), device=backend.device)
        self.num_ranks = 2
        self._device, self._is_cuda = _Collectives(backend, ends_broadcasts=ends_broadcasts, kept=self.kept), True

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of each."""
        return 2 * super().exchange(numbers)[:1]


class _Collectives:
    def __init__(self, backend: HostileBackend, *, ends_broadcasts: bool, kept: Mapping[int, torch.Tensor]) -> None:
        self._backend, self._ends_broadcasts, self._kept = backend, ends_broadcasts, kept
        self._stream = backend.make_stream()

    def allreduce(self, tensors: list[torch.Tensor]) -> "_Work":
        return self._multiply(tensors, by=2)

    def reduce(self, tensors: list[torch.Tensor], options: object) -> "_Work":
        return self._multiply(tensors, by=2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "_Work":
        (tensor,) = tensors
        kept = self._kept.get(tensor.untyped_storage()._cdata) if options.rootRank else None
        if kept is None:
            return self._multiply(tensors, by=1, ends=self._ends_broadcasts)
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.on(self._stream):
            tensor.copy_(kept)
        return _Work(self._backend, self._stream.record_event(), ends=self._ends_broadcasts)

    def abort(self) -> None:
        self._stream.synchronize()

    def _multiply(self, tensors: list[torch.Tensor], *, by: int, ends: bool = True) -> "_Work":
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.on(self._stream):
            for tensor in tensors:
                tensor.mul_(by)
        return _Work(self._backend, self._stream.record_event(), ends=ends)


class _Work:
    def __init__(self, backend: HostileBackend, done: HostileEvent, *, ends: bool) -> None:
        self._backend, self._done, self._ends = backend, done, ends
        self._is_waited_for = False

    def wait(self) -> None:
        stream: Any = self._backend.current_stream()
        stream.wait_event(self._done)
        self._is_waited_for = True

    def is_completed(self) -> bool:
        """Not before compute waits for it, and then at once."""
        return self._ends and self._is_waited_for
