"""One mix of jobs on one device, from submission to the last end: claims are real, time is simulated.

Each claim and each end is an event; between two of them every running job goes on at the pace that its neighbours leave it
(``optimizer/estimate/sharing.py``). Bytes are summed at each event from the predictions and not from what admission reserved.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.mixes.database import end_job
from benchmarks.mixes.subjects import Subject
from optimizer.estimate.sharing import Shares, lane_shares, slowdown
from optimizer.hardware.machine import Machine

if TYPE_CHECKING:
    from webapp.catalog import models as catalog
    from webapp.jobs import models as jobs

NUM_SLOTS = 4
"""Jobs at once on a device: a worker's default."""
FEWEST_JOBS, MOST_JOBS = 2, 8
SHORTEST_S, LONGEST_S = 300.0, 3600.0
_OWNERS = ("ada", "eve", "grace")


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Jobs that are submitted at one moment, in this order."""

    subjects: tuple[Subject, ...]
    times_s: tuple[float, ...]
    """Time of each alone."""
    owners: tuple[str, ...]


def draw_mix(subjects: Sequence[Subject], *, seed: str) -> Mix:
    """Two to eight jobs of one to three people, each of 5 to 60 minutes alone (uniform in the logarithm)."""
    draw = random.Random(seed)
    chosen = tuple(draw.choice(subjects) for _ in range(draw.randint(FEWEST_JOBS, MOST_JOBS)))
    times_s = tuple(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** draw.random() for _ in chosen)
    return Mix(subjects=chosen, times_s=times_s, owners=tuple(draw.choice(_OWNERS) for _ in chosen))


@dataclass(kw_only=True)
class Outcome:
    """The outcome of one mix under one policy."""

    makespan_s: float = 0.0
    waited_s: float = 0.0
    """Time in which at least one job waited."""
    lane_s: float = 0.0
    """The part of that in which the lane that is wanted most was busy."""
    bytes_s: float = 0.0
    """The same time, each second weighed by the part of the device's bytes that were held."""
    most_device_bytes: int = 0
    """Most that processes took of the device at once while more than one ran."""
    most_host_bytes: int = 0
    most_at_once: int = 0
    ended_s: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Running:
    attempt: "jobs.Attempt"
    subject: Subject
    shares: Shares
    left_s: float
    """The rest of its time alone."""


def simulate(
    mix: Mix, made: "Sequence[jobs.Job]", *, row: "catalog.Machine", machine: Machine, must_gain: bool
) -> Outcome:
    """Claim and end the mix's jobs. must_gain: as workers do unless they were given a number of slots."""
    from webapp.attempts.claiming import claim_job

    by_id = {job.pk: (subject, time_s) for job, subject, time_s in zip(made, mix.subjects, mix.times_s, strict=True)}
    running: list[_Running] = []
    now_s, found, num_waiting = 0.0, Outcome(), len(made)
    while num_waiting or running:
        while num_waiting and len(running) < NUM_SLOTS:
            attempt = claim_job(worker="benchmark:1", machine=row, must_gain=must_gain, lease_s=3600)
            if attempt is None:
                break
            subject, left_s = by_id[attempt.job_id]
            running.append(
                _Running(attempt=attempt, subject=subject, shares=_shares_of(subject, machine), left_s=left_s)
            )
            num_waiting -= 1
        if not running:
            raise RuntimeError(f"{num_waiting} jobs wait on an empty device: {', '.join(each.name for each in mix.subjects)}")
        _note_bytes(found, running)
        slower = slowdown(each.shares for each in running)
        pause_s = min(each.left_s for each in running) * slower
        if num_waiting:
            _note_use(found, running, pause_s=pause_s, machine=machine, slower=slower)
        now_s += pause_s
        for each in running:
            each.left_s -= pause_s / slower
        for each in [each for each in running if each.left_s <= 1e-9]:
            end_job(each.attempt)
            found.ended_s[each.attempt.job_id] = now_s
            running.remove(each)
    found.makespan_s = now_s
    return found


def _note_bytes(found: Outcome, running: Sequence[_Running]) -> None:
    found.most_at_once = max(found.most_at_once, len(running))
    if len(running) > 1:
        found.most_device_bytes = max(found.most_device_bytes, sum(each.subject.device_bytes for each in running))
        found.most_host_bytes = max(found.most_host_bytes, sum(each.subject.host_bytes for each in running))


def _note_use(found: Outcome, running: Sequence[_Running], *, pause_s: float, machine: Machine, slower: float) -> None:
    wanted = _add_lanes([each.shares for each in running])
    found.waited_s += pause_s
    found.lane_s += pause_s * min(1.0, max(wanted.values(), default=0.0) / slower)
    held_bytes = min(device_limit_bytes(machine), sum(each.subject.device_bytes for each in running))
    found.bytes_s += pause_s * held_bytes / device_limit_bytes(machine)


def _shares_of(subject: Subject, machine: Machine) -> Shares:
    return lane_shares(subject.prediction, device_kind=machine.device.kind) or {}


def _add_lanes(jobs: Sequence[Shares]) -> Shares:
    lanes = {lane for shares in jobs for lane in shares}
    return {lane: sum(shares.get(lane, 0.0) for shares in jobs) for lane in lanes}


def device_limit_bytes(machine: Machine) -> int:
    """All that processes may take of the device."""
    return machine.device.total_bytes or machine.device.memory_bytes


def least_makespan_s(mix: Mix, machine: Machine) -> float:
    """No order and no packing ends earlier: the longest job alone, and the work that the busiest lane has."""
    work = _add_lanes(
        [
            {lane: share * time_s for lane, share in _shares_of(subject, machine).items()}
            for subject, time_s in zip(mix.subjects, mix.times_s, strict=True)
        ]
    )
    return max([*mix.times_s, *work.values()])


def tensor_needs(mix: Mix) -> list[int]:
    """The control: what admission would reserve by a steady step's tensors alone, as if a card held nothing else."""
    return [min(each.budget_bytes, int(each.prediction["device_peak_high_bytes"])) for each in mix.subjects]


def is_over(found: Outcome, machine: Machine) -> Mapping[str, bool]:
    return {
        "device": found.most_device_bytes > device_limit_bytes(machine),
        "host": found.most_host_bytes > machine.host_memory_bytes,
    }
