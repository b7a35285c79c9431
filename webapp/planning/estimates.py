"""Prices one plan of a model on a known machine or a card of the table, and explains it. Torch-free; nothing is kept.

A model that was never profiled is asked of a worker, as a spec's is (``resolve.py``).
"""

from dataclasses import dataclass
from typing import Any

from optimizer.api.estimate import estimate_profiled
from optimizer.api.estimate_generation import estimate_generation_profiled
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from webapp.accounts.turns import take_turn
from webapp.planning.search.asked import AskedOfModel, read_generation, read_question


@dataclass(frozen=True, kw_only=True)
class EstimateRequest(AskedOfModel):
    """The same of one plan."""

    plan: str | dict[str, Any] | None
    with_knobs: bool


def estimate(user: Any, request: EstimateRequest) -> dict[str, Any] | None:
    """None while the model is being profiled.

    Raises InvalidInput for the first field that is wrong, ProfileFailed, and NoFeasiblePlan for ``best`` where nothing fits.
    """
    if request.generates:
        return _estimate_generation(user, request)
    plan = Plan.from_json(request.plan) if isinstance(request.plan, dict) else request.plan
    asked = read_question(user, request, plans=[plan] if isinstance(plan, Plan) else ())
    if asked is None:
        return None
    with take_turn():
        return estimate_profiled(asked.profile, plan=plan, with_knobs=request.with_knobs, **asked.here).to_json()


def _estimate_generation(user: Any, request: EstimateRequest) -> dict[str, Any] | None:
    plan = GenerationPlan.from_json(request.plan) if isinstance(request.plan, dict) else request.plan
    asked = read_generation(user, request)
    if asked is None:
        return None
    with take_turn():
        return {"kind": "generation", **estimate_generation_profiled(asked.profile, plan=plan, **asked.here).to_json()}
