"""Counts the bytes that autograd saves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def counting_saved() -> Iterator[list[int]]:
    """Bytes of the storages that autograd saves, each once."""
    sizes: dict[int, int] = {}
    kept = []
    total = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor)  # so that no address is used again
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total[0] = sum(sizes.values())
