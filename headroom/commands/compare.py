"""Jobs side by side on a terminal: only what differs, what came of it, what each decision costs."""

from collections.abc import Sequence
from typing import Any

from headroom.client.types import Comparison
from headroom.commands.tables import print_table
from optimizer.base.units import format_bytes, format_duration

LETTERS = "ABCDEFGHIJ"


def print_comparison(found: Comparison) -> None:
    """The answer of ``GET /compare``."""
    letters = LETTERS[: len(found["jobs"])]
    for letter, job in zip(letters, found["jobs"], strict=True):
        print(f"{letter}  {job['id']}  {job['name']}  ({job['state']})")
    print()
    outcomes = [(row["name"], *(_write(value, row["unit"]) for value in row["values"])) for row in found["outcomes"]]
    print_table(("outcome", *letters), outcomes, empty="nothing was measured yet")
    print()
    differences = [
        (_name(row["name"]), *(_plain(value, is_bytes=row["name"].endswith("_bytes")) for value in row["values"]))
        for row in found["differences"]
    ]
    print_table(("what differs", *letters), differences, empty="asked for and planned alike")
    if found["costs"]:
        print("\nA's plan with one decision of another, as predicted")
        print_table(("decision", "as in", "device memory", "step", "tokens/s"), list(map(_cost, found["costs"])), empty="")
    elif found["unpriced"]:
        print(f"\n{found['unpriced']}")


def _cost(row: dict[str, Any]) -> Sequence[str]:
    return (
        row["decision"].replace("_", " "),
        LETTERS[row["job_index"]],
        _signed(row["device_change_bytes"], "bytes"),
        _signed(row["step_change_ms"], "ms"),
        _signed(row["tokens_per_s_change"], "per_s"),
    )


def _signed(value: float, unit: str) -> str:
    return f"{'-' if value < 0 else '+'}{_write(abs(value), unit)}" if value else "none"


def _write(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "ms":
        return f"{value:.4g} ms" if value < 1000 else f"{value / 1000:.4g} s"
    if unit == "s":
        return format_duration(value)
    return f"{value:,.0f}" if unit == "per_s" else f"{value:.4g}"


def _name(path: str) -> str:
    """``goal.device_budget_bytes`` as ``device budget``, as the page has it."""
    return path.rpartition(".")[2].removesuffix("_bytes").removeprefix("num_").replace("_", " ")


def _plain(value: Any, *, is_bytes: bool) -> str:
    if value is None:
        return "-"
    if is_bytes and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
