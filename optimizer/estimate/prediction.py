"""What the estimator returns for one plan on one machine, and the verdict drawn from it. Torch-free, JSON-able."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from optimizer.serialize import from_json, to_json

Verdict = Literal["fits", "tight", "does_not_fit", "unknown"]
Lane = Literal["compute", "copy_in", "copy_out", "host", "disk", "network"]
"""What can be busy at once: the device, its copies from and to the host, the host's own work (updates, sums of gradients), the
scratch disk, the remote store."""
LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """Bytes on the device at one moment of a steady step."""

    offset_ms: float
    """Since the step began."""
    phase: str
    """forward, backward or optimizer."""
    bytes_by_category: dict[str, int]


Stage = Literal["first_step", "steady_step", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """Most bytes allocated on the device in one stage of a job."""

    stage: Stage
    device_peak_bytes: int
    device_bytes_by_category: dict[str, int]
    """At the peak moment; sums to ``device_peak_bytes``."""
    moment: str
    """For people, as ``Prediction.peak_moment``."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One plan, priced on one machine for one workload."""

    device_peak_bytes: int
    """Most bytes allocated on the device at any moment of a steady step, optimizer state included."""
    device_peak_low_bytes: int
    device_peak_high_bytes: int
    """Interval that covers the measurement, of whichever stage is the highest; the verdict compares ``high`` with the budget."""
    device_bytes_by_category: dict[str, int]
    """At the peak moment; sums to ``device_peak_bytes``."""
    host_peak_bytes: int
    """Bytes on the host tier at their most: what was offloaded and what always lives there."""
    peak_moment: str
    """Where the peak falls, for people: ``backward of block 11 of 12``."""
    step_ms: float
    """A steady optimizer step, accumulation included."""
    step_low_ms: float
    step_high_ms: float
    lane_busy_ms: dict[str, float]
    """Busy time per lane in one step."""
    exposed_copy_ms: float
    """Time per step that compute waits for copies, to and from whatever place."""
    tokens_per_s: float
    total_s: float
    """All steps of the workload, without evaluation and checkpoints."""
    timeline: tuple[TimelinePoint, ...]
    """Device bytes within one step, in order, at most 400 points, the peak moment always among them."""
    time_source: Literal["measured", "table"]
    """Whether the machine's rates were measured or come from the table."""
    disk_peak_bytes: int = 0
    """Bytes on the disk tier at their most."""
    remote_peak_bytes: int = 0
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that move between tiers in one steady step, by link (``categories.Link``); links without traffic left out."""
    exposed_ms: dict[str, float] = field(default_factory=dict)
    """Time per step that compute stands still, by the lane it waits for; lanes that cost nothing left out. All of
    ``exposed_copy_ms`` and what the host's updates cost."""
    busy_by_kind_ms: dict[str, float] = field(default_factory=dict)
    """What the step's work takes, by what is done (``time_kinds.KINDS``); kinds without work left out."""
    exposed_by_kind_ms: dict[str, float] = field(default_factory=dict)
    """Of those what the step waits for; the rest is hidden behind compute. Sums to ``step_ms``."""
    recomputed_ms: float = 0.0
    """Of the kinds on the compute lane, what is done a second time because it was not kept."""
    attained_by_kind: dict[str, float] = field(default_factory=dict)
    """The efficiency assumed: FLOPs per second of ``matmul`` and ``attention``, bytes moved per second of other ops."""
    time_factors: dict[str, float] = field(default_factory=dict)
    """What the calibration multiplied each kind by; all by one where none is named."""
    num_time_runs: int = 0
    """Finished runs that the time interval rests on; 0: its width is assumed."""

    peaks: tuple[StagePeak, ...] = ()
    """Of each stage that the workload has, in order: first step, steady step, evaluation (left out where the profile has none).
    All fields above are of the steady step."""

    @property
    def highest_peak_bytes(self) -> int:
        """Of all stages."""
        return max([self.device_peak_bytes, *(peak.device_peak_bytes for peak in self.peaks)])

    def verdict(self, budget_bytes: int) -> Verdict:
        """``tight`` is when only the upper end of the interval goes over."""
        if self.device_peak_high_bytes <= budget_bytes:
            return "fits"
        return "tight" if self.highest_peak_bytes <= budget_bytes else "does_not_fit"

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Prediction":
        return from_json(cls, document, path="prediction")
