"""The plan of a batch generation: one frozen, versioned, JSON-able table, as ``plan.py`` is for training.

Rows are the categories that generation has; categories without a row (gradients, optimizer state) do not exist then.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_field
from optimizer.plan import weights
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.techniques import LOSSY, Technique, list_techniques
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload

GENERATION_PLAN_VERSION: Final = 1
PREFILL: Final = "prefill"


def decode_phase(token: int) -> str:
    """The name of the forward pass that makes a sequence's new token of this number (the prefill makes number 1)."""
    return f"decode (token {token})"


def head_of(phase: str) -> str:
    """The name of a phase's head, which follows the backbone."""
    return f"head of {phase}"


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Every decision about the memory of one batch generation."""

    version: Literal[1] = GENERATION_PLAN_VERSION
    batch_size: int = 1
    """Sequences that run together: prompt, then token by token to the end. The last batch may have fewer."""
    num_micro_batches: int = 1
    """Micro-batches of ``batch_size`` sequences that share a pass: each block runs for one after the other while its weights are
    there. Two or more need the package greenlet. Of a model that is cut over devices they follow one another through the stages,
    each stage's blocks at once, and need no package."""
    prefill_tokens: int | None = None
    """Most tokens of a prompt that run at once, 2 or more; the others follow one by one, as new tokens do. The activations of a
    prompt, which a batch must leave room for, are then those of few tokens: more sequences fit at once, for more steps. None:
    as many tokens as the shortest prompt of a micro-batch has."""
    weights: WeightsPlan = field(default_factory=WeightsPlan)
    """Representation and place of the weights; ``frozen`` covers every matrix inside the blocks, since none is trained."""
    kv_cache: KvCachePlan = field(default_factory=KvCachePlan)
    allocator: AllocatorPlan = field(default_factory=AllocatorPlan)
    layout: GenerationLayout = field(default_factory=GenerationLayout)

    def __post_init__(self) -> None:
        counts = {
            "batch_size": (self.batch_size, 1),
            "num_micro_batches": (self.num_micro_batches, 1),
            "prefill_tokens": (self.prefill_tokens, 2),
        }
        for name, (value, least) in counts.items():
            if value is not None and value < least:
                raise InvalidPlan(
                    f"plan.{name} is {value}; allowed: {least} or more",
                    field=f"plan.{name}",
                    value=value,
                    allowed={"minimum": least},
                )

    @property
    def sequences_per_pass(self) -> int:
        """Largest number of sequences in a pass."""
        return self.batch_size * self.num_micro_batches

    @property
    def drops_ended(self) -> bool:
        """True if sequences that are over leave their micro-batch. In packed blocks, and in those off the device, all sequences
        of a token lie together: there they run on unseen until the last of them is over.
        """
        return self.kv_cache.is_plain

    @property
    def is_lossless(self) -> bool:
        """True if the numbers equal those of plain fp32 generation."""
        return not any(technique in LOSSY for technique in self.techniques)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques that the plan uses, in the order of ``Technique``."""
        return list_techniques(self, work="generation")

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def check(self, *, workload: GenerationWorkload, max_sequence_length: int) -> None:
        """Raise InvalidPlan where the plan contradicts itself or the workload, InvalidWorkload beyond the model's positions."""
        prompt_length, num_new_tokens = workload.longest
        num_tokens = prompt_length + num_new_tokens
        if num_tokens > max_sequence_length:
            raise InvalidWorkload(
                f"workload.prompt_length {prompt_length:,} and workload.num_new_tokens "
                f"{num_new_tokens:,} make {num_tokens:,} tokens; this model has positions for "
                f"{max_sequence_length:,}: shorten the prompt or generate fewer",
                field="workload.num_new_tokens",
                value=num_new_tokens,
                allowed={"prompt_length + num_new_tokens": {"maximum": max_sequence_length}},
            )
        conflict = self.find_conflict(workload)
        if conflict is not None:
            raise conflict

    def find_conflict(self, workload: GenerationWorkload) -> InvalidPlan | None:
        """The first decision that cannot be carried out for this workload, or beside another; None if all of them can."""
        layout_rules = self._layout_rules(workload)
        workload = workload.of_replica(0, num_replicas=min(self.layout.num_replicas, workload.num_sequences))
        rules: tuple[tuple[bool, str, object, str], ...] = (
            *layout_rules,
            (
                self.batch_size > workload.num_sequences,
                "batch_size",
                self.batch_size,
                f"is more than the sequences to generate (the workload has {workload.num_sequences})",
            ),
            (
                self.num_micro_batches > 1 and self.sequences_per_pass - self.batch_size >= workload.num_sequences,
                "num_micro_batches",
                self.num_micro_batches,
                f"times {self.batch_size} leaves the last one empty (the workload has {workload.num_sequences} sequences)",
            ),
            *(
                (value != knob.plain, knob.path, value, "is for training; to generate in fewer bits choose plan.weights.dtype")
                for knob in weights.KNOBS
                if knob.generation is None
                for value in [getattr(self.weights, knob.path.removeprefix("weights."))]
            ),
            (
                self.kv_cache.attention == "host" and self.kv_cache.place != "host",
                "kv_cache.attention",
                self.kv_cache.attention,
                f"needs keys and values on the host; their place is {self.kv_cache.place}",
            ),
            (
                self.kv_cache.attention == "host" and self.kv_cache.dtype != "same",
                "kv_cache.attention",
                self.kv_cache.attention,
                f"reads unpacked keys and values; dtype {self.kv_cache.dtype} packs them",
            ),
        )
        cache, name = self.kv_cache, "kv_cache.prefix_tokens"
        if cache.prefix_tokens:
            here = "saves nothing if keys and values stay on the device: choose another place for them, or 0"
            packed = f"saves nothing if keys and values travel in {cache.dtype}: choose dtype same for them, or 0"
            on_host = "saves nothing if attention is computed on the host: choose attention on the device, or 0"
            rules += (
                (cache.place == "device", name, cache.prefix_tokens, here),
                (cache.dtype != "same", name, cache.prefix_tokens, packed),
                (cache.attention == "host", name, cache.prefix_tokens, on_host),
            )
        for is_broken, name, value, why in rules:
            if is_broken:
                path = f"plan.{name}"
                return InvalidPlan(f"{shown_field(name)} is {value}, which {why}", field=path, value=value, allowed=why)
        return None

    def _layout_rules(self, workload: GenerationWorkload) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules of several devices, as ``find_conflict`` has them."""
        layout, place = self.layout, self.weights.place
        on_devices = "a model that is cut over devices cannot have: weights, and unpacked keys and values, stay on each device"
        return (
            (
                layout.num_replicas > workload.num_sequences,
                "layout.num_replicas",
                layout.num_replicas,
                f"leaves copies without a prompt (the workload has {workload.num_sequences})",
            ),
            (
                layout.is_cut and place != "device",
                "weights.place",
                place,
                on_devices,
            ),
            (
                layout.is_cut and not self.kv_cache.is_plain,
                "kv_cache",
                f"{self.kv_cache.dtype} on {self.kv_cache.place}",
                on_devices,
            ),
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "GenerationPlan":
        return from_json(cls, document, path="plan", error=InvalidPlan)
