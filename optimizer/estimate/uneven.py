"""Ranks that differ, priced together: each as one of as many that are all like it, then what they hold and wait for. Torch-free.

A rank's bytes depend on nothing but its own device and its own part of the plan, so its prediction is that of a machine whose
devices are all of its kind and do what it does; with shared state its own tensors are those that it owns there. Of several
machines it has its own one's host, and all ranks exchange over the network unless they are in one of them. The time is the
slowest rank's, or more: where compute waits for each exchange, every stretch between two of them takes as long as on the rank
that is slowest there. Ranks that take steps alone wait for each other once in a round. Stages of a model that is cut are laid out
together, each on its own device, and their step is one.

*Not modelled*: cards of unequal links to the host behind one switch; corrections that finished runs taught of other kinds than
the machine's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.categories.network import overlaps
from optimizer.estimate.outer_rounds import Round, take_time
from optimizer.estimate.prediction import Prediction, RankPrediction
from optimizer.estimate.step.ranks import list_machines
from optimizer.estimate.step.simulate import Simulation
from optimizer.hardware.machine import Machine, host_name
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """One rank's part, as if all ranks were like it: what the estimate of equal devices takes."""

    rank: int
    plan: Plan
    workload: TrainingWorkload
    machine: Machine


def list_cases(plan: Plan, workload: TrainingWorkload, machine: Machine) -> tuple[RankCase, ...]:
    """The case of each rank, in order. Stages of a model that is cut are of one plan, each on its own kind of device. Raises
    InvalidPlan for devices that the machine does not have, or not as many.
    """
    layout, cases = plan.layout, []
    _check_replicas(plan, workload, machine)
    for rank, (own, whole) in enumerate(zip(plan.of_ranks(), list_machines(machine, layout), strict=True)):
        size = own.batch.global_batch_size * layout.num_parts
        cases.append(
            RankCase(
                rank=rank,
                plan=replace(own, layout=layout.without_ranks),
                workload=replace(workload, global_batch_size=size),
                machine=whole,
            )
        )
    return tuple(cases)


def _check_replicas(plan: Plan, workload: TrainingWorkload, machine: Machine) -> None:
    """Raise InvalidPlan where ranks of several machines would share a home on the host, or what is to be in each machine."""
    layout = plan.layout
    places = [host_name(share.device or machine.device.name) for share in layout.ranks]
    starts = range(0, len(places), layout.num_sharing)
    spread = [start for start in starts if len(set(places[start : start + layout.num_sharing])) > 1]
    has_homes = plan.shares_homes(trains_all=workload.adapter is None)
    if spread and (layout.replicas > 1 or has_homes):
        first = spread[0]
        where = ", ".join(dict.fromkeys(places[first : first + layout.num_sharing]))
        raise InvalidPlan(
            f"plan.layout.replicas is {layout.replicas}; ranks {first} to {first + layout.num_sharing - 1} are in {where}, and "
            "those of a replica must be in one machine" + ", which has the weights that stream once for them" * has_homes,
            field="plan.layout.replicas",
            value=layout.replicas,
            allowed="replicas whose ranks are in one machine",
            hint="Take as many replicas as there are machines with as many devices each, and name a machine's devices together.",
        )


def combine_ranks(
    plan: Plan,
    *,
    workload: TrainingWorkload,
    cases: Sequence[RankCase],
    found: Sequence[Prediction],
    simulations: Sequence[Simulation],
    rounds: Sequence[Round] = (),
) -> Prediction:
    """The prediction of all ranks. found, simulations: of each case, its own rank's step. rounds: of ranks that take steps
    alone, which wait for each other in the last of them.
    """
    ranks = tuple(_describe(case, each) for case, each in zip(cases, found, strict=True))
    slowest = max(found, key=lambda each: each.step_ms)
    step_ms = step_of_all(simulations, waits=not overlaps(plan, device_kind=cases[0].machine.device.kind))
    if rounds:
        (every,) = {each.sync_every for each in rounds}
        before_ms = [(every - 1) * each.alone.step_ms for each in rounds]
        step_ms = step_of_all([each.synchronizing for each in rounds], waits=True, before_ms=before_ms) / every
    together = place_ranks(found, ranks).changed(
        rank_peak_bytes=tuple(rank.peak_bytes for rank in ranks) if len(ranks) > 1 else (),
        host_peak_bytes=max(each.host_peak_bytes for each in found),
        disk_peak_bytes=max(each.disk_peak_bytes for each in found),
        remote_peak_bytes=max(each.remote_peak_bytes for each in found),
        step_ms=step_ms,
        step_low_ms=step_ms * slowest.step_low_ms / slowest.step_ms,
        step_high_ms=step_ms * slowest.step_high_ms / slowest.step_ms,
        tokens_per_s=workload.tokens_per_step / step_ms * 1000,
        total_s=step_ms * workload.num_steps / 1000,
    )
    if not rounds:
        return together
    return take_time(together, step_ms, sync_ms=max(each.synchronizing.step_ms for each in rounds), workload=workload)


def combine_stages(found: Sequence[Prediction], cases: Sequence[RankCase]) -> Prediction:
    """The prediction of a model that is cut over unequal devices. found: of each stage, with what it waits for the others."""
    ranks = tuple(
        _describe(case, each, working_ms=each.step_ms - each.exposed_ms.get("network", 0.0))
        for case, each in zip(cases, found, strict=True)
    )
    longest = max(found, key=lambda each: each.step_ms)
    return place_ranks(found, ranks).changed(
        host_peak_bytes=max(each.host_peak_bytes for each in found),
        step_ms=longest.step_ms,
        step_low_ms=longest.step_low_ms,
        step_high_ms=longest.step_high_ms,
        tokens_per_s=longest.tokens_per_s,
        total_s=longest.total_s,
    )


def place_ranks(found: Sequence[Prediction], ranks: tuple[RankPrediction, ...]) -> Prediction:
    """The prediction of the rank whose device has the least room, with all ranks in it."""
    fullest = min(range(len(ranks)), key=lambda rank: ranks[rank].memory_bytes - ranks[rank].peak_high_bytes)
    return found[fullest].changed(
        ranks=ranks, device_peak_high_bytes=ranks[fullest].peak_high_bytes, device_peak_bytes=ranks[fullest].peak_bytes
    )


def step_of_all(simulations: Sequence[Simulation], *, waits: bool, before_ms: Sequence[float] = ()) -> float:
    """Milliseconds of a step of ranks that wait for each other at every exchange. waits: whether compute does; where it only
    begins them, the slowest rank's step is the step of all. before_ms: that each rank took before it without the others, in
    which case the time is of both.
    """
    before_ms = before_ms or [0.0] * len(simulations)
    steps_ms = [before + each.step_ms for before, each in zip(before_ms, simulations, strict=True)]
    exchanges = [
        [(before + start, before + end) for start, end in each.exchanges_ms]
        for before, each in zip(before_ms, simulations, strict=True)
    ]
    longest_ms = max(steps_ms)
    if not waits or len({len(listed) for listed in exchanges}) > 1:
        return longest_ms
    step_ms, ends = 0.0, [0.0] * len(simulations)
    for meeting in zip(*exchanges, strict=True):
        step_ms += max(start - end for (start, _), end in zip(meeting, ends, strict=True))
        step_ms += max(end - start for start, end in meeting)
        ends = [end for _, end in meeting]
    return step_ms + max(each_ms - end for each_ms, end in zip(steps_ms, ends, strict=True))


def _describe(case: RankCase, found: Prediction, *, working_ms: float | None = None) -> RankPrediction:
    """working_ms: of a stage, which waits for others in its step."""
    peak_bytes = found.rank_peak_bytes[case.rank] if found.rank_peak_bytes else found.device_peak_bytes
    return RankPrediction(
        device=case.machine.device.name,
        num_sequences=case.plan.batch.global_batch_size,
        memory_bytes=case.machine.device.memory_bytes,
        peak_bytes=peak_bytes,
        # Of the rank that owns most; this one's is lower by what it does not own.
        peak_high_bytes=found.device_peak_high_bytes - found.device_peak_bytes + peak_bytes,
        step_ms=found.step_ms if working_ms is None else working_ms,
    )
