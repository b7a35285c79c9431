"""Published measurements of generation as rows of ``generations.csv``; by rule, like the training rows:

- ``litgpt``: every single-GPU generation row of its resource tables without double quantization, of models that the estimator
  builds and that ran.
- FlexGen's table of throughput on one T4 (its README): every entry of a system that keeps keys and values on the device and
  whole layers of weights on the device or the host; those with a disk, with attention on the host or with weights split
  within layers are plans that we do not have.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.published.models import PublishedModel, read_table
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload

GENERATIONS_FILE = Path(__file__).with_name("generations.csv")


@dataclass(frozen=True, kw_only=True)
class PublishedGeneration(PublishedModel):
    """One batch generation."""

    prompt_length: int
    num_new_tokens: int
    batch_size: int
    weights: Literal["fp32", "bf16", "fp16"]
    frozen: Literal["same", "nf4"]
    place: Literal["device", "host"]
    """Tier of the blocks' weights between uses."""
    allocated_gb: float | None
    """Peak of the allocator, in 10^9 bytes."""
    tokens_per_s: float | None
    """New tokens of all sequences over prefill and decode."""

    @property
    def num_positions_used(self) -> int:
        return self.prompt_length + self.num_new_tokens

    @property
    def representation(self) -> str:
        """Representation of the weights, as profiles name it; fp16 has bf16's profile."""
        return WeightsPlan(dtype=self.weights, frozen=self.frozen).representation.replace("fp16", "bf16")

    def workload(self) -> GenerationWorkload:
        return GenerationWorkload(
            prompt_length=self.prompt_length, num_new_tokens=self.num_new_tokens, num_sequences=self.batch_size
        )

    def plan(self) -> GenerationPlan:
        weights = WeightsPlan(dtype=self.weights, frozen=self.frozen, place=self.place)
        return GenerationPlan(batch_size=self.batch_size, weights=weights)


def read_generations(file: Path = GENERATIONS_FILE) -> list[PublishedGeneration]:
    return read_table(PublishedGeneration, file)
