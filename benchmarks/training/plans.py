"""The plans that ``benchmarks.training`` runs: each technique alone, by name, and a plan in a few words."""

import itertools
from typing import Any

from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload


def make_plan(spec: ModelSpec, workload: TrainingWorkload, *, cut: int = 1, **changes: Any) -> Plan:
    """The plain plan with some decisions changed, each by its short name; ``blocks`` is a choice, or some in turn."""
    return make_plan_of(spec.num_blocks, workload, cut=cut, **changes)


def make_plan_of(num_blocks: int, workload: TrainingWorkload, *, cut: int = 1, **changes: Any) -> Plan:
    """The same of what has no spec."""
    blocks = changes.get("blocks", "keep")
    choices: list[Any] = [blocks] if isinstance(blocks, str) else list(blocks)
    per_block: tuple[BlockChoice, ...] = tuple(itertools.islice(itertools.cycle(choices), num_blocks))
    return Plan(
        batch=BatchPlan(micro_batch_size=workload.global_batch_size // cut, accumulation_steps=cut),
        weights=WeightsPlan(**changes.get("weights", {})),
        gradients=GradientsPlan(choice=changes.get("gradients", "keep")),
        optimizer_state=OptimizerStatePlan(**changes.get("state", {})),
        activations=ActivationsPlan(per_block=per_block, compress=changes.get("compress", "none")),
        logits_and_loss=LogitsAndLossPlan(num_chunks=changes.get("num_chunks", 1)),
    )


_ON_HOST = {"state": {"place": "host"}, "gradients": "host"}
_ON_DISK = {"state": {"place": "disk"}, "gradients": "host"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"blocks": "recompute"},
    "recompute selectively": {"blocks": "selective"},
    "activations to the host": {"blocks": "offload"},
    "activations to the disk": {"blocks": "offload_disk"},
    "activations to a remote store": {"blocks": "offload_remote"},
    "activations to the host as bf16": {"blocks": "offload", "compress": "bf16"},
    "activations to the host as int8": {"blocks": "offload", "compress": "int8"},
    "accumulate": {"cut": 4},
    "loss in chunks": {"num_chunks": 8},
    "gradients consumed": {"gradients": "consume"},
    "gradients to the host": {"gradients": "host"},
    "state on the host": _ON_HOST,
    "half the state on the host": {"state": {"place": "host", "fraction": 0.5}, "gradients": "host"},
    "state on the disk": _ON_DISK,
    "weights streamed from the host": {**_ON_HOST, "weights": {"place": "host"}},
    "weights streamed from the disk": {**_ON_DISK, "weights": {"place": "disk"}},
    "autocast": {"weights": {"autocast": "bf16"}},
    "bf16": {"weights": {"dtype": "bf16"}},
    "8-bit state": {"state": {"bits": 8}},
    "adapters": {"adapter": True},
    "adapters on int8": {"adapter": True, "weights": {"frozen": "int8"}},
    "adapters on nf4": {"adapter": True, "weights": {"frozen": "nf4"}},
}
"""Decisions that differ from plain training, by the names that ``make_plan`` takes."""


def describe(plan: Plan) -> str:
    """All that differs from plain training, in short."""
    batch, state = plan.batch, plan.optimizer_state
    words = [
        f"{plan.weights.representation} {batch.micro_batch_size}x{batch.accumulation_steps}",
        "".join(_LETTERS[choice] for choice in plan.activations.per_block),
    ]
    if plan.activations.compress != "none":
        words.append(f"compressed to {plan.activations.compress}")
    if plan.logits_and_loss.num_chunks > 1:
        words.append(f"loss in {plan.logits_and_loss.num_chunks}")
    if plan.gradients.choice != "keep":
        words.append(f"gradients {plan.gradients.choice}")
    if state.bits != 32 or state.place != "device":
        words.append(f"state {state.bits} bits on {state.place} x{state.fraction:g}")
    if plan.weights.place != "device":
        words.append(f"weights on {plan.weights.place}")
    return ", ".join(words)


_LETTERS: dict[BlockChoice, str] = {
    "keep": "k",
    "recompute": "r",
    "selective": "s",
    "offload": "o",
    "offload_disk": "d",
    "offload_remote": "n",
}
