"""Runs code that inductor made, with its buffers where the meter sees them and its products where the runtime's others are.

Generated code takes its buffers from an allocator that no dispatch mode hears of. It asks for them by a name of its module, and
here that name is torch's own ``empty_strided``, an op like any other. So the meter counts every buffer as it comes and goes, and
a trace notes it.

Its large fp32 products on the CPU are oneDNN's where those of linear layers are (``layers/matmul_dispatch.py``). *Not counted*:
what a generated kernel takes for itself while it runs, a few numbers for each thread.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from optimizer.base.errors import BlockNotCompiled
from optimizer.runtime.layers.matmul_dispatch import making_products

_ALLOCATORS: Final = {"empty_strided_cpu": "cpu", "empty_strided_cuda": "cuda"}
"""Names in a generated module, and the device on which each makes a buffer."""
_PRODUCTS: Final = "extern_kernels"


class Generated:
    """One graph's code."""

    def __init__(self, output: Any) -> None:
        """output: of ``compile_fx_inner``."""
        self._run: Callable[[list[Any]], Any] = output
        names = _names_of(output)
        for name, device in _ALLOCATORS.items():
            names[name] = partial(_make_buffer, device)
        names[_PRODUCTS] = _Products(names[_PRODUCTS])

    def __call__(self, args: list[Any]) -> Any:
        """args: emptied, so that the code can let go of each."""
        return self._run(args)


def _names_of(output: Any) -> dict[str, Any]:
    """The namespace that generated code looks names up in."""
    call = getattr(output, "current_callable", None)
    function = _unwrapped(getattr(call, "__func__", call))
    names: dict[str, Any] | None = getattr(function, "__globals__", None)
    if names is None or not {*_ALLOCATORS, _PRODUCTS} <= set(names):
        raise BlockNotCompiled("a block", "this version of torch generates code of another form, whose memory cannot be counted")
    return names


def _unwrapped(function: Any) -> Any:
    """The generated function inside of ``run``, which copies inputs on a card that do not lie as the code was made for
    (``torch._inductor.utils.align_inputs_from_check_idxs``).
    """
    while "model" in (names := getattr(getattr(function, "__code__", None), "co_freevars", ())):
        inner = function.__closure__[names.index("model")].cell_contents
        function = getattr(inner, "__func__", inner)
    return function


def _make_buffer(device: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Products:
    """``extern_kernels`` of a generated module."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def mm(self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        """Multiply into ``out``."""
        with making_products(*left.shape, right.shape[1], of=left):
            torch.mm(left, right, out=out)

    def addmm(
        self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, **scales: float
    ) -> None:
        """Multiply into ``out`` and add."""
        with making_products(*left.shape, right.shape[1], of=left):
            torch.addmm(added, left, right, out=out, **scales)
