"""Decisions about logits and loss: whether all logits exist at once."""

from dataclasses import dataclass
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.plan.knob import Face, Knob, TechniqueDeclaration, Use, exceeds

MAX_CHUNKS = 4096
WIDE_COPY_ELEMENTS = 65_536
"""Elements of the copy through which the CPU adds a narrow share of the head's gradient to a wide sum: little memory, and it
stays in the cache."""


@dataclass(frozen=True, kw_only=True)
class LogitsAndLossPlan:
    """Head and cross-entropy, forward and backward."""

    num_chunks: int = 1
    """The tokens of a micro-batch are cut into this many runs, the last one shorter; each run's logits, loss and gradients
    are made and dropped before the next's. 1 makes all logits at once. The head's gradient is a sum over chunks, so it
    differs from 1 in the order of sums."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_chunks <= MAX_CHUNKS:
            raise InvalidPlan(
                f"plan.logits_and_loss.num_chunks is {self.num_chunks}; allowed: 1 to {MAX_CHUNKS}",
                field="plan.logits_and_loss.num_chunks",
                value=self.num_chunks,
                allowed={"minimum": 1, "maximum": MAX_CHUNKS},
            )


@dataclass(frozen=True, kw_only=True)
class LogitsAndLossPins:
    """Decisions of ``LogitsAndLossPlan`` that are made beforehand; None leaves one free."""

    num_chunks: int | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="chunked_loss",
        label="make the loss in chunks",
        sentence="Runs head and cross-entropy over one run of tokens after the other, so that all logits never exist together.",
        group="Batch and loss",
        lowers=("logits_and_loss",),
    ),
)
KNOBS: Final = (
    Knob(
        path="logits_and_loss.num_chunks",
        plain=1,
        uses=(Use(technique="chunked_loss", asks=exceeds(1)),),
        training=Face(label="Loss in chunks", help="how many"),
    ),
)
