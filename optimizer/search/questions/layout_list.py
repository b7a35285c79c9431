"""Lists the layouts that a goal allows, and puts them in words.

Steps between synchronizations are listed as one layout for a number of devices: the one that is waited for least, since all of
them find the same plan. Which of them it is to be, ``settle_local`` says of the plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Final, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.pipeline.stage_costs import check_cut, find_obstacle
from optimizer.goal import Goal
from optimizer.plan.devices.layout import (
    DATA_PARALLEL,
    MAX_INT8_RANKS,
    DataParallel,
    DeviceLayout,
    SyncFormat,
    check_depth,
)
from optimizer.plan.devices.stages import PipelineSchedule, describe_cut
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.cutting import even_cut
from optimizer.workload import TrainingWorkload

_WORDS: Final[Mapping[str, str]] = {
    "replicated": "each keeps everything",
    "zero1": "optimizer state shared out (ZeRO-1)",
    "zero2": "optimizer state and gradients shared out (ZeRO-2)",
    "zero3": "optimizer state, gradients and weights shared out (ZeRO-3)",
}


_LOCAL_STEPS: Final = (8, 32, 128)
"""Steps between synchronizations that are tried: few enough for a last loss near that of shared steps, or the published ones."""
_STAGE_SIZES: Final = (2, 1, 4)
"""Blocks of a stage that are tried where devices have several stages: the first, and all where that is asked for."""
_SPARED: Final = 0.05
"""Share by which a step may take longer for ranks to synchronize more often, or to send finer numbers."""
WORTH_LOCAL: Final = 0.1
"""Share by which steps alone must be faster than shared ones to be chosen: they are another training."""
SHOWN_MS: Final = 0.05
"""Shortest wait that is worth a word."""


def list_layouts(
    goal: Goal,
    workload: TrainingWorkload | None,
    *,
    cuts: Sequence[DeviceLayout] = (),
    local: Sequence[DeviceLayout] = (),
    shared: Sequence[DeviceLayout] = (),
    num_within: int = 1,
) -> list[DeviceLayout]:
    """Layouts that the goal allows, one device first. workload: whose batch is dealt out evenly; None where that is open. cuts:
    those that cut the model. local: those whose ranks take steps alone. shared: those whose ranks share each block. num_within:
    devices that a faster link joins, which are replicas then.

    Raises InvalidPlan where pins and what is forbidden leave none.
    """
    pins = goal.pins.layout
    if pins.stage_blocks:
        return list(cuts) or _require_cut(pins.stage_blocks)
    if (pins.tensor or 1) > 1:
        return list(shared) or _require_shared(goal)
    found = list[DeviceLayout]()
    for num_devices in range(1, goal.num_devices + 1):
        if workload is not None and workload.global_batch_size % num_devices:
            continue
        for data in DATA_PARALLEL[: 1 if num_devices == 1 else None]:
            replicas = 1 if pins.replicas is None else pins.replicas
            if replicas != 1 and not makes_replicas(num_devices, replicas, data=data):
                continue
            layout = DeviceLayout(num_devices=num_devices, data=data, replicas=replicas)
            is_pinned = pins.num_devices in (None, num_devices) and pins.data in (None, data) and pins.sync_every in (None, 1)
            if is_pinned and not any(technique in goal.forbid for technique in _techniques(layout)):
                found.append(layout)
        is_open = pins.num_devices in (None, num_devices) and pins.replicas is None
        if num_within > 1 and is_open and num_devices > num_within and num_devices % num_within == 0:
            replicas = num_devices // num_within
            found += [
                DeviceLayout(num_devices=num_devices, data=data, replicas=replicas) for data in list_hybrid_modes(goal)
            ]
    found = sorted([*found, *cuts, *local, *shared], key=lambda layout: layout.num_devices)
    if found:
        return found
    raise InvalidPlan(
        f"no layout of up to {goal.num_devices} devices keeps the pins and what is forbidden, and deals the batch out evenly",
        field="goal.pins.layout",
        value=[pins.num_devices, pins.data, pins.replicas, pins.sync_every],
        allowed=f"1 to {goal.num_devices} devices; replicated on one; replicas of 2 devices or more",
        hint="Leave out the pin, permit more, or take a batch that the devices can share.",
    )


def makes_replicas(num_devices: int, replicas: int, *, data: DataParallel) -> bool:
    """Report whether so many devices make so many replicas, of two devices and more where they share something out."""
    return replicas >= 1 and num_devices % replicas == 0 and num_devices // replicas >= (1 if data == "replicated" else 2)


def list_hybrid_modes(goal: Goal) -> tuple[DataParallel, ...]:
    """Ways to share things out within each of several replicas. State alone is left out beside state with gradients, which takes
    less memory and crosses a network as seldom.
    """
    pins = goal.pins.layout
    if pins.replicas == 1 or pins.sync_every not in (None, 1):
        return ()
    hybrids = [DeviceLayout(num_devices=4, data=data, replicas=2) for data in DATA_PARALLEL[1:]]
    found = [each.data for each in hybrids if not any(technique in goal.forbid for technique in _techniques(each))]
    if pins.data is not None:
        return (pins.data,) if pins.data in found else ()
    return tuple(data for data in found if data != "zero1" or "zero2" not in found)


def list_local(goal: Goal, workload: TrainingWorkload, *, is_even: bool = True) -> list[DeviceLayout]:
    """A layout whose ranks take steps alone for each number of devices, where the goal allows that. is_even: whether the batch is
    dealt out evenly.
    """
    pins = goal.pins.layout
    if not goal.may_use("local_steps") or not goal.may_use("data_parallel") or pins.stage_blocks:
        return []
    if pins.data not in (None, "replicated") or pins.sync_every == 1:
        return []
    found = []
    for num_devices in range(2, goal.num_devices + 1):
        ways = list(_list_ways(goal, workload, num_devices))
        if ways and pins.num_devices in (None, num_devices) and not (is_even and workload.global_batch_size % num_devices):
            every, sync_format = ways[-1]
            replicas = 1 if pins.replicas is None else pins.replicas
            if makes_replicas(num_devices, replicas, data="replicated"):
                layout = DeviceLayout(num_devices=num_devices, replicas=replicas, sync_every=every, sync_format=sync_format)
                found.append(replace(layout, sync_rule=pins.sync_rule or "average"))
    return found


def list_shared(goal: Goal, profile: Profile) -> list[DeviceLayout]:
    """Layouts whose ranks share each block, of those that the goal allows and the profile has a part for."""
    pins = goal.pins.layout
    is_open = pins.data in (None, "replicated") and not pins.stage_blocks
    is_open = is_open and pins.sync_every in (None, 1) and pins.replicas in (None, 1)
    if not is_open or "share_blocks" in goal.forbid:
        return []
    numbers = [each.num_sharing for each in profile.narrower if each.num_sharing <= goal.num_devices]
    return [
        DeviceLayout(num_devices=number, tensor=number)
        for number in numbers
        if pins.tensor in (None, number) and pins.num_devices in (None, number)
    ]


def settle_local(
    plan: Plan, goal: Goal, workload: TrainingWorkload, *, price: Callable[[Plan], Prediction]
) -> tuple[Plan, Prediction]:
    """The plan with steps between synchronizations that lose least of those that are about as fast as any: as few as can be, and
    then the finest numbers. Other plans as they are.
    """
    if not plan.layout.steps_alone:
        return plan, price(plan)
    ways = _list_ways(goal, workload, plan.layout.num_devices)
    plans = [replace(plan, layout=replace(plan.layout, sync_every=every, sync_format=form)) for every, form in ways]
    found = [(each, price(each)) for each in plans]
    fastest_ms = min(prediction.step_ms for _, prediction in found)
    return next(pair for pair in found if pair[1].step_ms <= fastest_ms * (1 + _SPARED))


def _list_ways(goal: Goal, workload: TrainingWorkload, num_devices: int) -> Iterator[tuple[int, SyncFormat]]:
    """Steps between synchronizations and formats of what is sent, from those that lose least to those that take least time."""
    pins = goal.pins.layout
    numbers = _LOCAL_STEPS if pins.sync_every is None else (pins.sync_every,)
    formats = get_args(SyncFormat) if pins.sync_format is None else (pins.sync_format,)
    for every, sync_format in product(numbers, formats):
        fits = sync_format != "int8" or num_devices <= MAX_INT8_RANKS
        if fits and (every <= workload.num_steps or pins.sync_every is not None):
            yield every, sync_format


def list_cuts(goal: Goal, profile: Profile, workload: TrainingWorkload) -> list[DeviceLayout]:
    """Layouts that cut the model, with an even cut in the place of the one that is looked for. Raises InvalidPlan where a cut is
    pinned that cannot be carried out.
    """
    pins, obstacle = goal.pins.layout, find_obstacle(profile)
    if pins.stage_blocks is None and (obstacle or "cut_model" in goal.forbid or pins.data is not None):
        return []
    if not pins.stage_blocks and pins.replicas not in (None, 1):
        return []
    if pins.stage_blocks == () or (workload.objective != "next_token" and not pins.stage_blocks):
        return []
    if pins.stage_blocks:
        check_depth(pins.stage_blocks, profile.num_blocks)
        check_cut(profile)
        return [_pinned_cut(goal, pins.stage_blocks)]
    most = min(goal.num_devices, profile.num_blocks)
    numbers = [number for number in range(2, most + 1) if pins.num_devices in (None, number) and workload.global_batch_size > 1]
    return [
        DeviceLayout(num_devices=number, stage_blocks=even_cut(profile.num_blocks, number * num_rounds), schedule=schedule)
        for number in numbers
        for num_rounds, schedule in _list_orders(goal, profile.num_blocks, number)
    ]


def _list_orders(goal: Goal, num_blocks: int, num_devices: int) -> Iterator[tuple[int, PipelineSchedule]]:
    """The numbers of stages on each device that are tried, with the order of their micro-batches."""
    pinned = goal.pins.layout.schedule
    if pinned != "breadth_first":
        yield 1, pinned or "1f1b"
    if pinned in (None, "breadth_first"):
        sizes = _STAGE_SIZES if pinned else _STAGE_SIZES[:1]
        rounds = dict.fromkeys(num_blocks // (num_devices * size) for size in sizes)
        yield from ((number, "breadth_first") for number in rounds if number > (pinned is None))


def _pinned_cut(goal: Goal, cut: tuple[int, ...]) -> DeviceLayout:
    """The layout of a cut that is pinned: a stage for each device, or several where there are more stages than devices."""
    pins, shown = goal.pins.layout, ", ".join(map(str, cut))
    num_devices = pins.num_devices or (len(cut) if len(cut) <= goal.num_devices else goal.num_devices)
    if len(cut) % num_devices or (len(cut) > num_devices and pins.schedule not in (None, "breadth_first")):
        raise InvalidPlan(
            f"goal.pins.layout.stage_blocks is {shown}, {len(cut)} stages; goal.num_devices is {goal.num_devices}",
            field="goal.pins.layout.stage_blocks",
            value=shown,
            allowed=f"2 to {goal.num_devices} stages, or a multiple of the devices with schedule breadth_first",
            hint="Permit as many devices as there are stages, or cut into fewer, or into as many for every device.",
        )
    schedule = pins.schedule or ("1f1b" if len(cut) == num_devices else "breadth_first")
    return DeviceLayout(num_devices=num_devices, data=pins.data or "replicated", stage_blocks=cut, schedule=schedule)


def _require_cut(cut: tuple[int, ...]) -> list[DeviceLayout]:
    shown = ", ".join(map(str, cut))
    raise InvalidPlan(
        f"goal.pins.layout.stage_blocks is {shown}; models are cut for the fastest step and the cheapest run alone",
        field="goal.pins.layout.stage_blocks",
        value=shown,
        allowed="objective fastest_step or cheapest_run",
        hint="Leave out the pin, or ask for the fastest step.",
    )


def _require_shared(goal: Goal) -> list[DeviceLayout]:
    pinned = goal.pins.layout.tensor
    allowed = (
        f"like devices of one machine, up to goal.num_devices ({goal.num_devices}), for the fastest step, the cheapest run and "
        "the longest sequence, beside no other way to share"
    )
    raise InvalidPlan(
        f"goal.pins.layout.tensor is {pinned}; allowed: {allowed}",
        field="goal.pins.layout.tensor",
        value=pinned,
        allowed=allowed,
        hint="Leave out the pin, or pin and forbid nothing beside it that devices which share each block cannot have.",
    )


def _techniques(layout: DeviceLayout) -> list[str]:
    used = {
        "data_parallel": layout.num_devices > 1,
        "shard_state": layout.shares_state,
        "shard_gradients": layout.reduces_each_micro_batch,
        "shard_weights": layout.shares_weights,
        "hybrid_shard": layout.replicas > 1 and layout.shares_state,
        "local_steps": layout.steps_alone,
    }
    return [name for name, is_used in used.items() if is_used]


def describe_layout(layout: DeviceLayout) -> str:
    """Words for a layout: ``2 devices, optimizer state shared out (ZeRO-1)``."""
    if layout.is_cut:
        return f"{layout.num_devices} devices, the model cut into {describe_cut(layout.stage_blocks, layout.num_devices)}"
    if layout.shares_blocks:
        return f"{layout.num_devices} devices that share each block"
    if layout.steps_alone:
        every, form = layout.sync_every, layout.sync_format
        return f"{layout.num_devices} devices, each alone for {every} steps, differences sent in {form}"
    within = f", within each of {layout.replicas} replicas" * (layout.replicas > 1 and layout.shares_state)
    return "one device" if layout.num_devices == 1 else f"{layout.num_devices} devices, {_WORDS[layout.data]}{within}"
