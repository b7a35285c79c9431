"""Autocast for tensors on ``meta``, which torch's own leaves alone: the casts that it would make on the CPU.

The lists are those of the key ``AutocastCPU`` (aten/src/ATen/autocast_mode.cpp), as far as they are called from Python in a
model's forward pass; a test asks torch whether each is there. Whether autocast is on, and in which dtype, is torch's own state,
so what turns it off for a stretch, or on again where a block is recomputed, works as ever. Casts are not cached, as the runtime
asks (``runtime/step/precision.py``). *Not modelled*: the longer lists of CUDA, which has norms and softmax in fp32.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F

LOWER: Final = (
    "addbmm",
    "addmm",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "matmul",
    "mm",
    "scaled_dot_product_attention",
)
"""Run in autocast's dtype."""
FP32: Final = ("cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "prod", "smooth_l1_loss")
WIDEST: Final = ("cat", "stack")
"""Run in fp32 where one of the tensors is, else in autocast's dtype."""
_COMPOSED = ("__matmul__", "__rmatmul__", "einsum")
"""Ops that are not on the list by these names; made of ``matmul`` and ``bmm``, which are."""
_OWNERS = (torch, torch.Tensor, F)

_ChooseDtype = Callable[[list[torch.Tensor]], torch.dtype]


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """While entered, the functions above cast as they would on the CPU, wherever autocast is on for ``cpu``."""
    rules: tuple[tuple[tuple[str, ...], _ChooseDtype], ...] = (
        ((*LOWER, *_COMPOSED), _lower),
        (FP32, _fp32),
        (WIDEST, _widest),
    )
    with ExitStack() as stack:
        for names, choose in rules:
            for owner in _OWNERS:
                for name in names:
                    if (original := getattr(owner, name, None)) is not None:
                        stack.enter_context(mock.patch.object(owner, name, _casting(original, choose)))
        yield


def _casting(original: Callable[..., Any], choose: _ChooseDtype) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return original(*args, **kwargs)
        dtype = choose(_floating((args, kwargs)))
        # The last one first, as torch's builds for Linux do it (C++ leaves the order open): backward undoes the casts in turn.
        kwargs = {name: _cast(kwargs[name], dtype) for name in reversed(kwargs)}
        args = tuple([_cast(value, dtype) for value in reversed(args)][::-1])
        # On the CPU what an op is made of is not cast again.
        with torch.autocast("cpu", enabled=False):
            return original(*args, **kwargs)

    return call


def _lower(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _fp32(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    is_any_wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    return torch.float32 if is_any_wide else torch.get_autocast_dtype("cpu")


def _floating(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _floating(item)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        is_cast = value.is_floating_point() and value.dtype not in (dtype, torch.float64)
        return value.to(dtype) if is_cast else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
