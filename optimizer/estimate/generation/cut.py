"""One stage of a model that is cut: its profile, its weights, and the bytes at its two ends. Torch-free.

Bytes are those of one device at the same place (``runtime/generation/cut.py``): what is there before a stage's first block
is what would be there had the blocks before it run, in the middle of which hidden states come.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.base.errors import InvalidPlan
from optimizer.estimate.shape.compiled import CompiledShape, PartRequest
from optimizer.estimate.tasks.parts import PartBytes
from optimizer.estimate.tasks.tasks import NO_TIME, Task, single
from optimizer.hardware.machine import Machine
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.devices.layout import check_depth
from optimizer.plan.devices.stages import StageOfModel, list_stages
from optimizer.profile.generation import GenerationProfile, WeightBytes, block_part

_KV_CACHE = CATEGORIES.index("kv_cache")


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """A stage, and what is before it."""

    stage: StageOfModel
    profile: GenerationProfile
    """The profile of its blocks alone."""
    kinds_before: tuple[int, ...]
    """Distinct blocks that the blocks before it are."""

    def left_out_bytes(self, held: WeightBytes) -> int:
        """Bytes of weights outside the blocks that other stages hold. Raises InvalidPlan where blocks share weights."""
        if held.ends is None:
            raise InvalidPlan(
                "plan.layout.stage_blocks is given; blocks of this model share weights, so it cannot be cut over devices",
                field="plan.layout.stage_blocks",
                value="shared blocks",
                allowed=[],
            )
        return held.ends.left_out(is_first=self.stage.is_first, is_last=self.stage.is_last)

    def place_hidden(self, compiled: CompiledShape, *, hidden_bytes: int) -> tuple[Task, ...]:
        """The task in which hidden states come; none on the first stage."""
        if self.stage.is_first:
            return ()
        net = np.zeros(len(CATEGORIES), dtype=np.int64)
        for kind in self.kinds_before:
            net = net + compiled.part_bytes(PartRequest(block_part(kind))).net
        come = single("activations", hidden_bytes)
        return (_task(PartBytes(net=net, rise=hidden_bytes, at_rise=come)),)


def list_stage_costs(profile: GenerationProfile, layout: GenerationLayout) -> tuple[StageCosts, ...]:
    """All stages in order. Raises InvalidPlan where they are not the blocks of this model."""
    check_depth(layout.stage_blocks, profile.num_blocks)
    return tuple(
        StageCosts(
            stage=stage,
            profile=profile.with_blocks(stage.blocks),
            kinds_before=profile.block_kinds[: stage.first_block],
        )
        for stage in list_stages(layout.stage_blocks)
    )


def give_on(tasks: Iterable[Task]) -> Task:
    """The end of a forward pass on a stage that is not the last: all that these tasks left goes, but keys and values."""
    net = -np.sum([task.bytes.net for task in tasks], axis=0)
    net[_KV_CACHE] = 0
    return _task(PartBytes(net=net, rise=0, at_rise=np.zeros_like(net)))


def _task(num_bytes: PartBytes) -> Task:
    return Task(phase="", block=-1, name="", bytes=num_bytes, time=NO_TIME)


def check_devices(machine: Machine, layout: GenerationLayout) -> None:
    """Raise InvalidPlan for more cards than the machine has. On the CPU device any number of processes play devices."""
    if machine.device.kind == "cpu" or layout.num_devices <= machine.num_devices:
        return
    raise InvalidPlan(
        f"plan.layout is of {layout.num_devices} devices; the machine has {machine.num_devices}",
        field="plan.layout",
        value=layout.num_devices,
        allowed={"maximum": machine.num_devices},
    )
