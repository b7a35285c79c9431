"""Lists the layouts that a goal allows, and puts them in words."""

from collections.abc import Mapping
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.goal import Goal
from optimizer.plan.layout import DATA_PARALLEL, DeviceLayout
from optimizer.workload import TrainingWorkload

_WORDS: Final[Mapping[str, str]] = {
    "replicated": "each keeps everything",
    "zero1": "optimizer state shared out (ZeRO-1)",
    "zero2": "optimizer state and gradients shared out (ZeRO-2)",
    "zero3": "optimizer state, gradients and weights shared out (ZeRO-3)",
}


def list_layouts(goal: Goal, workload: TrainingWorkload | None) -> list[DeviceLayout]:
    """Layouts that the goal allows, one device first. workload: whose batch is dealt out evenly; None where that is open.

    Raises InvalidPlan where pins and what is forbidden leave none.
    """
    pins = goal.pins.layout
    found = []
    for num_devices in range(1, goal.num_devices + 1):
        if workload is not None and workload.global_batch_size % num_devices:
            continue
        for data in DATA_PARALLEL[: 1 if num_devices == 1 else None]:
            layout = DeviceLayout(num_devices=num_devices, data=data)
            is_pinned = pins.num_devices in (None, num_devices) and pins.data in (None, data)
            if is_pinned and not any(technique in goal.forbid for technique in _techniques(layout)):
                found.append(layout)
    if found:
        return found
    raise InvalidPlan(
        f"no layout of up to {goal.num_devices} devices keeps the pins and what is forbidden, and deals the batch out evenly",
        field="goal.pins.layout",
        value=[pins.num_devices, pins.data],
        allowed=f"1 to {goal.num_devices} devices; replicated on one",
        hint="Leave out the pin, permit more, or take a batch that the devices can share.",
    )


def _techniques(layout: DeviceLayout) -> list[str]:
    used = {
        "data_parallel": layout.num_devices > 1,
        "shard_state": layout.shares_state,
        "shard_gradients": layout.reduces_each_micro_batch,
        "shard_weights": layout.shares_weights,
    }
    return [name for name, is_used in used.items() if is_used]


def describe_layout(layout: DeviceLayout) -> str:
    """Words for a layout: ``2 devices, optimizer state shared out (ZeRO-1)``."""
    return "one device" if layout.num_devices == 1 else f"{layout.num_devices} devices, {_WORDS[layout.data]}"
