"""Makes a telemetry record of one training step, read off the trainer: ``begin`` before the step, the rest after it.

The fields are those of docs/attempt.md. Costs well under a millisecond a step, but for the step whose timeline is taken.
"""

from typing import Any

from optimizer.runtime.meter.lanes import LaneTimes, lane_fields, span_rows
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import StepResult, Trainer
from optimizer.workload import TrainingWorkload


class StepWatch:
    """The records of one trainer, step after step."""

    def __init__(self, trainer: Trainer, *, meter: Meter, workload: TrainingWorkload) -> None:
        self._trainer = trainer
        self._meter = meter
        self._workload = workload
        self._before_bytes = dict(trainer.tiers.copied_bytes)
        self._lanes = LaneTimes()

    def begin(self, *, with_timeline: bool = False) -> None:
        """with_timeline: the step is then to be counted."""
        tiers = self._trainer.tiers
        self._before_bytes = dict(tiers.copied_bytes)
        if with_timeline:
            self._meter.start_timeline()
        tiers.lanes.begin(with_spans=with_timeline)

    def end(self) -> None:
        """Right after the step, so that nothing else is in what was measured."""
        self._lanes = self._trainer.tiers.lanes.take()

    def timeline(self, result: StepResult) -> dict[str, Any]:
        """The timeline of a step that was begun with one: ``points``, ``spans`` and ``step_ms``."""
        points = [[offset_ms, by_category] for offset_ms, by_category in self._meter.take_timeline()]
        spans = span_rows(self._lanes, device=self._trainer.device)
        return {"points": points, "spans": spans, "step_ms": result.step_ms}

    def fields(
        self, result: StepResult, *, learning_rate: float, data_wait_ms: float, is_counted: bool
    ) -> dict[str, Any]:
        """The step's own record. ``device_peak_bytes`` is the last counted step's."""
        peak, moved = self._meter.peak(), self._trainer.tiers.copied_bytes
        fields = {
            "loss": result.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "step_ms": result.step_ms,
            "tokens_per_s": self._workload.tokens_per_step / (result.step_ms / 1000),
            "device_peak_bytes": peak.device_bytes,
            "device_bytes": peak.device_bytes_by_category,
            "host_bytes": peak.host_bytes,
            "is_counted": is_counted,
            "data_wait_ms": round(data_wait_ms, 3),
            "copied_bytes": {link: moved[link] - old for link, old in self._before_bytes.items() if moved[link] > old},
            **lane_fields(self._lanes, total_ms=result.step_ms, device=self._trainer.device),
        }
        if self._trainer.precision.scales_loss:
            fields |= {"loss_scale": result.loss_scale, "is_left_out": result.is_left_out}
        if result.rewards is not None:
            fields |= {"reward_accuracy": result.rewards.accuracy, "reward_margin": result.rewards.margin}
        return fields
