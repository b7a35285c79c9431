"""Every plan a search has priced, each once, and the best of them."""

from collections.abc import Callable

from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import SearchProblem, Setting

MAX_PRICES = 1500
"""Where a search stops trying to improve: a bound on time that, unlike a clock, gives the same answer on every machine."""

_Key = tuple[float, bool, int, int, tuple[int, int, int], PerBlock]


class PriceBook:
    """Memory of one search. Not shared between searches."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._priced: dict[tuple[Setting, PerBlock], tuple[Plan, Prediction]] = {}
        self._best_key: _Key | None = None
        self._best: tuple[Plan, Prediction] | None = None

    def price(self, setting: Setting, per_block: PerBlock) -> Prediction:
        known = self._priced.get((setting, per_block))
        if known is not None:
            return known[1]
        plan = setting.plan(per_block)
        prediction = self.problem.price(plan)
        self._priced[setting, per_block] = (plan, prediction)
        if self.problem.fits(prediction) and self.problem.permits(plan):
            key = order_key(plan, prediction)
            if self._best_key is None or key < self._best_key:
                self._best_key, self._best = key, (plan, prediction)
        return prediction

    @property
    def best(self) -> tuple[Plan, Prediction] | None:
        """The fastest permitted plan that fits, of all priced so far."""
        return self._best

    @property
    def best_step_ms(self) -> float:
        return self._best[1].step_ms if self._best else float("inf")

    @property
    def is_full(self) -> bool:
        return len(self._priced) >= MAX_PRICES

    def permitted(self) -> list[tuple[Plan, Prediction]]:
        """All priced plans that the goal allows, fitting or not, best first."""
        return self._sorted(lambda plan, _: self.problem.permits(plan))

    def feasible(self) -> list[tuple[Plan, Prediction]]:
        """Those that fit, best first."""
        return self._sorted(lambda plan, prediction: self.problem.permits(plan) and self.problem.fits(prediction))

    def _sorted(self, wanted: Callable[[Plan, Prediction], bool]) -> list[tuple[Plan, Prediction]]:
        return sorted((pair for pair in self._priced.values() if wanted(*pair)), key=lambda pair: order_key(*pair))


def order_key(plan: Plan, prediction: Prediction) -> _Key:
    """Faster first; then lossless, then fewer bytes moved, since a hidden copy still loads the link, then smaller.

    The rest only makes the order total, so that a search is deterministic.
    """
    rest = (plan.batch.accumulation_steps, plan.optimizer_state.bits, plan.weights.bytes_per_element)
    return (
        prediction.step_ms,
        not plan.is_lossless,
        prediction.host_peak_bytes,
        prediction.device_peak_high_bytes,
        rest,
        plan.activations.per_block,
    )
