"""Lists the layouts that a goal allows, and puts them in words."""

from collections.abc import Mapping, Sequence
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.step.pipeline.stage_costs import check_cut, find_obstacle
from optimizer.goal import Goal
from optimizer.plan.layout import DATA_PARALLEL, DeviceLayout, check_depth
from optimizer.plan.stages import PipelineSchedule
from optimizer.profile.profile import Profile
from optimizer.search.cut_model import even_cut
from optimizer.workload import TrainingWorkload

_WORDS: Final[Mapping[str, str]] = {
    "replicated": "each keeps everything",
    "zero1": "optimizer state shared out (ZeRO-1)",
    "zero2": "optimizer state and gradients shared out (ZeRO-2)",
    "zero3": "optimizer state, gradients and weights shared out (ZeRO-3)",
}


SHOWN_MS: Final = 0.05
"""Shortest wait that is worth a word."""


def list_layouts(
    goal: Goal, workload: TrainingWorkload | None, *, cuts: Sequence[DeviceLayout] = ()
) -> list[DeviceLayout]:
    """Layouts that the goal allows, one device first. workload: whose batch is dealt out evenly; None where that is open. cuts:
    those that cut the model.

    Raises InvalidPlan where pins and what is forbidden leave none.
    """
    pins = goal.pins.layout
    if pins.stage_blocks:
        return list(cuts) or _require_cut(pins.stage_blocks)
    found = list[DeviceLayout]()
    for num_devices in range(1, goal.num_devices + 1):
        if workload is not None and workload.global_batch_size % num_devices:
            continue
        for data in DATA_PARALLEL[: 1 if num_devices == 1 else None]:
            layout = DeviceLayout(num_devices=num_devices, data=data)
            is_pinned = pins.num_devices in (None, num_devices) and pins.data in (None, data)
            if is_pinned and not any(technique in goal.forbid for technique in _techniques(layout)):
                found.append(layout)
    found = sorted([*found, *cuts], key=lambda layout: layout.num_devices)
    if found:
        return found
    raise InvalidPlan(
        f"no layout of up to {goal.num_devices} devices keeps the pins and what is forbidden, and deals the batch out evenly",
        field="goal.pins.layout",
        value=[pins.num_devices, pins.data],
        allowed=f"1 to {goal.num_devices} devices; replicated on one",
        hint="Leave out the pin, permit more, or take a batch that the devices can share.",
    )


def list_cuts(goal: Goal, profile: Profile, workload: TrainingWorkload) -> list[DeviceLayout]:
    """Layouts that cut the model, with an even cut in the place of the one that is looked for. Raises InvalidPlan where a cut is
    pinned that cannot be carried out.
    """
    pins, obstacle = goal.pins.layout, find_obstacle(profile)
    if pins.stage_blocks is None and (obstacle or "cut_model" in goal.forbid or pins.data is not None):
        return []
    if pins.stage_blocks == () or (workload.objective != "next_token" and not pins.stage_blocks):
        return []
    schedule = pins.schedule or "1f1b"
    if pins.stage_blocks:
        check_depth(pins.stage_blocks, profile.num_blocks)
        check_cut(profile)
        return [_pinned_cut(goal, pins.stage_blocks, schedule)]
    most = min(goal.num_devices, profile.num_blocks)
    return [
        DeviceLayout(num_devices=number, stage_blocks=even_cut(profile.num_blocks, number), schedule=schedule)
        for number in range(2, most + 1)
        if pins.num_devices in (None, number) and workload.global_batch_size > 1
    ]


def _pinned_cut(goal: Goal, cut: tuple[int, ...], schedule: PipelineSchedule) -> DeviceLayout:
    shown = ", ".join(map(str, cut))
    if len(cut) > goal.num_devices:
        raise InvalidPlan(
            f"goal.pins.layout.stage_blocks is {shown}, {len(cut)} stages; goal.num_devices is {goal.num_devices}",
            field="goal.pins.layout.stage_blocks",
            value=shown,
            allowed=f"2 to {goal.num_devices} stages",
            hint="Permit as many devices as there are stages, or cut into fewer.",
        )
    return DeviceLayout(num_devices=len(cut), data=goal.pins.layout.data or "replicated", stage_blocks=cut, schedule=schedule)


def _require_cut(cut: tuple[int, ...]) -> list[DeviceLayout]:
    shown = ", ".join(map(str, cut))
    raise InvalidPlan(
        f"goal.pins.layout.stage_blocks is {shown}; models are cut for the fastest step and the cheapest run alone",
        field="goal.pins.layout.stage_blocks",
        value=shown,
        allowed="objective fastest_step or cheapest_run",
        hint="Leave out the pin, or ask for the fastest step.",
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
    if layout.is_cut:
        return f"{layout.num_devices} devices, the model cut into {' + '.join(map(str, layout.stage_blocks))} blocks"
    return "one device" if layout.num_devices == 1 else f"{layout.num_devices} devices, {_WORDS[layout.data]}"
