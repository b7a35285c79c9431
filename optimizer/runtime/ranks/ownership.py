"""Says which rank keeps the optimizer state of which trained tensor, and updates it: by name, for one rank of a replica.

Allocates nothing.
"""

from collections.abc import Mapping

from torch import nn

from optimizer.formats.ownership import assign_owners
from optimizer.plan.devices.layout import DeviceLayout


class Ownership:
    """The trained tensors of a model, in its order. Without shared state every rank acts as the owner of all."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], *, layout: DeviceLayout, rank: int, owners: Mapping[str, int] | None = None
    ) -> None:
        """owners: of each tensor, where the model is cut and they are not for the layout's rule to find."""
        self.is_shared = layout.shares_state or owners is not None
        self._place = layout.place_of(rank)
        self._owners: dict[str, int] = dict.fromkeys(named, self._place)
        if owners is not None:
            self._owners = {name: owners[name] for name in named}
        elif self.is_shared:
            sizes = [parameter.numel() for parameter in named.values()]
            self._owners = dict(zip(named, assign_owners(sizes, num_ranks=layout.num_sharing), strict=True))

    def owns(self, name: str) -> bool:
        """Report whether this rank updates the tensor."""
        return self._owners[name] == self._place

    def owner_of(self, name: str) -> int:
        """The place in a replica of the rank that updates the tensor; without shared state this one's."""
        return self._owners[name]

    def owned(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Those of the tensors that this rank updates, in the same order."""
        return {name: parameter for name, parameter in named.items() if self.owns(name)}
