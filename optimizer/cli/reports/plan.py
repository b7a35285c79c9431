"""The report of ``headroom plan``: the answer with its limit, plans side by side, cards ranked. At most 100 columns."""

from collections import Counter
from collections.abc import Sequence

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes, format_duration
from optimizer.cli.reports.compared import memory_costs, side_by_side
from optimizer.cli.reports.text import (
    VERDICTS,
    categories_table,
    format_bullets,
    format_header,
    format_ms,
    format_table,
    plans_table,
    size_or_dash,
    wrap_after,
)
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.hardware.machine import Machine
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.plan import Plan
from optimizer.search.answer.compare import Comparison
from optimizer.search.answer.frontier import plan_label
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.answers import LayoutOption, ObjectiveAnswer
from optimizer.search.questions.cards import CardAnswer
from optimizer.search.result import SearchResult

_OBJECTIVES = {
    "fastest_step": "the fastest step",
    "cheapest_run": "the cheapest run",
    "largest_batch": "the largest batch that runs at once",
    "longest_sequence": "the longest sequence",
    "largest_model": "the deepest model of this width",
}
_TIERS = {"device": "on the device", "host": "on the host", "disk": "on disk", "remote": "in the remote store"}
_ASPECTS = {"lifetime": "", "place": " in", "representation": " as"}


def report_answer(answer: ObjectiveAnswer, *, machine: Machine) -> str:
    """The question, the limit, the baselines with the chosen plan below them, its bytes, the frontier, the reasons."""
    result, by_hand = answer.result, {setup.label for setup in answer.setups}
    parts = [_header(answer, machine)]
    if answer.limit is not None:
        parts.append(f"Answer\n{format_bullets([answer.limit.reason])}")
    return "\n\n".join(
        [
            *parts,
            plans_table([*(each for label, each in result.baselines.items() if label not in by_hand), result.chosen]),
            *([_layouts_part(answer)] if answer.layouts else []),
            *([_setups_part(answer)] if answer.setups else []),
            categories_table(result.chosen.prediction),
            "Frontier (smallest budget for each speed)\n" + _frontier_table(result),
            "Chosen plan\n" + format_bullets([*result.explanation, *_bound_sentences(result), _time_sentence(answer)]),
        ]
    )


def _header(answer: ObjectiveAnswer, machine: Machine) -> str:
    return format_header(
        f"{answer.num_blocks} blocks, {answer.num_parameters:,} parameters",
        workload=answer.workload,
        machine=machine,
        budgets=[
            f"{format_bytes(size)} {_TIERS[tier]}" for tier, size in answer.budget_bytes.items() if size or tier == "host"
        ],
    ) + (f"\ngoal      {_OBJECTIVES[answer.objective]}" if answer.objective != "fastest_step" else "")


def _layouts_part(answer: ObjectiveAnswer) -> str:
    """The best of each layout, how they compare, and what each device of the chosen one holds and sends."""
    header = ("layout", "peak a device", "at most", "network a step", "waits for it", "step", "tokens/s")
    lines = [format_table(header, [_layout_row(option) for option in answer.layouts], left=1)]
    prediction = answer.result.chosen.prediction
    notes = [option.sentence for option in answer.layouts]
    if prediction.rank_peak_bytes:
        peaks = ", ".join(format_bytes(peak) for peak in prediction.rank_peak_bytes)
        busy_ms = prediction.lane_busy_ms.get("network", 0.0)
        notes.append(f"peaks of the devices: {peaks}")
        rarely = ""
        if prediction.sync_ms:
            together = f"{format_bytes(prediction.sync_bytes)} in each of {format_ms(prediction.sync_ms)} that synchronizes"
            rarely = f", on average: {together}, nothing in the others"
        notes.append(f"each sends {format_bytes(prediction.network_bytes)} a step, {format_ms(busy_ms)} on the network{rarely}")
    return "Layouts of devices\n" + "\n".join([*lines, format_bullets(notes)])


def _setups_part(answer: ObjectiveAnswer) -> str:
    """Each setup that people write by hand, but for ways to recompute that come to the same plan; and why some cannot be had."""
    header = ("setup", "peak, fullest device", "at most", "host, each", "step", "tokens/s", "verdict")
    shown: dict[Plan, PricedPlan] = {}
    notes = list[str]()
    for setup in answer.setups:
        priced = answer.result.baselines.get(setup.label)
        if priced is None or (priced.verdict not in ACCEPTED and priced.plan not in shown):
            notes.append(setup.sentence)
        if priced is not None:
            shown.setdefault(priced.plan, priced)
    rows = [
        (
            priced.label,
            format_bytes(priced.prediction.device_peak_bytes),
            format_bytes(priced.prediction.device_peak_high_bytes),
            size_or_dash(priced.prediction.host_peak_bytes),
            format_ms(priced.prediction.step_ms),
            f"{priced.prediction.tokens_per_s:,.0f}",
            VERDICTS[priced.verdict] + " (tensors)" * (priced.verdict in ACCEPTED and priced.prediction.memory is None),
        )
        for priced in shown.values()
    ]
    parts = [format_table(header, rows)] * bool(rows) + [format_bullets(notes)] * bool(notes)
    return "Setups that people write by hand\n" + "\n".join(parts)


def _layout_name(layout: DeviceLayout) -> str:
    """``2 devices, zero1``; of several kinds ``2x RTX 3060 12GB + RTX 4090, zero1``."""
    counts = Counter(share.device for share in layout.ranks)
    kinds = " + ".join(f"{count}x {name}" if count > 1 else name for name, count in counts.items() if name)
    if layout.num_devices == 1:
        return kinds or "one device"
    how: str = layout.data
    if layout.is_cut:
        how = f"{len(layout.stages)} stages" if layout.num_rounds > 1 else f"cut {'+'.join(map(str, layout.stage_blocks))}"
    if layout.shares_blocks:
        how = "each block shared"
    if layout.steps_alone:
        how = f"{layout.sync_every} steps alone, {layout.sync_format}"
    return f"{kinds or f'{layout.num_devices} devices'}, {how}"


def _layout_row(option: LayoutOption) -> tuple[str, ...]:
    layout = option.layout
    name = _layout_name(layout)
    if option.best is None:
        return name, "-", "-", "-", "-", f"from {format_ms(option.least_step_ms)}" if option.least_step_ms else "-", "-"
    found = option.best.prediction
    return (
        name,
        format_bytes(found.device_peak_bytes),
        format_bytes(found.device_peak_high_bytes),
        size_or_dash(found.network_bytes),
        format_ms(found.exposed_ms.get("network", 0.0)) if layout.num_devices > 1 else "-",
        format_ms(found.step_ms),
        f"{found.tokens_per_s:,.0f}",
    )


def _frontier_table(result: SearchResult) -> str:
    openings = [
        f"{format_bytes(point.prediction.device_peak_high_bytes):>9}  {format_ms(point.prediction.step_ms):>8}  "
        for point in result.frontier
    ]
    marks = ["  <- chosen" if point.plan == result.chosen.plan else "" for point in result.frontier]
    return "\n".join(
        [
            f"{'budget':>9}  {'step':>8}  plan",
            *(
                wrap_after(opening, plan_label(point.plan) + mark)
                for opening, mark, point in zip(openings, marks, result.frontier, strict=True)
            ),
        ]
    )


def _bound_sentences(result: SearchResult) -> list[str]:
    slowdown = 100 * (result.chosen.prediction.step_ms / result.unlimited_step_ms - 1)
    unlimited = format_ms(result.unlimited_step_ms)
    if result.gap is None:
        bound = "how far it is from the best that is allowed and fits is not known"
    elif result.is_optimal:
        bound = "no plan that is allowed and fits is faster"
    else:
        bound = f"at most {100 * result.gap:.1f} % slower than the best that is allowed and fits can be"
    return [bound, f"unlimited memory would allow {unlimited} a step; the chosen plan takes {slowdown:.0f} % more"]


def _time_sentence(answer: ObjectiveAnswer) -> str:
    return f"{answer.workload.num_steps:,} steps take {format_duration(answer.result.chosen.prediction.total_s)}"


def report_comparison(comparison: Comparison) -> str:
    """Cost, then what differs of the table, then bytes at the peak where they differ; a column for each plan."""
    labels = [priced.label for priced in comparison.plans]
    predictions = [priced.prediction for priced in comparison.plans]
    costs: list[Sequence[str]] = [
        *memory_costs(predictions),
        ("step", *(format_ms(found.step_ms) for found in predictions)),
        ("tokens/s", *(f"{found.tokens_per_s:,.0f}" for found in predictions)),
        ("verdict", *(VERDICTS[priced.verdict] for priced in comparison.plans)),
    ]
    cells = [(f"{cell.category.replace('_', ' ')}{_ASPECTS[cell.aspect]}", *cell.values) for cell in comparison.cells]
    moments = [found.peak_moment for found in predictions]
    return side_by_side(
        labels, costs, always=("peak, at most", "step"), decisions=cells, sizes=comparison.bytes_at_peak, moments=moments
    )


def report_cards(answers: Sequence[CardAnswer], *, num_tokens: int) -> str:
    """One line a card, what its plan does below it, and the dates of prices."""
    rows = [
        (
            answer.card,
            format_bytes(answer.memory_bytes),
            VERDICTS[answer.chosen.verdict] if answer.chosen else "does not fit",
            format_bytes(answer.chosen.prediction.device_peak_high_bytes) if answer.chosen else "-",
            format_ms(_step_ms(answer.chosen.prediction)) if answer.chosen else "-",
            f"{answer.tokens_per_s:,.0f}" if answer.tokens_per_s else "-",
            _money(answer, "rented"),
            _money(answer, "energy"),
        )
        for answer in answers
    ]
    header = ("card", "memory", "verdict", "peak", "step", "tokens/s", "rent/M tok", "power/M tok")
    lines = format_table(header, rows).splitlines()
    listed = [lines[0]]
    for line, answer in zip(lines[1:], answers, strict=True):
        listed += [line, wrap_after("    ", answer.what)]
    notes = [f"a million tokens of {num_tokens:,}; rents are {_rents(answers)}"]
    return "\n".join(listed) + "\n\n" + format_bullets(notes)


def _step_ms(found: Prediction | GenerationPrediction) -> float:
    """The time of a step; of a generation each later token's."""
    return found.step_ms if isinstance(found, Prediction) else found.decode_ms


def _money(answer: CardAnswer, kind: str) -> str:
    for cost in answer.costs:
        if cost.kind == kind and cost.per_million_tokens is not None:
            return f"{cost.currency} {cost.per_million_tokens:.3g}"
    return "-"


def _rents(answers: Sequence[CardAnswer]) -> str:
    rents = sorted({cost.price_date for answer in answers for cost in answer.costs if cost.kind == "rented"})
    if not rents:
        return "not known; docs/devices.md says how to add prices"
    when = rents[0] if len(rents) == 1 else f"{rents[0]} to {rents[-1]}"
    return f"list prices of {when}, the cheapest known of each card; energy is at full board power"


def report_ways_out(error: NoFeasiblePlan) -> str:
    """Ways out where nothing fits, what costs least first, each with the options that ask for it."""
    ways = error.fields.get("ways_out", ())
    if not ways:
        return error.hint
    listed = [line for way in ways for line in (f"- {way['sentence']}", f"    {way['flags']}")]
    return "\n".join(["What would fit, what costs least first:", *listed])
