"""The small model of all tests of techniques, and a plan for each technique."""



from typing import Any

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.workload import TrainingWorkload

NUM_BLOCKS = 3
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXTENT = Extent(representations=("fp32", "bf16"), shapes=((2, 24), (4, 24)))
"""Extent of the profile for all plans here, and for those of SGD (test_sgd.py)."""
ON_HOST = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}
TECHNIQUES: dict[str, Any] = {
    **{choice: {"activations": choice} for choice in ("recompute", "selective", "offload", "offload_disk")},
    "accumulate": {"batch": BatchPlan(micro_batch_size=2, accumulation_steps=2)},
    "chunked loss": {"logits_and_loss": LogitsAndLossPlan(num_chunks=3)},
    "consume": {"gradients": GradientsPlan(choice="consume")},
    "gradients on host": {"gradients": GradientsPlan(choice="host")},
    "state on host": ON_HOST,
    "half the state on host": {**ON_HOST, "optimizer_state": OptimizerStatePlan(place="host", fraction=0.5)},
    "state on disk": {**ON_HOST, "optimizer_state": OptimizerStatePlan(place="disk")},
    "weights on host": {**ON_HOST, "weights": WeightsPlan(place="host")},
    "weights on disk": {**ON_HOST, "weights": WeightsPlan(place="disk", prefetch=0)},
}


def make_plan(*names: str) -> Plan:
    """Make a plan; of two choices for blocks, the first holds for the outer ones and the second for those between."""
    columns = {"batch": BatchPlan(micro_batch_size=4, accumulation_steps=1)}
    for name in names:
        columns |= TECHNIQUES[name]
    choices = [TECHNIQUES[name]["activations"] for name in names if "activations" in TECHNIQUES[name]] or ["keep"]
    per_block = (choices[0], choices[-1], choices[0])
    return Plan(**columns | {"activations": ActivationsPlan(per_block=per_block)})


def make_workload(plan: Plan) -> TrainingWorkload:
    clip = None if plan.gradients.choice == "consume" else 1.0
    return TrainingWorkload(sequence_length=24, global_batch_size=4, max_grad_norm=clip)
