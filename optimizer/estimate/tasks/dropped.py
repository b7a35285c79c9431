"""Gradients that go as soon as they are complete, because they are consumed or leave for the host. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.tasks.change import Change
from optimizer.estimate.tasks.moments import TensorUpdate

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _TEMPORARIES, _STATE = _SLOT["gradients"], _SLOT["temporaries"], _SLOT["optimizer_state"]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """The fate of a complete gradient that does not stay on the device."""

    update: TensorUpdate | None = None
    """The update that uses it up inside backward; None where it leaves for the host, or for the rank that owns its tensor."""


def drop_gradients(changes: Iterable[Change], dropped: Dropped, *, region: int) -> Iterable[Change]:
    """A part's changes where each gradient goes as soon as it is complete: when it comes to count as a gradient.

    region: place of the category under which what the update needs for a moment counts.
    """
    for change in changes:
        yield change
        tier, slot, num_bytes = change
        if tier == "device" and slot == _GRADIENTS and num_bytes > 0:
            if dropped.update is None:
                yield "device", _GRADIENTS, -num_bytes
                continue
            slots = {"copies": region, "scratch": _TEMPORARIES, "gradients": _GRADIENTS, "optimizer_state": _STATE}
            for what, used_bytes in dropped.update.list_changes(num_bytes // dropped.update.gradient_bytes):
                yield "device", slots[what], used_bytes
