"""A benchmark's record: rows printed and written as they come, failures, the machine, and at the end its goals and exit code.

The file holds ``{"machine": ..., "rows": [...], "summary": {goal: {"value", "goal", "met"}}}``. The summary has the goals that
the run could measure: a quick run, and one of some cases alone, leave out what they have no rows for and what needs more than
they measure (``goal``). A full run has all goals, and misses those that it shows nothing for. A benchmark ends with 1 where a
goal of its summary is missed, else with 0.
"""

import contextlib
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optimizer.base.units import format_bytes

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
GoalEntry = dict[str, Any]
"""An entry of the summary, as ``goal`` makes it."""
Needs = Literal["rows", "full size", "all cases"]
"""The least run that can judge a goal: any with a row for it, any that is not quick, or only one of all parts and cases."""

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = {f"{_ROOT}/": "", f"{sys.prefix}/": "", f"{sys.base_prefix}/": "", f"{Path.home()}/": "~/"}
"""Folders that paths begin with on this machine, and the names that replace them in a result, which is published."""


@dataclass(kw_only=True)
class Record:
    """The rows so far, printed and written as they come: the earlier ones stay when a later one fails."""

    file: Path | None
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    is_quick: bool = False
    """Fewer and smaller cases are measured, in fewer rounds (``--quick``)."""
    is_whole: bool = True
    """All cases are measured; False if some were asked for by name."""
    summary: dict[str, GoalEntry] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tables beside the summary, for a benchmark that reports more than goals."""
    started_s: float = field(default_factory=time.monotonic)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        short = {name: value for name, value in row.items() if not isinstance(value, dict) and name != "traceback"}
        print("  ".join(f"{name}={shown(name, value)}" for name, value in short.items()), flush=True)
        self._write()

    def add_all(self, what: str, rows: Iterator[Row]) -> None:
        """Add the rows; an error ends them and becomes a row itself."""
        try:
            for row in rows:
                self.add(row)
        except Exception as error:
            self.add(failure(what, error))
        clear()

    def finish(self, goals: Mapping[str, GoalEntry]) -> int:
        """Put the goals that this run measured into the summary, print and write it; return the benchmark's exit code."""
        left_out = [name for name, entry in goals.items() if not self._judges(entry)]
        for name, entry in goals.items():
            if name not in left_out:
                self.summary[name] = {key: value for key, value in entry.items() if key != "needs"}
        self._close()
        if left_out:
            print("left to a full run:", *left_out, sep="\n  ")
        return 0 if all(entry["met"] for entry in self.summary.values()) else 1

    def _judges(self, entry: GoalEntry) -> bool:
        needs: Needs = "all cases" if entry["value"] is None else entry.get("needs", "rows")
        if needs == "all cases":
            return self.is_whole and not self.is_quick
        return needs == "rows" or not self.is_quick

    def _close(self) -> None:
        for name, entry in self.summary.items():
            print(f"{name}: {entry['value']} (goal {entry['goal']}, {'met' if entry['met'] else 'MISSED'})")
        print(f"took {time.monotonic() - self.started_s:.0f} s")
        self._write()

    def _write(self) -> None:
        if self.file is not None:
            result = {"machine": self.machine, "rows": self.rows, "summary": self.summary}
            if self.tables:
                result["tables"] = self.tables
            staged = self.file.with_name(f".{self.file.name}")  # a run may be ended at any time, and its file read
            staged.write_text(json.dumps(result, indent=1) + "\n")
            staged.replace(self.file)


def failure(what: object, error: Exception) -> Row:
    """A row that says why something has none, with paths as the repository has them."""
    trace = _as_in_repository("".join(traceback.format_exception(error)))
    return {"what": "failed", "of": what, "error": _as_in_repository(f"{type(error).__name__}: {error}"), "traceback": trace}


def _as_in_repository(text: str) -> str:
    for folder, name in _FOLDERS.items():
        text = text.replace(folder, name)
    return text


def goal(value: object, wanted: object, *, met: bool, needs: Needs = "rows") -> GoalEntry:
    """One goal of a summary.

    value: None if the run has nothing to judge the goal by, which is then not met.
    needs: "full size" for a time that quick runs, of few rounds and small models, do not settle; "all cases" for a count.
    """
    entry = {"value": value, "goal": wanted, "met": met and value is not None}
    return entry if needs == "rows" else {**entry, "needs": needs}


def at_most(value: float | None, limit: float, *, needs: Needs = "rows") -> GoalEntry:
    """The goal that a value, None if nothing was measured, is no larger than the limit."""
    return goal(value, f"<= {limit}", met=value is not None and value <= limit, needs=needs)


def all_of(outcomes: Iterable[bool], *, needs: Needs = "rows") -> GoalEntry:
    """The goal that every outcome is good; without outcomes nothing was measured."""
    found = list(outcomes)
    value = f"{sum(found)} of {len(found)}" if found else None
    return goal(value, "all", met=all(found), needs=needs)


def none_of(num_bad: int, rows: Sized) -> GoalEntry:
    """The goal that nothing bad is found in the rows; without rows nothing was measured."""
    return goal(num_bad if rows else None, 0, met=num_bad == 0)


def describe_machine(device: "torch.device | None" = None) -> dict[str, Any]:
    """device: where tensors are; None for a benchmark without any, whose process must not import torch."""
    facts: dict[str, Any] = {
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
    }
    if device is None:
        return facts
    import torch

    facts |= {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"device": properties.name, "device_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts


def _processor_name() -> str:
    """The system's name of the processor; Python often knows the architecture alone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def clear() -> None:
    """Free cycles that hold tensors, and the blocks that the allocator keeps cached."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def shown(name: str, value: object) -> object:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
