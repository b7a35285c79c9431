"""The estimator's answer for one generation under one plan on one machine. Torch-free, JSON-able."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from optimizer.base.serialize import from_json, to_json
from optimizer.estimate.prediction import CardMemory, StagePeak, TimelinePoint, Verdict, judge


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """The decode of one token."""

    num_tokens: int
    """Tokens that the new token sees, itself included: prompt and what was generated so far."""
    step_ms: float
    device_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One device of a model that is cut."""

    first_block: int
    num_blocks: int
    device_peak_bytes: int
    device_peak_high_bytes: int
    """Upper end, which the budget of each device is held to."""
    device_bytes_by_category: dict[str, int]
    """Bytes at the stage's own peak."""
    peak_moment: str
    """Blocks are counted within the stage."""
    busy_ms: float
    """Time that it computes in a pass; for the rest of the pass it waits, or hands over."""
    sent_bytes: int
    """Bytes of hidden states that it gives to the next stage in a pass."""


@dataclass(frozen=True, kw_only=True)
class GenerationPrediction:
    """One plan, priced on one machine for one workload. Of a pass: one of ``plan.batch_size`` sequences."""

    device_peak_bytes: int
    """Most bytes allocated on a device at any moment of a pass."""
    device_peak_low_bytes: int
    device_peak_high_bytes: int
    """Interval that covers the measurement, of a pass or of the load before, whichever is higher; the verdict compares ``high``
    with the budget."""
    device_bytes_by_category: dict[str, int]
    """Bytes by category at the peak moment; sums to ``device_peak_bytes``."""
    peak_moment: str
    """Name of the peak moment, for people: ``prefill of block 11 of 12``, ``head of decode (token 40)``."""
    kv_cache_bytes: int
    """Bytes of a pass's keys and values, all of it, wherever it is; without what blocks share on the device."""
    host_peak_bytes: int
    disk_peak_bytes: int
    copied_bytes: dict[str, int]
    """Bytes copied in all passes by link (``categories.Link``); links without traffic left out, as in the next two."""
    copied_bytes_per_pass: dict[str, int]
    copied_bytes_per_token: dict[str, int]
    """Bytes copied for one decoded token of every sequence of a pass; on average where it grows with the cache."""
    prefill_ms: float
    """Time from a pass's start to its first token."""
    prefill_low_ms: float
    prefill_high_ms: float
    decode_ms: float
    """Time of each later token, on average over the pass; 0 where there is only one."""
    decode_low_ms: float
    decode_high_ms: float
    decode: tuple[DecodePoint, ...]
    """Growth of ``decode_ms`` with the cache: the points that were priced, in order; between two neighbours time is a
    straight line."""
    tokens_per_s: float
    """New tokens of all sequences, prefill included."""
    total_s: float
    lane_busy_ms: dict[str, float]
    """Busy time per lane in one pass."""
    exposed_ms: dict[str, float]
    """Time of a pass that compute stands still, by the lane it waits for; lanes that cost nothing left out."""
    prefill_by_kind_ms: dict[str, float]
    """Time of a pass's prefill by each kind of work (``time_kinds``), and by each lane that compute waits for."""
    decode_by_kind_ms: dict[str, float]
    """Time of all later tokens of a pass, by each kind of work and each lane that compute waits for."""
    timeline: tuple[TimelinePoint, ...]
    """Device bytes within one pass, in order, at most 400 points, the peak moment always among them."""
    time_source: Literal["measured", "table"]
    """Origin of the machine's rates: measured, or from the table."""
    num_time_runs: int = 0
    """Finished runs that the time intervals are drawn from; 0: an assumption."""
    unmetered_bytes: int = 0
    """Bytes beyond the meter, as ``Prediction.unmetered_bytes``."""
    remote_peak_bytes: int = 0
    """Bytes in the remote store at their most."""
    memory: CardMemory | None = None
    """Memory from tensors to a card (``estimate/generation/process.py``); None where it was not worked out."""
    num_replicas: int = 1
    """Copies of the model that share the prompts, each on a device of its own. What is said of a device, of the host, the disk
    and the store, and of all passes, is of the first, which has no less to do than another."""
    stages: tuple[StagePrediction, ...] = ()
    """Each device of a model that is cut; none otherwise. What is said of one device is then of the fullest, and time is that of
    all of them together, with what they wait for each other as the network's."""
    load: StagePeak | None = None
    """The peaks while the model is loaded, before the first pass (``estimate/generation/load.py``); None where its tensors are
    not known, and of a model that is cut."""

    @property
    def total_interval_s(self) -> tuple[float, float]:
        """From and to, around ``total_s``: the wider of what the first and the later tokens have."""
        times = [
            (self.prefill_low_ms, self.prefill_ms, self.prefill_high_ms),
            (self.decode_low_ms, self.decode_ms, self.decode_high_ms),
        ]
        known = [(low / middle, high / middle) for low, middle, high in times if middle]
        shortest = min((low for low, _ in known), default=1.0)
        longest = max((high for _, high in known), default=1.0)
        return self.total_s * shortest, self.total_s * longest

    def decode_step_ms(self, num_tokens: int) -> float:
        """Time for the token that sees so many, itself included; the nearest priced one beyond the pass's own."""
        points = self.decode
        if not points:
            return 0.0
        for before, after in pairwise(points):
            if before.num_tokens <= num_tokens <= after.num_tokens:
                share = (num_tokens - before.num_tokens) / (after.num_tokens - before.num_tokens)
                return before.step_ms + share * (after.step_ms - before.step_ms)
        return points[0].step_ms if num_tokens < points[0].num_tokens else points[-1].step_ms

    def verdict(self, budget_bytes: int) -> Verdict:
        """The verdict as in ``Prediction.verdict``: the tensors against the budget, and where ``memory`` was worked out
        also as allocated, and of the process against the card.
        """
        return judge(
            self.highest_peak_bytes, self.device_peak_high_bytes, memory=self.memory, budget_bytes=budget_bytes
        )

    @property
    def highest_peak_bytes(self) -> int:
        """Most bytes on the device in a pass, or in the load where that is higher."""
        return max(self.device_peak_bytes, 0 if self.load is None else self.load.device_peak_bytes)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "GenerationPrediction":
        return from_json(cls, document, path="prediction")
