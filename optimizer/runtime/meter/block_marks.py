"""Says where in the model a run is: as each block begins to run forward, and as its backward begins.

By hooks that add nothing to the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Mark = Callable[[int], None]
"""Called with a block's index."""


def watch_blocks(blocks: Sequence[nn.Module], *, at_forward: Mark, at_backward: Mark) -> list[RemovableHandle]:
    handles: list[RemovableHandle] = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(_forward_marker(index, at_forward)))
        handles.append(block.register_forward_hook(_backward_marker(index, at_backward)))
    return handles


def _forward_marker(index: int, mark: Mark) -> Callable[..., None]:
    def before_forward(module: nn.Module, args: Any) -> None:
        mark(index)

    return before_forward


def _backward_marker(index: int, mark: Mark) -> Callable[..., None]:
    def at_backward(gradient: torch.Tensor) -> None:
        mark(index)

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        if hidden.requires_grad:
            hidden.register_hook(at_backward)

    return after_forward
