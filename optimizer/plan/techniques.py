"""The register of everything that a plan can decide: knobs and techniques, as the modules of this folder declare them."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, Literal, cast, get_args

from optimizer.base.categories import CATEGORIES, Category
from optimizer.base.limits import MAX_DEVICES
from optimizer.plan import (
    activations,
    allocator,
    batch,
    gradients,
    kv_cache,
    logits_and_loss,
    optimizer_state,
    weights,
)
from optimizer.plan.devices import declarations as devices
from optimizer.plan.knob import Asks, Condition, Group, Knob, TechniqueDeclaration, Work

Technique = Literal[
    "recompute",
    "offload",
    "accumulate",
    "chunked_loss",
    "consume_gradients",
    "offload_gradients",
    "offload_optimizer",
    "stream_weights",
    "disk",
    "remote",
    "compress",
    "bf16",
    "no_master_weights",
    "fp16",
    "autocast",
    "8bit_optimizer",
    "quantize_frozen",
    "compile_blocks",
    "data_parallel",
    "shard_state",
    "shard_gradients",
    "shard_weights",
    "share_prompts",
    "cut_model",
    "share_blocks",
    "local_steps",
    "offload_kv",
    "host_attention",
    "quantize_kv",
    "rebuild_kv",
]
"""Techniques that a goal may forbid, by name: for the type checker and for reading JSON. A test holds it to ``DECLARATIONS``."""

_PLACES: Final = (
    TechniqueDeclaration(
        name="disk",
        label="anything on disk",
        sentence="Keeps anything at all in the scratch file: state, weights, activations, keys and values.",
        group="Places",
        searches=("training", "generation"),
    ),
    TechniqueDeclaration(
        name="remote",
        label="anything in a remote store",
        sentence="Keeps anything at all in another machine's memory, behind a store that speaks the Redis protocol.",
        group="Places",
        searches=("training", "generation"),
    ),
)
KNOBS: Final[dict[str, Knob]] = {
    knob.path: knob
    for declared in (
        devices.KNOBS,
        batch.KNOBS,
        batch.GENERATION_KNOBS,
        weights.KNOBS,
        gradients.KNOBS,
        optimizer_state.KNOBS,
        activations.KNOBS,
        logits_and_loss.KNOBS,
        kv_cache.KNOBS,
        allocator.KNOBS,
    )
    for knob in declared
}
"""By path, in the order of the plans."""
_DECLARED: Final[dict[str, TechniqueDeclaration]] = {
    declared.name: declared
    for declarations in (
        activations.TECHNIQUES,
        batch.TECHNIQUES,
        logits_and_loss.TECHNIQUES,
        gradients.TECHNIQUES,
        optimizer_state.TECHNIQUES,
        weights.TECHNIQUES,
        devices.TECHNIQUES,
        kv_cache.TECHNIQUES,
        _PLACES,
    )
    for declared in declarations
}
DECLARATIONS: Final[dict[Technique, TechniqueDeclaration]] = {
    name: _DECLARED[name] for group in get_args(Group) for name in get_args(Technique) if _DECLARED[name].group == group
}
"""All of them, in the order of ``TECHNIQUE_GROUPS``."""

LOSSY: Final[tuple[Technique, ...]] = tuple(name for name in get_args(Technique) if _DECLARED[name].loss != "none")
"""Techniques that change the numbers."""
ROUNDING: Final[tuple[Technique, ...]] = tuple(name for name in LOSSY if _DECLARED[name].loss == "rounding")
"""Lossy techniques that only round, as training in 16 bits does. The others' effect on a result depends on the model."""
TECHNIQUE_LABELS: Final[dict[Technique, str]] = {name: declared.label for name, declared in DECLARATIONS.items()}
TECHNIQUE_GROUPS: Final[tuple[tuple[Group, tuple[Technique, ...]], ...]] = tuple(
    (group, tuple(name for name, declared in DECLARATIONS.items() if declared.group == group)) for group in get_args(Group)
)


def techniques_for(work: Work, *, num_devices: int = 1) -> tuple[Technique, ...]:
    """Techniques that plans of this kind of work can use on so many devices, and that their search tries."""
    return tuple(
        name
        for name, declared in DECLARATIONS.items()
        if work in declared.searches and declared.num_devices <= num_devices
    )


def techniques_that_lower() -> dict[Category, tuple[Technique, ...]]:
    """By category of memory, the techniques of training that make it smaller."""
    return {
        category: found
        for category in CATEGORIES
        if (found := tuple(name for name in techniques_for("training") if category in DECLARATIONS[name].lowers))
    }


def knobs_of(work: Work, *, num_devices: int = 1) -> tuple[Knob, ...]:
    """The knobs that decide something in this kind of work's plans on so many devices, in their order."""
    return tuple(
        knob for knob in KNOBS.values() if getattr(knob, work) is not None and knob.num_devices <= num_devices
    )


def is_idle(path: str, plan: Any) -> bool:
    """Report whether a knob decides nothing in this plan, because its subject is absent."""
    knob = KNOBS[path]
    if all(_holds(condition, plan) for condition in knob.matters_where):
        return False
    return not any(_holds(condition, plan) for condition in knob.or_where)


def _holds(condition: Condition, plan: Any) -> bool:
    """Report whether a plan's decision is as asked; False where plans of its kind have no such decision."""
    decided = plan
    for name in condition.path.split("."):
        if not hasattr(decided, name):
            return False
        decided = getattr(decided, name)
    return condition.holds(decided)


_Question = tuple[Callable[[Any], Any], Asks]
"""Reads a knob's value from a plan, and tests it."""


def _list_ways(work: Work) -> "tuple[tuple[Technique, tuple[tuple[_Question, ...], ...]], ...]":
    """By technique, the ways in which a plan can use it: questions that must all be answered with yes."""
    ways: dict[Technique, list[tuple[_Question, ...]]] = {}
    for knob in knobs_of(work, num_devices=MAX_DEVICES):
        for use in knob.uses:
            where = (*knob.matters_where, *use.where)
            conditions = tuple((attrgetter(condition.path), condition.holds) for condition in where)
            ways.setdefault(cast(Technique, use.technique), []).append(((attrgetter(knob.path), use.asks), *conditions))
    return tuple((name, tuple(ways[name])) for name in get_args(Technique) if name in ways)


_WAYS: "Final[dict[Work, tuple[tuple[Technique, tuple[tuple[_Question, ...], ...]], ...]]]" = {
    work: _list_ways(work) for work in get_args(Work)
}


def list_techniques(plan: Any, *, work: Work) -> tuple[Technique, ...]:
    """The techniques that a plan uses, in the order of ``Technique``."""
    return tuple(
        name for name, ways in _WAYS[work] if any(all(asks(get(plan)) for get, asks in way) for way in ways)
    )
