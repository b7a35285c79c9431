"""Reads a trainer into a checkpoint, and back: trained weights, optimizer state, loss scale and random state.

The same tensors under the same names wherever the plan keeps them, so a run may go on under a plan with other places; dtype of
weights and bits of state must stay. Frozen weights are not in it, only their hash: they are made again from where they came.
"""

from collections.abc import Mapping
from typing import Any

import torch

from optimizer.base.errors import CheckpointInvalid
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.job.checkpoint import Checkpoint, TensorGroups
from optimizer.runtime.step.step import Trainer


def export_trainer(trainer: Trainer, *, frozen_sha256: str) -> tuple[TensorGroups, dict[str, Any]]:
    """Tensors by group, to be written before the next step, and facts beside them."""
    weights = trainer.named_weights()
    optimizer_tensors, optimizer_scalars = trainer.optimizer.export_state()
    groups: TensorGroups = {
        "model": weights,
        "optimizer": optimizer_tensors,
        "random": _random_states(trainer.device),
    }
    return groups, {
        "optimizer_scalars": optimizer_scalars,
        "frozen_sha256": frozen_sha256,
        "weights_dtype": trainer.plan.weights.dtype,
        "optimizer_bits": trainer.plan.optimizer_state.bits,
        "loss_scale": trainer.precision.export_state(),
    }


def import_trainer(trainer: Trainer, checkpoint: Checkpoint, *, frozen_sha256: str) -> None:
    """Undo ``export_trainer``. Raises CheckpointInvalid for another model, representation or frozen weights."""
    facts = checkpoint.facts
    _check_representation(trainer, checkpoint, frozen_sha256)
    names = trainer.named_weights().keys()
    stored = checkpoint.load("model")
    if stored.keys() != names:
        raise CheckpointInvalid(
            f"checkpoint {checkpoint.folder.name} holds {len(stored)} tensors; the model has {len(names)}, or of other names"
        )
    trainer.set_weights(stored)
    trainer.optimizer.import_state(checkpoint.load("optimizer"), facts["optimizer_scalars"])
    trainer.assign_optimizer_state()
    if "loss_scale" in facts:
        trainer.precision.import_state(facts["loss_scale"])
    _set_random_states(checkpoint.load("random"), trainer.device)


def _check_representation(trainer: Trainer, checkpoint: Checkpoint, frozen_sha256: str) -> None:
    facts, plan = checkpoint.facts, trainer.plan
    wanted = (plan.weights.dtype, plan.optimizer_state.bits)
    found = (facts["weights_dtype"], facts["optimizer_bits"])
    if wanted != found:
        raise CheckpointInvalid(
            f"checkpoint {checkpoint.folder.name} holds {found[0]} weights and {found[1]}-bit optimizer state; "
            f"the plan wants {wanted[0]} and {wanted[1]} bits",
            hint="Resume with a plan of the same representation.",
        )
    if facts.get("frozen_sha256", "") != frozen_sha256:
        raise CheckpointInvalid(
            f"checkpoint {checkpoint.folder.name} was trained on other frozen weights than those of this model and plan",
            hint="Resume with the model, the seed and plan.weights.frozen that the checkpoint was made with.",
        )


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    own = backend_of(device).random_state()
    return states if own is None else {**states, device.type: own}


def _set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].clone())
    if device.type != "cpu" and device.type in states:
        backend_of(device).set_random_state(states[device.type].clone())
