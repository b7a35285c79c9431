"""What benchmarks share that run for long: rows printed and written as they come, goals, failures, and what a machine is.

The file holds ``{"machine": ..., "rows": [...], "summary": {goal: {"value", "goal", "met"}}}``.
"""

import contextlib
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.base.units import format_bytes

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = {f"{_ROOT}/": "", f"{sys.prefix}/": "", f"{sys.base_prefix}/": "", f"{Path.home()}/": "~/"}
"""What paths begin with on this machine, and with what in a result, which is published."""


@dataclass(kw_only=True)
class Record:
    """The rows so far, printed and written as they come: what came stays when a later one dies."""

    file: Path | None
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What goes beside the summary, where a benchmark has more to tell than goals."""
    started_s: float = field(default_factory=time.monotonic)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        short = {name: value for name, value in row.items() if not isinstance(value, dict) and name != "traceback"}
        print("  ".join(f"{name}={shown(name, value)}" for name, value in short.items()), flush=True)
        self._write()

    def add_all(self, what: str, rows: Iterator[Row]) -> None:
        """The rows, and instead of an error one more that tells it."""
        try:
            for row in rows:
                self.add(row)
        except Exception as error:
            self.add(failure(what, error))
        clear()

    def close(self) -> None:
        for name, entry in self.summary.items():
            print(f"{name}: {entry['value']} (goal {entry['goal']}, {'met' if entry['met'] else 'MISSED'})")
        print(f"took {time.monotonic() - self.started_s:.0f} s")
        self._write()

    def _write(self) -> None:
        if self.file is not None:
            result = {"machine": self.machine, "rows": self.rows, "summary": self.summary}
            if self.tables:
                result["tables"] = self.tables
            self.file.write_text(json.dumps(result, indent=1) + "\n")


def failure(what: object, error: Exception) -> Row:
    """The row that tells why something has none, with paths as the repository has them."""
    trace = _as_in_repository("".join(traceback.format_exception(error)))
    return {"what": "failed", "of": what, "error": _as_in_repository(f"{type(error).__name__}: {error}"), "traceback": trace}


def _as_in_repository(text: str) -> str:
    for folder, name in _FOLDERS.items():
        text = text.replace(folder, name)
    return text


def goal(value: object, wanted: object, *, met: bool) -> dict[str, Any]:
    return {"value": value, "goal": wanted, "met": met}


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
    """As the system calls it; Python often knows the architecture alone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def clear() -> None:
    """Cycles that hold tensors, and what the allocator keeps cached."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def shown(name: str, value: object) -> object:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
