"""Lets keys that are not where the model is name who attends to them: with the newest token's own, as an attribute.

A cache that keeps keys and values elsewhere hands out the newest token's alone, since others would have to come. Whoever attends
asks them first (``attend_of``). An attribute, so that a cache keeps transformers' interface, in which nothing else reaches from
``update`` to attention.
"""

from typing import Protocol

import torch

_NAME = "headroom_attend"


class Attend(Protocol):
    """Attention of the newest token to all that its cache holds."""

    def __call__(self, query: torch.Tensor, *, scaling: float | None, softcap: float | None) -> torch.Tensor:
        """[batch, 1, heads, channels of values] of queries [batch, heads, 1, channels of keys]. scaling: of scores; None for one
        by the root of the channels. softcap: on scores.
        """


def set_attend(key: torch.Tensor, attend: Attend) -> None:
    setattr(key, _NAME, attend)


def attend_of(key: torch.Tensor) -> Attend | None:
    """None where all keys are in the tensor."""
    attend: Attend | None = getattr(key, _NAME, None)
    return attend
