"""Storages that a micro-batch makes before its blocks and that blocks share, such as a mask: where each goes. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.tasks.change import FROM_PROLOGUE, Move
from optimizer.plan.activations import BlockChoice

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
Release = tuple[int, int]
"""A storage that blocks share, and the op of a part after which it goes."""


@dataclass
class SharedPlaces:
    """Places where storages that blocks share go under one plan."""

    forward: dict[int, tuple[Release, ...]] = field(default_factory=dict)
    """Releases by block, in its part of the forward pass."""
    backward: dict[int, tuple[Release, ...]] = field(default_factory=dict)
    freed: list[Move] = field(default_factory=list)
    """Storages that go between the blocks and the head."""


class SharedStorages:
    """The shared storages of one shape."""

    def __init__(self, compiled: CompiledShape) -> None:
        self._compiled = compiled
        self._templates = compiled.regime.block_templates
        self._holds: dict[BlockChoice, list[dict[int, int]]] = {}

    def place(self, choices: Sequence[BlockChoice], *, blocks: range | None = None) -> SharedPlaces:
        """Place each release in the backward of the first block that holds it, or in the forward pass. blocks: those that run;
        all unless given.
        """
        blocks = range(len(choices)) if blocks is None else blocks
        regime = self._compiled.regime
        waiting = set(range(len(regime.shared)))
        places = SharedPlaces()
        for block in blocks:
            if not waiting:
                break
            choice = choices[block]
            held = self._holds_of(choice)[self._templates[block]]
            if not waiting.isdisjoint(held):
                places.backward[block] = tuple((index, until) for index, until in held.items() if index in waiting)
                waiting.difference_update(held)
        for index in sorted(waiting):
            shared = regime.shared[index]
            block = self._templates.index(shared.ends_in) if shared.ends_in >= 0 else -1
            if block in blocks:
                num_ops = self._compiled.num_ops((choices[block], self._templates[block], "forward"))
                after = num_ops - 1 - shared.ends_before
                places.forward[block] = (*places.forward.get(block, ()), (index, after))
            else:
                num_bytes, category = self._compiled.shared_bytes(index)
                places.freed.append(Move("device", _SLOT[category], -num_bytes, -1, storage=FROM_PROLOGUE))
        return places

    def _holds_of(self, choice: BlockChoice) -> list[dict[int, int]]:
        """The op of its backward until which a block holds each shared storage that it holds; by template."""
        held = self._holds.get(choice)
        if held is None:
            templates = self._compiled.regime.templates_of(choice)
            held = self._holds[choice] = [{hold.index: hold.until for hold in template.holds} for template in templates]
        return held
