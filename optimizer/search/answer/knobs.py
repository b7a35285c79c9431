"""Prices what each knob would buy and cost: a plan's neighbours, each one change away, priced beside it. Torch-free.

A change brings what it cannot do without: state on the host takes the gradients there, streamed weights take both. What then
still cannot be carried out together (``Plan.find_conflict``), what the machine cannot do and what the goal forbids is left out;
what changes the numbers is listed and marked.
"""

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import WithJson
from optimizer.estimate.prediction import Prediction, Verdict
from optimizer.plan.activations import BlockChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.pins.training import knob_kinds
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique, is_idle, knobs_of
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OUTER_FIELDS, OuterPlan, SearchProblem, divisors
from optimizer.search.solver.grid import TOKENS_PER_CHUNK

_BLOCKS: tuple[tuple[BlockChoice, Technique, str], ...] = (
    ("keep", "recompute", "keep the activations of every block"),
    ("recompute", "recompute", "recompute every block"),
    ("selective", "recompute", "recompute the cheap ops of every block"),
    ("offload", "offload", "offload the activations of every block to the host"),
    ("offload_disk", "disk", "offload the activations of every block to the disk"),
    ("offload_remote", "remote", "offload the activations of every block to the remote store"),
)


@dataclass(frozen=True, kw_only=True)
class Knob(WithJson):
    """One change of a plan, with what it would make of peak and time. Differences are new minus old."""

    technique: Technique
    """To which the change belongs: what is added, taken away or turned."""
    change: str
    """For people: ``recompute every block``."""
    plan: Plan
    """With the change."""
    verdict: Verdict
    """Verdict on that plan, against the goal's budgets."""
    is_lossless: bool
    """True where that plan's numbers equal plain fp32 training's."""
    device_peak_bytes: int
    """Peak of that plan; the next field is the difference from the plan at hand."""
    device_change_bytes: int
    host_change_bytes: int
    disk_change_bytes: int
    remote_change_bytes: int
    step_ms: float
    step_change_ms: float


def list_knobs(
    problem: SearchProblem,
    plan: Plan,
    *,
    prediction: Prediction | None = None,
    is_wanted: Callable[[Technique, Plan], bool] = lambda *_: True,
) -> tuple[Knob, ...]:
    """Those that apply to the plan, the largest saving of device memory first.

    prediction: the plan's own, where it is at hand. is_wanted: which to price at all. Raises NotProfiled where the problem's
    profile is partial.
    """
    here = problem.price(plan) if prediction is None else prediction
    seen = {plan}
    knobs = []
    for technique, change, other in _neighbours(problem, plan):
        if other not in seen and _is_possible(problem, other) and is_wanted(technique, other):
            seen.add(other)
            knobs.append(_priced(problem, technique, change, other, here))
    return tuple(sorted(knobs, key=lambda knob: (knob.device_change_bytes, knob.step_change_ms, knob.change)))


def _is_possible(problem: SearchProblem, plan: Plan) -> bool:
    excluded = problem.unavailable | set(problem.goal.forbid)
    if any(technique in excluded for technique in plan.techniques):
        return False
    return problem.find_conflict(plan) is None and problem.is_known(plan.representation)


def _priced(problem: SearchProblem, technique: Technique, change: str, plan: Plan, here: Prediction) -> Knob:
    there = problem.price(plan)
    return Knob(
        technique=technique,
        change=change,
        plan=plan,
        verdict=problem.verdict(there),
        is_lossless=plan.is_lossless,
        device_peak_bytes=there.highest_peak_bytes,
        device_change_bytes=there.highest_peak_bytes - here.highest_peak_bytes,
        host_change_bytes=there.host_peak_bytes - here.host_peak_bytes,
        disk_change_bytes=there.disk_peak_bytes - here.disk_peak_bytes,
        remote_change_bytes=there.remote_peak_bytes - here.remote_peak_bytes,
        step_ms=there.step_ms,
        step_change_ms=there.step_ms - here.step_ms,
    )


def _neighbours(problem: SearchProblem, plan: Plan) -> Iterator[tuple[Technique, str, Plan]]:
    setting, per_block = OuterPlan.of(plan), plan.activations.per_block
    yield from _block_changes(setting, per_block)
    changes = [*_batch_changes(problem, setting), *_place_changes(setting), *_declared_changes(problem, plan)]
    for technique, change, changed in changes:
        try:
            yield technique, change, changed.plan(per_block)
        except InvalidPlan:
            continue  # Contradicts itself: 8-bit state away from the device, autocast of half-precision weights.


def _block_changes(setting: OuterPlan, per_block: PerBlock) -> Iterator[tuple[Technique, str, Plan]]:
    for choice, technique, change in _BLOCKS:
        yield technique, change, setting.plan((choice,) * len(per_block))


_Changes = Iterator[tuple[Technique, str, OuterPlan]]


def _batch_changes(problem: SearchProblem, setting: OuterPlan) -> _Changes:
    sizes = divisors(problem.workload.global_batch_size)
    place = sizes.index(setting.micro_batch_size)
    for other in sizes[max(0, place - 1) : place + 2]:
        steps = problem.workload.global_batch_size // other
        changed = replace(setting, micro_batch_size=other, accumulation_steps=steps)
        yield "accumulate", f"micro-batches of {other} instead of {setting.micro_batch_size}", changed
    num_tokens = setting.micro_batch_size * problem.workload.sequence_length
    for tokens in TOKENS_PER_CHUNK:
        count = -(-num_tokens // tokens)
        if count > 1 and count != setting.num_chunks:
            yield "chunked_loss", f"make the loss in {count} chunks", replace(setting, num_chunks=count)
            break
    if setting.num_chunks > 1:
        yield "chunked_loss", "make all logits at once", replace(setting, num_chunks=1)


def _place_changes(setting: OuterPlan) -> _Changes:
    yield "consume_gradients", "update as gradients appear", replace(setting, gradients="consume")
    yield "offload_gradients", "gradients on the host", replace(setting, gradients="host")
    places: tuple[tuple[StatePlace, Technique, str], ...] = (
        ("host", "offload_optimizer", "on the host"),
        ("disk", "disk", "on the disk"),
        ("remote", "remote", "in the remote store"),
    )
    for place, technique, words in places:
        away = replace(setting, gradients="host", state_place=place, state_fraction=1.0)
        yield technique, f"optimizer state {words}, with the gradients on the host", away
    streamed = replace(setting, gradients="host", state_place="host", state_fraction=1.0, weights_place="host")
    yield "stream_weights", "stream the weights from the host, with state and gradients there", streamed
    back = replace(setting, weights_place="device")
    yield "stream_weights", "weights on the device", back
    back = replace(back, state_place="device", state_fraction=1.0)
    yield "offload_optimizer", "optimizer state on the device", back
    yield "offload_gradients", "gradients and optimizer state on the device", replace(back, gradients="keep")


def _declared_changes(problem: SearchProblem, plan: Plan) -> _Changes:
    """To each value of the knobs that declare words for it, with what the value brings."""
    setting = OuterPlan.of(plan)
    for knob in knobs_of("training"):
        if is_idle(knob.path, plan) or (knob.path == "weights.frozen" and problem.workload.adapter is None):
            continue
        if knob.training is None or not knob.training.change:
            continue
        for value in typing.get_args(knob_kinds()[knob.path]):
            made = {knob.path: value, **knob.brings.get(value, {})}
            changed = replace(setting, **{OUTER_FIELDS[path]: made[path] for path in made})
            technique = typing.cast(Technique, knob.technique_of(value))
            yield technique, knob.training.describe(value, before=None), changed
