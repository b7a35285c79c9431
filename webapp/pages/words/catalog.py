"""Values for the pages of models and datasets: structure, cards, lengths. Pure functions; no database, no HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.models.structure import Fold, Structure
from webapp.catalog.models import Dataset
from webapp.planning.reach import METHODS, Card, CardVerdict

VERDICT_WORDS: dict[CardVerdict | None, str] = {
    "fits": "fits",
    "fits_saving": "fits, memory saved",
    "does_not_fit": "does not fit",
    None: "not known",
}
_VERDICT_CLASSES: dict[CardVerdict | None, str] = {
    "fits": "fits",
    "fits_saving": "tight",
    "does_not_fit": "does_not_fit",
    None: "unknown",
}
SHOWN_LINES = 10
"""Unusable lines of a file of prompts that are named, the first of them."""


@dataclass(frozen=True, kw_only=True)
class FoldRow:
    """Blocks that are alike, or a few that come again and again."""

    where: str
    what: str
    each: int
    total: int


@dataclass(frozen=True, kw_only=True)
class CardRow:
    """Cards of one size, which share their verdicts."""

    names: tuple[str, ...]
    memory_bytes: int
    cells: tuple[tuple[str, str, str], ...]
    """For each method the word, its class and the method's title."""


def structure_rows(structure: Structure) -> list[tuple[str, list[FoldRow]]]:
    """By stack; the name is empty where there is only one."""
    has_several = len(structure.stacks) > 1
    return [
        (stack.name if has_several else "", [_fold_row(fold) for fold in stack.folds]) for stack in structure.stacks
    ]


def _fold_row(fold: Fold) -> FoldRow:
    first, last = fold.runs[0].first, fold.runs[0].first + fold.num_blocks - 1
    where = f"block {first}" if first == last else f"blocks {first} to {last}"
    if len(fold.runs) == 1:
        run = fold.runs[0]
        what = f"{run.num_blocks} × {_kind(run.block.kind)}" if run.num_blocks > 1 else _kind(run.block.kind)
        return FoldRow(where=where, what=what, each=run.block.num_parameters, total=fold.num_parameters)
    pattern = ", ".join(f"{run.num_blocks} × {_kind(run.block.kind)}" for run in fold.runs)
    return FoldRow(
        where=where,
        what=f"{fold.times} times: {pattern}",
        each=fold.num_parameters // fold.num_blocks,
        total=fold.num_parameters,
    )


def _kind(kind: str) -> str:
    return f"{kind.replace('_', ' ')} block" if kind else "block"


def fold_cards(cards: Sequence[Card]) -> list[CardRow]:
    """Smallest first; cards of the same whole GiB with the same verdicts are one row."""
    rows: dict[tuple[int, tuple[CardVerdict | None, ...]], list[Card]] = {}
    for card in cards:
        rows.setdefault((round(card.memory_bytes / 2**30), card.verdicts), []).append(card)
    return [
        CardRow(
            names=tuple(card.name for card in found),
            memory_bytes=min(card.memory_bytes for card in found),
            cells=tuple(
                (VERDICT_WORDS[verdict], _VERDICT_CLASSES[verdict], method.title)
                for verdict, method in zip(verdicts, METHODS, strict=True)
            ),
        )
        for (_, verdicts), found in rows.items()
    ]


def unusable_lines(dataset: Dataset) -> list[str]:
    """The lines of a file of prompts that get no answer, each with its reason, below their number; empty if all are usable."""
    num_refused = dataset.facts.get("num_refused") or 0
    if not num_refused:
        return []
    named = [f"line {problem['line']}: {problem['message']}" for problem in dataset.facts["problems"][:SHOWN_LINES]]
    more = [f"and {num_refused - len(named):,} more"] if num_refused > len(named) else []
    are = "line of {} cannot be used and gets" if num_refused == 1 else "lines of {} cannot be used and get"
    return [f"{num_refused:,} {are.format(f'{dataset.num_documents:,}')} no answer", *named, *more]


def columns_words(dataset: Dataset) -> str:
    """The columns in the form in which a person says them; empty for a text."""
    return ", ".join(f"{part}={name}" for part, name in (dataset.facts.get("columns") or {}).items())


def length_facts(dataset: Dataset) -> dict[str, Any] | None:
    """Data of the chart of lengths and its table; None where nobody has looked yet."""
    lengths = dataset.facts.get("lengths")
    if not lengths:
        return None
    bins = [{"label": _range(end), "count": count} for end, count in lengths]
    return {"unit": "characters", "counted": "prompts" if dataset.format == "prompts" else "documents", "bins": bins}


def _range(end: int) -> str:
    """Label of a bin that ends before ``end``, a power of two."""
    return f"{end // 2:,} to {end - 1:,}" if end > 2 else str(end - 1)
