"""The few plans that the New job page offers, as bars on one scale: the recommended one, the fastest, and two standard setups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from webapp.pages.presentation import StackedBar, stacked_bar
from webapp.pages.shown.offer_rows import OfferRow

STANDARD: Final = ("keep_all", "resident")
"""Labels of the plans that save nothing, of training and of generation."""
_FITTING: Final = ("fits", "tight")


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One plan, and the roles it has among all."""

    title: str
    """``Recommended, fastest``."""
    row: OfferRow
    bar: StackedBar


def choose_picks(rows: Sequence[OfferRow], *, budget_bytes: int) -> tuple[Pick, ...]:
    """Plans of the machine that the first row is for; one plan with two roles is named once. A plan taken by hand is added."""
    if not rows:
        return ()
    roles: dict[str, list[str]] = {}
    here = [row for row in rows if row.machine == rows[0].machine]
    for title, row in _roles(here):
        twin = next((other.id for other in here if other.id in roles and _are_twins(other, row)), row.id)
        roles.setdefault(twin, []).append(title)
    for row in rows:
        if row.selected:
            roles.setdefault(row.id, ["Your choice"])
    by_id = {row.id: row for row in rows}
    widest_bytes = max(by_id[key].bar.total_bytes for key in roles)
    return tuple(
        Pick(
            title=", ".join(titles).capitalize(),
            row=by_id[key],
            bar=stacked_bar(
                by_id[key].bytes_by_category,
                budget_bytes=budget_bytes,
                widest_bytes=widest_bytes,
                may_leave_budget=True,
            ),
        )
        for key, titles in roles.items()
    )


def mark_picks(rows: Sequence[OfferRow], picks: Sequence[Pick]) -> tuple[OfferRow, ...]:
    """The rows, those among the picks marked: a plan has one radio button on a page."""
    picked = {pick.row.id for pick in picks}
    return tuple(replace(row, is_pick=row.id in picked) for row in rows)


def _are_twins(row: OfferRow, other: OfferRow) -> bool:
    """Report whether two plans hold the same bytes and take the same time, within a fiftieth."""
    return row.bytes_by_category == other.bytes_by_category and abs(row.total_s - other.total_s) <= 0.02 * row.total_s


def _roles(rows: Sequence[OfferRow]) -> Iterable[tuple[str, OfferRow]]:
    fitting = [row for row in rows if row.verdict in _FITTING]
    yield from (("Recommended", row) for row in rows if row.chosen)
    if fitting:
        # of equals the recommended one, which stands first
        yield "Fastest", min(fitting, key=lambda row: row.total_s)
    smallest = min(rows, key=lambda row: row.peak_bytes)
    # a search finds smaller plans than these, so it is not called the smallest of all
    if not smallest.chosen:
        yield "Smallest standard setup", smallest
    yield from (("No memory saved", row) for row in rows if row.label in STANDARD)
