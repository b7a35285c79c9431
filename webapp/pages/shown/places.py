"""Draws where a plan keeps things, as a picture: letters block by block, and shares of what is divided between places.

Pure: from the plan's JSON and the number of blocks to rows. A row has either a letter for each block or shares of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from webapp.pages.presentation import BLOCK_CHOICES, PLACE_WORDS

_LETTERS = {choice: letter for choice, (letter, _) in BLOCK_CHOICES.items()}
_MEANINGS = dict(BLOCK_CHOICES.values())
_OF_PLACE = {"device": "K", "host": "O", "disk": "D", "remote": "N"}


@dataclass(frozen=True, kw_only=True)
class BlockCell:
    """One block of the model in a row."""

    number: int
    letter: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class PlaceShare:
    """A part of what is divided between places."""

    place: str
    letter: str
    percent: int


@dataclass(frozen=True, kw_only=True)
class PlaceRow:
    """One category."""

    label: str
    words: str
    cells: tuple[BlockCell, ...] = ()
    shares: tuple[PlaceShare, ...] = ()
    """Add up to 100; given only where there are two."""


@dataclass(frozen=True, kw_only=True)
class PlacePicture:
    rows: tuple[PlaceRow, ...]
    legend: tuple[tuple[str, str], ...]
    """The letters in use, with what they mean."""


def places_of(plan: Mapping[str, Any] | None, *, num_blocks: int) -> PlacePicture | None:
    """None without a plan. num_blocks: of the model; where it is not known (0) rows have no letters."""
    if plan is None:
        return None
    rows = _generation_rows(plan, num_blocks) if "kv_cache" in plan else _training_rows(Plan.from_json(dict(plan)))
    used = {cell.letter for row in rows for cell in row.cells} | {share.letter for row in rows for share in row.shares}
    return PlacePicture(rows=tuple(rows), legend=tuple((letter, words) for letter, words in _MEANINGS.items() if letter in used))


def _training_rows(plan: Plan) -> list[PlaceRow]:
    weights, state, choices = plan.weights, plan.optimizer_state, plan.activations.per_block
    away = weights.place != "device"
    gradients = {"keep": "device, until the update", "consume": "device, used up as they appear", "host": "host, as they appear"}
    share = state.fraction if state.place != "device" else 0.0
    return [
        PlaceRow(label="activations", words="", cells=_cells([_LETTERS[choice] for choice in choices])),
        PlaceRow(
            label="weights",
            words=f"{weights.dtype}, {weights.place}" + (f", fetched {weights.prefetch} ahead" if away else ""),
            cells=_cells([_OF_PLACE[weights.place]] * len(choices)) if away else (),
        ),
        PlaceRow(label="gradients", words=gradients[plan.gradients.choice]),
        PlaceRow(
            label="optimizer state",
            words=f"{state.bits} bits, {_placed(state.place, share)}",
            shares=_shares(state.place, share),
        ),
    ]


def _generation_rows(document: Mapping[str, Any], num_blocks: int) -> list[PlaceRow]:
    plan = GenerationPlan.from_json(dict(document))
    weights, cache = plan.weights, plan.kv_cache
    rows = []
    for label, part, dtype in (("weights", weights, weights.dtype), ("KV cache", cache, cache.dtype)):
        away = part.place != "device"
        again = f", {cache.prefix_tokens:,} tokens made again" if label == "KV cache" and cache.prefix_tokens else ""
        words = f"{weights.dtype if dtype == 'same' else dtype}, {PLACE_WORDS.get(part.place, part.place)}"
        if label == "weights" and weights.frozen != "same":
            words = f"{weights.frozen} in blocks, {part.place}"
        if away:
            stays = label == "KV cache" and cache.attention == "host"
            words += ", attention there" if stays else f", fetched {part.prefetch} ahead"
        rows.append(
            PlaceRow(
                label=label,
                words=words + again,
                cells=_cells([_OF_PLACE[part.place]] * num_blocks),
            )
        )
    return rows


def _cells(letters: Sequence[str]) -> tuple[BlockCell, ...]:
    return tuple(
        BlockCell(number=number, letter=letter, meaning=_MEANINGS[letter]) for number, letter in enumerate(letters, start=1)
    )


def _placed(place: str, share: float) -> str:
    if not 0 < share < 1:
        return place
    return f"{place} {100 * share:.0f} %, device {100 - round(100 * share)} %"


def _shares(place: str, share: float) -> tuple[PlaceShare, ...]:
    percent = round(100 * share)
    if not 0 < percent < 100:
        return ()
    return (
        PlaceShare(place=place, letter=_OF_PLACE[place], percent=percent),
        PlaceShare(place="device", letter="K", percent=100 - percent),
    )
