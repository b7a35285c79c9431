"""Decisions about the batch: how many sequences run at once, and how many times before the optimizer steps."""

from dataclasses import dataclass

from optimizer.base.errors import InvalidPlan


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
