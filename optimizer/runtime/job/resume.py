"""Reads a trainer into a checkpoint, and back: trained weights, optimizer state, loss scale and random state.

The same tensors under the same names wherever the plan keeps them, so a run may go on under a plan with other places; dtype of
weights and bits of state must stay. Frozen weights are not in it, only their hash: they are made again from where they came.

Of several ranks rank 0 writes the state of all, as one device would, and the random state of each, so that a run may go on with
another number of ranks or another layout; each rank reads what it owns, or its parts of what ranks share. Of ranks that take
steps alone a checkpoint is written when they have the same weights, and holds the momentum of the outer step and each rank's own
optimizer state beside rank 0's: the same ranks go on to the same bits, any other layout from these weights and rank 0's state.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from optimizer.base.errors import CheckpointInvalid
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.job.checkpoint import Checkpoint, TensorGroups
from optimizer.runtime.ranks.gathering import AnyTensor, gather_to_first
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.tensor.slices import SlicedTensors, Slices
from optimizer.runtime.step.host_update import MASTER
from optimizer.runtime.step.step import Trainer

T = TypeVar("T")
_SCALARS = "optimizer_scalars"
_OUTER = "outer"
_OF_RANK = " of rank: "
"""Between a rank's ending and the name of a number of its optimizer's, while both are on their way."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of neighbouring ranks: the golden ratio's fraction of 2**64, so that seeds of other jobs are not met."""


def export_trainer(trainer: Trainer, *, frozen_sha256: str) -> tuple[TensorGroups, dict[str, Any]]:
    """Tensors by group, to be written before the next step, and facts beside them."""
    weights = trainer.held_weights()
    optimizer_tensors, optimizer_scalars = trainer.optimizer.export_state()
    groups: TensorGroups = {
        "model": weights,
        "optimizer": optimizer_tensors,
        "random": _random_states(trainer),
    }
    if trainer.outer is not None:
        groups = {**groups, _OUTER: trainer.outer.export_state()}
    return groups, {
        _SCALARS: optimizer_scalars,
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
    tensors, scalars = _read_state(trainer, checkpoint)
    if trainer.parts is not None:
        stored, tensors = (SlicedTensors(each, trainer.parts.slices) for each in (stored, tensors))
    trainer.set_weights(stored)
    trainer.optimizer.import_state(_Owned(tensors, trainer), dict(_Owned(scalars, trainer)))
    if trainer.outer is not None:
        trainer.outer.import_state(_load(checkpoint, _OUTER))
    trainer.assign_optimizer_state()
    if "loss_scale" in facts:
        trainer.precision.import_state(facts["loss_scale"])
    _set_random_states(checkpoint.load("random"), trainer, step=checkpoint.manifest.step)


def export_together(
    trainer: Trainer, groups: TensorGroups, facts: Mapping[str, Any], *, write: Callable[[TensorGroups, dict[str, Any]], T]
) -> T | None:
    """Call ``write`` with what ``export_trainer`` gave; of several ranks on rank 0 alone, with the state of all, while the others
    wait and answer. Returns its result, None on the others.
    """
    ranks = trainer.ranks
    if ranks is None:
        return write(groups, dict(facts))
    if trainer.parts is not None:
        return _export_joined(trainer.parts.slices, ranks, groups, facts, write=write)
    # Weights that are not shared out are the same on all ranks, and so is state, but for ranks that take steps alone.
    given: dict[str, Mapping[str, AnyTensor]] = dict(groups)
    own = "" if trainer.outer is None else _suffix(trainer)
    has_own_state = trainer.shares_state and trainer.is_in_first_replica
    if not ranks.is_first:
        given = {name: groups[name] for name in ("random", "optimizer") if name == "random" or has_own_state}
        if own:
            given[f"optimizer{own}"] = {name: held for name, held in groups["optimizer"].items() if not _is_common(name)}
        dealt = trainer.weights.dealt_names if trainer.is_in_first_replica else ()
        given["model"] = {name: tensor for name, tensor in groups["model"].items() if name in dealt}
    scalars = facts[_SCALARS] if ranks.is_first or has_own_state or own else {}
    names = trainer.named_weights().keys()

    def write_all(everything: dict[str, dict[str, AnyTensor]], found: dict[str, Any]) -> T:
        in_order = {name: everything["model"][name] for name in names}
        by_rank: dict[str, dict[str, Any]] = {}
        for name, value in found.items():
            suffix, _, scalar = name.rpartition(_OF_RANK)
            by_rank.setdefault(f"{_SCALARS}{suffix}", {})[scalar] = value
        return write({**everything, "model": in_order}, {**facts, _SCALARS: {}, **by_rank})

    marked = {f"{own}{_OF_RANK}{name}": value for name, value in scalars.items()} if own else scalars
    return gather_to_first(ranks, groups=given, facts=marked, use=write_all)


def _export_joined(
    slices: Slices,
    ranks: Ranks,
    groups: TensorGroups,
    facts: Mapping[str, Any],
    *,
    write: Callable[[TensorGroups, dict[str, Any]], T],
) -> T | None:
    """The same of ranks that share each block: whole tensors, and numbers that all have."""
    given = slices.give({name: groups[name] for name in ("model", "optimizer")})

    def write_all(everything: dict[str, dict[str, AnyTensor]], found: dict[str, Any]) -> T:
        return write({**slices.join(everything), "random": everything["random"]}, dict(facts))

    return gather_to_first(ranks, groups={**given, "random": groups["random"]}, facts={}, use=write_all)


def _read_state(trainer: Trainer, checkpoint: Checkpoint) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """The optimizer's state for this rank: its own where ranks that took steps alone left one, else the only one, or rank 0's."""
    tensors, scalars = checkpoint.load("optimizer"), checkpoint.facts[_SCALARS]
    group = f"optimizer{_suffix(trainer)}"
    if trainer.outer is None or trainer.ranks is None or trainer.ranks.is_first:
        return tensors, scalars
    own = _load(checkpoint, group)
    if not own:
        return tensors, scalars
    return _Layered(own, tensors), checkpoint.facts.get(f"{_SCALARS}{_suffix(trainer)}", {})


def _load(checkpoint: Checkpoint, group: str) -> Mapping[str, torch.Tensor]:
    """A group of tensors; none where the checkpoint does not have it."""
    return checkpoint.load(group) if checkpoint.has(group) else {}


def _is_common(name: str) -> bool:
    """Report whether ranks that take steps alone have the same of this when they have the same weights."""
    return name.endswith(f"//{MASTER}")


def seed_random(seed: int, *, rank: int = 0, step: int = 0) -> None:
    """Begin the random numbers of a rank, which are its own; those of rank 0 are one device's. step: where there is no state of
    that step to go on from, as when a run goes on with more ranks.
    """
    torch.manual_seed((seed + _SEED_STEP * rank + step) % 2**63)


class _Owned(Mapping[str, T]):
    """The optimizer's state that this rank keeps, read when it is asked for; and entries that no rank of this model has."""

    def __init__(self, stored: Mapping[str, T], trainer: Trainer) -> None:
        self._stored = stored
        known = trainer.named_weights().keys()
        owners = ((name, name.rpartition("//")[0]) for name in stored)
        self._names = [name for name, owner in owners if owner not in known or trainer.owns(owner)]

    def __getitem__(self, name: str) -> T:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Layered(Mapping[str, T]):
    """Entries of a rank's own, and of the others what all have in common."""

    def __init__(self, own: Mapping[str, T], others: Mapping[str, T]) -> None:
        self._own = own
        self._others = others
        self._names = [*own, *(name for name in others if _is_common(name))]

    def __getitem__(self, name: str) -> T:
        return self._own[name] if name in self._own else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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


def _random_states(trainer: Trainer) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    own = backend_of(trainer.device).random_state()
    if own is not None:
        states[trainer.device.type] = own
    return {f"{kind}{_suffix(trainer)}": state for kind, state in states.items()}


def _set_random_states(states: Mapping[str, torch.Tensor], trainer: Trainer, *, step: int) -> None:
    suffix, kind = _suffix(trainer), trainer.device.type
    if f"cpu{suffix}" not in states:
        seed_random(trainer.workload.seed, rank=trainer.rank, step=step)
        return
    torch.set_rng_state(states[f"cpu{suffix}"].clone())
    if kind != "cpu" and f"{kind}{suffix}" in states:
        backend_of(trainer.device).set_random_state(states[f"{kind}{suffix}"].clone())


def _suffix(trainer: Trainer) -> str:
    """Ending of the names of a rank's random states; rank 0 has the names of one device."""
    return f".{trainer.rank}" if trainer.rank else ""
