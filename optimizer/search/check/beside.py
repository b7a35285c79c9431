"""Bytes that kernels hold beside a plan's tensors, learnt from a few plans and added to the price of all.

A price counts tensors; what CUDA's kernels hold is known once a plan is worked out in detail, which is too slow for each that a
search tries. Mostly it is little. But attention that keeps all its scores for backward, as in fp32 with fewer key heads than
query heads, holds more than the block's own tensors, in every block that is not rebuilt, wherever those tensors go. A search
that does not know it goes for such plans at every budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from optimizer.estimate.prediction import Prediction
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem

_LITTLE = 1.05
"""Plans that allocate up to so much more than was counted are searched by what was counted."""
_Form = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes for each sequence of a micro-batch."""

    once_bytes: float
    """While some block's kernels run."""
    per_block_bytes: float
    """From forward to backward in each block that is not rebuilt."""

    def of(self, plan: Plan) -> int:
        num_kept = _num_kept(plan)
        return round(plan.batch.micro_batch_size * (self.once_bytes + num_kept * self.per_block_bytes))


class Beside:
    """The bytes that were learnt, by the form that numbers have."""

    def __init__(self) -> None:
        self._held: dict[_Form, Held] = {}

    def learn(self, problem: SearchProblem, chosen: PricedPlan) -> bool:
        """Report whether the plan, worked out in detail, allocates more than is counted so far; if so, count it.

        problem: as it is without what was learnt.
        """
        found, plan = _beside_bytes(chosen.prediction), chosen.plan
        counted = chosen.prediction.device_peak_high_bytes + self._of(plan)
        if found is None or chosen.prediction.device_peak_high_bytes + found <= counted * _LITTLE:
            return False
        form, num_sequences, num_kept = _form_of(plan), plan.batch.micro_batch_size, _num_kept(plan)
        rebuilt = self._rebuilt(problem, plan) if num_kept else None
        before = self._held.get(form, Held(once_bytes=0, per_block_bytes=0))
        if rebuilt is None and num_kept:
            held = Held(once_bytes=before.once_bytes, per_block_bytes=found / num_kept / num_sequences)
        elif rebuilt is None:
            held = Held(once_bytes=found / num_sequences, per_block_bytes=before.per_block_bytes)
        else:
            more_bytes = max(0, found - rebuilt)
            held = Held(once_bytes=rebuilt / num_sequences, per_block_bytes=more_bytes / num_kept / num_sequences)
        self._held[form] = held
        return True

    def added_to(self, problem: SearchProblem) -> SearchProblem:
        """The same problem whose prices have the bytes in the upper end of the peak; details stay what they are."""
        if not self._held:
            return problem
        work_out, price = problem.detail, problem.price

        def detail(plan: Plan, _: Prediction) -> Prediction:
            assert work_out is not None
            return work_out(plan, price(plan))

        return replace(
            problem,
            price=self._raised(price),
            price_afresh=self._raised(problem.price_afresh or price),
            detail=None if work_out is None else detail,
        )

    def _raised(self, price: Callable[[Plan], Prediction]) -> Callable[[Plan], Prediction]:
        def raised(plan: Plan) -> Prediction:
            prediction, beside_bytes = price(plan), self._of(plan)
            return prediction.raised_to(prediction.device_peak_high_bytes + beside_bytes) if beside_bytes else prediction

        return raised

    def _of(self, plan: Plan) -> int:
        held = self._held.get(_form_of(plan))
        return 0 if held is None else held.of(plan)

    def _rebuilt(self, problem: SearchProblem, plan: Plan) -> int | None:
        """The bytes that the same plan has beside its tensors where every block is rebuilt; None where none may be."""
        if "recompute" not in problem.rebuilding:
            return None
        rebuilt: BlockChoice = "recompute"
        same = OuterPlan.of(plan).plan((rebuilt,) * problem.num_blocks)
        return _beside_bytes(problem.priced("rebuilt", same).prediction)


def _beside_bytes(prediction: Prediction) -> int | None:
    """By the upper ends, as a budget counts them; None where it was not worked out."""
    memory = prediction.memory
    return None if memory is None else max(0, memory.allocated.high - prediction.device_peak_high_bytes)


def _form_of(plan: Plan) -> _Form:
    return plan.weights.dtype, plan.weights.autocast


def _num_kept(plan: Plan) -> int:
    return sum(choice != "recompute" for choice in plan.activations.per_block)
