"""Epochs of a job spec, as steps. The rows of an epoch are counted in the data; large files are counted at their beginning."""

from collections.abc import Mapping
from typing import Any

from optimizer.base.errors import InvalidWorkload
from optimizer.base.shown import shown_value
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Dataset, Model
from webapp.catalog.preview import preview_samples

FIELD = "num_epochs"
MAX_EPOCHS = 1_000


def split_epochs(workload: Any) -> tuple[Any, float | None]:
    """A workload's fields without ``num_epochs``, and that; None where it is not given. Raises InvalidWorkload."""
    if not isinstance(workload, Mapping) or workload.get(FIELD) is None:
        return workload, None
    rest = {name: value for name, value in workload.items() if name != FIELD}
    epochs = _read(workload[FIELD])
    if "num_steps" in rest:
        raise InvalidWorkload(
            f"workload.num_epochs is {epochs:g} and workload.num_steps {rest['num_steps']!r:.40}; one says how long to train",
            field="workload.num_epochs",
            value=epochs,
            allowed="one of the two",
            hint="Leave one of them out.",
        )
    return rest, epochs


def steps_of(epochs: float, dataset: Dataset, model: Model, workload: TrainingWorkload) -> int:
    """Optimizer steps of so many passes over the data. Raises InvalidDataset."""
    rows = count_epoch_rows(dataset, model, workload)
    return max(1, round(epochs * rows / workload.global_batch_size))


def count_epoch_rows(dataset: Dataset, model: Model, workload: TrainingWorkload) -> float:
    """Rows, or pairs of them, that training passes over in one epoch; a guess from the file's beginning where it holds too much
    to count.
    """
    found = preview_samples(dataset, model, sequence_length=workload.sequence_length, loss_on=workload.loss_on)
    each = workload.rows_per_sequence
    rows: float = found["epoch_rows"][workload.packing] / each
    if found["is_whole"]:
        return rows
    if dataset.format == "txt":
        whole, counted = int(dataset.facts.get("num_characters") or 0), int(found["num_characters"])
    else:
        whole, counted = dataset.num_documents or 0, int(found["num_samples"]) // each
    return rows * max(1.0, whole / max(1, counted))


def _read(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_EPOCHS:
        raise InvalidWorkload(
            f"workload.num_epochs is {value!r:.40}; allowed: above 0, at most {MAX_EPOCHS:,}",
            field="workload.num_epochs",
            value=shown_value(value),
            allowed=f"above 0, at most {MAX_EPOCHS:,}",
        )
    return float(value)
