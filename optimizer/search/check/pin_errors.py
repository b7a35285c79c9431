"""What is said of pins that no plan can keep, of training and of generations alike."""

from optimizer.base.errors import InvalidPlan
from optimizer.base.units import format_bytes
from optimizer.plan.pins.table import PinTable, listed_pins


def refuse_pin(path: str, value: object, why: str) -> InvalidPlan:
    """One that cannot be kept whatever the others are. why: what is allowed, or what is wrong."""
    name = f"goal.pins.{path}"
    return InvalidPlan(f"{name} is {value}; {why}", field=name, value=value, allowed=why)


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


def no_room_elsewhere(
    pins: PinTable, *, host_budget_bytes: int, disk_budget_bytes: int, remote_budget_bytes: int
) -> InvalidPlan:
    """Without pins everything may stay on the device, so only they can ask for more of another tier than there is."""
    listed = listed_pins(pins)
    return InvalidPlan(
        f"what is pinned ({listed}) needs more than {format_bytes(host_budget_bytes)} on the host, "
        f"{format_bytes(disk_budget_bytes)} on disk, or {format_bytes(remote_budget_bytes)} in a remote store",
        field="goal.pins",
        value=listed,
        hint="Give it more room there, or leave a pin out.",
    )
