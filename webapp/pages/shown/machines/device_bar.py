"""A machine's device as one bar: the jobs that hold it, each with its categories; and runs beside their predictions.

Pure functions from what ``webapp.jobs.fleet`` reads to what templates and charts draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.units import format_bytes
from webapp.jobs.fleet import Accuracy, Holder, Occupancy, Within
from webapp.pages.presentation import Segment, StackedBar, bar_percent, stacked_bar

OTHERS = "someone else's job"


@dataclass(frozen=True, kw_only=True)
class DeviceBar:
    """Categories job by job; a job's stretch is as wide as what was set aside for it, or as what it holds where that is more."""

    segments: tuple[Segment, ...]
    bounds: tuple[str, ...]
    """End of a job's stretch, in percent."""
    summary: str


@dataclass(frozen=True, kw_only=True)
class HolderRow:
    """One running job, for the table under the bar."""

    job_id: str
    name: str
    worker: str
    devices: tuple[int, ...]
    """Places of those that it uses."""
    needs_bytes: int
    held_bytes: int
    bar: StackedBar


def device_bar(occupancy: Occupancy) -> DeviceBar:
    widths = [max(holder.needs_bytes, holder.held_bytes) for holder in occupancy.holders]
    scale_bytes = max(occupancy.memory_bytes, sum(widths), 1)
    segments: list[Segment] = []
    bounds = []
    start_bytes = 0
    for holder, width_bytes in zip(occupancy.holders, widths, strict=True):
        own = stacked_bar(holder.bytes_by_category, budget_bytes=None)
        reached_bytes = start_bytes
        for segment in own.segments:
            segments.append(
                Segment(
                    category=segment.category,
                    label=f"{holder.name or OTHERS}: {segment.label}",
                    num_bytes=segment.num_bytes,
                    start_percent=bar_percent(reached_bytes, scale_bytes),
                    width_percent=bar_percent(segment.num_bytes, scale_bytes),
                )
            )
            reached_bytes += segment.num_bytes
        start_bytes += width_bytes
        bounds.append(bar_percent(start_bytes, scale_bytes))
    return DeviceBar(segments=tuple(segments), bounds=tuple(bounds), summary=_summary(occupancy))


def holder_rows(holders: Sequence[Holder]) -> list[HolderRow]:
    return [
        HolderRow(
            job_id=holder.job_id,
            name=holder.name or OTHERS,
            worker=holder.worker,
            devices=holder.devices,
            needs_bytes=holder.needs_bytes,
            held_bytes=holder.held_bytes,
            bar=stacked_bar(holder.bytes_by_category, budget_bytes=holder.needs_bytes),
        )
        for holder in holders
    ]


def devices_words(machine: Mapping[str, Any]) -> str:
    """``2 devices with 40.0 GiB each, linked by NVLink (240.0 GB/s, from data sheets)``; empty for one device."""
    num_devices, device = int(machine.get("num_devices", 1)), machine.get("device", {})
    others = [(kind["device"], int(kind["num_devices"])) for kind in machine.get("others") or ()]
    if num_devices == 1 and not others:
        return ""
    size = format_bytes(int(device["memory_bytes"]))
    shares_memory = device["kind"] == "cpu" and not device.get("is_capped")
    memory = f"{size} together" if shares_memory else f"{size} each"
    if others:
        kinds = [(device, num_devices), *others]
        num_devices = sum(number for _, number in kinds)
        memory = ", ".join(f"{number}x {_with_memory(each)}" for each, number in kinds)
    link = machine.get("peers")
    if not link:
        return f"{num_devices} devices with {memory}"
    rate = f"{link['bytes_per_s'] / 1e9:,.1f} GB/s, {_RATE_SOURCES[link['source']]}"
    return f"{num_devices} devices with {memory}, linked by {_LINKS[link['kind']]} ({rate})"


def _with_memory(device: Mapping[str, Any]) -> str:
    """``RTX 4090 (24.0 GiB)``; the name alone where that says it."""
    name, size = str(device["name"]), format_bytes(int(device["memory_bytes"]))
    return name if name.endswith(size) else f"{name} ({size})"


_LINKS: Final = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "host": "the host's memory",
    "loopback": "the loopback interface",
    "network": "a network",
}
_RATE_SOURCES: Final = {"measured": "measured here", "table": "from data sheets"}


def within_words(found: Within | None) -> str:
    """The error of the predictions so far in words; of fewer than ten runs the worst alone."""
    if found is None:
        return ""
    runs = f"{found.num_runs} run{'' if found.num_runs == 1 else 's'}"
    if found.num_runs < 10:
        return f"within {_share(found.worst)} over {runs}"
    return f"within {_share(found.nine_of_ten)} in 90 % of {runs} (worst {_share(found.worst)})"


def accuracy_facts(accuracy: Accuracy) -> dict[str, Any]:
    """Points of the chart, oldest first."""
    runs = [run for run in reversed(accuracy.runs) if run.predicted_bytes and run.measured_bytes]
    timed = [run for run in reversed(accuracy.runs) if run.predicted_ms and run.measured_ms]
    return {
        "peak": [[run.predicted_bytes, run.measured_bytes, run.name or OTHERS] for run in runs],
        "step": [[run.predicted_ms, run.measured_ms, run.name or OTHERS] for run in timed],
    }


def _share(error: float) -> str:
    return "0.01 %" if 0 < error < 0.0001 else f"{100 * error:.2g} %"


def _summary(occupancy: Occupancy) -> str:
    held = [f"{holder.name or OTHERS} {format_bytes(holder.needs_bytes)}" for holder in occupancy.holders]
    free = f"{format_bytes(max(0, occupancy.free_bytes))} of {format_bytes(occupancy.memory_bytes)} free"
    return f"{free}; set aside: {', '.join(held)}" if held else f"{free}; no job is running"
