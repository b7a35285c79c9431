"""Makes a CUDA device ready for a run, and leaves it as it was: the right card, exact arithmetic, the same bits each time.

What is decided here, for every run on CUDA; the CPU device needs none of it:

- Deterministic algorithms, so that a resumed job ends with the bits of an undisturbed one, and recomputing with those of
  keeping: flash attention's backward else adds up in the order in which its blocks happen to end. cuBLAS is given fixed
  workspaces (``CUBLAS_WORKSPACE_CONFIG``). It costs some speed in attention's backward; an op that has no such algorithm
  raises instead of giving other bits.
- No TF32, in matrix products and in cuDNN's convolutions: fp32 means fp32, or a lossless plan would not be one.
- ``torch.empty`` stays empty: deterministic mode would fill it, at the cost of a pass over each fetched tensor.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch.nn import functional

from optimizer.base.errors import InvalidPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.device.backends import backend_of

_CUBLAS_WORKSPACES = ":4096:8"
"""Eight buffers of 4 MiB for each handle; one of the two settings that NVIDIA calls reproducible."""


@contextmanager
def prepared_device(device: torch.device) -> Iterator[None]:
    """Settings of the process for the length of a run. Call before anything was multiplied on the device."""
    backend = backend_of(device)
    if backend.memory is None:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACES)
    precision = torch.get_float32_matmul_precision()
    cudnn: Any = torch.backends.cudnn
    had_tf32 = cudnn.allow_tf32
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    was_filled = deterministic.fill_uninitialized_memory
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    deterministic.fill_uninitialized_memory = False
    try:
        # Pinned memory belongs to the current card, whatever card the tensors are on.
        with backend.current():
            yield
    finally:
        # A meter with a cap limited it.
        backend.memory.limit(1.0)
        deterministic.fill_uninitialized_memory = was_filled
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
        cudnn.allow_tf32 = had_tf32
        torch.set_float32_matmul_precision(precision)


def set_num_threads() -> None:
    """Threads of the processor: ``HEADROOM_NUM_THREADS``, in which a rank is given its part, else the cores that this process may
    use.

    Sums depend on it, so a job resumed with another number ends with other low bits.
    """
    configured = os.environ.get("HEADROOM_NUM_THREADS", "")
    torch.set_num_threads(int(configured) if configured else len(os.sched_getaffinity(0)))


def has_bf16(device: torch.device) -> bool:
    """Report whether the device computes in bf16."""
    return backend_of(device).computes_bf16


def check_dtype(plan: WeightsPlan, device: torch.device) -> None:
    """Raise InvalidPlan for bf16 on a card that would emulate it: slow, and with attention that saves other tensors."""
    name = next((name for name in ("dtype", "autocast") if getattr(plan, name) == "bf16"), None)
    if name is not None and not has_bf16(device):
        allowed = ["fp32", "fp16"] if name == "dtype" else ["off", "fp16"]
        raise InvalidPlan(
            f"plan.weights.{name} is bf16, which {backend_of(device).name} does not compute in; "
            f"allowed: {', '.join(allowed)}",
            field=f"plan.weights.{name}",
            value="bf16",
            allowed=allowed,
        )


def reserve_workspaces(device: torch.device) -> int:
    """Have the matrix libraries take their scratch memory now, and return how many bytes that is; 0 on the CPU.

    It comes from torch's allocator, stays until the process ends, is the same for every plan, and belongs to no tensor.
    Forward and backward run on threads of their own, each with its own share.
    """
    backend = backend_of(device)
    if backend.memory is None:
        return 0
    backend.memory.clear_workspaces()
    before_bytes = backend.memory.allocated_bytes
    for dtype in (torch.float32, torch.bfloat16) if has_bf16(device) else (torch.float32,):
        _multiply(device, dtype)
    backend.synchronize()
    return max(0, backend.memory.allocated_bytes - before_bytes)


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
    bias = torch.ones(64, device=device, dtype=dtype, requires_grad=True)
    hidden = torch.ones(64, 64, device=device, dtype=dtype)
    total = functional.linear(functional.linear(hidden, weight, bias), weight).sum()
    torch.autograd.grad(total, (weight, bias))
