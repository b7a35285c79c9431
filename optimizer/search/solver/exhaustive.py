"""Small problems: every plan is tried, but for those of settings that cannot hold the best one.

Assumes of a price what holds of any schedule in which compute waits for copies and nothing waits for memory: in one setting no
plan is faster than the one whose blocks all keep, but for the time that fresh memory takes to be touched on the CPU device. That
grows with what is kept and is left out of the bound. ``tests/optimizer/search/solver/test_exhaustive.py`` holds the
estimator to it.
"""

from optimizer.search.arrangements import keep_everything
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.space import every_arrangement, few_settings

_OF_MEMORY = "allocation"
"""The kind of time that grows with what is kept."""


def price_all(book: PriceBook, *, settings: list[OuterPlan] | None = None, prune: bool = True) -> bool:
    """Try all plans of a small problem and report whether it was one; then ``book.best`` is the best of them, if any fits.

    settings: where they have been listed. prune: leave out what cannot be faster than a plan that fits; else all are priced.
    """
    settings = few_settings(book) if settings is None else settings
    if settings is None:
        return False
    bounds = {setting: bound_of_setting(book, setting) for setting in settings}
    for setting in sorted(settings, key=lambda setting: (bounds[setting], repr(setting))):
        if prune and bounds[setting] > book.best_step_ms:
            break
        for per_block in every_arrangement(book.problem):
            book.price(setting, per_block)
    book.is_complete = prune or book.is_complete
    return True


def bound_of_setting(book: PriceBook, setting: OuterPlan) -> float:
    """No plan of the setting takes less time, in milliseconds."""
    prediction = book.price(setting, keep_everything(book.problem.num_blocks))
    return prediction.step_ms - prediction.busy_by_kind_ms.get(_OF_MEMORY, 0.0)
