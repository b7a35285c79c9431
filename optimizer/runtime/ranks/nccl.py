"""Makes groups of ranks by which NCCL exchanges what is on cards.

A group is connected as it is made: else NCCL would take its memory with the first sum, in the midst of backward, when torch may
have taken it. It takes all of it then where ``NCCL_RUNTIME_CONNECT`` is 0, as a worker's ranks have it.
"""

import re
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.runtime.device.backends import backend_of

_REFUSED_BYTES: Final = re.compile(r"Failed to CUDA [mc]alloc(?: async)? (\d+) bytes")
"""NCCL has words for it, but no type of error (its issue 1235)."""
_dist: Any = torch.distributed
"""Its classes for groups and stores have no annotations."""


def make_nccl_group(store: Any, *, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> Any:
    """A connected group. timeout_s: after which NCCL's watchdog ends the process, from when something was asked for.

    Raises OutOfDeviceMemory where the card has no room for it, RuntimeError where the others cannot be reached.
    """
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = _dist.ProcessGroupNCCL(store, rank, num_ranks, options)
    try:
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        refused = _REFUSED_BYTES.search(str(error))
        if refused is None and "out of memory" not in str(error):
            raise
        raise _no_room(device, requested_bytes=int(refused[1]) if refused else 0) from error
    return group


def _no_room(device: torch.device, *, requested_bytes: int) -> OutOfDeviceMemory:
    """requested_bytes: 0 where NCCL does not say."""
    memory = backend_of(device).memory
    assert memory is not None
    free_bytes = memory.free_bytes
    return OutOfDeviceMemory(
        # What was refused was more than there is.
        requested_bytes=max(requested_bytes, free_bytes + 1),
        in_use_bytes=memory.total_bytes - free_bytes,
        budget_bytes=memory.total_bytes,
        bytes_by_category={},
        moment="while NCCL connected the ranks, whose memory is beside the budget",
        hint="Leave more of the card free: lower the budget, or end other programs on it.",
    )
