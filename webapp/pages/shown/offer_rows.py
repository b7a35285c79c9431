"""Priced plans as rows: bytes by category, times, words, and the cells of a table in which differences stand out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from webapp.pages.presentation import BLOCK_CHOICES, StackedBar, batch_words, largest_part, stacked_bar
from webapp.pages.words.plan_names import layout_words, plan_name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One category of one plan, and whether it differs from the plan at the top."""

    num_bytes: int
    differs: bool


@dataclass(frozen=True, kw_only=True)
class OfferRow:
    """One plan, priced on one machine."""

    id: str
    label: str
    chosen: bool
    selected: bool
    verdict: str
    machine: str
    lossless: bool
    explanation: tuple[str, ...]
    peak_bytes: int
    host_bytes: int
    step_ms: float
    total_s: float
    tokens_per_s: float
    time_source: str
    bytes_by_category: dict[str, int]
    cells: tuple[Cell, ...]
    bar: StackedBar
    largest: tuple[str, int] | None
    blocks: str
    """One letter a block, runs shortened: ``K2 R10``."""
    batch: str
    first_token_ms: float | None = None
    """True for a generation, whose ``step_ms`` is that of each later token of a pass."""
    costs: tuple[str, ...] = ()
    """In words, with the date of the price."""
    name: str = ""
    """The plan in a few words."""
    device: str = ""
    """The machine's device, as people know it."""
    layout: str = ""
    """The devices that share a step, in words; empty for one."""
    high_bytes: int = 0
    """Upper end of the peak, which the verdict goes by."""
    is_pick: bool = False
    """Offered among the few (``picks``)."""


def offer_cells(row: OfferRow, *, against: OfferRow, columns: Sequence[str]) -> tuple[Cell, ...]:
    first = against.bytes_by_category
    return tuple(
        Cell(
            num_bytes=row.bytes_by_category.get(category, 0),
            differs=row is not against and row.bytes_by_category.get(category, 0) != first.get(category, 0),
        )
        for category in columns
    )


def offer_rows(documents: Sequence[Mapping[str, Any]], *, budget_bytes: int, selected: str) -> list[OfferRow]:
    """The chosen plan first; of the others the faster ones first. ``selected`` is ``label@machine``."""
    ordered = sorted(documents, key=lambda offer: (not offer["chosen"], offer["prediction"]["total_s"]))
    known = any(_key(offer) == selected for offer in ordered)
    return [
        _row(offer, budget_bytes=budget_bytes, selected=_key(offer) == selected if known else bool(offer["chosen"]))
        for offer in ordered
    ]


def _key(offer: Mapping[str, Any]) -> str:
    return f"{offer['label']}@{offer['machine']['id']}"


def _row(offer: Mapping[str, Any], *, budget_bytes: int, selected: bool) -> OfferRow:
    prediction, plan = offer["prediction"], offer["plan"]
    sizes = prediction["device_bytes_by_category"]
    is_generation = "kv_cache" in plan
    return OfferRow(
        id=offer["id"],
        label=offer["label"],
        chosen=offer["chosen"],
        selected=selected,
        verdict=offer["verdict"],
        machine=offer["machine"]["name"],
        lossless=offer["lossless"],
        explanation=tuple(offer["explanation"]),
        peak_bytes=prediction["device_peak_bytes"],
        host_bytes=prediction["host_peak_bytes"],
        step_ms=prediction["decode_ms" if is_generation else "step_ms"],
        first_token_ms=prediction["prefill_ms"] if is_generation else None,
        total_s=prediction["total_s"],
        tokens_per_s=prediction["tokens_per_s"],
        time_source=prediction["time_source"],
        bytes_by_category=sizes,
        cells=(),
        bar=stacked_bar(sizes, budget_bytes=budget_bytes),
        largest=largest_part(sizes),
        blocks=weights_words(plan["weights"]) if is_generation else block_letters(plan["activations"]["per_block"]),
        batch=batch_words(plan),
        costs=tuple(_cost_words(cost) for cost in offer["costs"]),
        name=plan_name(plan),
        device=str(offer["machine"].get("device", "")),
        layout=layout_words(plan),
        high_bytes=prediction.get("device_peak_high_bytes", prediction["device_peak_bytes"]),
    )


def _cost_words(cost: Mapping[str, Any]) -> str:
    what = "to rent" if cost["kind"] == "rented" else "of energy, at most"
    return f"{cost['currency']} {cost['amount']:,.2f} {what} (price of {cost['price_date']})"


def weights_words(weights: Mapping[str, Any]) -> str:
    """``fp32 on the device``, ``bf16 int8 on the host``."""
    packed = "" if weights["frozen"] == "same" else f" {weights['frozen']}"
    return f"{weights['dtype']}{packed} on the {weights['place']}"


def block_letters(choices: Sequence[str]) -> str:
    """``["keep", "keep", "recompute"]`` as ``K2 R1``."""
    runs: list[tuple[str, int]] = []
    for choice in choices:
        letter = BLOCK_CHOICES[choice][0]
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return " ".join(f"{letter}{length}" for letter, length in runs)
