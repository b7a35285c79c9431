"""Prices single ranks of a cut model, and runs any of them against each other: what a search for the best cut asks for hundreds
of times. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from optimizer.estimate.bounds.relaxation import least_compute_ms
from optimizer.estimate.categories.network import crossing_ms, notice_ms
from optimizer.estimate.step.pipeline.schedule import RankPrice, run_steady
from optimizer.estimate.step.pipeline.stage_clock import StagesClock, time_stages
from optimizer.estimate.step.ranks import RankPart
from optimizer.estimate.step.setting import find_stages
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class RankPricer:
    """Prices of a cut model's ranks for one workload, each on its own device."""

    profile: Profile
    parts: tuple[RankPart, ...]
    """By rank."""
    memory_bytes: tuple[int, ...] = ()
    """By rank, what its device has, beyond which no budget goes; empty where devices are alike."""
    _known: dict[Any, list[float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def device_kind(self) -> str:
        return self.parts[0].machine.device.kind

    def limits_bytes(self, budget_bytes: int) -> tuple[int, ...]:
        """By rank, the most that it may take under a budget of every device."""
        memory_bytes = self.memory_bytes or (budget_bytes,) * len(self.parts)
        return tuple(min(budget_bytes, num_bytes) for num_bytes in memory_bytes)

    def whole_ms(self, plan: Plan) -> list[float]:
        """By rank, the least time in which its device would do all blocks' work on a step."""
        key = (plan.batch, plan.weights, plan.kernels)
        if key not in self._known:
            found: dict[int, float] = {}
            for part in self.parts:
                if id(part.machine) not in found:
                    found[id(part.machine)] = least_compute_ms(
                        self.profile, plan=plan, workload=part.workload, machine=part.machine
                    )
            self._known[key] = [found[id(part.machine)] for part in self.parts]
        return self._known[key]

    def least_ms(self, plan: Plan) -> float:
        """No cut of the plan over its devices is faster.

        A stage works t on each of M micro-batches and takes c to receive them from its neighbours; before it begins the first has
        come through the stages before it, and the last goes back through these: a step S is at least M (t + c) and their work on
        one. Shares t / T of the work on one micro-batch, for which device p alone would take T_p, add up to 1. They are at most
        the sum of y_p (S - M c_p), where M y_p and all y behind p are 1 / T_p or more (the dual of that linear program). Of P
        like devices on a link that takes no time S is T / (1 - (1 - 1/M)^P). Where a device has several stages what it waits for
        before its first and behind its last is little, and is left out: y_p is 1 / T_p.
        """
        num_micro_batches, last = plan.batch.accumulation_steps, len(self.parts) - 1
        crossing_ms, num_rounds = self._crossing_ms(plan), plan.layout.num_rounds
        behind, received_ms = 0.0, 0.0
        for index, whole_ms in reversed([*enumerate(self.whole_ms(plan))]):
            share = max(0.0, num_micro_batches / whole_ms - behind) / num_micro_batches if num_rounds == 1 else 1 / whole_ms
            num_received = 2 * num_rounds - (index == 0) - (index == last)
            received_ms += share * num_micro_batches * crossing_ms * num_received
            behind += share
        return (1 + received_ms) / behind

    def _crossing_ms(self, plan: Plan) -> float:
        """Time of one micro-batch's hidden states from a stage to the next."""
        part = self.parts[0]
        assert part.network is not None
        num_tokens = plan.batch.micro_batch_size * part.workload.sequence_length
        return crossing_ms(part.network, num_tokens * self.profile.hidden_size * plan.weights.bytes_per_element)

    def price_rank(self, plan: Plan, own: RankStages) -> RankPrice:
        """plan: of which the blocks' choices count, and the layout's order and numbers of devices and stages, not its cut."""
        part = self.parts[own.rank]
        setting, layout = find_stages(self.profile, plan, part, own)
        parts, device_kind = layout.parts(plan.activations.per_block), part.machine.device.kind
        resident = setting.resident(plan, own)
        computed = [parts[stage].times(device_kind) for stage in sorted(parts)]
        return RankPrice(
            peak_bytes=resident.device_bytes + layout.top_bytes(parts),
            host_bytes=resident.host + layout.host_top_bytes(parts),
            times=time_stages(parts, device_kind=device_kind),
            first_stage=computed[0],
            compute_ms=sum(each.of_all_ms(plan.batch.accumulation_steps) for each in computed),
            make_clock=partial(StagesClock, parts, layout.update, device_kind=device_kind),
        )

    def step_ms(self, plan: Plan, ranks: Sequence[RankStages], prices: Sequence[RankPrice]) -> float:
        """Milliseconds of a step of ranks that were priced one by one."""
        part = self.parts[0]
        assert part.network is not None
        _, end_ms = run_steady(
            [price.make_clock() for price in prices],
            ranks=ranks,
            num_micro_batches=plan.batch.accumulation_steps,
            schedule=plan.layout.schedule,
            crossing_ms=self._crossing_ms(plan),
            notice_ms=notice_ms(part.network),
        )
        return end_ms
