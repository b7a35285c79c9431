"""The values that one attempt at a training job is given, and those that it ends with; ``train`` does the work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optimizer.base.serialize import to_json
from optimizer.goal import Goal
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.export.artifacts import Artifact, Exported
from optimizer.runtime.job.stage_watch import MeasuredStage
from optimizer.runtime.meter.counting import COUNT_EVERY_S
from optimizer.runtime.ranks.group import RankPlace
from optimizer.workload import TrainingWorkload

Report = Callable[[dict[str, Any]], None]
PROBED = "probed"
"""Reason of a run that its own probe ended."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """All that one attempt at a training job needs to know."""

    spec: ModelSpec
    plan: Plan
    workload: TrainingWorkload
    goal: Goal
    device: str
    """``cpu`` or ``cuda:0``."""
    attempt: int
    fence: int
    """Goes into the names of checkpoints and artifacts, so that a superseded attempt's can be distinguished."""
    job_folder: Path
    weights_folder: Path | None
    """Folder of the weights that fine-tuning starts from."""
    token_file: Path
    """Folder of the tokenized dataset."""
    tokenizer_file: Path | None
    """None: the tokenizer that ships with the program."""
    resume_from: str | None = None
    """``newest`` (or nothing when there is none yet), the path of a checkpoint, or None for a fresh start."""
    earlier_job_folders: tuple[Path, ...] = ()
    """Folders of jobs that this one retries, the last first: with ``newest``, searched when this one has no checkpoint."""
    timeline_every_s: float = COUNT_EVERY_S
    """A step is counted this often or, where counting is slow, more rarely, beside an attempt's first ones
    (``meter/counting.py``); each but the very first reports its timeline."""
    model_folder: Path | None = None
    """The model's own folder, whose templates and settings go along with what is exported; ``weights_folder`` unless given."""
    base_folder: Path | None = None
    """Folder in which jobs of this machine meet that stream the same frozen weights from the host; None: each has its own."""
    name: str = "model"
    """The job's, for files that carry one."""
    ranks: RankPlace | None = None
    """This process among those of a plan for several devices, which share the job's folder; None on one device. Budgets of
    ``goal`` are then one rank's."""

    def exported(self) -> Exported:
        return Exported(
            spec=self.spec,
            export=self.workload.export,
            trained_dtype=self.plan.weights.dtype,
            tokenizer_file=self.tokenizer_file,
            model_folder=self.model_folder or self.weights_folder,
            job_folder=self.job_folder,
            fence=self.fence,
            name=self.name,
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured times of a job's steady steps; the first step of an attempt has no optimizer state yet and is left out."""

    device_peak_bytes: int = 0
    """This rank's, where there are several."""
    rank_peak_bytes: list[int] = field(default_factory=list)
    """The same of each rank; empty on one device."""
    device_bytes_by_category: dict[str, int] = field(default_factory=dict)
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    """In the scratch file."""
    allocator_slack_bytes: int = 0
    """Most that torch's allocator had reserved beyond what was allocated: fragmentation; 0 on the CPU device."""
    stages: dict[str, MeasuredStage] = field(default_factory=dict)
    """Peaks on each tier by stage, of the last attempt; empty until it has ended."""
    step_ms: float = 0.0
    """Median of the steps that were not counted, where there were any."""
    num_steps: int = 0


Probe = Callable[[Measured, int], str]
"""Says why to stop for another plan, empty to go on, from what the first steady steps measured and how many are left."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """``result.json`` but for errors, which ``train`` raises."""

    outcome: Literal["succeeded", "drained"]
    reason: str
    message: str
    step: int
    measured: Measured
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return {**document, "error": None}
