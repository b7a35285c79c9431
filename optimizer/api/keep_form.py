"""Pins a goal to the form of weights and optimizer state that a checkpoint holds: places may change on the way, bits may not."""

from dataclasses import replace

from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import LOSSY


def keep_form(goal: Goal, plan: Plan, *, has_adapter: bool) -> Goal:
    """The goal with the form of weights and optimizer state pinned to those of ``plan``'s checkpoints. The loss of that form is
    allowed, since the checkpoint has taken it already, and no other that the goal refuses.
    """
    weights = replace(goal.pins.weights, dtype=plan.weights.dtype)
    if plan.weights.dtype == "bf16":
        weights = replace(weights, master=plan.weights.master)
    if has_adapter:
        weights = replace(weights, frozen=plan.weights.frozen)
    state = replace(goal.pins.optimizer_state, bits=plan.optimizer_state.bits)
    pins = replace(goal.pins, weights=weights, optimizer_state=state)
    taken = {technique for _, technique in pins.techniques()}
    refused = [technique for technique in LOSSY if not goal.allows_loss_by(technique)]
    if taken.isdisjoint(refused):
        return replace(goal, pins=pins)
    others = tuple(technique for technique in refused if technique not in {*taken, *goal.forbid})
    return replace(goal, pins=pins, allow_lossy=True, most_loss="any", forbid=(*goal.forbid, *others))
