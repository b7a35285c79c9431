"""The goal that a plan must meet: budgets in bytes, an objective, which losses of quality are allowed, pinned decisions."""

from dataclasses import dataclass, field
from typing import Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.limits import MAX_DEVICES
from optimizer.base.ranges import require_int
from optimizer.plan.pins.generation import GenerationPins
from optimizer.plan.pins.table import shown_pin
from optimizer.plan.pins.training import Pins
from optimizer.plan.techniques import LOSSY, ROUNDING, Technique

Loss = Literal["rounding", "any"]
"""The quality that may be lost: what the techniques in ROUNDING lose, or what any in LOSSY does."""
Objective = Literal["fastest_step", "cheapest_run", "largest_batch", "longest_sequence", "largest_model"]
"""The best plan's measure. The last three change the workload: as much of it as fits, and then the fastest plan."""
OnOutOfMemory = Literal["replan", "stop"]
"""The answer to memory that ran out: go on from the last checkpoint under another plan, or end."""
UNLIMITED_BYTES = 2**60
"""The largest budget that a goal may have; callers without a budget in mind pass it."""
GenerationObjective = Literal["throughput", "first_token", "largest_batch"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Budgets that plans of training and of generation have in common."""

    device_budget_bytes: int
    """Cap on bytes allocated on the device tier. Where tensors are counted (each stage at first, then one step of many:
    ``runtime/meter/counting.py``) the first one over it ends the job. On a card torch's peak is also held against it after each
    step and each other stage, and every 32 tokens of a generation, and its allocator refuses what lies more than an eighth above,
    at least 256 MiB. A load counts each tensor as it is read from its file; random weights only once they are drawn."""
    host_budget_bytes: int | None = None
    """Cap on bytes on the host tier; None means what the machine has free."""
    disk_budget_bytes: int | None = None
    """Cap on bytes on the disk tier; None means what the machine has free."""


@dataclass(frozen=True, kw_only=True)
class GenerationGoal(Budgets):
    """Budgets, objective and limits that the plan of a batch generation must meet."""

    objective: GenerationObjective = "throughput"
    """throughput: the whole workload in the least time. first_token: the first pass's first token after the least time.
    largest_batch: most sequences at once."""
    allow_lossy: bool = False
    """Allows choices that change the numbers (bf16, packed weights)."""
    forbid: tuple[Technique, ...] = ()
    """Techniques that must not be used."""
    pins: GenerationPins = field(default_factory=GenerationPins)
    """Decisions of the plan that are made already."""
    num_devices: int = 1
    """Most devices of the machine that a plan may use, 1 to 64. The device's budget is of each of them, those of the host and the
    disk of all together."""

    def __post_init__(self) -> None:
        _check_budgets(self)
        require_int("num_devices", self.num_devices, low=1, high=MAX_DEVICES, section="goal")
        _check_pins(self)

    def allows_loss_by(self, technique: Technique) -> bool:
        """Return true if the technique loses no quality, or if the goal allows its loss."""
        return self.allow_lossy or technique not in LOSSY


@dataclass(frozen=True, kw_only=True)
class Goal(Budgets):
    """Budgets, objective and limits that a training plan must meet."""

    objective: Objective = "fastest_step"
    """cheapest_run weighs machines against each other by money; on one machine the fastest step is the cheapest."""
    allow_lossy: bool = False
    """Allows choices that change the numbers (bf16, 8-bit state)."""
    most_loss: Loss = "any"
    """The largest loss that those choices may cause, if they are allowed."""
    forbid: tuple[Technique, ...] = ()
    """Techniques that must not be used."""
    pins: Pins = field(default_factory=Pins)
    """Decisions of the plan that are made already."""
    num_devices: int = 1
    """Most devices of the machine that a plan may use, 1 to 64. Budgets of the host and the disk are of all of them together."""
    on_out_of_memory: OnOutOfMemory | None = None
    """None: replan if the search chose the plan, stop if a person took it by name. No budget is raised, no pin is lifted."""

    def __post_init__(self) -> None:
        _check_budgets(self)
        require_int("num_devices", self.num_devices, low=1, high=MAX_DEVICES, section="goal")
        _check_pins(self)

    def replans(self, plan_label: str) -> bool:
        """Report whether a job whose plan has this label goes on with another one when memory runs out."""
        return (self.on_out_of_memory or ("replan" if plan_label == "chosen" else "stop")) == "replan"

    def allows_loss_by(self, technique: Technique) -> bool:
        """Return true if the technique loses no more quality than the goal allows."""
        if technique not in LOSSY:
            return True
        return self.allow_lossy and (self.most_loss == "any" or technique in ROUNDING)

    def may_use(self, technique: Technique) -> bool:
        """Return true if the technique is not forbidden, and loses no more quality than the goal allows."""
        return technique not in self.forbid and self.allows_loss_by(technique)


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


def _check_budgets(goal: Budgets) -> None:
    require_int("device_budget_bytes", goal.device_budget_bytes, low=1, high=UNLIMITED_BYTES, section="goal")
    if goal.host_budget_bytes is not None:
        require_int("host_budget_bytes", goal.host_budget_bytes, low=0, high=UNLIMITED_BYTES, section="goal")
    if goal.disk_budget_bytes is not None:
        require_int("disk_budget_bytes", goal.disk_budget_bytes, low=0, high=UNLIMITED_BYTES, section="goal")
