"""Every plan a search has priced, each once, and the best of them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import PerBlock, keep_everything
from optimizer.search.problem import OuterPlan, SearchProblem

MAX_PRICES = 480
"""Number of prices after which a search stops looking for a better plan: a bound on time that, unlike a clock, is the
same on every machine."""
MAX_POLISH_PRICES = 160
"""Prices that polishing the plan found may add."""

_Key = tuple[float, bool, int, int, int, int, str, PerBlock]


class PriceBook:
    """Memory of one search. Not shared between searches."""

    def __init__(self, problem: SearchProblem, *, most_prices: int = MAX_PRICES, most_ms: float = math.inf) -> None:
        """most_prices: after which a search in it looks no further. most_ms: slower plans are of no use and never the best."""
        self.problem = problem
        self._most_prices, self._most_ms = most_prices, most_ms
        self._priced: dict[Plan, Prediction] = {}
        self._known: dict[tuple[OuterPlan, PerBlock], Prediction] = {}
        """The same by what was asked; several settings may make one plan."""
        self._best_key: _Key | None = None
        self._best: tuple[Plan, Prediction] | None = None
        self._permitted: dict[Plan, bool] = {}
        self._keys: dict[Plan, _Key] = {}
        self._num_before_polishing = 0
        self.is_complete = False
        """True where no plan that was not priced can be the best: set by whoever knows."""
        self.floor_ms: float | None = None
        """No permitted plan that fits is faster: set by who knows."""

    def price(self, setting: OuterPlan, per_block: PerBlock) -> Prediction:
        key = (setting, per_block)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._price(setting.plan(per_block))
        return known

    def _price(self, plan: Plan) -> Prediction:
        known = self._priced.get(plan)
        if known is not None:
            return known
        prediction = self._priced[plan] = self.problem.price(plan)
        if prediction.step_ms <= self.best_step_ms and self.problem.fits(prediction) and self._permits(plan):
            key = self._key_of(plan, prediction)
            if self._best_key is None or key < self._best_key:
                self._best_key, self._best = key, (plan, prediction)
        return prediction

    def keep_all_ms(self, setting: OuterPlan) -> float:
        """A lower bound on every plan of the setting: no choice of a block is faster than to keep."""
        return self.price(setting, keep_everything(self.problem.num_blocks)).step_ms

    @property
    def best(self) -> tuple[Plan, Prediction] | None:
        """The fastest permitted plan that fits, of all priced so far."""
        return self._best

    @property
    def best_step_ms(self) -> float:
        """Milliseconds that a plan must not exceed to be of use."""
        return self._best[1].step_ms if self._best else self._most_ms

    @property
    def has_limit(self) -> bool:
        """True where plans may fit and be of no use."""
        return self._most_ms < math.inf

    @property
    def num_prices(self) -> int:
        return len(self._priced)

    @property
    def is_full(self) -> bool:
        return self.num_prices >= self._most_prices

    @property
    def is_polished(self) -> bool:
        """True where nothing more may be priced to improve the best plan."""
        return self.num_prices >= self._num_before_polishing + MAX_POLISH_PRICES

    @contextmanager
    def more_prices(self, number: int) -> Iterator[None]:
        """So many prices may be worked out within, and none of them counts afterwards."""
        num_before, most_prices = self.num_prices, self._most_prices
        self._most_prices = num_before + number
        try:
            yield
        finally:
            self._most_prices = most_prices + self.num_prices - num_before

    def begin_polishing(self) -> None:
        self._num_before_polishing = self.num_prices

    def permitted(self) -> list[tuple[Plan, Prediction]]:
        """All priced plans that the goal allows, fitting or not, best first."""
        return self._sorted(lambda plan, _: self._permits(plan))

    @property
    def fastest_permitted_ms(self) -> float:
        """The least step time of all priced plans that the goal allows, fitting or not."""
        return min(prediction.step_ms for plan, prediction in self._priced.items() if self._permits(plan))

    def feasible(self) -> list[tuple[Plan, Prediction]]:
        """Those that fit, best first."""
        return self._sorted(lambda plan, prediction: self.problem.fits(prediction) and self._permits(plan))

    def find_lighter(self, peak_bytes: int) -> Plan | None:
        """The best plan with a peak of so many bytes or less, by its upper end; None where none was priced."""
        fitting = (plan for plan, prediction in self.feasible() if prediction.device_peak_high_bytes <= peak_bytes)
        return next(fitting, None)

    def list_best(self, number: int) -> list[Plan]:
        """The best plans of so many settings, whatever the number of chunks and the share of the state that leaves."""
        found: dict[OuterPlan, Plan] = {}
        for plan, _ in self.feasible():
            if len(found) < number:
                found.setdefault(OuterPlan.of(plan).home, plan)
        return list(found.values())

    def _sorted(self, wanted: Callable[[Plan, Prediction], bool]) -> list[tuple[Plan, Prediction]]:
        found = [pair for pair in self._priced.items() if wanted(*pair)]
        return sorted(found, key=lambda pair: self._key_of(*pair))

    def _permits(self, plan: Plan) -> bool:
        """Asked of each plan once: the answer does not change within a search."""
        if plan not in self._permitted:
            self._permitted[plan] = self.problem.permits(plan)
        return self._permitted[plan]

    def _key_of(self, plan: Plan, prediction: Prediction) -> _Key:
        if plan not in self._keys:
            self._keys[plan] = order_key(plan, prediction)
        return self._keys[plan]


def remembering(problem: SearchProblem) -> SearchProblem:
    """The problem with every price worked out once, but for the last check of the chosen plan; for several books."""
    remembered = replace(problem, price=cache(problem.price), price_afresh=problem.price_afresh or problem.price)
    if problem.detail is None:
        return remembered
    work_out, known = problem.detail, dict[Plan, Prediction]()

    def detail(plan: Plan, prediction: Prediction) -> Prediction:
        if plan not in known:
            known[plan] = work_out(plan, prediction)
        return known[plan]

    return replace(remembered, detail=detail)


def order_key(plan: Plan, prediction: Prediction) -> _Key:
    """Faster first; then lossless, then fewer bytes moved, since a hidden copy still loads the link, then smaller, then with
    fewer techniques.

    The rest only makes the order total, so that a search is deterministic.
    """
    elsewhere_bytes = prediction.host_peak_bytes + prediction.disk_peak_bytes + prediction.remote_peak_bytes
    return (
        prediction.step_ms,
        not plan.is_lossless,
        sum(prediction.copied_bytes.values()) + elsewhere_bytes,
        prediction.device_peak_high_bytes,
        len(plan.techniques),
        plan.batch.accumulation_steps,
        repr(OuterPlan.of(plan)),
        plan.activations.per_block,
    )
