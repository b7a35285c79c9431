"""Models that somebody measured, by their published shape, and files of rows about them.

What training and generating rows share: where a figure is from, what it leaves open, and the model as a spec that the
estimator builds.
"""

import csv
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from optimizer.hardware.devices import find_device
from optimizer.models.spec import ModelSpec, read_model_spec

Family = Literal["megatron", "mpt", "llama", "mistral", "qwen2", "opt"]
_POSITIONS = (1_024, 2_048, 8_192, 131_072)
_LEAST_POSITIONS: dict[Family, int] = {"megatron": 0, "opt": 2_048}
"""Few lengths of position tables, so that rows share profiles; only Megatron's and OPT's tables have weights."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel(ABC):
    """One model on one kind of device. Empty cells of the file are None."""

    name: str
    source: str
    system: str
    device: str
    model: str
    family: Family
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    open_facts: str
    """Facts that the source leaves open or has otherwise, and what is assumed instead."""

    @property
    @abstractmethod
    def num_positions_used(self) -> int:
        """The longest sequence of the run."""

    @property
    def num_positions(self) -> int:
        least = _LEAST_POSITIONS.get(self.family, 8_192)
        return next(size for size in _POSITIONS if size >= max(self.num_positions_used, least))

    @property
    def shape_key(self) -> tuple[object, ...]:
        """Key of the profile: all that it depends on."""
        sizes = (self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim, self.vocab, self.tied)
        return (self.family, *sizes, self.num_positions)

    def spec(self) -> ModelSpec:
        if self.family in ("megatron", "mpt"):
            return read_model_spec(_own_decoder(self))
        return read_model_spec(_opt(self) if self.family == "opt" else _rope(self))


def _own_decoder(row: PublishedModel) -> dict[str, Any]:
    """GPT as Megatron has it and MPT, in our own decoder: like theirs, GELU is one kernel and queries, keys and values are one
    product. Megatron's default dropout, but not on attention weights: traced on the CPU that would be another attention than
    a CUDA device runs. MPT's attention biases (ALiBi) cost nothing worth counting.
    """
    is_megatron = row.family == "megatron"
    return {
        "model_type": "headroom_decoder",
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "intermediate_size": row.ffn,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "max_position_embeddings": row.num_positions,
        "activation": "gelu",
        "norm": "layer",
        "use_bias": is_megatron,
        "positions": "learned" if is_megatron else "none",
        "dropout": 0.1 if is_megatron else 0.0,
        "tie_word_embeddings": row.tied,
    }


def _opt(row: PublishedModel) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "ffn_dim": row.ffn,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "max_position_embeddings": row.num_positions,
        "word_embed_proj_dim": row.hidden,
        "tie_word_embeddings": row.tied,
    }


def _rope(row: PublishedModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": row.family,
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "intermediate_size": row.ffn,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "num_key_value_heads": row.kv_heads,
        "max_position_embeddings": row.num_positions,
        "tie_word_embeddings": row.tied,
    }
    if row.family != "qwen2":
        config["head_dim"] = row.head_dim
    if row.family == "mistral":
        config["sliding_window"] = None
    return config


# Files.

RowType = TypeVar("RowType", bound=PublishedModel)


def read_table(kind: type[RowType], file: Path) -> list[RowType]:
    """Read rows in order. Raises KeyError for a column that is missing, ValueError for a cell, InvalidInput for a device."""
    with file.open(newline="", encoding="utf-8") as stream:
        rows = [
            kind(**{field.name: _value(field, cells[field.name]) for field in dataclasses.fields(kind)})
            for cells in csv.DictReader(stream)
        ]
    for row in rows:
        find_device(row.device)
    return rows


def write_table(rows: Iterable[PublishedModel], file: Path) -> None:
    held = list(rows)
    names = [field.name for field in dataclasses.fields(held[0])]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(getattr(row, name)) for name in names] for row in held)


def _value(field: dataclasses.Field[Any], text: str) -> Any:
    if field.type == int or field.type == (int | None):  # noqa: E721
        return int(text) if text else None
    if field.type == float or field.type == (float | None):  # noqa: E721
        return float(text) if text else None
    if field.type is bool:
        return text == "yes"
    return tuple(text.split()) if field.type == tuple[str, ...] else text


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value)
    return "" if value is None else value
