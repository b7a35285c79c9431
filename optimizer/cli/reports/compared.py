"""Plans side by side as text: a column for each, and only the rows that differ."""

from collections.abc import Collection, Sequence

from optimizer.base.categories import CATEGORY_LABELS
from optimizer.base.units import format_bytes
from optimizer.cli.reports.text import WIDTH, bytes_elsewhere, format_bullets, size_or_dash
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.search.answer.compare import BytesAtPeak


def side_by_side(
    labels: Sequence[str],
    costs: Sequence[Sequence[str]],
    *,
    always: Collection[str],
    decisions: Sequence[Sequence[str]],
    sizes: Sequence[BytesAtPeak],
    moments: Sequence[str],
) -> str:
    """Costs, then decisions, then bytes at the peak, and where each plan's peak is.

    costs, decisions: rows of a name and a text for each plan; of costs those that are alike are left out, but for ``always``.
    """
    shown = [row for row in costs if len(set(row[1:])) > 1 or row[0] in always]
    parts = [_columns("", labels, shown)]
    if decisions:
        parts.append(_columns("What differs", labels, decisions))
    if sizes:
        rows = [(CATEGORY_LABELS[row.category], *map(size_or_dash, row.values)) for row in sizes]
        parts.append(_columns("At the peak", labels, rows))
    where = [f"{label}: {moment}" for label, moment in zip(labels, moments, strict=True)]
    return "\n\n".join([*parts, "Where the peak is\n" + format_bullets(where)])


def memory_costs(predictions: Sequence[Prediction | GenerationPrediction]) -> list[Sequence[str]]:
    """The rows that plans of both kinds have: bytes on the device, elsewhere and on their way."""
    return [
        ("peak, at most", *(format_bytes(found.device_peak_high_bytes) for found in predictions)),
        ("elsewhere", *(size_or_dash(bytes_elsewhere(found)) for found in predictions)),
        ("copied", *(size_or_dash(sum(found.copied_bytes.values())) for found in predictions)),
    ]


def _columns(title: str, labels: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of one width, so that tables below each other line up; cells that are too wide are wrapped."""
    first = 24
    width = min(30, (WIDTH - first) // len(labels) - 2)
    lines = [title.ljust(first) + "".join(f"  {label[:width].ljust(width)}" for label in labels)]
    for name, *values in rows:
        wrapped = [_wrapped(value, width) for value in values]
        for index in range(max(len(lines_of) for lines_of in wrapped)):
            cells = [lines_of[index] if index < len(lines_of) else "" for lines_of in wrapped]
            opening = (name if index == 0 else "").ljust(first)
            lines.append(opening + "".join(f"  {cell.ljust(width)}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        together = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], together] if len(together) <= width else [*lines, word]
    return [line for line in lines if line] or [""]
