"""The cases of ``cards.py``: real models, plans, and the card whose memory each gets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.cases import is_held_back
from benchmarks.accuracy.techniques import merge_changes
from benchmarks.training.cards import THREE_B
from benchmarks.training.plans import make_plan
from optimizer.base.units import GIB, MIB
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload

DEADLINE_S = 380.0
"""No case is begun after this; the slowest takes half a minute."""


@dataclass(frozen=True, kw_only=True)
class CardCase:
    """One plan of one model under one card's memory."""

    name: str
    spec: ModelSpec
    techniques: tuple[str, ...]
    card_bytes: int
    workload: TrainingWorkload
    plan: Plan

    @property
    def is_held_back(self) -> bool:
        return is_held_back(self.name)


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The cases of a run, and how they are measured."""

    cases: tuple[CardCase, ...]
    probe_s: float = 10.0
    deadline_s: float = DEADLINE_S


_BF16, _LORA = ("bf16",), ("bf16", "lora")
_SELECTED: tuple[tuple[str, int, int, int, tuple[tuple[str, ...], ...]], ...] = (
    (
        "gpt2",
        4,
        512,
        8,
        (
            (),
            ("recompute",),
            ("selective",),
            ("offload",),
            ("accumulate",),
            ("chunks",),
            ("autocast",),
            _BF16,
            ("8bit",),
        ),
    ),
    ("gpt2", 8, 1024, 8, ((), ("autocast", "recompute"), ("fp16",), ("mixed",), ("consume",), ("host-gradients",))),
    (
        "qwen2.5-0.5b",
        8,
        1024,
        4,
        (
            _BF16,
            ("bf16", "recompute"),
            ("bf16", "offload"),
            ("bf16", "chunks", "8bit"),
            ("bf16", "host-state"),
            ("bf16", "recompute", "chunks", "streamed"),
            ("bf16", "offload-int8", "chunks"),
        ),
    ),
    (
        "llama-3.2-1b",
        12,
        1024,
        4,
        (
            ("bf16", "recompute", "chunks"),
            ("bf16", "recompute", "chunks", "8bit"),
            ("bf16", "recompute", "chunks", "host-state"),
            ("bf16", "selective", "chunks", "streamed"),
            _LORA,
            ("bf16", "lora", "recompute"),
            ("bf16", "qlora-int8", "recompute"),
            ("bf16", "qlora-nf4", "recompute", "chunks"),
        ),
    ),
    ("llama-3.2-1b", 24, 2048, 4, (("bf16", "chunks"), ("bf16", "offload", "chunks"))),
    ("3b", 16, 1024, 4, (("bf16", "recompute", "chunks", "streamed"), ("bf16", "lora", "recompute", "chunks"))),
    (
        "llama-3-8b",
        24,
        1024,
        2,
        (("bf16", "lora", "recompute", "chunks"), ("bf16", "qlora-nf4", "recompute", "chunks")),
    ),
)
"""Model, card in GiB, tokens, sequences, techniques; smallest models first, so that little is lost when time is out."""


def cuda_cards() -> Cards:
    return Cards(cases=tuple(_list_cases()))


def _list_cases() -> Iterator[CardCase]:
    for model, card_gib, length, batch, selected in _SELECTED:
        spec = read_model_spec(THREE_B) if model == "3b" else PRESETS[model].spec
        for techniques in selected:
            yield make_case(model, spec, techniques, card_gib * GIB, length=length, batch=batch)


def make_case(
    model: str, spec: ModelSpec, techniques: tuple[str, ...], card_bytes: int, *, length: int, batch: int
) -> CardCase:
    changes = merge_changes(techniques)
    workload = TrainingWorkload(
        sequence_length=length, global_batch_size=batch, learning_rate=1e-5, **changes.pop("work", {})
    )
    return CardCase(
        name=f"card/{model}/{card_bytes / GIB:g} GiB/{batch}x{length}/{'+'.join(techniques) or 'plain'}",
        spec=spec,
        techniques=techniques,
        card_bytes=card_bytes,
        workload=workload,
        plan=make_plan(spec, workload, **changes),
    )


def small_cards(spec: ModelSpec, techniques: Sequence[tuple[str, ...]], *, card_bytes: int) -> Cards:
    """The same on shapes that the CPU device runs in a moment."""
    cases = [make_case("small", spec, names, card_bytes, length=32, batch=4) for names in techniques]
    return replace(cuda_cards(), cases=tuple(cases), probe_s=0.1)


def list_small_cards() -> Cards:
    """Techniques of one small decoder, where there is no card to run the others."""
    spec = read_model_spec({"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 64})
    return small_cards(spec, ((), ("recompute",), ("offload", "chunks")), card_bytes=16 * MIB)
