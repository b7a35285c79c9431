"""Lets rank 0 read the tensors of all ranks, one at a time as it asks for them; the others answer until it is done.

For checkpoints and exports, which rank 0 writes alone and in the form that one device writes. Facts go ahead as JSON; a tensor is
read by its rank when rank 0 wants it (from the device, the host or a store), and crosses as bytes.

What is allocated, all of it on the host as temporaries: on rank 0 the bytes of the tensor that it reads; on the tensor's owner a
copy of it, unless it lies on the host in one piece.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch

from optimizer.base.errors import RankLost
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.tiers.homes import LaterTensor

T = TypeVar("T")
AnyTensor = torch.Tensor | LaterTensor
_DONE: Final = -1
"""Sent in place of a tensor's index."""


class _Remote:
    """A tensor of another rank."""

    def __init__(self, ranks: Ranks, *, source: int, index: int, dtype: torch.dtype, shape: torch.Size) -> None:
        self._ranks = ranks
        self._source = source
        self._index = index
        self.dtype = dtype
        self.shape = shape
        self.nbytes = dtype.itemsize * shape.numel()

    def load(self) -> torch.Tensor:
        """In host memory."""
        _send_index(self._ranks, self._index, to=self._source)
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        self._ranks.receive(data, source=self._source)
        return data.view(self.dtype).view(self.shape)


def load_tensor(held: AnyTensor) -> torch.Tensor:
    """The numbers of a tensor, read where they are elsewhere; not to be written to."""
    return held.detach() if isinstance(held, torch.Tensor) else held.load()


def gather_to_first(
    ranks: Ranks,
    *,
    groups: Mapping[str, Mapping[str, AnyTensor]],
    facts: Mapping[str, Any],
    use: Callable[[dict[str, dict[str, AnyTensor]], dict[str, Any]], T],
) -> T | None:
    """Call ``use`` on rank 0 with the tensors and facts of all ranks, and return its result there; None on the others.

    groups: this rank's tensors, by group and name, which must stay as they are until this returns; names of one group are of
    one rank. facts: JSON-able, by keys that are one rank's.
    """
    tensors = [(group, name, tensor) for group, named in groups.items() for name, tensor in named.items()]
    listed = [[group, name, _name_of(tensor.dtype), list(tensor.shape)] for group, name, tensor in tensors]
    found = ranks.exchange_json({"tensors": [] if ranks.is_first else listed, "facts": dict(facts)})
    if not ranks.is_first:
        _answer(ranks, [tensor for _, _, tensor in tensors])
        return None
    everything: dict[str, dict[str, AnyTensor]] = {group: dict(named) for group, named in groups.items()}
    for rank, theirs in enumerate(found):
        for index, (group, name, dtype, shape) in enumerate(theirs["tensors"]):
            everything.setdefault(group, {})[name] = _Remote(
                ranks, source=rank, index=index, dtype=getattr(torch, dtype), shape=torch.Size(shape)
            )
    try:
        return use(everything, {key: value for theirs in found for key, value in theirs["facts"].items()})
    finally:
        for rank in range(1, ranks.num_ranks):
            # Where one is gone, that has been raised already, or will be at the next exchange.
            with contextlib.suppress(RankLost):
                _send_index(ranks, _DONE, to=rank)


def _answer(ranks: Ranks, tensors: Sequence[AnyTensor]) -> None:
    """Send rank 0 what it asks for until it is done."""
    asked = np.empty(1, dtype=np.int64)
    while True:
        ranks.receive(torch.from_numpy(asked), source=0)
        if asked[0] == _DONE:
            return
        tensor = tensors[int(asked[0])]
        data = load_tensor(tensor)
        ranks.send(data.cpu().contiguous(), to=0)
        del data


def _send_index(ranks: Ranks, index: int, *, to: int) -> None:
    ranks.send(torch.from_numpy(np.array([index], dtype=np.int64)), to=to)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
