"""The goal that a plan must meet: budgets in bytes, an objective, which losses of quality are allowed, pinned decisions."""

from dataclasses import dataclass, field
from typing import Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.ranges import require_int
from optimizer.plan.pins.generation import GenerationPins
from optimizer.plan.pins.table import shown_pin
from optimizer.plan.pins.training import Pins
from optimizer.plan.techniques import LOSSY, ROUNDING, Technique

Loss = Literal["rounding", "any"]
"""How much of quality may be lost: what ROUNDING names, or whatever LOSSY does."""
Objective = Literal["fastest_step", "cheapest_run", "largest_batch", "longest_sequence", "largest_model"]
"""What is best. The last three change what is asked for: as much of it as fits, and of that the fastest."""
UNLIMITED_BYTES = 2**60
"""The largest budget of a goal, for whoever has none in mind."""
GenerationObjective = Literal["throughput", "first_token", "largest_batch"]


@dataclass(frozen=True, kw_only=True)
class GenerationGoal:
    """What the plan of a batch generation must honour, and what it is judged by."""

    device_budget_bytes: int
    """As in ``Goal``, as are the next two."""
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None
    objective: GenerationObjective = "throughput"
    """throughput: the whole workload in the least time. first_token: the first pass's first token after the least time.
    largest_batch: most sequences at once."""
    allow_lossy: bool = False
    """Whether choices that change the numbers (bf16, packed weights) may be taken."""
    forbid: tuple[Technique, ...] = ()
    """Techniques that must not be used."""
    pins: GenerationPins = field(default_factory=GenerationPins)
    """Decisions of the plan that are made already."""

    def __post_init__(self) -> None:
        _check_budgets(self)
        _check_pins(self)

    def allows_loss_by(self, technique: Technique) -> bool:
        """As ``Goal``'s."""
        return self.allow_lossy or technique not in LOSSY


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan must honour, and what it is judged by."""

    device_budget_bytes: int
    """Hard cap on bytes allocated on the device tier, at every moment."""
    host_budget_bytes: int | None = None
    """Cap on bytes on the host tier; None means what the machine has free."""
    disk_budget_bytes: int | None = None
    """Cap on bytes on the disk tier; None means what the machine has free."""
    objective: Objective = "fastest_step"
    """cheapest_run weighs machines against each other by money; on one machine the fastest step is the cheapest."""
    allow_lossy: bool = False
    """Whether choices that change the numbers (bf16, 8-bit state) may be taken."""
    most_loss: Loss = "any"
    """How far they may go, where they may be taken."""
    forbid: tuple[Technique, ...] = ()
    """Techniques that must not be used."""
    pins: Pins = field(default_factory=Pins)
    """Decisions of the plan that are made already."""

    def __post_init__(self) -> None:
        _check_budgets(self)
        _check_pins(self)

    def allows_loss_by(self, technique: Technique) -> bool:
        """Whether a technique's loss of quality is allowed; of one that has none it is."""
        if technique not in LOSSY:
            return True
        return self.allow_lossy and (self.most_loss == "any" or technique in ROUNDING)


def _check_pins(goal: "Goal | GenerationGoal") -> None:
    """Raise InvalidWorkload where a pin asks for what the goal rules out."""
    for path, technique in goal.pins.techniques():
        name, value = f"goal.pins.{path}", dict(goal.pins.values())[path]
        if technique in goal.forbid:
            raise InvalidWorkload(
                f"{name} is {shown_pin(value)}, which needs {technique!r}, and goal.forbid names that",
                field=name,
                value=shown_pin(value),
                hint=f"Leave {technique!r} out of goal.forbid, or the pin.",
            )
        if not goal.allows_loss_by(technique):
            is_little = isinstance(goal, Goal) and goal.allow_lossy
            limit = "most_loss is rounding" if is_little else "allow_lossy is false"
            raise InvalidWorkload(
                f"{name} is {shown_pin(value)}, which changes the numbers, and goal.{limit}",
                field=name,
                value=shown_pin(value),
                hint=f"Set goal.{'most_loss to any' if is_little else 'allow_lossy'}, or leave the pin out.",
            )


def _check_budgets(goal: "Goal | GenerationGoal") -> None:
    require_int("device_budget_bytes", goal.device_budget_bytes, low=1, high=UNLIMITED_BYTES, section="goal")
    if goal.host_budget_bytes is not None:
        require_int("host_budget_bytes", goal.host_budget_bytes, low=0, high=UNLIMITED_BYTES, section="goal")
    if goal.disk_budget_bytes is not None:
        require_int("disk_budget_bytes", goal.disk_budget_bytes, low=0, high=UNLIMITED_BYTES, section="goal")
