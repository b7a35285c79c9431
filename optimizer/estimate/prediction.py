"""The estimator's answer for one plan on one machine, and the verdict drawn from it. Torch-free, JSON-able."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from optimizer.base.categories import LANES as LANES
from optimizer.base.categories import Category
from optimizer.base.categories import Lane as Lane
from optimizer.base.intervals import ByteInterval
from optimizer.base.serialize import from_json, to_json
from optimizer.base.units import format_bytes

Verdict = Literal["fits", "tight", "does_not_fit", "unknown"]
MEMORY_MARGIN = {"cpu": 0.0025, "cuda": 0.05}
"""Share of the peak added above. cpu: the simulation equals the meter, and what torch holds besides is counted apart; the share
is for models that no test holds to it, and for kernels' scratch that is not modelled.
cuda: an assumption until a card has been measured; other attention kernels save other tensors, and blocks are rounded up to 512
bytes."""


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """Bytes on the device at one moment of a steady step."""

    offset_ms: float
    """Time since the step began."""
    phase: str
    """forward, backward or optimizer."""
    bytes_by_category: dict[str, int]


ONCE_WIDTH: Final = 3.0
"""Factor to either end of the interval around ``once_s``, which is taken from a table (``compiling.py``)."""
Stage = Literal["load", "resume", "first_step", "steady_step", "evaluation", "save", "merge", "export"]
"""In the order in which a job comes to them."""


STAGE_WORDS: Final[Mapping[Stage, str]] = {
    "load": "loading the model",
    "resume": "going on from a checkpoint",
    "first_step": "the first step",
    "steady_step": "a steady step",
    "evaluation": "an evaluation",
    "save": "saving a checkpoint",
    "merge": "adding the adapters to the model",
    "export": "writing the weights",
}
TIER_WORDS: Final[Mapping[str, str]] = {"host": "host memory", "disk": "the disk"}


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """Most bytes in one stage of a job, on the device and, where all stages are listed, on the other tiers."""

    stage: Stage
    device_peak_bytes: int
    device_bytes_by_category: dict[str, int]
    """Bytes by category at the peak moment; sums to ``device_peak_bytes``."""
    moment: str
    """Name of the moment, for people, as ``Prediction.peak_moment``."""
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    """The scratch file, and the job's own files: checkpoints and what is exported."""
    file_bytes: int = 0
    """The part of them in the job's own files, which are there once for all ranks."""
    together_peak_bytes: int = 0
    """Most on device and host at once, or more: what a process holds where the processor is the device."""

    def disk_bytes_of(self, num_ranks: int) -> int:
        """Bytes that so many ranks have on one disk together."""
        return num_ranks * (self.disk_peak_bytes - self.file_bytes) + self.file_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One line of what a process takes of the device at its highest moment."""

    name: str
    """Name of the part, for people: ``weights``, ``allocator: rounding and gaps``, ``CUDA context``."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """Storages of one kind that are in memory at the peak, largest first in a prediction."""

    category: Category
    made_in: str
    """``forward of blocks 1 to 12 of 12``, ``between steps``."""
    op: str
    """The op that made them; empty where it is not known."""
    num_storages: int
    num_bytes: int


class HostMemory(NamedTuple):
    """Memory of the host that a plan takes: what cannot be swapped, and the rest."""

    pinned: ByteInterval
    pageable: ByteInterval


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """Memory that a plan takes of a CUDA card, or of the CPU device, beyond the bytes of its tensors; and of the host.

    Worked out for plans that are shown, not for each that a search tries (``estimate/card/process.py``).
    """

    allocated: ByteInterval
    """Bytes that torch's allocator counts: whole blocks. On the CPU device the tensors' bytes."""
    reserved: ByteInterval
    """Bytes that the allocator takes from the card for them, gaps included. On the CPU device as allocated."""
    process: ByteInterval
    """``reserved``, the workspaces and the CUDA context: what ``nvidia-smi`` shows. On the CPU device as allocated."""
    host_pinned: ByteInterval
    """Host memory that cannot be swapped, as it is really taken: in whole slabs and pages."""
    host_pageable: ByteInterval
    releasable_bytes: int = 0
    """The part of ``reserved`` that is in segments that are wholly free at that moment: a retry at the card's limit
    gives them back."""
    num_segments: int = 0
    parts: tuple[MemoryPart, ...] = ()
    """Parts that sum to ``process.value``."""
    contributors: tuple[Contributor, ...] = ()
    """Storages that are in memory at the peak, largest first."""
    total_bytes: int = 0
    """Bytes that the process can have of the card; 0 where it is not known, and on the CPU device, where a cap decides."""
    not_modelled: tuple[str, ...] = ()
    """Why nobody can say whether it fits, in words; empty where everything was modelled."""


@dataclass(frozen=True, kw_only=True)
class RankPrediction:
    """One rank of a plan whose ranks differ."""

    device: str
    """Name of the kind of device that it runs on."""
    num_sequences: int
    """Its part of a step."""
    memory_bytes: int
    """Memory of its device, beyond which no budget goes."""
    peak_bytes: int
    peak_high_bytes: int
    """Most bytes of tensors at any moment, and the upper end of their interval."""
    step_ms: float
    """The step if all ranks were like this one, which then waits for nobody slower; of a stage of a model that is cut, what it
    works in a step."""
    memory: CardMemory | None = None
    """From tensors to its card; None where it was not worked out."""

    def verdict(self, budget_bytes: int) -> Verdict:
        """Judge this rank as ``Prediction.verdict`` does, within its own device."""
        return judge(
            self.peak_bytes, self.peak_high_bytes, memory=self.memory, budget_bytes=min(budget_bytes, self.memory_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One plan, priced on one machine for one workload.

    A search asks for hundreds and reads little of each, so an estimate may leave ``DETAILS`` for later (``detailed_later``);
    nobody who reads one sees a difference. None of those fields has a plain default, which would be found in their place.
    """

    device_peak_bytes: int
    """Most bytes allocated on the device at any moment of a steady step, optimizer state included."""
    device_peak_low_bytes: int
    device_peak_high_bytes: int
    """Interval that covers the measurement, of whichever stage is the highest; the verdict compares ``high`` with the budget."""
    device_bytes_by_category: dict[str, int]
    """Bytes by category at the peak moment; sums to ``device_peak_bytes``."""
    host_peak_bytes: int
    """Bytes on the host tier at their most: what was offloaded and what always lives there."""
    peak_moment: str
    """The moment of the peak, for people: ``backward of block 11 of 12``."""
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
    """Time of all steps of the workload and of what goes before the first (``once_s``), without evaluation and checkpoints."""
    timeline: tuple[TimelinePoint, ...]
    """Device bytes within one step, in order, at most 400 points, the peak moment always among them."""
    time_source: Literal["measured", "table"]
    """Origin of the machine's rates: measured, or from the table."""
    disk_peak_bytes: int = 0
    """Bytes on the disk tier at their most."""
    remote_peak_bytes: int = 0
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that move between tiers in one steady step, by link (``categories.Link``); links without traffic left out."""
    exposed_ms: dict[str, float] = field(default_factory=dict)
    """Time per step that compute stands still, by the lane it waits for; lanes that cost nothing left out. All of
    ``exposed_copy_ms`` and what the host's updates cost."""
    busy_by_kind_ms: dict[str, float] = field(default_factory=dict)
    """Time that the step's work takes, by what is done (``time_kinds.KINDS``); kinds without work left out."""
    exposed_by_kind_ms: dict[str, float] = field(default_factory=dict)
    """The part of ``busy_by_kind_ms`` that the step waits for; the rest is hidden behind compute. Sums to ``step_ms``."""
    recomputed_ms: float = field(default_factory=float)
    """Time on the compute lane of what is done a second time because it was not kept."""
    attained_by_kind: dict[str, float] = field(default_factory=dict)
    """The efficiency assumed: FLOPs per second of ``matmul`` and ``attention``, bytes moved per second of other ops."""
    time_factors: dict[str, float] = field(default_factory=dict)
    """Factors by which the calibration multiplied each kind; all by one where none is named."""
    is_model_held_to_measurement: bool = True
    """Tests hold predictions for this model type to measured steps; False: it was traced by the same means, checked by nobody."""
    num_time_runs: int = 0
    """Finished runs that the time interval rests on; 0: its width is assumed."""

    peaks: tuple[StagePeak, ...] = field(default_factory=tuple)
    """Peaks of each stage that the workload has, in order: first step, steady step, evaluation (left out where the
    profile has none). All fields above are of the steady step."""

    stages: tuple[StagePeak, ...] = ()
    """Every stage of the job, from loading to export; empty where they were not worked out."""

    unmetered_bytes: int = 0
    """Bytes by which torch's own peak is higher on the CPU device: what kernels hold while they run, and random states.
    A budget there is about ``device_peak_bytes``, which the meter enforces; the interval reaches above both. 0 on CUDA:
    see ``memory``."""

    memory: CardMemory | None = None
    """Memory from tensors to a card; None where it was not worked out."""

    rank_peak_bytes: tuple[int, ...] = ()
    """Peak of each rank where several devices share a step; other bytes on the device are of the highest, the lowest of such,
    bytes elsewhere those of the rank that has most. Empty on one device."""

    ranks: tuple[RankPrediction, ...] = ()
    """The ranks in order, where they differ; the fields above are then of the rank whose device has the least room left, times
    of all together. Empty where all are alike."""

    base_bytes: int = 0
    """Part of ``host_peak_bytes`` that jobs with adapters on one base model, held in the same form, have there once for all of
    them: its frozen weights, where they stream from the host to one device."""

    network_bytes: int = 0
    """Bytes that a rank sends to the others in a step, the mean of all ranks. Time on the network is among ``lane_busy_ms``."""

    sync_ms: float = 0.0
    """The step at whose end ranks that take steps alone are brought together; 0 where they share every step. Times above are
    means over the steps from one of these to the next."""
    sync_bytes: int = 0
    """Bytes that a rank sends in that step, the mean of all ranks."""

    once_s: float = 0.0
    """Time before the first step for compiling blocks; 0 where none are compiled."""

    def detailed_later(self, work_out: Mapping[str, Callable[[], Any]]) -> "Prediction":
        """The same prediction, whose details are worked out when they are first read.

        work_out: each of ``DETAILS``.
        """
        values = {name: value for name, value in self.__dict__.items() if name not in DETAILS}
        return _make_without_init({**values, _WORK_OUT: work_out})

    @property
    def total_interval_s(self) -> tuple[float, float]:
        """From and to, around ``total_s``, as a step's time has it."""
        each_s = (self.total_s - self.once_s) / self.step_ms if self.step_ms else 0.0
        once = ONCE_WIDTH
        return each_s * self.step_low_ms + self.once_s / once, each_s * self.step_high_ms + self.once_s * once

    def over(self, num_steps: int) -> "Prediction":
        """The same step in a run of so many."""
        total_s = self.step_ms * num_steps / 1000 + self.once_s
        if total_s == self.total_s:
            return self
        return self.changed(total_s=total_s)

    def changed(self, **values: Any) -> "Prediction":
        """The same with other values of some fields; what was left for later is still."""
        return _make_without_init({**self.__dict__, **values})

    def raised_to(self, high_bytes: int) -> "Prediction":
        """The same with the device's upper end no lower than this."""
        return self.changed(device_peak_high_bytes=max(self.device_peak_high_bytes, high_bytes))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for what is not there: a detail not yet worked out."""
            work_out = self.__dict__.get(_WORK_OUT)
            if name not in DETAILS or work_out is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            found = self.__dict__[name] = work_out[name]()
            if self.__dict__.keys() >= DETAILS:
                del self.__dict__[_WORK_OUT]
            return found

    @property
    def highest_peak_bytes(self) -> int:
        """The highest peak of all stages."""
        return max([self.device_peak_bytes, *(peak.device_peak_bytes for peak in (*self.peaks, *self.stages))])

    def verdict(self, budget_bytes: int) -> Verdict:
        """The worst of: tensors against the budget; as allocated, the same; the process against the card. The last two where
        ``memory`` was worked out.

        ``fits``: the upper ends of both intervals do. ``tight``: only upper ends go over. ``does_not_fit``: the most likely
        value goes over, less what the allocator would give back at the limit. ``unknown``: it does not go over as far as
        anyone can say, but something was not modelled (``memory.not_modelled``).
        """
        if self.ranks:
            found = {rank.verdict(budget_bytes) for rank in self.ranks}
            return next(verdict for verdict in _WORST_FIRST if verdict in found)
        highest = self.highest_peak_bytes
        high_bytes = max(highest, self.device_peak_high_bytes)
        return judge(highest, high_bytes, memory=self.memory, budget_bytes=budget_bytes)

    def fits_within(self, budget_bytes: int) -> bool:
        """Report whether even the upper end of the interval is within the budget, and of unequal ranks within each device."""
        if self.ranks:
            return all(rank.peak_high_bytes <= min(budget_bytes, rank.memory_bytes) for rank in self.ranks)
        return self.device_peak_high_bytes <= budget_bytes

    @property
    def fullest_rank(self) -> int | None:
        """The rank whose device has the least room left; None where ranks do not differ."""
        rooms = [rank.memory_bytes - rank.peak_high_bytes for rank in self.ranks]
        return rooms.index(min(rooms)) if rooms else None

    @property
    def slowest_rank(self) -> int | None:
        """The rank that the others wait for; None where ranks do not differ."""
        times = [rank.step_ms for rank in self.ranks]
        return times.index(max(times)) if times else None

    def stages_over(self, *, host_bytes: int, disk_bytes: int, num_sharing: int = 1) -> list[str]:
        """Sentences on stages that another tier has no room for. host_bytes, disk_bytes: of each of ``num_sharing`` ranks that
        share a host; 0 where nothing is known of the disk.
        """
        return stages_over(self.stages, host_bytes=host_bytes, disk_bytes=disk_bytes, num_sharing=num_sharing)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Prediction":
        return from_json(cls, document, path="prediction")


def stages_over(stages: Sequence[StagePeak], *, host_bytes: int, disk_bytes: int, num_sharing: int = 1) -> list[str]:
    """Sentences on these stages where another tier has no room for one. Arguments as ``Prediction.stages_over`` has them."""
    if not stages:
        return []
    found = []
    worst = max(stages, key=lambda peak: peak.host_peak_bytes)
    if worst.host_peak_bytes > host_bytes:
        found.append(_too_much(worst, worst.host_peak_bytes, host_bytes, tier="host"))
    fullest = max(stages, key=lambda peak: peak.disk_bytes_of(num_sharing))
    needed_bytes, allowed_bytes = fullest.disk_bytes_of(num_sharing), disk_bytes * num_sharing
    if 0 < allowed_bytes < needed_bytes:
        found.append(_too_much(fullest, needed_bytes, allowed_bytes, tier="disk"))
    return found


def _too_much(peak: StagePeak, needed_bytes: int, allowed_bytes: int, *, tier: str) -> str:
    needed, allowed = format_bytes(needed_bytes), format_bytes(allowed_bytes)
    return f"{STAGE_WORDS[peak.stage]} takes {needed} of {TIER_WORDS[tier]}; {allowed} may be used"


def _make_without_init(values: Mapping[str, Any]) -> Prediction:
    """A prediction with these values, details among them or not; ``replace`` would read every field, and so work them out."""
    made = object.__new__(Prediction)
    made.__dict__.update(values)
    return made


DETAILS: Final = frozenset(
    (
        "device_bytes_by_category",
        "lane_busy_ms",
        "timeline",
        "busy_by_kind_ms",
        "exposed_by_kind_ms",
        "recomputed_ms",
        "attained_by_kind",
        "time_factors",
        "peaks",
    )
)
"""The fields of a prediction that only a person, or a comparison of whole predictions, asks for."""
_WORK_OUT = "_work_out"
_WORST_FIRST: Final[tuple[Verdict, ...]] = ("does_not_fit", "unknown", "tight", "fits")


def judge(peak_bytes: int, high_bytes: int, *, memory: CardMemory | None, budget_bytes: int) -> Verdict:
    """``Prediction.verdict`` of a peak of tensors, its upper end, and what they take of a card where that was worked out."""
    judged = [_judge(peak_bytes, high_bytes, budget_bytes)]
    if memory is None:
        return judged[0]
    judged.append(_judge(memory.allocated.value, memory.allocated.high, budget_bytes))
    if memory.total_bytes:
        process = memory.process
        judged.append(_judge(process.value - memory.releasable_bytes, process.high, memory.total_bytes))
    if "does_not_fit" in judged:
        return "does_not_fit"
    if memory.not_modelled:
        return "unknown"
    return "tight" if "tight" in judged else "fits"


def _judge(value_bytes: int, high_bytes: int, limit_bytes: int) -> Verdict:
    if high_bytes <= limit_bytes:
        return "fits"
    return "tight" if value_bytes <= limit_bytes else "does_not_fit"
