"""Notes the peaks of a job's stages on each tier, as the meter and the disk show them, to stand beside the predicted ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.runtime.meter.meter import Meter, count_allocations, mark_phase
from optimizer.runtime.meter.stage_names import JobStage, name_stage

_FOLDERS = ("checkpoints", "artifacts")


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """Most bytes in one stage, over all times that a job was in it."""

    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    """The scratch file and the job's own files."""


class StageWatch:
    """The stages of one attempt. ``scratch_bytes`` is set once there is a scratch file to ask."""

    def __init__(self, meter: Meter, *, job_folder: Path | None) -> None:
        """job_folder: None for a run that leaves no files."""
        self._meter = meter
        self._job_folder = job_folder
        self.scratch_bytes: Callable[[], int] = lambda: 0
        self.found: dict[str, MeasuredStage] = {}

    @contextmanager
    def during(self, stage: JobStage, *, on_host: bool = False) -> Iterator[None]:
        """on_host: everything that is made meanwhile is on the host, and counted there. Raises OutOfDeviceMemory over the cap."""
        with name_stage(stage), self._meter.peak_of_its_own():
            if not on_host:
                yield
            else:
                with count_allocations(self._meter), self._meter.region("temporaries", tier="host"):
                    mark_phase(self._meter, stage)
                    yield
            self._meter.check_peak()
            self.note(stage)

    def note(self, stage: JobStage) -> None:
        """Keep what was highest since the peak was last reset."""
        peak, known = self._meter.peak(), self.found.get(stage, MeasuredStage())
        disk_bytes = self.scratch_bytes() + self.file_bytes()
        self.found[stage] = MeasuredStage(
            device_peak_bytes=max(known.device_peak_bytes, peak.device_bytes),
            host_peak_bytes=max(known.host_peak_bytes, peak.host_bytes),
            disk_peak_bytes=max(known.disk_peak_bytes, disk_bytes),
        )

    def note_disk(self, stage: JobStage, *, more_bytes: int = 0) -> None:
        """Keep the disk's bytes alone, where nothing was counted meanwhile. more_bytes: of files that are gone by now."""
        known = self.found.get(stage, MeasuredStage())
        disk_bytes = max(known.disk_peak_bytes, self.scratch_bytes() + self.file_bytes() + more_bytes)
        self.found[stage] = replace(known, disk_peak_bytes=disk_bytes)

    def file_bytes(self) -> int:
        """Bytes of the job's checkpoints and artifacts as they lie there now."""
        if self._job_folder is None:
            return 0
        found = (path for folder in _FOLDERS for path in (self._job_folder / folder).rglob("*"))
        return sum(path.stat().st_size for path in found if path.is_file())
