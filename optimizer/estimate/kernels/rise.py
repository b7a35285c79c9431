"""The highest point of a part with what kernels hold while its ops run. Torch-free."""

from collections.abc import Mapping, Sequence

from optimizer.base.categories import Tier


def rise_with_scratch(changes: Sequence[tuple[tuple[Tier, int, int], int]], scratch: Mapping[int, int]) -> int:
    """Bytes by which a part goes above its start while its ops hold so much. 0 where they hold nothing.

    changes: in order, each with the number of its op; what comes with an op is there while it runs, what goes leaves after.
    """
    level = index = rise = 0
    for op in sorted(scratch):
        while index < len(changes) and changes[index][1] < op:
            level += _device_bytes(changes[index][0])
            index += 1
        while index < len(changes) and changes[index][1] == op and _device_bytes(changes[index][0]) >= 0:
            level += _device_bytes(changes[index][0])
            index += 1
        rise = max(rise, level + scratch[op])
    return rise


def _device_bytes(change: tuple[Tier, int, int]) -> int:
    tier, _, num_bytes = change
    return num_bytes if tier == "device" else 0
