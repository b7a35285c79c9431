"""What a search is given: the goal, the freedom it leaves, and a function that prices one plan.

The core knows no model and no machine, only ``price``; ``search.py`` binds it to the estimator. So the solver can be
tested against any function, and what it optimizes is by construction what the estimator predicts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from optimizer.estimate.prediction import Prediction, Verdict
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsDtype, WeightsPlan
from optimizer.serialize import to_json
from optimizer.workload import Goal, Technique, TrainingWorkload

Price = Callable[[Plan], Prediction]
StateBits = Literal[32, 8]

LOSSY: tuple[Technique, ...] = ("compress", "bf16", "fp16", "autocast", "8bit_optimizer", "quantize_frozen")
"""Techniques that change the numbers."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """One plan with what it is predicted to cost."""

    label: str
    """``chosen``, a baseline's name, or for points of the frontier what the plan does in a few words."""
    plan: Plan
    prediction: Prediction
    verdict: Verdict
    """Against the goal's budgets."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The discrete choices outside the blocks."""

    micro_batch_size: int
    accumulation_steps: int
    dtype: WeightsDtype = "fp32"
    bits: StateBits = 32

    def plan(self, per_block: tuple[BlockChoice, ...]) -> Plan:
        return Plan(
            batch=BatchPlan(micro_batch_size=self.micro_batch_size, accumulation_steps=self.accumulation_steps),
            weights=WeightsPlan(dtype=self.dtype),
            optimizer_state=OptimizerStatePlan(bits=self.bits),
            activations=ActivationsPlan(per_block=per_block),
        )


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """Everything the solver may know."""

    num_blocks: int
    workload: TrainingWorkload
    goal: Goal
    host_budget_bytes: int
    """Cap on offloaded bytes: the goal's, or what the machine has."""
    price: Price
    """Pure: the same plan costs the same, always."""
    can_bf16: bool = True
    """Whether the machine has a rate for bf16."""
    can_8bit: bool = True
    """Whether the machine has a rate for 8-bit state; without bitsandbytes a measured machine has none."""

    def allows(self, technique: Technique) -> bool:
        """Whether the goal and the machine permit it."""
        if technique in self.goal.forbid or (technique in LOSSY and not self.goal.allow_lossy):
            return False
        return {"bf16": self.can_bf16, "8bit_optimizer": self.can_8bit}.get(technique, True)

    @property
    def choices(self) -> tuple[BlockChoice, ...]:
        """What a block may do."""
        recompute: tuple[BlockChoice, ...] = ("recompute",) if self.allows("recompute") else ()
        offload: tuple[BlockChoice, ...] = ("offload",) if self.allows("offload") else ()
        return ("keep", *recompute, *offload)

    def permits(self, plan: Plan) -> bool:
        """Whether every technique of the plan is allowed."""
        return all(self.allows(technique) for technique in techniques_of(plan))

    def settings(self) -> tuple[Setting, ...]:
        """All of them: representations from lossless to smallest, and in each the micro-batch from small to large."""
        dtypes: list[WeightsDtype] = ["fp32", "bf16"] if self.allows("bf16") else ["fp32"]
        widths: list[StateBits] = [32, 8] if self.allows("8bit_optimizer") else [32]
        total = self.workload.global_batch_size
        sizes = divisors(total) if self.allows("accumulate") else [total]
        return tuple(
            Setting(micro_batch_size=size, accumulation_steps=total // size, dtype=dtype, bits=bits)
            for dtype in dtypes
            for bits in widths
            for size in sizes
        )

    def fits_device(self, prediction: Prediction) -> bool:
        """Whether even the upper end of the interval honours the budget."""
        return prediction.device_peak_high_bytes <= self.goal.device_budget_bytes

    def fits(self, prediction: Prediction) -> bool:
        return self.fits_device(prediction) and prediction.host_peak_bytes <= self.host_budget_bytes

    def verdict(self, prediction: Prediction) -> Verdict:
        """The prediction's own verdict, and ``does_not_fit`` where the host has no room."""
        if prediction.host_peak_bytes > self.host_budget_bytes:
            return "does_not_fit"
        return prediction.verdict(self.goal.device_budget_bytes)

    def priced(self, label: str, plan: Plan, prediction: Prediction) -> PricedPlan:
        return PricedPlan(label=label, plan=plan, prediction=prediction, verdict=self.verdict(prediction))


def techniques_of(plan: Plan) -> tuple[Technique, ...]:
    """What the plan uses of the things a goal may forbid, in the order of ``Technique``."""
    state, activations = plan.optimizer_state, plan.activations
    used: dict[Technique, bool] = {
        "recompute": activations.count("recompute", "selective") > 0,
        "offload": activations.num_offloaded > 0,
        "accumulate": plan.batch.accumulation_steps > 1,
        "chunked_loss": plan.logits_and_loss.num_chunks > 1,
        "consume_gradients": plan.gradients.choice == "consume",
        "offload_gradients": plan.gradients.choice == "host",
        "offload_optimizer": state.place != "device",
        "stream_weights": plan.weights.place != "device",
        "disk": "disk" in (state.place, plan.weights.place) or activations.count("offload_disk") > 0,
        "remote": activations.count("offload_remote") > 0,
        "compress": activations.compress != "none" and activations.num_offloaded > 0,
        "bf16": plan.weights.dtype == "bf16",
        "fp16": plan.weights.dtype == "fp16",
        "autocast": plan.weights.autocast != "off",
        "8bit_optimizer": state.bits == 8,
        "quantize_frozen": plan.weights.frozen != "same",
    }
    return tuple(technique for technique, is_used in used.items() if is_used)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
