"""The reports of ``headroom estimate`` and ``headroom plan`` on a batch generation: the same tables as for training."""

from collections.abc import Sequence

from optimizer.api.estimate_generation import GenerationEstimate
from optimizer.base.units import format_bytes, format_duration
from optimizer.cli.reports.compared import memory_costs, side_by_side
from optimizer.cli.reports.tables import card_table, contributors_table, lanes_table, peak_table
from optimizer.cli.reports.text import (
    VERDICTS,
    format_bullets,
    format_ms,
    format_pairs,
    format_table,
    peak_cells,
    stage_sentence,
)
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import stages_over
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import PROBE_DISTURBED_FACT, Machine
from optimizer.plan.pins.generation_knobs import written_value
from optimizer.search.generation.compare import GenerationComparison
from optimizer.search.generation.frontier import generation_label
from optimizer.search.generation.one_device import GenerationSearchResult
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.workload import GenerationWorkload

_NOTHING = 1e-9
"""A gap that is only rounding."""


def report_generation(estimate: GenerationEstimate, *, is_explained: bool = False) -> str:
    """is_explained: with what the card holds besides, the lanes, the kinds of work, and how a token's time grows."""
    prediction = estimate.prediction
    parts = [
        _header(
            f"{estimate.model_type}, {estimate.num_blocks} blocks",
            workload=estimate.workload,
            machine=estimate.machine,
            goal=estimate.goal,
            host_budget_bytes=estimate.host_budget_bytes,
        ),
        generations_table(estimate.plans),
        f"Verdict: {VERDICTS[estimate.verdict]}\n{format_bullets(_verdict_sentences(estimate))}",
        peak_table(estimate.explanation),
    ]
    if is_explained and prediction.memory is not None and estimate.machine.device.kind == "cuda":
        parts += [card_table(prediction.memory), contributors_table(prediction.memory)]
    parts.append(f"Plan\n{format_bullets(estimate.sentences)}")
    if is_explained:
        parts += [lanes_table(estimate.explanation), _kinds_table(prediction), _growth_table(prediction)]
    return "\n\n".join(part for part in parts if part)


def report_generation_search(
    result: GenerationSearchResult,
    *,
    model: str,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    machine: Machine,
    host_budget_bytes: int,
) -> str:
    """Header, the baselines with the chosen plan below them, the frontier, the reasons. model: in a few words."""
    is_best = result.gap < _NOTHING
    gap = "no plan that is allowed and fits is better" if is_best else f"at most {100 * result.gap:.2f} % behind the best"
    return "\n\n".join(
        [
            _header(model, workload=workload, machine=machine, goal=goal, host_budget_bytes=host_budget_bytes),
            generations_table([*result.baselines.values(), result.chosen]),
            "Frontier (smallest budget for each speed)\n" + _frontier_table(result),
            "Chosen plan\n" + format_bullets([*result.explanation, gap]),
        ]
    )


def report_generation_comparison(comparison: GenerationComparison) -> str:
    """Plans of a generation side by side; ``reports/plan.py`` has it for training."""
    predictions = [priced.prediction for priced in comparison.plans]
    costs: list[Sequence[str]] = [
        *memory_costs(predictions),
        ("first token", *(format_ms(found.prefill_ms) for found in predictions)),
        ("later ones", *(format_ms(found.decode_ms) if found.decode_ms else "-" for found in predictions)),
        ("tokens/s", *(f"{found.tokens_per_s:,.1f}" for found in predictions)),
        ("in all", *(format_duration(found.total_s) for found in predictions)),
        ("verdict", *(VERDICTS[priced.verdict] for priced in comparison.plans)),
    ]
    return side_by_side(
        [priced.label for priced in comparison.plans],
        costs,
        always=("peak, at most", "tokens/s"),
        decisions=[
            (decision.knob.replace(".", " ").replace("_", " "), *map(written_value, decision.values))
            for decision in comparison.decisions
        ],
        sizes=comparison.bytes_at_peak,
        moments=[found.peak_moment for found in predictions],
    )


def generations_table(plans: Sequence[PricedGenerationPlan]) -> str:
    """A row for each plan."""
    sizes = ("peak", "at most", "elsewhere")
    header = ("plan", *sizes, "first token", "later ones", "tokens/s", "in all", "verdict", "what it does")
    return format_table(header, [_row(priced) for priced in plans])


def _row(priced: PricedGenerationPlan) -> tuple[str, ...]:
    prediction = priced.prediction
    return (
        priced.label,
        *peak_cells(prediction),
        format_ms(prediction.prefill_ms),
        format_ms(prediction.decode_ms) if prediction.decode_ms else "-",
        f"{prediction.tokens_per_s:,.1f}",
        format_duration(prediction.total_s),
        VERDICTS[priced.verdict],
        generation_label(priced.plan),
    )


def _header(
    model: str, *, workload: GenerationWorkload, machine: Machine, goal: GenerationGoal, host_budget_bytes: int
) -> str:
    source = "rates measured" if machine.rates.source == "measured" else "rates from data sheets, unmeasured"
    most = "up to " if workload.prompt_lengths else ""
    prompts = f"{workload.num_sequences:,} prompt{'s' * (workload.num_sequences != 1)} of {most}{workload.prompt_length:,} tokens"
    return format_pairs(
        [
            ("model", model),
            ("workload", f"{prompts}, {workload.num_new_tokens:,} new ones each"),
            ("machine", f"{machine.name}, {machine.device.name}; {source}"),
            (
                "budget",
                f"{format_bytes(goal.device_budget_bytes)} on the device, {format_bytes(host_budget_bytes)} on the host",
            ),
        ]
    )


def _verdict_sentences(estimate: GenerationEstimate) -> list[str]:
    prediction = estimate.prediction
    sizes = f"{format_bytes(prediction.device_peak_low_bytes)} to {format_bytes(prediction.device_peak_high_bytes)}"
    first = f"{format_ms(prediction.prefill_low_ms)} to {format_ms(prediction.prefill_high_ms)}"
    later = f"{format_ms(prediction.decode_low_ms)} to {format_ms(prediction.decode_high_ms)}"
    times = f"{first} to the first token" + (f", {later} for each later one" if prediction.decode_ms else "")
    sentences = [f"{estimate.priced.label}: {sizes} on the device, {times}"]
    memory = prediction.memory
    if memory is not None and memory.total_bytes:
        sentences.append(
            f"with the allocator's gaps, workspaces and the CUDA context: {format_bytes(memory.process.low)} to "
            f"{format_bytes(memory.process.high)} of the card's {format_bytes(memory.total_bytes)}"
        )
    if prediction.load is not None:
        sentences.append(stage_sentence(prediction.load))
        sentences += stages_over([prediction.load], host_bytes=estimate.host_budget_bytes, disk_bytes=0)
    if prediction.host_peak_bytes > estimate.host_budget_bytes:
        sentences.append(
            f"the host would hold {format_bytes(prediction.host_peak_bytes)}, of "
            f"{format_bytes(estimate.host_budget_bytes)} it has"
        )
    sentences += estimate.unread
    if not prediction.num_time_runs and PROBE_DISTURBED_FACT in estimate.machine.facts:
        sentences.append(f"times are uncertain: {estimate.machine.facts[PROBE_DISTURBED_FACT]}")
    if estimate.nothing_fits is not None:
        sentences.append(f"no plan that is allowed fits: {estimate.nothing_fits}")
    return sentences


def _kinds_table(prediction: GenerationPrediction) -> str:
    """Times of one pass: compute by kind of op, and each lane that compute waits for."""
    prefill, decode = prediction.prefill_by_kind_ms, prediction.decode_by_kind_ms
    rows = [
        (kind.replace("_", " "), format_ms(prefill.get(kind, 0.0)), format_ms(decode.get(kind, 0.0)))
        for kind in dict.fromkeys((*prefill, *decode))
    ]
    return "Where a pass's time goes\n" + format_table(("", "prompt", "later tokens"), rows)


def _growth_table(prediction: GenerationPrediction) -> str:
    """Empty where nothing is decoded."""
    if not prediction.decode:
        return ""
    last = len(prediction.decode) - 1
    shown = [point for index, point in enumerate(prediction.decode) if index in {0, last // 2, last}]
    rows = [
        (f"{point.num_tokens:,}", format_ms(point.step_ms), format_bytes(point.device_peak_bytes)) for point in shown
    ]
    return "One token, as the cache grows\n" + format_table(("tokens seen", "takes", "peak"), rows)


def _frontier_table(result: GenerationSearchResult) -> str:
    rows = [
        (
            format_bytes(point.prediction.device_peak_high_bytes),
            format_duration(point.prediction.total_s),
            f"{point.prediction.tokens_per_s:,.1f}",
            generation_label(point.plan) + ("  <- chosen" if point.plan == result.chosen.plan else ""),
        )
        for point in result.frontier
    ]
    return format_table(("budget", "in all", "tokens/s", "plan"), rows, left=0)
