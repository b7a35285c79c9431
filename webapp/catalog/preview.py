"""Shows people what training on their dataset would learn with a model, before any job; read by a limited process, once."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from django.conf import settings

from optimizer.base.errors import InvalidDataset
from optimizer.base.recent import remembered
from optimizer.models.spec import read_model_spec
from optimizer.workload import LossOn, TrainingWorkload
from webapp.catalog.files.limited import run_limited
from webapp.catalog.files.model_parts import CHAT_FILE
from webapp.catalog.models import Dataset, Model

_TIMEOUT_S = 60
MAX_REMEMBERED = 64


def _key(dataset: Dataset, model: Model, *, sequence_length: int, loss_on: LossOn) -> tuple[Hashable, ...]:
    return dataset.sha256, dataset.format, json.dumps(dataset.columns), model.pk, sequence_length, loss_on


@remembered(most=MAX_REMEMBERED, key=_key)
def preview_samples(dataset: Dataset, model: Model, *, sequence_length: int, loss_on: LossOn) -> dict[str, Any]:
    """``optimizer.data.preview.Preview`` as JSON. Raises InvalidDataset for what no job could train on."""
    TrainingWorkload(sequence_length=sequence_length)
    if dataset.format == "prompts":
        raise InvalidDataset(
            f"dataset {dataset.name!r} holds prompts to generate from, not samples to train on",
            field="dataset",
            value=dataset.name,
            allowed="a dataset to train on",
        )
    home = Path(settings.HEADROOM_HOME)
    spec = read_model_spec(model.config)
    arguments = [str(home / dataset.file), "--format", dataset.format, "--vocab-size", str(spec.vocab_size)]
    if dataset.columns:
        arguments += ["--columns", json.dumps(dataset.columns)]
    arguments += ["--sequence-length", str(sequence_length), "--loss-on", loss_on]
    if model.has_tokenizer:
        arguments += ["--tokenizer", str(home / model.folder / "tokenizer.json")]
    if model.has_chat:
        arguments += ["--chat", str(home / model.folder / CHAT_FILE)]
    if spec.end_of_text_id is not None:
        arguments += ["--end-of-text-id", str(spec.end_of_text_id)]
    answer = run_limited(
        "optimizer.data.preview",
        arguments,
        field="dataset",
        error=InvalidDataset,
        owner_id=dataset.owner_id,
        timeout_s=_TIMEOUT_S,
    )
    preview: dict[str, Any] = answer["preview"]
    return preview
