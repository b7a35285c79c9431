"""The report of ``headroom estimate``: the plans, the peak and its reasons, the step over time, what each knob would buy."""

from collections.abc import Sequence

from optimizer.api.estimate import Estimate
from optimizer.api.estimate_padded import PaddedEstimate
from optimizer.base.units import format_bytes
from optimizer.cli.reports.tables import card_table, contributors_table, lanes_table, peak_table
from optimizer.cli.reports.text import (
    VERDICTS,
    categories_table,
    format_bullets,
    format_header,
    format_ms,
    format_pairs,
    format_table,
    plans_table,
    stage_sentence,
)
from optimizer.estimate.prediction import Prediction
from optimizer.hardware.machine import PROBE_DISTURBED_FACT
from optimizer.hardware.rental import Cost, describe_costs
from optimizer.plan.explain.training import explain_plan
from optimizer.profile.time_kinds import PRODUCTS
from optimizer.search.answer.knobs import Knob

_CHART_COLUMNS = 72
_CHART_ROWS = 8


def report_estimate(estimate: Estimate, *, is_explained: bool = False) -> str:
    """is_explained: with the step over time, the lanes and the knobs."""
    priced = estimate.priced
    baseline = estimate.plans[0].prediction if len(estimate.plans) > 1 else None
    sentences = explain_plan(priced.plan, prediction=priced.prediction, baseline=baseline)
    parts = [
        format_header(
            f"{estimate.model_type}, {estimate.num_blocks} blocks, {estimate.num_parameters:,} trained parameters",
            workload=estimate.workload,
            machine=estimate.machine,
            budgets=[
                f"{format_bytes(estimate.goal.device_budget_bytes)} on the device",
                f"{format_bytes(estimate.host_budget_bytes)} on the host",
            ],
        ),
        plans_table(estimate.plans),
        f"Verdict: {VERDICTS[priced.verdict]}\n{format_bullets(_verdict_sentences(estimate))}",
    ]
    if not is_explained:
        return "\n\n".join([*parts, categories_table(priced.prediction), f"Plan\n{format_bullets(sentences)}"])
    parts.append(peak_table(estimate.explanation))
    if priced.prediction.memory is not None and estimate.machine.device.kind == "cuda":
        parts += [card_table(priced.prediction.memory), contributors_table(priced.prediction.memory)]
    parts += [
        f"Plan\n{format_bullets(sentences)}",
        f"Device memory over one step of {format_ms(priced.prediction.step_ms)}\n{_chart(priced.prediction)}",
        lanes_table(estimate.explanation),
    ]
    if priced.prediction.busy_by_kind_ms:
        parts.append(_kinds_table(priced.prediction))
    parts.append(_knobs_table(estimate.knobs))
    return "\n\n".join(parts)


def report_padded(estimate: PaddedEstimate) -> str:
    """A dataset's padded batches: the worst, the mean, and the share of padding."""
    predicted, batch = estimate.predicted, estimate.predicted.worst_batch
    peak = f"{format_bytes(predicted.device_peak_bytes)}, at most {format_bytes(predicted.device_peak_high_bytes)}"
    rows = [
        ("sequences", f"{estimate.num_sequences:,}, cut to {estimate.workload.sequence_length:,} tokens"),
        ("worst batch", f"step {batch.step + 1:,}: {batch.num_sequences} sequences of {batch.length:,} tokens"),
        ("device memory there", f"{peak}, {predicted.peak.moment}"),
        ("that step", format_ms(predicted.worst.step_ms)),
        ("a step on average", format_ms(predicted.mean.step_ms)),
        (
            "padded lengths",
            f"half up to {predicted.median_length:,}, 90 % up to {predicted.p90_length:,}, 99 % up to {predicted.p99_length:,}",
        ),
        ("padding", f"{predicted.padding_share:.0%} of all tokens"),
        ("verdict", VERDICTS[estimate.verdict]),
    ]
    return format_pairs(rows)


def report_costs(costs: tuple[Cost, ...], *, device: str, num_steps: int) -> str:
    """Costs of all steps, each with the date of its price; or that no price is known."""
    return f"Cost of {num_steps:,} steps\n{format_bullets(describe_costs(costs, device=device))}"


def _verdict_sentences(estimate: Estimate) -> list[str]:
    prediction = estimate.priced.prediction
    sizes = f"{format_bytes(prediction.device_peak_low_bytes)} to {format_bytes(prediction.device_peak_high_bytes)}"
    times = f"{format_ms(prediction.step_low_ms)} to {format_ms(prediction.step_high_ms)}"
    sentences = [f"{estimate.priced.label}: {sizes} on the device, {times} a step"]
    memory = prediction.memory
    if memory is not None and memory.total_bytes:
        sentences.append(
            f"with the allocator's gaps, workspaces and the CUDA context: {format_bytes(memory.process.low)} to "
            f"{format_bytes(memory.process.high)} of the card's {format_bytes(memory.total_bytes)}"
        )
    sentences += [stage_sentence(peak) for peak in prediction.stages or prediction.peaks]
    disk_bytes = estimate.goal.disk_budget_bytes or estimate.machine.disk_free_bytes
    sentences += prediction.stages_over(host_bytes=estimate.host_budget_bytes, disk_bytes=disk_bytes)
    if prediction.host_peak_bytes > estimate.host_budget_bytes:
        sentences.append(
            f"the host would hold {format_bytes(prediction.host_peak_bytes)}, of "
            f"{format_bytes(estimate.host_budget_bytes)} it has"
        )
    if not prediction.num_time_runs and PROBE_DISTURBED_FACT in estimate.machine.facts:
        sentences.append(f"times are uncertain: {estimate.machine.facts[PROBE_DISTURBED_FACT]}")
    sentences += estimate.unread
    if not prediction.is_model_held_to_measurement:
        sentences.append("no test holds predictions for this model type to a measurement; it was traced as the others are")
    if estimate.nothing_fits is not None:
        sentences.append(f"no plan that is allowed fits: {estimate.nothing_fits}")
    return sentences


def _chart(prediction: Prediction) -> str:
    """Highest level in each of so many equal stretches of the step; the phases stand below."""
    points = prediction.timeline
    levels, phases = [0] * _CHART_COLUMNS, [""] * _CHART_COLUMNS
    for point in points:
        column = min(_CHART_COLUMNS - 1, int(_CHART_COLUMNS * point.offset_ms / prediction.step_ms))
        levels[column] = max(levels[column], sum(point.bytes_by_category.values()))
        phases[column] = point.phase
    for column in range(1, _CHART_COLUMNS):
        # A stretch without a point is inside a task, which began in an earlier one.
        levels[column] = levels[column] or levels[column - 1]
        phases[column] = phases[column] or phases[column - 1]
    top = max(levels)
    labels = {_CHART_ROWS: format_bytes(top), 1: format_bytes(round(top / _CHART_ROWS))}
    width = max(len(label) for label in labels.values())
    lines = [
        f"{labels.get(row, '').rjust(width)} |"
        + "".join("#" if level * _CHART_ROWS > top * (row - 1) else " " for level in levels).rstrip()
        for row in range(_CHART_ROWS, 0, -1)
    ]
    return "\n".join([*lines, f"{' ' * width} |{_phase_marks(phases)}"])


def _phase_marks(phases: Sequence[str]) -> str:
    """``f``, ``b`` and ``o`` for each column's phase: forward, backward, optimizer."""
    return "".join(phase[:1] or " " for phase in phases) + "  (forward, backward, optimizer)"


def _kinds_table(prediction: Prediction) -> str:
    exposed = prediction.exposed_by_kind_ms
    rows = [
        (kind.replace("_", " "), format_ms(takes_ms), format_ms(exposed.get(kind, 0.0)), _attained(prediction, kind))
        for kind, takes_ms in prediction.busy_by_kind_ms.items()
    ]
    again = f"\n{format_ms(prediction.recomputed_ms)} of it is done a second time" if prediction.recomputed_ms else ""
    return "Kinds of work\n" + format_table(("", "takes", "exposed", "at"), rows) + again


def _attained(prediction: Prediction, kind: str) -> str:
    rate = prediction.attained_by_kind.get(kind)
    if not rate:
        return ""
    return f"{rate / 1e12:.1f} TFLOP/s" if kind in PRODUCTS else f"{format_bytes(round(rate))}/s"


def _knobs_table(knobs: Sequence[Knob]) -> str:
    rows = [
        (
            knob.change,
            _signed(knob.device_change_bytes),
            _signed(knob.host_change_bytes + knob.disk_change_bytes + knob.remote_change_bytes),
            f"{'+' if knob.step_change_ms >= 0 else '-'}{format_ms(abs(knob.step_change_ms))}",
            VERDICTS[knob.verdict],
            "" if knob.is_lossless else "changes the numbers",
        )
        for knob in knobs
    ]
    table = format_table(("one change", "device peak", "elsewhere", "step", "verdict", ""), rows)
    return f"What each knob would buy and cost, from this plan\n{table}"


def _signed(num_bytes: int) -> str:
    if num_bytes == 0:
        return "-"
    return f"{'+' if num_bytes > 0 else '-'}{format_bytes(abs(num_bytes))}"
