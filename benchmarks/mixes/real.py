"""Small jobs that really train on the CPU device: some keep the processor busy, some wait for the remote store's link."""

from dataclasses import dataclass
from typing import Any

from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload

_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, kw_only=True)
class Real:
    """One job."""

    spec: ModelSpec
    plan: Plan
    workload: TrainingWorkload
    waits: bool
    """It is made to wait for the link for most of its time."""


def _make(choice: BlockChoice, *, state: str, batch_size: int, waits: bool) -> Real:
    spec = read_model_spec(_CONFIG)
    is_far = state == "remote"
    return Real(
        spec=spec,
        workload=TrainingWorkload(sequence_length=128, global_batch_size=batch_size, num_steps=1_000_000),
        plan=Plan(
            batch=BatchPlan(micro_batch_size=batch_size, accumulation_steps=1),
            activations=ActivationsPlan(per_block=(choice,) * spec.num_blocks),
            gradients=GradientsPlan(choice="host" if is_far else "keep"),
            optimizer_state=OptimizerStatePlan(place="remote" if is_far else "device"),
        ),
        waits=waits,
    )


REAL: dict[str, Real] = {
    "resident": _make("keep", state="device", batch_size=4, waits=False),
    "resident, larger batch": _make("keep", state="device", batch_size=8, waits=False),
    "recomputed": _make("recompute", state="device", batch_size=4, waits=False),
    "activations remote": _make("offload_remote", state="device", batch_size=2, waits=True),
    "state remote": _make("keep", state="remote", batch_size=2, waits=True),
}
