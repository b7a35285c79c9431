"""Draws a job in a terminal: a progress bar, memory stacked by category against its budget, speed and loss.

The colours and order of the categories are those of every other page. Nothing here talks to the service: a JobView is fed
events and renders itself, in place where there is a terminal, as plain lines where there is none.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headroom.client import Row, StreamEvent
from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS, Category
from optimizer.base.units import format_bytes, format_duration

CATEGORY_COLOURS: dict[Category, str] = {
    "weights": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_state": "#7B4EA3",
    "activations": "#009E73",
    "logits_and_loss": "#56B4E9",
    "kv_cache": "#D55E00",
    "temporaries": "#8A8F98",
}
CATEGORY_SIGNS: dict[Category, str] = {
    "weights": "█",
    "gradients": "▞",
    "optimizer_state": "▓",
    "activations": "▒",
    "logits_and_loss": "▤",
    "kv_cache": "▥",
    "temporaries": "░",
}
"""Legible without colour too."""
BUDGET_COLOUR = "#C62828"
BAR_CELLS = 48
_BESIDE_BAR = 8
"""Room for ``  100 %`` at its end."""
PLAIN_EVERY_S = 5.0
"""Least time between two progress lines where lines cannot be redrawn."""


@dataclass(kw_only=True)
class JobView:
    """The state of a followed job; ``feed`` takes the stream's events."""

    job: Row
    sample: Row = field(default_factory=dict)
    """The newest sample of a step, or of generating."""
    validation_loss: float | None = None
    peak_bytes: int = 0
    """Largest device_peak_bytes seen."""
    connection: str = ""
    message: str = ""

    def feed(self, event: StreamEvent) -> None:
        data = event.data
        self.connection = "connection lost, resuming" if event.kind == "lost" else ""
        if event.kind == "snapshot":
            self._take_snapshot(data)
        elif event.kind in ("state", "done"):
            self._take_job(data.get("job", data))
        elif event.kind == "sample":
            self._take_sample(data.get("sample", data))
        elif event.kind in ("log", "phase"):
            self.message = str(data.get("message", ""))

    def _take_snapshot(self, data: Row) -> None:
        self._take_job(data.get("job", data))
        for sample in data.get("samples", []):
            self._take_sample(sample)

    def _take_job(self, job: Row) -> None:
        if "state" not in job:
            return
        self.job = {**self.job, **job}
        summary = self.job.get("summary") or {}
        self.peak_bytes = max(self.peak_bytes, int(summary.get("device_peak_bytes") or 0))
        # While it runs, the summary is up to one evaluation older than the samples.
        is_newest = self.validation_loss is None or bool(self.job.get("is_terminal"))
        if summary.get("validation_loss") is not None and is_newest:
            self.validation_loss = summary["validation_loss"]

    def _take_sample(self, sample: Row) -> None:
        if sample.get("kind") == "eval":
            self.validation_loss = sample.get("validation_loss", self.validation_loss)
        elif sample.get("kind") in ("step", "generate"):
            self.sample = sample
            self.peak_bytes = max(self.peak_bytes, int(sample.get("device_peak_bytes") or 0))

    @property
    def step(self) -> int:
        reached = self.sample.get("prompts_done" if self.generates else "step")
        return max(int(self.job.get("step") or 0), int(reached or 0))

    @property
    def generates(self) -> bool:
        """True where prompts are counted instead of steps."""
        return self.job.get("kind") == "generate"

    @property
    def num_steps(self) -> int:
        return int(self.job.get("num_steps") or 0)

    @property
    def budget_bytes(self) -> int:
        goal = (self.job.get("spec") or {}).get("goal") or {}
        return int(goal.get("device_budget_bytes") or 0)

    @property
    def predicted_bytes(self) -> int:
        return int((self.job.get("prediction") or {}).get("device_peak_bytes") or 0)

    @property
    def eta_s(self) -> float | None:
        """From the newest step's time; the job's own figure until there is one."""
        step_ms = self.sample.get("step_ms")
        if step_ms and self.num_steps:
            return max(0, self.num_steps - self.step) * float(step_ms) / 1000
        eta_s = self.job.get("eta_s")
        return float(eta_s) if eta_s is not None else None


def headline(view: JobView) -> str:
    """``kjv-demo  running · training · step 128 of 400 · 6 min left``"""
    job = view.job
    parts = [str(job.get("state", ""))]
    if job.get("phase") and not job.get("is_terminal"):
        parts.append(str(job["phase"]))
    if view.num_steps:
        parts.append(f"{'prompt' if view.generates else 'step'} {view.step:,} of {view.num_steps:,}")
    if view.eta_s is not None and not job.get("is_terminal") and view.step < view.num_steps:
        parts.append(f"{format_duration(view.eta_s)} left")
    if view.connection:
        parts.append(view.connection)
    return f"{job.get('name', '')}  {' · '.join(part for part in parts if part)}"


def memory_words(view: JobView) -> str:
    """``peak 412 MiB of 480 MiB · predicted 409 MiB (-0.7 %)``"""
    words = f"peak {format_bytes(view.peak_bytes)}"
    if view.budget_bytes:
        words += f" of {format_bytes(view.budget_bytes)}"
    if view.predicted_bytes:
        words += f" · predicted {format_bytes(view.predicted_bytes)}"
        if view.peak_bytes:
            words += f" ({view.predicted_bytes / view.peak_bytes - 1:+.1%})".replace("%", " %")
    return words


def figures(view: JobView) -> str:
    """``1,240 tok/s · loss 3.91 · validation 4.20``"""
    parts = []
    if view.sample.get("tokens_per_s"):
        parts.append(f"{view.sample['tokens_per_s']:,.0f} tok/s")
    if view.sample.get("num_errors"):
        parts.append(f"{view.sample['num_errors']:,} with an error")
    if view.sample.get("loss") is not None:
        parts.append(f"loss {view.sample['loss']:.3f}")
    if view.validation_loss is not None:
        parts.append(f"validation {view.validation_loss:.3f}")
    return " · ".join(parts)


def progress_bar(done: int, total: int, *, cells: int = BAR_CELLS) -> Text:
    filled = round(cells * min(1.0, done / total)) if total else 0
    bar = Text("█" * filled, style="bold")
    bar.append("─" * (cells - filled), style="dim")
    return bar.append(f"  {done / total:.0%}".replace("%", " %") if total else "")


def memory_bar(bytes_by_category: dict[str, Any], *, limit_bytes: int, cells: int = BAR_CELLS) -> Text:
    """Categories stacked left to right, the budget as a red line at the right end; more than fits is cut at the line."""
    bar = Text()
    known = [(category, int(bytes_by_category.get(category) or 0)) for category in CATEGORIES]
    scale_bytes = max(limit_bytes, 1)
    reached_bytes, reached_cells = 0, 0
    for category, num_bytes in known:
        reached_bytes += num_bytes
        end = min(cells, round(cells * reached_bytes / scale_bytes))
        bar.append(CATEGORY_SIGNS[category] * (end - reached_cells), style=CATEGORY_COLOURS[category])
        reached_cells = end
    bar.append(" " * (cells - reached_cells))
    return bar.append("▏", style=f"bold {BUDGET_COLOUR}")


def memory_legend(bytes_by_category: dict[str, Any]) -> Text:
    legend = Text()
    for category in CATEGORIES:
        num_bytes = int(bytes_by_category.get(category) or 0)
        if num_bytes:
            legend.append(f"{CATEGORY_SIGNS[category]} ", style=CATEGORY_COLOURS[category])
            legend.append(f"{CATEGORY_LABELS[category]} {format_bytes(num_bytes)}  ", style="dim")
    return legend


def render(view: JobView, *, width: int = BAR_CELLS + _BESIDE_BAR) -> Group:
    """The whole block, six lines where the terminal is wide enough. width: of the terminal; a narrow one has shorter bars."""
    cells = max(8, min(BAR_CELLS, width - _BESIDE_BAR))
    lines: list[Text] = [Text(headline(view), style="bold"), progress_bar(view.step, view.num_steps, cells=cells)]
    by_category = view.sample.get("device_bytes") or {}
    if by_category:
        limit_bytes = view.budget_bytes or sum(int(value or 0) for value in by_category.values())
        bar = memory_bar(by_category, limit_bytes=limit_bytes, cells=cells)
        lines += [bar, memory_legend(by_category), Text(memory_words(view))]
    elif view.message:
        lines.append(Text(view.message, style="dim"))
    if figures(view):
        lines.append(Text(figures(view)))
    return Group(*lines)


def plain_line(view: JobView) -> str:
    """One line for logs and pipes."""
    parts = [headline(view)]
    if view.peak_bytes:
        parts.append(memory_words(view))
    parts.append(figures(view) or view.message)
    return " · ".join(part for part in parts if part)


def watch(view: JobView, events: Iterable[StreamEvent], *, console: Console) -> JobView:
    """Feed every event to the view and show it, until the events end. Returns the view as it is then."""
    if console.is_terminal:
        with Live(render(view, width=console.width), console=console, refresh_per_second=8) as live:
            for event in events:
                view.feed(event)
                live.update(render(view, width=console.width))
        return view
    _watch_plainly(view, events, console=console)
    return view


def _watch_plainly(view: JobView, events: Iterable[StreamEvent], *, console: Console) -> None:
    """A line for each change of state or phase, in between one every few seconds; never the same line twice in a row."""
    shown_at, shown_moment, shown_line = 0.0, None, ""

    def show() -> None:
        nonlocal shown_at, shown_line
        line = plain_line(view)
        if line != shown_line:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
            shown_at, shown_line = time.monotonic(), line

    for event in events:
        view.feed(event)
        moment = (view.job.get("state"), view.job.get("phase"), view.connection)
        if moment != shown_moment or time.monotonic() - shown_at >= PLAIN_EVERY_S:
            shown_moment = moment
            show()
    show()
