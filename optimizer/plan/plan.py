"""The plan: one frozen, versioned, JSON-able table that search decides, estimate prices, runtime carries out.

Rows are the categories of tensors, columns what can be decided about them (see the modules beside this one). A plan holds no
prediction and no machine; those belong to the estimate made of it.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from optimizer.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.serialize import from_json, to_json
from optimizer.workload import TrainingWorkload

PLAN_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The devices a plan runs on. One for now; the field is here so that nothing assumes it."""

    num_devices: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every decision about one job's memory."""

    version: Literal[1] = PLAN_VERSION
    layout: Layout = field(default_factory=Layout)
    batch: BatchPlan
    weights: WeightsPlan = field(default_factory=WeightsPlan)
    optimizer_state: OptimizerStatePlan = field(default_factory=OptimizerStatePlan)
    activations: ActivationsPlan

    @property
    def is_lossless(self) -> bool:
        """Whether the numbers equal plain fp32 training's; accumulation changes only the order of sums."""
        return self.weights.dtype == "fp32" and self.optimizer_state.bits == 32

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def check(self, *, num_blocks: int, workload: TrainingWorkload) -> None:
        """Raise InvalidPlan where the plan does not match the model's depth or the workload's batch."""
        if len(self.activations.per_block) != num_blocks:
            raise InvalidPlan(
                f"plan.activations.per_block names {len(self.activations.per_block)} blocks; the model has {num_blocks}",
                field="plan.activations.per_block",
                value=len(self.activations.per_block),
                allowed=num_blocks,
            )
        if self.batch.global_batch_size != workload.global_batch_size:
            raise InvalidPlan(
                f"plan.batch makes {self.batch.global_batch_size} sequences per step; "
                f"workload.global_batch_size is {workload.global_batch_size}",
                field="plan.batch",
                value=self.batch.global_batch_size,
                allowed=workload.global_batch_size,
            )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        return from_json(cls, document, path="plan", error=InvalidPlan)
