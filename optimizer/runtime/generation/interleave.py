"""Several forward passes that take turns block by block, so that each block's weights serve all of them while they are there.

Models run by their own forward, which knows nothing of this: each runs in a greenlet, a stack of its own on the same thread
(what torch keeps for a thread stays as it is), and hands over as it comes to a block, and as its backbone has ended. So block
``j`` runs for every pass before any comes to block ``j + 1``: the block schedule of FlexGen (Sheng et al. 2023, section 4.1).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import MissingExtra


class Turns:
    """Runs functions that call the same model; hooks go on before any other, so that others' see each block in one go."""

    def __init__(self, *, resumed: Callable[[], None]) -> None:
        """resumed: called each time a function goes on, to set again what others may have changed."""
        self._resumed = resumed
        self._waiting: list[Any] = []
        self._is_taking_turns = False

    def watch(self, backbone: nn.Module, blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Hand over where a block begins, and where the backbone has ended."""
        handles = [block.register_forward_pre_hook(lambda module, args: self._hand_over()) for block in blocks]
        return [*handles, backbone.register_forward_hook(lambda module, args, output: self._hand_over())]

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """All of them, to the end. An error of one ends the others too. Raises MissingExtra where two or more are to take turns
        without greenlet.
        """
        if len(functions) == 1:
            functions[0]()
            return
        greenlet = _greenlet_type()
        running = [greenlet(function) for function in functions]
        self._is_taking_turns = True
        try:
            while running:
                for each in running:
                    each.switch()
                running = [each for each in running if not each.dead]
        finally:
            self._is_taking_turns = False
            for each in running:
                # What is left of a stack would hold its tensors.
                each.throw()

    def _hand_over(self) -> None:
        if self._is_taking_turns:
            _greenlet_type().getcurrent().parent.switch()
            self._resumed()


def check_turns() -> None:
    """Raise MissingExtra where several micro-batches could not take turns."""
    _greenlet_type()


def _greenlet_type() -> Any:
    try:
        from greenlet import greenlet
    except ImportError as error:
        raise MissingExtra("greenlet", needed_for="a pass of several micro-batches") from error
    return greenlet
