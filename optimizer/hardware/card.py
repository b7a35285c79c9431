"""The facts of a card on which the memory of its kernels depends."""

from typing import NamedTuple


class Card(NamedTuple):
    """Facts of a card that decide, beside a plan, how much memory its kernels hold."""

    capability: tuple[int, int] | None
    """Compute capability; None where it is not known."""
    multiprocessors: tuple[int, int, int]
    """Fewest, likely and most: the same where they are known."""
    torch_version: tuple[int, int] | None = None
