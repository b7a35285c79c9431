"""Predicts what jobs that share one device cost each other, from the lanes that each keeps busy. Pure and torch-free.

A job alone keeps each lane (the processor or card, each direction of copies, the host, the disk, the network) busy for a part of
its step. Beside others the parts of one lane add up, since kernels and copies of several processes take turns; where they come to
more than the whole, all become slower by that. Time in which a job only prepares work (``dispatch`` and ``hooks``) is spent on a
host core and keeps a card waiting, so others can use it; on the CPU device the same processor does both.

Bytes add up as well: each job counts with the highest of all its stages, and on a card with its own CUDA context, workspaces and
the gaps of its allocator, which a neighbour sees as taken.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from optimizer.formats.allocator_slack import allocator_slack_bytes
from optimizer.hardware.cuda_facts import bytes_beside_tensors
from optimizer.hardware.machine import Device
from optimizer.profile.time_kinds import COMPUTE_KINDS, KINDS, by_present_names

LEAST_GAIN: Final = 1.1
"""Work done by all jobs at once against what was done before, from which another job may join them. Below, the queue's order is
worth more: the first of them would end later, and the last no earlier."""
_PREPARING: Final = frozenset({"dispatch", "hooks"})
_COMPUTE: Final = "compute"

Shares = dict[str, float]
"""The part of a job's time, when it is alone, that each lane is busy with it: from 0 to 1."""


def device_need_bytes(prediction: Mapping[str, Any] | None, *, budget_bytes: int | None, device: Device | None) -> int:
    """Device memory that must be free for a job with this stored prediction, at most what one job may use of the device.

    budget_bytes: caps the tensors of every stage, since the runtime enforces it, but not what a process takes of a card beside
    them. device: None where the job may run on any. A card holds one context more than this counts when jobs add up: its
    ``memory_bytes`` have one taken off already, and a job alone is not refused for it.
    """
    highest = [] if prediction is None else _highest_on_device(prediction)
    tensor_bytes = min([size for size in (budget_bytes, max(highest, default=None)) if size is not None], default=0)
    if device is None or device.kind != "cuda" or not tensor_bytes:
        return tensor_bytes
    memory = (prediction or {}).get("memory")
    if memory is None:
        beside_bytes = bytes_beside_tensors(device) + allocator_slack_bytes(tensor_bytes)
    else:
        beside_bytes = max(0, int(memory["process"]["high"]) - int(memory["allocated"]["high"]))
    return min(tensor_bytes + beside_bytes, device.memory_bytes)


def host_need_bytes(prediction: Mapping[str, Any] | None) -> int:
    """Memory of the host tier that a job with this stored prediction takes in the highest of its stages."""
    document = prediction or {}
    stages = [int(stage.get("host_peak_bytes") or 0) for stage in document.get("stages") or ()]
    return max([int(document.get("host_peak_bytes") or 0), *stages])


def host_need_together(jobs: Iterable[tuple[Mapping[str, Any] | None, int, str]]) -> int:
    """Memory of the host tier that jobs of one machine take together.

    jobs: of each, the stored prediction, its number of devices, and a name for the base model and the form it is held in: what
    jobs of the same name share is counted once.
    """
    apart_bytes = 0
    shared_bytes: dict[str, int] = {}
    for prediction, num_devices, base in jobs:
        base_bytes = int((prediction or {}).get("base_bytes") or 0)
        apart_bytes += num_devices * host_need_bytes(prediction) - base_bytes
        shared_bytes[base] = max(shared_bytes.get(base, 0), base_bytes)
    return apart_bytes + sum(shared_bytes.values())


def lane_shares(prediction: Mapping[str, Any] | None, *, device_kind: str) -> Shares | None:
    """Shares by lane, from a stored prediction of training or of a generation; None where it does not say.

    device_kind: ``cpu`` or ``cuda``.
    """
    if not prediction:
        return None
    busy, whole_ms = _times_of(prediction)
    if whole_ms <= 0:
        return None
    left_out = frozenset() if device_kind == "cpu" else _PREPARING
    shares: Shares = {}
    for kind, time_ms in busy.items():
        if kind not in KINDS or kind in left_out:
            continue
        lane = _COMPUTE if kind in COMPUTE_KINDS or kind == "allocation" else kind
        shares[lane] = shares.get(lane, 0.0) + time_ms / whole_ms
    return {lane: min(1.0, share) for lane, share in shares.items()}


def slowdown(jobs: Iterable[Shares]) -> float:
    """Time of each job beside the others, by its time alone: 1 where no lane is wanted by more than it can give."""
    wanted: Shares = {}
    for shares in jobs:
        for lane, share in shares.items():
            wanted[lane] = wanted.get(lane, 0.0) + share
    return max(1.0, *wanted.values()) if wanted else 1.0


def gains(running: list[Shares], joining: Shares) -> bool:
    """Report whether enough more is done in the same time once the job has joined those that run."""
    before, after = len(running) / slowdown(running), (len(running) + 1) / slowdown([*running, joining])
    return after >= LEAST_GAIN * before


def _highest_on_device(prediction: Mapping[str, Any]) -> list[int]:
    """Upper ends of a step's peak, of what the allocator makes of it, and the peaks of all stages."""
    stages = [*(prediction.get("stages") or ()), *(prediction.get("peaks") or ())]
    memory = prediction.get("memory") or {}
    allocated = [int(memory["allocated"]["high"])] if memory else []
    return [int(prediction["device_peak_high_bytes"]), *allocated, *(int(stage["device_peak_bytes"]) for stage in stages)]


def _times_of(prediction: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Busy milliseconds by kind, and those of the whole step or pass."""
    if "step_ms" in prediction:
        return by_present_names(prediction.get("busy_by_kind_ms") or {}), float(prediction["step_ms"])
    phases = [by_present_names(prediction.get(name) or {}) for name in ("prefill_by_kind_ms", "decode_by_kind_ms")]
    compute = {kind: sum(phase.get(kind, 0.0) for phase in phases) for kind in COMPUTE_KINDS}
    others = {lane: time_ms for lane, time_ms in (prediction.get("lane_busy_ms") or {}).items() if lane != _COMPUTE}
    return {**compute, **others}, sum(sum(phase.values()) for phase in phases)
