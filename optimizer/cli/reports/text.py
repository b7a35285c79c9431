"""Writes the planning commands' reports: aligned plain text, sizes and durations with their units. Same text in a terminal and
a pipe."""

import textwrap
from collections.abc import Iterable, Sequence

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.base.units import format_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction, StagePeak
from optimizer.hardware.devices import BESIDE_FACT
from optimizer.hardware.machine import PROBE_DISTURBED_FACT, Machine, PeerLink
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan
from optimizer.workload import TrainingWorkload

WIDTH = 100
"""Columns that tables and sentences keep to."""
VERDICTS = {"fits": "fits", "tight": "tight", "does_not_fit": "does not fit", "unknown": "unknown"}


def report_profile(profile: Profile) -> str:
    return f"{profile.num_blocks} blocks, {profile.num_parameters:,} parameters"


def report_machine(machine: Machine) -> str:
    rates = machine.rates
    rows = [
        ("machine", machine.name),
        (
            "device",
            f"{machine.device.name} ({machine.device.kind}), {format_bytes(machine.device.memory_bytes)} usable",
        ),
        ("host memory", format_bytes(machine.host_memory_bytes)),
        *((f"matrix products {dtype}", _tera(rate)) for dtype, rate in rates.matmul_flops_per_s.items()),
        *((f"attention {dtype}", _tera(rate)) for dtype, rate in rates.attention_flops_per_s.items()),
        ("element-wise", f"{format_bytes(round(rates.memory_bytes_per_s))}/s"),
        ("one op", f"{rates.op_overhead_s * 1e6:.1f} us"),
        *(
            (f"dispatch {way}", f"{seconds * 1e6:.1f} us an op")
            for way, seconds in (("forward", rates.forward_dispatch_s), ("backward", rates.backward_dispatch_s))
            if seconds is not None
        ),
        *([("waking threads", f"{rates.wake_s * 1e6:.1f} us")] if rates.wake_s else []),
        ("device to host", f"{format_bytes(round(rates.device_to_host_bytes_per_s))}/s"),
        ("host to device", f"{format_bytes(round(rates.host_to_device_bytes_per_s))}/s"),
        *(
            (f"optimizer {kind}", f"{rate / 1e6:,.0f} M elements/s")
            for kind, rate in rates.optimizer_elements_per_s.items()
        ),
        *_store_rows("disk", rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s, machine.disk_free_bytes),
        *(
            [("disk, from the page cache", f"{format_bytes(round(rates.disk_cached_read_bytes_per_s))}/s read")]
            if rates.disk_cached_read_bytes_per_s is not None
            else []
        ),
        *_store_rows(
            "remote store", rates.remote_write_bytes_per_s, rates.remote_read_bytes_per_s, machine.remote_free_bytes
        ),
        *(
            [("round trip there", f"{rates.remote_round_trip_s * 1e6:.1f} us")]
            if rates.remote_round_trip_s is not None
            else []
        ),
        ("rates", rates.source),
        *((name, fact) for name, fact in machine.facts.items() if name != PROBE_DISTURBED_FACT),
    ]
    remark = machine.facts.get(PROBE_DISTURBED_FACT)
    return format_pairs(rows) + (f"\n\nNote: {remark}." if remark else "")


def _store_rows(
    name: str, write_bytes_per_s: float | None, read_bytes_per_s: float | None, free_bytes: int
) -> list[tuple[str, str]]:
    if write_bytes_per_s is None or read_bytes_per_s is None:
        return []
    speeds = f"{format_bytes(round(write_bytes_per_s))}/s written, {format_bytes(round(read_bytes_per_s))}/s read"
    return [(name, f"{speeds}, {format_bytes(free_bytes)} free")]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Columns two spaces apart; the first ``left`` and the last to the left, the others to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if column < left or column == len(row) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_ms(milliseconds: float) -> str:
    """Durations of a step: ``0.84 ms``, ``12.3 ms``, ``1.50 s``."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:.1f} ms"


def format_header(model: str, *, workload: TrainingWorkload, machine: Machine, budgets: Sequence[str]) -> str:
    """The first lines of a report: the question."""
    source = "rates measured" if machine.rates.source == "measured" else "rates from data sheets, unmeasured"
    return format_pairs(
        [
            ("model", model),
            ("workload", f"{workload.global_batch_size} sequences of {workload.sequence_length:,} tokens a step"),
            ("machine", f"{machine.name}, {machine.device.name}; {source}"),
            *([("devices", _describe_devices(machine))] if machine.total_devices > 1 else []),
            *([("to the host", _describe_way(machine))] if machine.total_devices > 1 and machine.device.kind == "cuda" else []),
            *([("beside each" if machine.hosts else "beside it", found)] if (found := machine.facts.get(BESIDE_FACT)) else []),
            ("budget", ", ".join(budgets)),
        ]
    )


def _describe_devices(machine: Machine) -> str:
    each = [f"{kind.num_devices}x {kind.device.name}" for kind in machine.kinds]
    count = ", ".join(each) if machine.others else f"{machine.num_devices} alike"
    if machine.peers is None:
        return count
    inside = [f"in {host.name} by {_describe_link(host.peers)}" for host in machine.hosts if host.peers is not None]
    if machine.peers_within is not None:
        inside.append(f"each {machine.num_within} neighbours by {_describe_link(machine.peers_within)}")
    assumed = "measured" if machine.peers.source == "measured" else "from data sheets or assumed"
    return ", ".join([f"{count}, linked by {_describe_link(machine.peers)}", *inside]) + f"; {assumed}"


def _describe_way(machine: Machine) -> str:
    """The way of several cards to the host, and how it can be stated where it is assumed."""
    if machine.hosts:
        return ", ".join(f"in {host.name} {_count_on_switch(host.cards_per_switch)}" for host in machine.hosts)
    stated = " (--cards-per-switch)" if machine.rates.source == "table" else ""
    return _count_on_switch(machine.cards_per_switch) + stated


def _count_on_switch(cards_per_switch: int) -> str:
    return "a PCIe link for each card" if cards_per_switch == 1 else f"{cards_per_switch} cards on each PCIe link"


def _describe_link(link: PeerLink) -> str:
    through = {
        "nvlink": "NVLink",
        "pcie": "PCIe",
        "host": "the host's memory",
        "loopback": "this machine's own network",
        "network": f"a network with {link.latency_s * 1000:.1f} ms of delay",
    }
    rate = f"{link.bytes_per_s / 1e9:.1f} GB/s" if link.bytes_per_s >= 1e8 else f"{link.bytes_per_s / 1e6:.1f} MB/s"
    return f"{through[link.kind]}, {rate} each way"


def plans_table(plans: Sequence[PricedPlan]) -> str:
    header = ("plan", "peak", "at most", "elsewhere", "copied", "step", "tokens/s", "verdict")
    return format_table(header, [_plan_row(priced) for priced in plans])


def _plan_row(priced: PricedPlan) -> tuple[str, ...]:
    prediction = priced.prediction
    return (
        priced.label,
        *peak_cells(prediction),
        size_or_dash(sum(prediction.copied_bytes.values())),
        format_ms(prediction.step_ms),
        f"{prediction.tokens_per_s:,.0f}",
        VERDICTS[priced.verdict],
    )


def peak_cells(prediction: Prediction | GenerationPrediction) -> tuple[str, str, str]:
    """The peak, its upper end, and what lies elsewhere."""
    peaks = prediction.device_peak_bytes, prediction.device_peak_high_bytes
    return format_bytes(peaks[0]), format_bytes(peaks[1]), size_or_dash(bytes_elsewhere(prediction))


def bytes_elsewhere(prediction: Prediction | GenerationPrediction) -> int:
    """On host, disk and remote store together, each at its most."""
    return prediction.host_peak_bytes + prediction.disk_peak_bytes + prediction.remote_peak_bytes


def size_or_dash(num_bytes: int) -> str:
    """A dash for nothing."""
    return format_bytes(num_bytes) if num_bytes else "-"


def categories_table(prediction: Prediction) -> str:
    sizes = prediction.device_bytes_by_category
    rows = [(CATEGORY_LABELS[name], format_bytes(sizes[name])) for name in CATEGORIES if sizes.get(name)]
    rows.append(("together", format_bytes(prediction.device_peak_bytes)))
    width = max(len(size) for _, size in rows)
    return f"At the peak, {prediction.peak_moment}\n" + format_pairs([(name, size.rjust(width)) for name, size in rows])


def format_bullets(sentences: Iterable[str]) -> str:
    """One a line, longer ones wrapped."""
    return "\n".join(wrap_after("- ", sentence) for sentence in sentences)


def wrap_after(opening: str, text: str) -> str:
    """``opening`` and the text, in lines that fit a terminal; those after the first begin where the text does."""
    lines = textwrap.wrap(text, WIDTH - len(opening), break_long_words=False, break_on_hyphens=False)
    return opening + f"\n{' ' * len(opening)}".join(lines)


def format_pairs(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.2f} TFLOP/s" if flops_per_s >= 1e11 else f"{flops_per_s / 1e9:.1f} GFLOP/s"


def stage_sentence(peak: StagePeak) -> str:
    """A stage with its peaks: ``load: 1.2 GiB, 300 MiB on the host``."""
    others = [
        f"{format_bytes(num_bytes)} {place}"
        for num_bytes, place in ((peak.host_peak_bytes, "on the host"), (peak.disk_peak_bytes, "on the disk"))
        if num_bytes
    ]
    moment = f", {peak.moment}" if peak.moment != peak.stage else ""
    return f"{peak.stage.replace('_', ' ')}: {', '.join([format_bytes(peak.device_peak_bytes), *others])}{moment}"
