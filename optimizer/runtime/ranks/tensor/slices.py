"""Slices of a model's tensors that ranks have where they share each block: taken, joined, and read from files.

What is allocated: a slice that is taken is a new tensor, beside the whole it is taken from; joined ones likewise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from optimizer.formats.shared_blocks import Slice, Widths, find_slice
from optimizer.models.files.load import WeightRead
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.gathering import AnyTensor, load_tensor

_STATE: Final = "//"
"""Between the name of a parameter and that of a part of its optimizer's state."""
_OF_RANK: Final = " of rank "
"""Between the name of a group of tensors and the rank that has them."""


class Slices:
    """The slices of one rank's model among so many."""

    def __init__(self, model: nn.Module, *, rank: int, num_ranks: int) -> None:
        """model: the rank's own, with adapters or without."""
        config: Any = model.config
        keys = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        widths = Widths.of({key: getattr(config, key, None) for key in keys}, num_ranks=num_ranks)
        self.rank, self.num_ranks = rank, num_ranks
        found = {name: find_slice(name, widths) for name, _ in model.named_parameters(remove_duplicate=False)}
        self.by_name: dict[str, Slice] = {name: each for name, each in found.items() if each is not None}
        """The slices, by the names of the parameters of which each rank has a part."""

    def of(self, name: str) -> Slice | None:
        """The slice of a parameter, or of a part of its optimizer's state, which has its parameter's shape; None of what all
        have.
        """
        return self.by_name.get(name.rpartition(_STATE)[0] if _STATE in name else name)

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, a new one; the tensor itself where all have it."""
        found = self.of(name)
        if found is None or not whole.dim():
            return whole
        dim = found.dim if whole.dim() > 1 else 0
        pieces = [whole.narrow(dim, start, size) for start, size in found.pieces_of(self.rank, self.num_ranks)]
        return torch.cat(pieces, dim=dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)

    def read(self, name: str, weight: WeightRead, *, meter: Meter | None) -> WeightRead:
        """The read of this rank's part. meter: counts the whole where it is on the host meanwhile."""
        found = self.of(name)
        if found is None:
            return weight
        shape = list(weight.shape)
        shape[found.dim] //= self.num_ranks
        read = partial(self._read, name, weight, meter)
        if weight.read_slice is not None:
            read = partial(weight.read_slice, found, self.rank, self.num_ranks)
        return replace(weight, shape=tuple(shape), read=read)

    def _read(self, name: str, weight: WeightRead, meter: Meter | None) -> torch.Tensor:
        with nullcontext() if meter is None else meter.region("temporaries", tier="host"):
            whole = weight.read()
        return self.take(name, whole)


    # Of all ranks, where the first writes what one device would.

    def give(self, groups: Mapping[str, Mapping[str, AnyTensor]]) -> dict[str, Mapping[str, AnyTensor]]:
        """This rank's tensors by group and name, for ``gather_to_first``: all of the first rank's, of the others their parts."""
        if self.rank == 0:
            return dict(groups)
        return {
            f"{group}{_OF_RANK}{self.rank}": {name: each for name, each in named.items() if self.of(name) is not None}
            for group, named in groups.items()
        }

    def join(self, gathered: Mapping[str, Mapping[str, AnyTensor]]) -> dict[str, dict[str, AnyTensor]]:
        """The groups that ``give`` has given of all ranks, each once and of whole tensors."""
        return {
            group: {name: self._join(group, name, each, gathered) for name, each in named.items()}
            for group, named in gathered.items()
            if _OF_RANK not in group
        }

    def _join(self, group: str, name: str, first: AnyTensor, gathered: Mapping[str, Mapping[str, AnyTensor]]) -> AnyTensor:
        found = self.of(name)
        if found is None or not first.shape:
            return first
        others = [gathered[f"{group}{_OF_RANK}{rank}"][name] for rank in range(1, self.num_ranks)]
        return JoinedTensor([first, *others], found)


class SlicedTensors(Mapping[str, torch.Tensor]):
    """One rank's parts of whole tensors, each read when it is asked for."""

    def __init__(self, whole: Mapping[str, torch.Tensor], slices: Slices) -> None:
        self._whole, self._slices = whole, slices

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._slices.take(name, self._whole[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


class JoinedTensor:
    """A whole tensor whose parts ranks have, read when it is asked for."""

    def __init__(self, held: Sequence[AnyTensor], slice_: Slice) -> None:
        """held: each rank's part, in order."""
        first = held[0]
        self._held, self._slice = held, slice_
        shape = list(first.shape)
        if shape:
            shape[self._dim] *= len(held)
        self.dtype, self.shape = first.dtype, torch.Size(shape)
        self.nbytes = self.dtype.itemsize * self.shape.numel()

    def load(self) -> torch.Tensor:
        """In host memory."""
        return join_slices([load_tensor(held).cpu() for held in self._held], self._slice)

    @property
    def _dim(self) -> int:
        return self._slice.dim if len(self._held[0].shape) > 1 else 0


def join_slices(held: Sequence[torch.Tensor], slice_: Slice) -> torch.Tensor:
    """The whole of each rank's part, in order; of numbers that all have, the first."""
    if not held[0].dim():
        return held[0]
    dim = slice_.dim if held[0].dim() > 1 else 0
    sizes = [length // len(held) for length in slice_.parts]
    by_part = zip(*(torch.split(each, sizes, dim=dim) for each in held), strict=True)
    return torch.cat([piece for pieces in by_part for piece in pieces], dim=dim)
