"""Runs an ``export`` job in the attempt's process: the weights of another job's checkpoint, on the host alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimizer.base.serialize import from_json
from optimizer.models.files.linked_files import checked_folder
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload
from worker.run.reporter import Reporter


def export_attempt(attempt: dict[str, Any], *, reporter: Reporter, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """The content of ``result.json``. A stop that comes meanwhile is answered after the end, or by a kill."""
    from optimizer.runtime.job.export.export_checkpoint import CheckpointExport, export_checkpoint

    workload = from_json(TrainingWorkload, attempt["workload"], path="workload")
    starts_from_weights = workload.mode == "finetune"
    run = CheckpointExport(
        spec=read_model_spec(attempt["config"]),
        plan=Plan.from_json(attempt["plan"]),
        workload=workload,
        checkpoint=Path(attempt["checkpoint_folder"]),
        weights_folder=checked_folder(attempt["weights_folder"], attempt["linked_files"]) if starts_from_weights else None,
        model_folder=Path(attempt["model_folder"]) if starts_from_weights else None,
        tokenizer_file=Path(attempt["tokenizer_file"]) if attempt["tokenizer_file"] else None,
        job_folder=Path(attempt["job_folder"]),
        fence=attempt["fence"],
        name=attempt["model_name"],
    )
    return export_checkpoint(run, report=reporter)
