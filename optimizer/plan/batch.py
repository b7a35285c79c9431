"""Decisions about the batch: how many sequences run at once, and how many times before the optimizer steps."""

from dataclasses import dataclass
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.plan.knob import Face, Knob, Package, TechniqueDeclaration, Use, exceeds


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """``micro_batch_size * accumulation_steps`` sequences make one optimizer step."""

    micro_batch_size: int
    accumulation_steps: int

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise InvalidPlan(
                    f"plan.batch.{name} is {getattr(self, name)}; allowed: 1 or more",
                    field=f"plan.batch.{name}",
                    value=getattr(self, name),
                    allowed={"minimum": 1},
                )

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps


@dataclass(frozen=True, kw_only=True)
class BatchPins:
    """Decisions of ``BatchPlan`` that are made beforehand; None leaves one free."""

    micro_batch_size: int | None = None
    accumulation_steps: int | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="accumulate",
        label="split the batch (accumulate)",
        sentence="Runs the batch as several micro-batches, one after the other, and sums their gradients.",
        group="Batch and loss",
        lowers=("activations", "logits_and_loss"),
    ),
)
KNOBS: Final = (
    Knob(path="batch.micro_batch_size", plain=None, training=Face(label="Micro-batch", help="sequences at once")),
    Knob(
        path="batch.accumulation_steps",
        plain=1,
        uses=(Use(technique="accumulate", asks=exceeds(1)),),
        training=Face(label="Accumulation steps", help="micro-batches of a step"),
    ),
)

GENERATION_KNOBS: Final = (
    Knob(
        path="batch_size",
        plain=1,
        generation=Face(
            label="Sequences at once",
            help="of a micro-batch",
            change="{value:,} sequences at once instead of {before:,}",
        ),
    ),
    Knob(
        path="num_micro_batches",
        plain=1,
        packages=(Package(name="greenlet", asks=exceeds(1)),),
        generation=Face(
            label="Micro-batches",
            help="that share a pass",
            change="{value:,} micro-batches to a pass instead of {before:,}",
        ),
    ),
    Knob(
        path="prefill_tokens",
        plain=None,
        generation=Face(
            label="Prompt tokens at once",
            help="a number, or all",
            change="{value} tokens of a prompt at once",
            changes={None: "prompts whole"},
        ),
    ),
)
"""Decisions of a generation's plan about its passes."""
