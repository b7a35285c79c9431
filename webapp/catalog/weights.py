"""The one place that knows where a model's weights lie."""

from pathlib import Path
from typing import Any

from django.conf import settings

from webapp.catalog.models import Model


def model_folder(model: Model, *, home: Path | None = None) -> Path:
    """The model's own folder: config.json, tokenizer.json, templates, and its weights or links to them."""
    return (home or Path(settings.HEADROOM_HOME)) / model.folder


def weights_folder(model: Model, *, home: Path | None = None) -> Path | None:
    """The folder that ``load_weights`` reads; None for a model without weights.

    Linked weights are links in the model's own folder, so that nothing else has to know of them; ``check_links`` with
    ``model.linked_files`` says whether they are still what was added.
    """
    return model_folder(model, home=home) if model.has_weights else None


def weights_part(model: Model, *, home: Path) -> dict[str, Any]:
    """The entries of an attempt's brief: the folder of the weights, and what its links led to when they were made."""
    folder = weights_folder(model, home=home)
    return {"weights_folder": None if folder is None else str(folder), "linked_files": model.linked_files}
