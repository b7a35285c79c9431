"""Puts in words how setups that people write by hand compare with the chosen plan, and when it is better not to share."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from optimizer.base.units import format_bytes, format_slowdown
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.answer.nothing_fits import list_short_of
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.answers import SetupOption
from optimizer.search.questions.by_hand.pricing import PricedSetup

_FASTER: Final = 0.99
"""Part of the chosen plan's time under which a setup is called faster."""


def list_options(found: Sequence[PricedSetup], chosen: PricedPlan) -> tuple[SetupOption, ...]:
    """Every setup, and how it compares with the chosen plan."""
    return tuple(
        SetupOption(setup=each.setup.label, label=each.label, words=each.words, finding=_compare(each, chosen))
        for each in found
    )


def explain_sharing(found: Sequence[PricedSetup], chosen: PricedPlan) -> Iterator[str]:
    """Sentences on why the chosen plan shares no more out, or why less would not do. Of setups their fastest way that fits."""
    layout, ddp = chosen.plan.layout, _fastest(found, "ddp")
    sharded = _fastest(found, "fsdp", "hsdp") or _fastest(found, "zero1", "zero2")
    if layout.num_devices == 1 and ddp is not None:
        yield f"do not share it among devices: one is enough, and {_name(ddp)} {_would(ddp, chosen)}"
    elif layout.num_devices > 1 and _keeps_everything(layout) and sharded is not None:
        room = "each device has room for all weights, gradients and optimizer state"
        yield f"do not shard: {room}, and {_name(sharded)} {_would(sharded, chosen)}"
    elif layout.num_devices > 1 and not _keeps_everything(layout) and ddp is not None:
        yield f"{_name(ddp)}, which keeps everything on each device, {_would(ddp, chosen)}"


def _name(setup: PricedSetup) -> str:
    """``FSDP (ZeRO-3) on 2x RTX 3060 12GB``."""
    return setup.setup.words.partition(":")[0] + setup.on.replace(",", "")


def _fastest(found: Sequence[PricedSetup], *labels: str) -> PricedSetup | None:
    """The fastest way of these setups, one that fits where there is one; None where none can be carried out."""
    ways = [each for each in found if each.setup.label in labels and each.priced is not None]
    return min(ways, key=lambda each: each.step_ms, default=None)


def _would(setup: PricedSetup, chosen: PricedPlan) -> str:
    """``would be 12 % slower``, ``does not fit: ...``."""
    if setup.step_ms == math.inf:
        return _compare(setup, chosen)
    times = setup.step_ms / chosen.prediction.step_ms
    return f"would {'take' if times >= 2 else 'be'} {format_slowdown(times)}"


def _keeps_everything(layout: DeviceLayout) -> bool:
    return not layout.shares_state and not layout.sees_whole_batch


def _compare(setup: PricedSetup, chosen: PricedPlan) -> str:
    if setup.priced is None or setup.problem is None:
        return setup.why
    if setup.priced.plan == chosen.plan:
        return "the chosen plan"
    if setup.priced.verdict not in ACCEPTED:
        return _what_is_short(setup.priced, setup.problem)
    times = setup.step_ms / chosen.prediction.step_ms
    compared = f"{100 * (1 - times):.0f} % faster" if times < _FASTER else format_slowdown(times)
    refused = _what_is_refused(setup.priced, setup.problem)
    by_tensors = setup.problem.detail is not None and setup.priced.prediction.memory is None
    return compared + f"; {refused}" * bool(refused) + "; it fits as far as tensors say" * by_tensors


def _what_is_short(priced: PricedPlan, problem: SearchProblem) -> str:
    """Why a setup's lightest plan does not fit."""
    found, budget_bytes = priced.prediction, problem.goal.device_budget_bytes
    name, high_bytes = "each device", found.device_peak_high_bytes
    if found.ranks:
        fullest = max(found.ranks, key=lambda rank: rank.peak_high_bytes - min(budget_bytes, rank.memory_bytes))
        name, high_bytes, budget_bytes = fullest.device, fullest.peak_high_bytes, min(budget_bytes, fullest.memory_bytes)
    short = [f"{name} has {format_bytes(budget_bytes)}, up to {format_bytes(high_bytes)} is needed"] * (high_bytes > budget_bytes)
    short += [f"for each device {sentence}" for sentence in list_short_of(problem, found)]
    return f"{'hardly fits' if priced.verdict == 'tight' else 'does not fit'}: {'; '.join(short)}"


def _what_is_refused(priced: PricedPlan, problem: SearchProblem) -> str:
    """Why a setup that fits may not be chosen; empty where it may."""
    unused = [TECHNIQUE_LABELS[name] for name in priced.plan.techniques if not problem.allows(name)]
    if unused:
        return f"not allowed: {', '.join(unused)}"
    pin = problem.goal.pins.broken_by(priced.plan)
    return "" if pin is None else f"it does not keep the pin of {pin}"
