"""A small estimator for the solver: real schedules in miniature, with every quantity visible.

Forward saves, the loss spikes, backward rebuilds or fetches and lets go, gradients grow or leave, the optimizer steps on the
device or the host. One copy lane each way; farther tiers and streamed weights share them.
"""

from dataclasses import dataclass, replace

from optimizer.estimate.prediction import Prediction, TimelinePoint
from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.search.problem import Price, SearchProblem
from optimizer.workload import Adapter, TrainingWorkload

MIB = 1024**2
_REBUILT_SHARE = {"recompute": 1.0, "selective": 0.3}
_FAR = {"offload": 1.0, "offload_remote": 3.0, "offload_disk": 5.0}
_PACKED = {"none": 1.0, "bf16": 0.5, "int8": 0.25}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one block and one sequence, in fp32."""

    weight_mib: float = 10
    saved_mib: float = 20
    selective_mib: float = 11
    input_mib: float = 2
    loss_mib: float = 15
    forward_ms: float = 10.0
    copy_ms_per_mib: float = 0.2
    host_update_ms_per_mib: float = 0.3
    chunk_ms: float = 0.4


def synthetic_price(*, num_blocks: int, sizes: Sizes) -> Price:
    def price(plan: Plan) -> Prediction:
        return _Step(plan, num_blocks, sizes).predict()

    return price


class _Step:
    """One optimizer step of a plan."""

    def __init__(self, plan: Plan, num_blocks: int, sizes: Sizes) -> None:
        self.plan, self.num_blocks, self.sizes = plan, num_blocks, sizes
        self.factor = plan.weights.bytes_per_element / 4
        self.compute_factor = self.factor if plan.weights.autocast == "off" else 0.5
        micro = plan.batch.micro_batch_size
        self.saved, self.selective, self.entry, self.loss = (
            round(size * micro * self.compute_factor * MIB)
            for size in (sizes.saved_mib, sizes.selective_mib, sizes.input_mib, sizes.loss_mib)
        )
        self.forward_ms = sizes.forward_ms * (micro + 0.2) * (0.6 if self.compute_factor < 1 else 1.0)
        self.block_weight = round(sizes.weight_mib * self.factor * MIB)
        self.share = 0.0 if plan.optimizer_state.place == "device" else plan.optimizer_state.fraction
        self.points: list[TimelinePoint] = []
        self.now = self.waited = 0.0
        self.tiers = {"host": 0, "disk": 0, "remote": 0}
        self.activations = 0

    def predict(self) -> Prediction:
        self._forward()
        self._backward()
        self.now *= self.plan.batch.accumulation_steps
        self._update()
        peak = max(self.points, key=lambda point: sum(point.bytes_by_category.values()))
        peak_bytes = sum(peak.bytes_by_category.values())
        return Prediction(
            device_peak_bytes=peak_bytes,
            device_peak_low_bytes=peak_bytes,
            device_peak_high_bytes=peak_bytes + MIB,
            device_bytes_by_category=peak.bytes_by_category,
            host_peak_bytes=self.tiers["host"] + self._resting("host"),
            disk_peak_bytes=self.tiers["disk"] + self._resting("disk"),
            remote_peak_bytes=self.tiers["remote"],
            peak_moment=f"{peak.phase} at {peak.offset_ms:.0f} ms",
            step_ms=self.now,
            step_low_ms=self.now * 0.9,
            step_high_ms=self.now * 1.1,
            lane_busy_ms={"compute": self.now},
            exposed_copy_ms=self.waited,
            tokens_per_s=1.0,
            total_s=1.0,
            timeline=tuple(self.points),
            time_source="measured",
        )

    def _forward(self) -> None:
        self.out_free = 0.0
        for choice in self.plan.activations.per_block:
            self._stream_weights(self.now)
            self.activations += self.saved
            self._note("forward", self._gradients(0))
            self.now += self.forward_ms
            self.activations -= self.saved - self._held(choice)
            if choice in _FAR:
                self.tiers[self._tier(choice)] += round(self.saved * _PACKED[self.plan.activations.compress])
                self.out_free = max(self.out_free, self.now) + self._copy_ms(choice)
        chunks = self.plan.logits_and_loss.num_chunks
        self.now += self.sizes.chunk_ms * (chunks - 1)
        self._note("forward", self._gradients(0), logits_and_loss=-(-self.loss // chunks))

    def _backward(self) -> None:
        lane_free = max(self.now, self.out_free)
        for done, choice in enumerate(reversed(self.plan.activations.per_block)):
            self._stream_weights(self.now)
            if choice in _FAR:
                lane_free = max(lane_free, self.now - self.forward_ms) + self._copy_ms(choice)
                self.waited += max(0.0, lane_free - self.now)
                self.now = max(self.now, lane_free)
            self.now += self.forward_ms * _REBUILT_SHARE.get(choice, 0.0)
            self.activations += self.saved - self._held(choice)
            self._note("backward", self._gradients(done + 1))
            self.now += 2 * self.forward_ms
            self.activations -= self.saved
        if self.plan.gradients.choice == "host":
            self.now += 0.1 * self.sizes.copy_ms_per_mib * self.block_weight / MIB * self.num_blocks

    def _update(self) -> None:
        millis = self.sizes.weight_mib * self.num_blocks
        self.now += millis * 0.05 * (1 - self.share)
        slow = {"disk": 3.0, "remote": 4.0}.get(self.plan.optimizer_state.place, 1.0)
        self.now += millis * self.sizes.host_update_ms_per_mib * self.share * slow
        self._note("optimizer", self._gradients(self.num_blocks))

    def _stream_weights(self, now: float) -> None:
        """Half of each fetch hides with one block ahead, all but a tenth with more."""
        if self.plan.weights.place == "device":
            return
        far = {"disk": 5.0, "remote": 7.0}.get(self.plan.weights.place, 1.0)
        hidden = {0: 1.0, 1: 0.5}.get(self.plan.weights.prefetch, 0.1)
        self.now += self.sizes.copy_ms_per_mib * far * self.block_weight / MIB * hidden

    def _held(self, choice: str) -> int:
        if choice in _FAR:
            return self.entry // 2
        return {"keep": self.saved, "recompute": self.entry, "selective": self.selective}[choice]

    def _copy_ms(self, choice: str) -> float:
        packed = _PACKED[self.plan.activations.compress]
        return self.sizes.copy_ms_per_mib * packed * self.saved / MIB * _FAR[choice] + (0.2 if packed < 1 else 0.0)

    def _tier(self, choice: str) -> str:
        return {"offload": "host", "offload_disk": "disk", "offload_remote": "remote"}[choice]

    def _gradients(self, num_done: int) -> int:
        if self.plan.gradients.choice != "keep":
            return self.block_weight if 0 < num_done <= self.num_blocks else 0
        return self.block_weight * (self.num_blocks if self.plan.batch.accumulation_steps > 1 else num_done)

    def _weights(self) -> int:
        streamed = self.plan.weights.place != "device"
        return self.block_weight * (
            min(self.num_blocks, 1 + self.plan.weights.prefetch) if streamed else self.num_blocks
        )

    def _state_bytes(self) -> int:
        elements = self.sizes.weight_mib * self.num_blocks * MIB
        moments = elements * (2 if self.plan.optimizer_state.bits == 32 else 0.5)
        return round(moments + (elements if self.factor < 1 else 0))

    def _resting(self, tier: str) -> int:
        """State, gradients and weights that live there."""
        masters = self.sizes.weight_mib * self.num_blocks * MIB * 3
        resting = round(masters * self.share) if self.plan.optimizer_state.place == tier else 0
        if self.plan.gradients.choice == "host" and tier == "host":
            resting += self.block_weight * self.num_blocks
        if self.plan.weights.place == tier:
            resting += self.block_weight * self.num_blocks
        return resting

    def _note(self, phase: str, gradients: int, **extra: int) -> None:
        sizes = {
            "weights": self._weights(),
            "gradients": gradients,
            "optimizer_state": round(self._state_bytes() * (1 - self.share)),
            "activations": self.activations,
        }
        self.points.append(TimelinePoint(offset_ms=self.now, phase=phase, bytes_by_category=sizes | extra))


def synthetic_problem(
    *,
    budget_mib: int,
    num_blocks: int = 4,
    global_batch_size: int = 2,
    allow_lossy: bool = False,
    forbid: tuple[Technique, ...] = (),
    host_budget_mib: int = 10**6,
    disk_budget_mib: int = 0,
    remote_budget_mib: int = 0,
    max_grad_norm: float | None = 1.0,
    adapter: Adapter | None = None,
    **sizes: float,
) -> SearchProblem:
    return SearchProblem(
        num_blocks=num_blocks,
        workload=TrainingWorkload(global_batch_size=global_batch_size, max_grad_norm=max_grad_norm, adapter=adapter),
        goal=Goal(device_budget_bytes=budget_mib * MIB, allow_lossy=allow_lossy, forbid=forbid),
        host_budget_bytes=host_budget_mib * MIB,
        disk_budget_bytes=disk_budget_mib * MIB,
        remote_budget_bytes=remote_budget_mib * MIB,
        price=synthetic_price(num_blocks=num_blocks, sizes=replace(Sizes(), **sizes)),
        representations=frozenset({"fp32", "bf16", "fp32+bf16"}),
    )
