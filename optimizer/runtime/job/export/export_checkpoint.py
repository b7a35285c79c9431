"""Exports a run's weights at one of its checkpoints, on the host alone: what ``train`` leaves at its end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.serialize import to_json
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.runtime.job.checkpoint import read_checkpoint
from optimizer.runtime.job.export.artifacts import Artifact, Exported, hash_weights, leave_weights
from optimizer.runtime.job.export.export_weights import FinalWeights
from optimizer.workload import TrainingWorkload

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class CheckpointExport:
    """All that exporting a checkpoint needs to know."""

    spec: ModelSpec
    plan: Plan
    """The plan that the checkpoint was written under."""
    workload: TrainingWorkload
    """The workload of the run that wrote it, with what is to be exported."""
    checkpoint: Path
    weights_folder: Path | None
    """Folder that the run read the model's own weights from; None for random ones."""
    model_folder: Path | None
    tokenizer_file: Path | None
    job_folder: Path
    fence: int
    """Fence of the attempt that exports."""
    name: str = "model"


def export_checkpoint(run: CheckpointExport, *, report: Report) -> dict[str, Any]:
    """The content of ``result.json``. Raises CheckpointInvalid, DiskFull, ExportInvalid and the errors of bad input."""

    def enter_phase(phase: str, message: str) -> None:
        report({"type": "phase", "phase": phase, "message": message})

    enter_phase("loading", "checking the checkpoint")
    checkpoint = read_checkpoint(run.checkpoint)
    report({"type": "started", "resumed_from_step": checkpoint.manifest.step})
    final = FinalWeights.of_checkpoint(
        checkpoint,
        run.spec,
        weights=run.plan.weights,
        workload=run.workload,
        weights_folder=run.weights_folder,
    )
    exported = Exported(
        spec=run.spec,
        export=run.workload.export,
        trained_dtype=run.plan.weights.dtype,
        tokenizer_file=run.tokenizer_file,
        model_folder=run.model_folder or run.weights_folder,
        job_folder=run.job_folder,
        fence=run.fence,
        name=run.name,
    )
    artifacts = leave_weights(final, exported, enter_phase=enter_phase)
    return _result(checkpoint.manifest.step, checkpoint.facts, artifacts)


def _result(step: int, facts: dict[str, Any], artifacts: list[Artifact]) -> dict[str, Any]:
    return {
        "outcome": "succeeded",
        "reason": "done",
        "message": f"Exported the weights after step {step}; each file was read again and compared.",
        "error": None,
        "step": step,
        "summary": {"loss": facts.get("loss"), "weights_sha256": hash_weights(artifacts)},
        "artifacts": [to_json(artifact) for artifact in artifacts],
    }
