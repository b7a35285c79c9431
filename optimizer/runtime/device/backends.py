"""Finds the backend of a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from optimizer.runtime.device.backend import Backend
from optimizer.runtime.device.cpu import CpuBackend
from optimizer.runtime.device.cuda import CudaBackend

_MAKERS: dict[str, Callable[[torch.device], Backend]] = {"cpu": CpuBackend, "cuda": CudaBackend}
"""By the device's type in torch."""
_BACKENDS: dict[torch.device, Backend] = {}


def backend_of(device: torch.device) -> Backend:
    """The one backend of a device; made when first asked for, which does not touch the device."""
    found = _BACKENDS.get(device)
    if found is None:
        if device.type not in _MAKERS:
            raise NotImplementedError(f"{device} is no device that plans run on; those are {', '.join(_MAKERS)}")
        found = _BACKENDS[device] = _MAKERS[device.type](device)
    return found


@contextmanager
def in_place_of_its_device(backend: Backend) -> Iterator[None]:
    """Inside, ``backend_of`` answers with this one for its device, from whatever thread it is asked."""
    known = backend_of(backend.device)
    _BACKENDS[backend.device] = backend
    try:
        yield
    finally:
        _BACKENDS[backend.device] = known
