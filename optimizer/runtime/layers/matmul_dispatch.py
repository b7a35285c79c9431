"""Products in fp32 by oneDNN on the CPU device, where torch's own library leaves half of the processor unused.

torch gives them to MKL, which on processors that are not Intel's does without AVX-512: half the rate or less. oneDNN has kernels
for it, and torch one switch for whom to ask, meant for products that may be rounded to bf16 on the way. They are not where the
processor has no tiles for bf16 (AMX); that is checked, by multiplying what such rounding would change. So sums are those of
fp32 in another order, as between any two libraries.

The switch is the whole process's, and oneDNN takes longer than MKL for small products, of which attention makes one for each
head. So it is on only while a linear layer multiplies: in the layer's forward, and in its node of the graph, by hooks.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from optimizer.formats.matmul_dispatch import uses_onednn

_LIBRARY: Any = torch.backends.mkldnn
_ON: Final = "bf16"
_OFF: Final = ("none", "ieee")
_SETTING: Final = "HEADROOM_FP32_PRODUCTS"
"""``torch`` leaves all to torch."""
_PRODUCTS: Final = frozenset({"MmBackward0", "AddmmBackward0"})
_AFTER_PRODUCTS: Final = frozenset({"ViewBackward0", "UnsafeViewBackward0", "AddBackward0"})
"""Endings of a layer: its rows laid out as they came, a bias added."""
_SIDE: Final = 64
"""Size of the product that shows whether results are rounded."""
_NEEDS_FP32: Final = 1 + 2.0**-12


@functools.cache
def has_quicker_library() -> bool:
    """Report whether this processor is one of those that MKL does not do justice to, and oneDNN keeps its fp32."""
    backends: Any = torch.backends
    has_both = backends.mkl.is_available() and backends.mkldnn.is_available()
    has_tiles = torch.cpu._is_amx_tile_supported()
    is_such = has_both and backends.cpu.get_cpu_capability() == "AVX512" and not has_tiles and not _is_intels()
    return is_such and os.environ.get(_SETTING) != "torch" and _keeps_fp32()


def watch_products(model: nn.Module) -> Callable[[], None]:
    """Have oneDNN make the large products of the model's linear layers; returns a function that ends it.

    Does nothing where that is not quicker, or where the process has chosen how precisely torch multiplies fp32. A forward that
    backward may run again (recomputation) must be wrapped in ``interrupting``.
    """
    if not _may_switch():
        return lambda: None
    watched = [module for module in model.modules() if _is_linear(module) and "forward" not in vars(module)]
    for module in watched:
        module.forward = _watched(module)

    def undo() -> None:
        # An error may have left it on.
        _SWITCH.turn_off()
        for module in watched:
            # The wrapper is an attribute of the instance; without it the class's own method shows again.
            del module.forward

    return undo


def interrupting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that backward runs again, while a layer's product waits for what it saved: what it runs is not that product."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _SWITCH.is_on:
            return forward(*args, **kwargs)
        _SWITCH.turn_off()
        try:
            return forward(*args, **kwargs)
        finally:
            _SWITCH.turn_on()

    return run


@contextmanager
def making_products(*sides: int, of: torch.Tensor) -> Iterator[None]:
    """Around products that no linear layer makes. sides: three, in any order. of: one of the operands."""
    if not (asks_library(of) and uses_onednn(*sides)):
        yield
        return
    with asking_library():
        yield


def asks_library(operand: torch.Tensor) -> bool:
    """Report whether large products with it are the library's."""
    return operand.device.type == "cpu" and operand.dtype == torch.float32 and _may_switch()


@contextmanager
def asking_library() -> Iterator[None]:
    """Whatever their size."""
    _SWITCH.turn_on()
    try:
        yield
    finally:
        _SWITCH.turn_off()


class _Switch:
    """The process has one."""

    def __init__(self) -> None:
        self.is_on = False
        self.off = _OFF[0]
        """Leave the model as it was found."""

    def turn_on(self, *_: Any) -> None:
        self.is_on = True
        _LIBRARY.matmul.fp32_precision = _ON

    def turn_off(self, *_: Any) -> None:
        self.is_on = False
        _LIBRARY.matmul.fp32_precision = self.off


_SWITCH: Final = _Switch()


def _may_switch() -> bool:
    """Not where somebody else has."""
    if not has_quicker_library():
        return False
    if not _SWITCH.is_on:
        found = _LIBRARY.matmul.fp32_precision
        if found not in _OFF:
            return False
        _SWITCH.off = found
    return True


def _watched(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    depth, columns = _sides(module)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if hidden is None or hidden.dtype is not torch.float32 or not uses_onednn(hidden.numel() // depth, depth, columns):
            return forward(*args, **kwargs)
        _SWITCH.turn_on()
        try:
            result = forward(*args, **kwargs)
        finally:
            _SWITCH.turn_off()
        node = result.grad_fn
        if node is not None:
            while node is not None and node.name() in _AFTER_PRODUCTS:
                node = node.next_functions[0][0]
            if node is not None and node.name() in _PRODUCTS:
                node.register_prehook(_SWITCH.turn_on)
                node.register_hook(_SWITCH.turn_off)
        return result

    return run


def _is_linear(module: nn.Module) -> bool:
    """With a matrix that is multiplied as it is, not packed; models have linear layers of their own classes."""
    if isinstance(module, nn.Linear):
        return module.weight.shape == (module.out_features, module.in_features)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _sides(linear: nn.Module) -> tuple[int, int]:
    """Widths of a layer's input and output."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    conv: Any = linear
    depth, columns = conv.weight.shape
    return depth, columns


def _is_intels() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        # Not known: then nothing is changed.
        return True


def _keeps_fp32() -> bool:
    one = torch.full((_SIDE, _SIDE), _NEEDS_FP32)
    given = _LIBRARY.matmul.fp32_precision
    _LIBRARY.matmul.fp32_precision = _ON
    try:
        products = (one @ one.t(), one @ one, one.t() @ one)
    finally:
        _LIBRARY.matmul.fp32_precision = given
    exact = _SIDE * _NEEDS_FP32**2
    return all(bool(torch.all((product - exact).abs() < _SIDE * 2.0**-20)) for product in products)
