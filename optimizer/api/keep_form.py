"""Pins a goal to the form of weights and optimizer state that a checkpoint holds: places may change on the way, bits may not."""

from dataclasses import replace

from optimizer.goal import Goal
from optimizer.plan.plan import Plan


def keep_form(goal: Goal, plan: Plan, *, has_adapter: bool) -> Goal:
    """The goal with the form of weights and optimizer state pinned to those of ``plan``'s checkpoints, and its loss allowed."""
    weights = replace(goal.pins.weights, dtype=plan.weights.dtype)
    if plan.weights.dtype == "bf16":
        weights = replace(weights, master=plan.weights.master)
    if has_adapter:
        weights = replace(weights, frozen=plan.weights.frozen)
    state = replace(goal.pins.optimizer_state, bits=plan.optimizer_state.bits)
    loses = plan.weights.dtype != "fp32" or plan.weights.frozen != "same" or plan.optimizer_state.bits != 32
    pins = replace(goal.pins, weights=weights, optimizer_state=state)
    # the loss is one that the checkpoint has taken already
    return replace(goal, pins=pins, allow_lossy=goal.allow_lossy or loses, most_loss="any" if loses else goal.most_loss)
