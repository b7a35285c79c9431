"""Decisions about devices of a batch generation: whole copies of the model that share the prompts, or one copy cut into stages.

Each device of one machine has a process of its own, a rank. Replicas hold the whole model each and run the same plan on a share
of the prompts. Stages hold neighbouring blocks each, with the keys and values of these blocks; the first also the embeddings, the
last the output projection. Hidden states go from stage to stage, and each new token from the last stage to all others. The plan's
micro-batches follow one another through the stages, so that several of them work at once (GPipe's schedule without a backward:
Huang et al. 2019, section 2.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from optimizer.base.errors import InvalidPlan
from optimizer.base.limits import MAX_DEVICES, find_stages_fault


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """The devices of one machine that generate together. One device unless one of the two says otherwise."""

    num_replicas: int = 1
    """Whole copies of the model, 1 to 64, each on a device of its own with a share of the prompts."""
    stage_blocks: tuple[int, ...] = ()
    """Number of blocks on each device in the order of the model, 2 to 64 devices; empty if the model is not cut."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_DEVICES:
            raise _refused("num_replicas", self.num_replicas, f"allowed: 1 to {MAX_DEVICES}")
        if fault := find_stages_fault(self.stage_blocks):
            raise _refused("stage_blocks", ", ".join(map(str, self.stage_blocks)), fault)
        if self.stage_blocks and self.num_replicas > 1:
            why = "stage_blocks cut the model as well, and copies of a cut model are not supported"
            raise _refused("num_replicas", self.num_replicas, why)

    @property
    def is_cut(self) -> bool:
        return bool(self.stage_blocks)

    @property
    def num_devices(self) -> int:
        return len(self.stage_blocks) or self.num_replicas

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Number of each stage's first block."""
        return (0, *accumulate(self.stage_blocks))[: len(self.stage_blocks)]


def count_devices(plan: Mapping[str, Any] | None) -> int:
    """Devices that a stored plan runs on, of training or of a generation; one where it does not say."""
    layout: Mapping[str, Any] = (plan or {}).get("layout") or {}
    if "num_devices" in layout:
        return int(layout["num_devices"])
    return max(int(layout.get("num_replicas", 1)), len(layout.get("stage_blocks") or ()))


def _refused(name: str, value: object, why: str) -> InvalidPlan:
    path = f"plan.layout.{name}"
    return InvalidPlan(f"{path} is {value}; {why}", field=path, value=value, allowed=why)
