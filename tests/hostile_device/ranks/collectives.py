"""Stands in for NCCL, which needs a card for each rank: collectives beside compute, with another rank that has just what this
one has. It works on streams of the hostile device, and on those of one card.

As NCCL's they begin after what compute has queued, run on streams of their own, one for each group, and compute that is to find
their results waits for them. The other rank of a model that is cut sends numbers drawn by their order, and keeps a copy of what
it is sent. What the host exchanges is the real thing of one rank, twice.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optimizer.runtime.device.backend import Backend
from optimizer.runtime.ranks.group import RankPlace, Ranks

_DEADLINE_S = 5.0
_BUSY_CYCLES = 200_000
"""A tenth of a millisecond by a card's clock."""
_SMALL = 0.01
"""Size of what the other rank sends."""


class TwinRanks(Ranks):
    """One rank of two, or of more that have just what this one has."""

    def __init__(
        self,
        backend: Backend,
        *,
        folder: Path,
        rank: int = 0,
        timeout_s: float = _DEADLINE_S,
        ends_broadcasts: bool = True,
        fails: bool = False,
        are_at_once: bool = False,
        num_ranks: int = 2,
    ) -> None:
        """ends_broadcasts: False has the other rank never take part in one to its end. fails: True has collectives end in an
        error, which is raised where they are waited for a second time. are_at_once: True has the host wait for each collective,
        so that nothing runs beside it.
        """
        self.kept: dict[int, torch.Tensor] = {}
        """Bytes of tensors that the other rank keeps and never changes, by their storage."""
        self.sent: list[torch.Tensor] = []
        """Tensors as the other rank found them."""
        self.numbers_on_their_way: list[Sequence[int]] = []
        """Those that were sent, and that nobody has waited for."""
        super().__init__(RankPlace(rank=0, num_ranks=1, folder=folder, timeout_s=timeout_s), device=torch.device("cpu"))
        self.rank, self.num_ranks = rank, num_ranks
        self._make_group = lambda: _Collectives(
            backend,
            num_ranks=num_ranks,
            ends_broadcasts=ends_broadcasts,
            fails=fails,
            are_at_once=are_at_once,
            kept=self.kept,
            sent=self.sent,
        )
        self._make_some = lambda members: TwinRanks(
            backend,
            folder=folder / "-".join(map(str, members)),
            rank=list(members).index(rank),
            timeout_s=timeout_s,
            ends_broadcasts=ends_broadcasts,
            fails=fails,
            are_at_once=are_at_once,
            num_ranks=len(members),
        )
        self._device, self._is_cuda = self._make_group(), True
        self._ways = [self._device]

    def open_ways(self, number: int) -> None:
        while len(self._ways) < number:
            self._ways.append(self._make_group())

    def among(self, members: Sequence[int]) -> Ranks:
        key = tuple(members)
        if key not in self._some:
            self._some[key] = self._make_some(members)
        return self._some[key]

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of each."""
        return self.num_ranks * [super().exchange(numbers)[self.rank]]

    def begin_sending(self, integers: Sequence[int], *, to: int, tag: int) -> Any:
        self.numbers_on_their_way.append(integers)
        return _SentNumbers(self.numbers_on_their_way, integers)

    def receive_integers(self, count: int, *, source: int, tag: int) -> NDArray[np.int64]:
        """Zeros: the first token of the vocabulary, or that nobody wishes to stop."""
        return np.zeros(count, dtype=np.int64)


class _SentNumbers:
    def __init__(self, on_their_way: list[Sequence[int]], integers: Sequence[int]) -> None:
        self._on_their_way, self._integers = on_their_way, integers

    def wait(self) -> None:
        self._on_their_way.remove(self._integers)


class _Collectives:
    """A group, with a stream of its own."""

    def __init__(
        self,
        backend: Backend,
        *,
        num_ranks: int,
        ends_broadcasts: bool,
        fails: bool,
        are_at_once: bool,
        kept: Mapping[int, torch.Tensor],
        sent: list[torch.Tensor],
    ) -> None:
        self._backend, self._kept, self._sent, self._num_ranks = backend, kept, sent, num_ranks
        self._ends_broadcasts, self._fails, self._are_at_once = ends_broadcasts, fails, are_at_once
        self._stream = backend.make_stream()
        self._drawn: list[torch.Tensor] = []
        """Tensors that the other rank has sent, which it holds."""

    def allreduce(self, tensors: list[torch.Tensor]) -> "_Work":
        return self._multiply(tensors, by=self._num_ranks)

    def reduce(self, tensors: list[torch.Tensor], options: object) -> "_Work":
        return self._multiply(tensors, by=self._num_ranks)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "_Work":
        (tensor,) = tensors
        kept = self._kept.get(tensor.untyped_storage()._cdata) if options.rootRank else None
        if kept is None:
            return self._multiply(tensors, by=1, ends=self._ends_broadcasts)
        return self._copy(kept, tensor, ends=self._ends_broadcasts)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> "_Work":
        (tensor,) = tensors
        self._sent.append(torch.zeros_like(tensor))
        return self._copy(tensor, self._sent[-1])

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "_Work":
        (tensor,) = tensors
        generator = torch.Generator().manual_seed(len(self._drawn))
        numbers = torch.randn(tensor.shape, generator=generator).mul_(_SMALL)
        self._drawn.append(numbers.to(device=tensor.device, dtype=tensor.dtype))
        return self._copy(self._drawn[-1], tensor)

    def abort(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor, *, ends: bool = True) -> "_Work":
        return self._do(lambda: target.copy_(source), beside=target, ends=ends)

    def _multiply(self, tensors: list[torch.Tensor], *, by: int, ends: bool = True) -> "_Work":
        return self._do(lambda: [tensor.mul_(by) for tensor in tensors], beside=tensors[0], ends=ends)

    def _do(self, do: Callable[[], object], *, beside: torch.Tensor, ends: bool) -> "_Work":
        if self._stream is None:
            do()
            return _Work(self._backend, None, ends=ends, fails=self._fails)
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.on(self._stream):
            _be_late(beside)
            do()
        work = _Work(self._backend, self._stream.record_event(), ends=ends, fails=self._fails)
        if self._are_at_once:
            self._stream.synchronize()
        return work


def _be_late(tensor: torch.Tensor) -> None:
    """On a card: keep the stream busy for a moment. The hostile device is late by itself."""
    if tensor.is_cuda:
        torch.cuda._sleep(_BUSY_CYCLES)


class _Work:
    def __init__(self, backend: Backend, done: Any, *, ends: bool, fails: bool) -> None:
        self._backend, self._done, self._ends, self._fails = backend, done, ends, fails
        self._is_waited_for = False

    def wait(self) -> None:
        if self._is_waited_for and self._fails:
            raise RuntimeError("the other rank has left in the midst of it")
        if self._done is not None:
            self._backend.current_stream().wait_event(self._done)
        self._is_waited_for = True

    def is_completed(self) -> bool:
        """Not before compute waits for it, and then at once."""
        return self._ends and self._is_waited_for
