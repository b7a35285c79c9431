"""Has the blocks of a model run as compiled code wherever autograd watches; without it the model's own code runs.

One graph is compiled for each kind of block and each layout of what blocks are given. Blocks are of one kind if their modules,
the plain values these hold and the layouts of their tensors are the same, whatever the numbers in them: parameters are arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimizer.base.errors import BlockNotCompiled
from optimizer.formats.stock_layers import uses_memory_saving_layers
from optimizer.runtime.compiled.graph import Forward, Graph

_PLAIN: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_POSITIONS: Final = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "target_name"})
"""Attributes that say where a block, or a layer that peft has wrapped, stands in its model; of effect on a cache alone, and
training has none.
"""
_Key = tuple[Any, ...]


_graphs_of: "WeakKeyDictionary[nn.Module, dict[_Key, Graph]]" = WeakKeyDictionary()
"""Graphs of a model, by its first block: another run of the same model in this process compiles none again."""


class CompiledBlocks:
    """The compiled graphs of a model's blocks. ``close`` gives the blocks their own forwards back."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._graphs = _graphs_of.setdefault(blocks[0], {}) if blocks else {}
        self._blocks = list(blocks)
        for block in blocks:
            block.forward = self._compiled(block)

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far; no more are once each kind of block has seen each layout."""
        return len(self._graphs)

    def close(self) -> None:
        """Take the compiled forwards off."""
        for block in self._blocks:
            # What another wrapper took off with its own is gone already.
            vars(block).pop("forward", None)

    def _compiled(self, block: nn.Module) -> Forward:
        forward = block.forward
        kind = _kind_of(block)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            key = (kind, block.training, _autocast(), str(structure), *(_layout_of(leaf, block) for leaf in leaves))
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._graphs[key] = Graph(block, forward, leaves, structure)
            return graph(block, leaves)

        return run


def compile_blocks(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Have these blocks run compiled; returns a function that ends it."""
    return CompiledBlocks(blocks).close


def _kind_of(block: nn.Module) -> _Key:
    """Equal for blocks of which one graph can serve for all: what is no plain value must be the very same object."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        held = {
            key: _by_value(value)
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in _POSITIONS and key not in ("forward", "training")
        }
        parts.append((name, type(module), tuple(sorted(held.items()))))
    own = [(name, _layout_of(tensor, block)) for name, tensor in (*block.named_parameters(), *block.named_buffers())]
    return (uses_memory_saving_layers(), *parts, *own)


def _by_value(held: Any) -> Any:
    """Equal for what holds equal plain values, such as an adapter's scaling or the form of packed weights."""
    if isinstance(held, _PLAIN):
        return held
    if isinstance(held, list | tuple):
        return (type(held), *map(_by_value, held))
    if isinstance(held, dict):
        return (type(held), *((key, _by_value(value)) for key, value in held.items() if key not in _POSITIONS))
    if getattr(getattr(held, "__dataclass_params__", None), "frozen", False) and not isinstance(held, type):
        return (type(held), *(_by_value(getattr(held, field.name)) for field in dataclasses.fields(held)))
    return id(held)


def _layout_of(leaf: Any, block: nn.Module) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.requires_grad, leaf.device)
    if isinstance(leaf, _PLAIN):
        return (type(leaf), leaf)
    raise BlockNotCompiled(type(block).__name__, f"it is given {type(leaf).__name__}, which is no tensor and no plain value")


def _autocast() -> _Key:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
