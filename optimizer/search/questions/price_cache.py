"""Prices that outlive a search. Another budget, or other techniques allowed, asks for mostly the same plans again.

A price is a function of plan, model, machine and of what ``priced_part`` leaves of the workload, so what is remembered is what
would be found again, to the byte.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from optimizer.base.recent import Recent
from optimizer.base.serialize import to_json
from optimizer.estimate.job.files import NUM_KEPT
from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.problem import SearchProblem
from optimizer.workload import TrainingWorkload

MAX_WORKLOADS = 2
MAX_PLANS = 1_200
"""Prices kept for one workload: several searches' worth, a few KiB each until someone reads their details."""
_DEFAULTS = TrainingWorkload()


def priced_part(workload: TrainingWorkload) -> TrainingWorkload:
    """The workload with all that no price reads at its default; of steps it matters whether there is a second one."""
    return replace(
        workload,
        num_steps=min(2, workload.num_steps),
        warmup_steps=0,
        learning_rate=_DEFAULTS.learning_rate,
        schedule=_DEFAULTS.schedule,
        weight_decay=_DEFAULTS.weight_decay,
        beta1=_DEFAULTS.beta1,
        beta2=_DEFAULTS.beta2,
        epsilon=_DEFAULTS.epsilon,
        seed=_DEFAULTS.seed,
        eval_every_steps=_DEFAULTS.eval_every_steps,
        checkpoint_every_steps=_DEFAULTS.checkpoint_every_steps,
        sample_tokens=_DEFAULTS.sample_tokens,
        export=_DEFAULTS.export,
    )


def name_work(profile_fingerprint: str, workload: TrainingWorkload) -> str:
    """A name for all work of a model that has the same prices."""
    facts = [profile_fingerprint, to_json(priced_part(workload))]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def detailed_part(workload: TrainingWorkload) -> TrainingWorkload:
    """The workload with all that neither prices nor the job's other stages read at its default.

    Stages read what is exported and how many checkpoints lie there at once, which grows no more after a few of them.
    """
    every = workload.checkpoint_every_steps
    return replace(
        priced_part(workload),
        num_steps=min(workload.num_steps, max(2, (NUM_KEPT + 1) * every + 1)),
        checkpoint_every_steps=every,
        export=workload.export,
    )


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The prices of one workload."""

    prices: dict[Plan, Prediction] = field(default_factory=dict)


class PriceMemory:
    """The prices of one model on one machine as it is calibrated; for several threads."""

    def __init__(self) -> None:
        self._known: Recent[TrainingWorkload, _Known] = Recent(MAX_WORKLOADS)
        self._detailed: Recent[TrainingWorkload, _Known] = Recent(MAX_WORKLOADS)

    def bind(self, problem: SearchProblem) -> SearchProblem:
        """The problem with prices from memory. It must be about this model and this machine."""
        known, num_steps = self._known.obtain(priced_part(problem.workload), _Known), problem.workload.num_steps
        detailed = self._detailed.obtain(detailed_part(problem.workload), _Known)
        price, detail = problem.price, problem.detail

        def remembered_price(plan: Plan) -> Prediction:
            return _recall(known.prices, plan, lambda: price(plan)).over(num_steps)

        if detail is None:
            return replace(problem, price=remembered_price)

        def remembered_detail(plan: Plan, prediction: Prediction) -> Prediction:
            return _recall(detailed.prices, plan, lambda: detail(plan, prediction)).over(num_steps)

        return replace(problem, price=remembered_price, detail=remembered_detail)


def _recall(found: dict[Plan, Prediction], plan: Plan, work_out: Callable[[], Prediction]) -> Prediction:
    known = found.get(plan)
    if known is None:
        if len(found) >= MAX_PLANS:
            found.clear()
        known = found[plan] = work_out()
    return known
