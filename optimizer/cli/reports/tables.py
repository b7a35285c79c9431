"""Tables that an estimate of training and one of a generation share: the peak, the card, its contributors, the lanes."""

from optimizer.base.categories import CATEGORY_LABELS
from optimizer.base.units import format_bytes
from optimizer.cli.reports.text import (
    format_ms,
    format_table,
)
from optimizer.estimate.explanation import Explanation
from optimizer.estimate.prediction import CardMemory

_MAX_CONTRIBUTORS = 8
_LANE_LABELS = {
    "compute": "compute",
    "copy_in": "copies to the device",
    "copy_out": "copies to the host",
    "host": "host's own work",
    "disk": "disk",
    "network": "network",
}


def peak_table(explanation: Explanation) -> str:
    """Each category at the peak and at its own highest, with its reason."""
    rows = [
        (CATEGORY_LABELS[row.category], format_bytes(row.peak_bytes), format_bytes(row.highest_bytes), row.reason)
        for row in explanation.categories
    ]
    total = format_bytes(sum(row.peak_bytes for row in explanation.categories))
    table = format_table(("", "then", "highest", "why it is there"), [*rows, ("together", total, "", "")])
    return f"At the peak, {explanation.peak_moment}\n{table}"


def card_table(memory: CardMemory) -> str:
    """From tensors to the process that the driver sees."""
    rows = [(part.name, format_bytes(part.num_bytes), "") for part in memory.parts]
    totals = (("process on the card", memory.process), ("pinned host memory", memory.host_pinned))
    rows += [
        (name, format_bytes(size.value), f"{format_bytes(size.low)} to {format_bytes(size.high)}")
        for name, size in totals
        if size.high
    ]
    of_total = f", which has {format_bytes(memory.total_bytes)}" if memory.total_bytes else ""
    unknown = "".join(f"\nnot modelled: {reason}" for reason in memory.not_modelled)
    return f"On the card{of_total}\n{format_table(('', 'then', 'between'), rows)}{unknown}"


def contributors_table(memory: CardMemory) -> str:
    """The largest groups of tensors."""
    rows = [
        (format_bytes(part.num_bytes), f"{part.num_storages:,}", CATEGORY_LABELS[part.category], part.made_in, part.op)
        for part in memory.contributors[:_MAX_CONTRIBUTORS]
    ]
    return "Largest in memory then\n" + format_table(("bytes", "tensors", "as", "made in", "by"), rows)


def lanes_table(explanation: Explanation) -> str:
    """Busy times of lanes, and the part hidden behind compute."""
    rows = [
        (
            _LANE_LABELS.get(use.lane, use.lane),
            format_ms(use.busy_ms),
            format_ms(use.hidden_ms),
            format_ms(use.exposed_ms),
        )
        for use in explanation.lanes
    ]
    return "Lanes\n" + format_table(("", "busy", "hidden", "exposed"), rows)
