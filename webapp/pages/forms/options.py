"""Labels of models and datasets in a list to choose from: the name, and what decides whether it is the right one."""

from collections.abc import Sequence

from webapp.catalog.distinct_names import distinct_names
from webapp.catalog.models import Dataset, Model


def option_labels(rows: Sequence[Model | Dataset]) -> dict[str, str]:
    """By id. Of rows with one name each also says its project, and where that is one too, when it was added."""
    names = distinct_names(rows)
    return {row.pk: " · ".join([names[row.pk], *_facts(row)]) for row in rows}


def _facts(row: Model | Dataset) -> list[str]:
    return _model_facts(row) if isinstance(row, Model) else _dataset_facts(row)


def _model_facts(model: Model) -> list[str]:
    context = model.config.get("max_position_embeddings") or model.config.get("n_positions")
    return [
        count_words(model.num_parameters),
        "weights" if model.has_weights else "no weights: trains from scratch",
        *([f"context {context:,}"] if isinstance(context, int) else []),
    ]


def _dataset_facts(dataset: Dataset) -> list[str]:
    if not dataset.num_documents:
        return [dataset.get_format_display()]
    noun = "prompt" if dataset.format == "prompts" else "document"
    unusable = [f"{refused:,} unusable"] if (refused := dataset.facts.get("num_refused")) else []
    return [f"{dataset.num_documents:,} {noun}{'' if dataset.num_documents == 1 else 's'}", *unusable]


def count_words(num_parameters: int | None) -> str:
    """``8.03 B parameters``, ``4.2 M parameters``."""
    if not num_parameters:
        return "size unknown"
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num_parameters >= scale:
            return f"{num_parameters / scale:.3g} {letter} parameters"
    return f"{num_parameters} parameters"
