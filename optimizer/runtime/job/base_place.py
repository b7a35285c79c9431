"""Names the base model of a job, so that jobs with the same one find each other's weights on the host."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import torch

from optimizer.runtime.job.training_run import TrainingRun
from optimizer.runtime.tiers.base_homes import BasePlace

_FORM: Final = 1
"""Counted up when the same files become other bytes: while a machine is updated, jobs of both versions run on it."""


def find_base(run: TrainingRun) -> BasePlace | None:
    """The place where a run shares frozen weights; None for one that reads none, or trains them.

    Files are known by device, inode, size and time of change, and so by links as well; two copies of a file are two bases.
    """
    if run.base_folder is None or run.weights_folder is None or run.workload.adapter is None:
        return None
    weights = run.plan.weights
    facts = {
        "form": [_FORM, torch.__version__, weights.dtype, weights.frozen],
        "files": sorted(_identify(file) for file in run.weights_folder.iterdir() if file.is_file()),
    }
    return BasePlace(folder=run.base_folder, name=hashlib.sha256(json.dumps(facts).encode()).hexdigest())


def _identify(file: Path) -> list[Any]:
    found = file.stat()
    return [file.name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]
