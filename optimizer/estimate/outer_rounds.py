"""A round of ranks that take steps alone: steps without the others, and one at whose end they are brought together. Torch-free.

Both kinds of step are simulated. What a prediction says of a step is the mean over a round; peaks are the higher of the two, and
its timeline is that of a step alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.simulate import Simulation
from optimizer.workload import TrainingWorkload

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The steps of one rank."""

    sync_every: int
    alone: Simulation
    synchronizing: Simulation

    @property
    def step_ms(self) -> float:
        """The mean over a round."""
        return self.mean(self.alone.step_ms, self.synchronizing.step_ms)

    def mean(self, alone: float, synchronizing: float) -> float:
        """The mean of something that is so much in each step alone and so much in the last one."""
        return alone + (synchronizing - alone) / self.sync_every

    def mean_of(self, alone: Mapping[Name, float], synchronizing: Mapping[Name, float]) -> dict[Name, float]:
        """The same of several."""
        names = dict.fromkeys((*alone, *synchronizing))
        return {name: self.mean(alone.get(name, 0.0), synchronizing.get(name, 0.0)) for name in names}


Details = Mapping[str, Callable[[], Any]]
"""By name, what a person may want to see of a step, to be worked out when it is read."""
_SPREAD: Final = ("lane_busy_ms", "busy_by_kind_ms", "exposed_by_kind_ms")
"""Those that are times."""


def spread_over_round(
    prediction: Prediction,
    found: Round,
    *,
    sent_bytes: Sequence[int],
    workload: TrainingWorkload,
    alone: Details,
    synchronizing: Details,
) -> Prediction:
    """The prediction of a step alone as the mean over a round. sent_bytes: by each rank in a synchronization. alone,
    synchronizing: of each kind of step.
    """
    exposed_ms = found.mean_of(found.alone.exposed_ms, found.synchronizing.exposed_ms)
    changed = prediction.changed(
        host_peak_bytes=max(prediction.host_peak_bytes, found.synchronizing.host_peak_bytes),
        exposed_ms=exposed_ms,
        exposed_copy_ms=sum(lane_ms for lane, lane_ms in exposed_ms.items() if lane not in ("host", "network")),
        sync_bytes=round(sum(sent_bytes) / len(sent_bytes)),
    )
    changed = take_time(changed, found.step_ms, sync_ms=found.synchronizing.step_ms, workload=workload)
    spread = {name: partial(_spread, found, alone[name], synchronizing[name]) for name in _SPREAD}
    return changed.detailed_later({**alone, **spread})


def _spread(found: Round, alone: Callable[[], Any], synchronizing: Callable[[], Any]) -> dict[str, float]:
    return found.mean_of(alone(), synchronizing())


def take_time(prediction: Prediction, step_ms: float, *, sync_ms: float, workload: TrainingWorkload) -> Prediction:
    """The same with the times of a round. *Not modelled*: a last round that is shorter than the others."""
    low, high = (each / prediction.step_ms for each in (prediction.step_low_ms, prediction.step_high_ms))
    return prediction.changed(
        step_ms=step_ms,
        step_low_ms=step_ms * low,
        step_high_ms=step_ms * high,
        sync_ms=sync_ms,
        tokens_per_s=workload.tokens_per_step / step_ms * 1000,
        total_s=step_ms * workload.num_steps / 1000 + prediction.once_s,
    )
