"""Words the errors about pins that no plan can keep, for training and generations alike."""

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import format_bytes
from optimizer.plan.pins.table import PinTable, listed_pins, shown_pin
from optimizer.search.budgeted import Budgeted, GoalT, PlanT, PredictionT


def refuse_pin(path: str, value: object, why: str) -> InvalidPlan:
    """One that cannot be kept whatever the others are. why: what is allowed, or what is wrong."""
    name = f"goal.pins.{path}"
    return InvalidPlan(f"{name} is {value}; {why}", field=name, value=value, allowed=why)


def check_pinned_techniques(problem: Budgeted[PlanT, PredictionT, GoalT]) -> None:
    """Raise InvalidPlan for the first pin that needs what the machine or the job does not have."""
    pins = problem.goal.pins
    for path, technique in pins.techniques():
        if not problem.allows(technique):
            raise refuse_pin(
                path, shown_pin(dict(pins.values())[path]), f"{technique} is not to be had on this machine for this job"
            )


def no_plan_keeps(pins: PinTable, why: str = "") -> InvalidPlan:
    """why: what is wrong with a plan that has them all; without, that lies in what else is forbidden or missing."""
    listed = listed_pins(pins)
    if why:
        return InvalidPlan(
            f"no plan keeps every pin ({listed}): {why}", field="goal.pins", value=listed, hint="Leave one of them out."
        )
    return InvalidPlan(
        f"no plan keeps every pin ({listed}) with what else is forbidden or not to be had on this machine",
        field="goal.pins",
        value=listed,
        hint="Leave one of them out, or permit more.",
    )


def no_room_elsewhere(problem: Budgeted[PlanT, PredictionT, GoalT]) -> InvalidPlan:
    """Without pins everything may stay on the device, so only they can ask for more of another tier than there is."""
    listed = listed_pins(problem.goal.pins)
    return InvalidPlan(
        f"what is pinned ({listed}) needs more than {format_bytes(problem.host_budget_bytes)} on the host, "
        f"{format_bytes(problem.disk_budget_bytes)} on disk, or {format_bytes(problem.remote_budget_bytes)} in a remote store",
        field="goal.pins",
        value=listed,
        hint="Give it more room there, or leave a pin out.",
    )
