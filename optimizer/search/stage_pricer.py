"""Prices single stages of a cut model, and runs any of them against each other: what a search for the best cut asks for hundreds
of times. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optimizer.estimate.bounds.relaxation import least_compute_ms
from optimizer.estimate.categories.network import crossing_ms
from optimizer.estimate.step.pipeline.schedule import StagePrice, run_schedule
from optimizer.estimate.step.ranks import RankPart
from optimizer.estimate.step.setting import find_stage
from optimizer.plan.plan import Plan
from optimizer.plan.stages import StageOfModel
from optimizer.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class StagePricer:
    """Prices of one model's stages for one workload, on one machine."""

    profile: Profile
    part: RankPart
    _known: dict[Any, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def device_kind(self) -> str:
        return self.part.machine.device.kind

    def least_ms(self, plan: Plan) -> float:
        """No cut of the plan over its devices is faster.

        A stage works t on each of M micro-batches, after the first has come through the stages before it, and before the last
        goes back through these: a step is M t and their work on one. Of P stages that share out the work T on one micro-batch so
        that this is the same for each, it is T / (1 - (1 - 1/M)^P).
        """
        key = (plan.batch, plan.weights, plan.kernels)
        if key not in self._known:
            self._known[key] = least_compute_ms(
                self.profile, plan=plan, workload=self.part.workload, machine=self.part.machine
            )
        num_micro_batches = plan.batch.accumulation_steps
        of_one_ms = self._known[key] / num_micro_batches
        found: float = of_one_ms / (1 - (1 - 1 / num_micro_batches) ** plan.layout.num_devices)
        return found

    def price_stage(self, plan: Plan, stage: StageOfModel) -> StagePrice:
        """plan: of which the blocks' choices count, and the layout's order and number of devices, not its cut."""
        part = self.part
        setting, layout = find_stage(self.profile, plan, part, stage)
        parts, device_kind = layout.parts(plan.activations.per_block), part.machine.device.kind
        return StagePrice(
            peak_bytes=setting.resident(plan).device_bytes + layout.top_bytes(parts),
            times=parts.times(device_kind),
            update_ms=sum(layout.update.steps(device_kind).compute_ms),
        )

    def step_ms(self, plan: Plan, stages: Sequence[StageOfModel], prices: Sequence[StagePrice]) -> float:
        """Milliseconds of a step of stages that were priced one by one."""
        assert self.part.network is not None
        num_tokens = plan.batch.micro_batch_size * self.part.workload.sequence_length
        hidden_bytes = num_tokens * self.profile.hidden_size * plan.weights.bytes_per_element
        ran = run_schedule(
            [price.times for price in prices],
            stages=stages,
            num_micro_batches=plan.batch.accumulation_steps,
            schedule=plan.layout.schedule,
            crossing_ms=crossing_ms(self.part.network, hidden_bytes),
        )
        return ran.total_ms + max(price.update_ms for price in prices)
