"""Finds for how many devices that share each block a question needs profiles of their parts, and joins these to the model's.

A part is traced as a model of its own (seconds), so only where it may be of use: where it is pinned, and where a batch has fewer
sequences than there are devices, which leaves them no other way to share a step of several layers at once. Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidPlan
from optimizer.formats.shared_blocks import find_obstacle, narrow_config
from optimizer.goal import Goal
from optimizer.models.spec import ModelSpec
from optimizer.optimizers import OPTIMIZERS
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def list_sharing(spec: ModelSpec, workload: TrainingWorkload, goal: Goal) -> tuple[int, ...]:
    """Numbers of devices that may share each block: the pinned one; unless one is pinned the most that can, where that may pay.

    Raises InvalidPlan in words for a pinned number that the goal or the model does not have.
    """
    check_shared_pin(spec.config, goal.pins, num_devices=goal.num_devices)
    if goal.pins.layout.tensor is not None:
        return (goal.pins.layout.tensor,) if goal.pins.layout.tensor > 1 else ()
    if workload.global_batch_size >= goal.num_devices or "share_blocks" in goal.forbid or not can_share(workload):
        return ()
    numbers = range(goal.num_devices, 1, -1)
    return next(((number,) for number in numbers if not find_obstacle(spec.config, number)), ())


def check_shared_pin(config: Mapping[str, Any], pins: Pins, *, num_devices: int) -> None:
    """Raise InvalidPlan in words where devices that share each block are pinned, more than there may be, or of a model that
    cannot be shared so.
    """
    pinned = shared_number(pins)
    if pinned > num_devices:
        raise InvalidPlan(
            f"goal.pins.layout.tensor is {pinned}; goal.num_devices is {num_devices}",
            field="goal.pins.layout.tensor",
            value=pinned,
            allowed={"minimum": 1, "maximum": num_devices},
            hint="Permit as many devices, or leave out the pin.",
        )
    if pinned > 1:
        narrow_config(config, pinned)


def shared_number(pins: Pins, *, ran: Plan | None = None) -> int:
    """Devices that share each block by a pin, or else in a plan that ran; 1 where none do."""
    return pins.layout.tensor or (1 if ran is None else ran.layout.tensor)


def can_share(workload: TrainingWorkload) -> bool:
    """Report whether a workload has nothing that devices which share each block refuse (``Plan.find_conflict``)."""
    has_dropout = workload.adapter is not None and workload.adapter.dropout > 0
    return workload.objective == "next_token" and not OPTIMIZERS[workload.optimizer].is_factored and not has_dropout


def obtain_parts(
    spec: ModelSpec, numbers: Sequence[int], *, workload: TrainingWorkload, extent: Extent, folder: Path | None = None
) -> list[Profile]:
    """The profile of the part that each of so many devices has, by number; of 1 the whole model's. spec: of the whole model."""
    asked: dict[str, Any] = {"is_packed": workload.is_packed, "objective": workload.objective, "extent": extent, "folder": folder}
    return [obtain_profile(spec, adapter=workload.adapter, num_sharing=number, **asked) for number in numbers]


def with_narrower(profile: Profile, narrower: Sequence[Profile]) -> Profile:
    """The model's profile with those of parts of it; itself where there are none."""
    return replace(profile, narrower=tuple(narrower)) if narrower else profile
