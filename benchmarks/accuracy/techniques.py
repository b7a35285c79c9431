"""The techniques of ``benchmarks.accuracy``: what each changes of plain training or generation, and which go together."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.accuracy.configs import SHAPES, Shape, make_config
from benchmarks.training.plans import make_plan_of
from optimizer.base.errors import InvalidPlan
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.workload import Adapter, TrainingWorkload

_UNCLIPPED = {"work": {"max_grad_norm": None}}
_ADAPTED = {"work": {"adapter": Adapter(rank=4)}}
_HOST_STATE = {"state": {"place": "host"}, "gradients": "host"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "recompute": {"blocks": "recompute"},
    "selective": {"blocks": "selective"},
    "offload": {"blocks": "offload"},
    "offload-disk": {"blocks": "offload_disk"},
    "offload-remote": {"blocks": "offload_remote"},
    "offload-bf16": {"blocks": "offload", "compress": "bf16"},
    "offload-int8": {"blocks": "offload", "compress": "int8"},
    "mixed": {"blocks": ("offload", "selective", "recompute", "keep", "offload_disk", "keep")},
    "accumulate": {"cut": 2},
    "chunks": {"num_chunks": 3},
    "consume": {"gradients": "consume", **_UNCLIPPED},
    "host-gradients": {"gradients": "host"},
    "host-state": _HOST_STATE,
    "part-host-state": {"state": {"place": "host", "fraction": 0.4}, "gradients": "host"},
    "disk-state": {"state": {"place": "disk"}, "gradients": "host"},
    "part-disk-state": {"state": {"place": "disk", "fraction": 0.6}, "gradients": "host"},
    "streamed": {**_HOST_STATE, "weights": {"place": "host"}},
    "streamed-disk": {**_HOST_STATE, "weights": {"place": "disk", "prefetch": 0}},
    "8bit": {"state": {"bits": 8}},
    "unclipped": _UNCLIPPED,
    "sgd": {"work": {"optimizer": "sgd"}},
    "sgd-plain": {"work": {"optimizer": "sgd", "momentum": 0.0}},
    "bf16": {"weights": {"dtype": "bf16"}},
    "fp16": {"weights": {"dtype": "fp16"}},
    "autocast": {"weights": {"autocast": "bf16"}},
    "autocast-fp16": {"weights": {"autocast": "fp16"}},
    "lora": _ADAPTED,
    "qlora-int8": {**_ADAPTED, "weights": {"frozen": "int8"}},
    "qlora-nf4": {**_ADAPTED, "weights": {"frozen": "nf4"}},
}
"""Changes of each to plain training: to the workload under ``work``, the rest by the names that ``make_plan`` takes."""
GENERATION = "generate"
"""Marks the cases that generate text, among the techniques of their name."""
GENERATIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "int8": {"frozen": "int8"},
    "nf4": {"frozen": "nf4"},
    "streamed": {"place": "host"},
    "streamed-ahead": {"place": "host", "prefetch": 2},
    "streamed-disk": {"place": "disk", "prefetch": 0},
}
"""Changes of each technique of generation to fp32 weights on the device."""
REMOTE = frozenset({"offload-remote"})
"""Techniques that need a store at ``HEADROOM_REMOTE_URL``."""
_NO_CHUNKS = frozenset({"chunks"})
IMPOSSIBLE: dict[str, frozenset[str]] = {
    "bert": _NO_CHUNKS,
    "roberta": _NO_CHUNKS,
    "t5": _NO_CHUNKS | {"fp16", "autocast-fp16"},
    "bart": _NO_CHUNKS | {"fp16", "autocast-fp16"},
}
"""Techniques that a model cannot have: heads that are no plain projection, values clamped in fp16 alone."""


def draw_techniques(generator: random.Random) -> tuple[str, ...]:
    """Two to four that can be carried out together, none of which undoes another's choice."""
    while True:
        names = sorted(generator.sample(list(TECHNIQUES), generator.randint(2, 4)), key=list(TECHNIQUES).index)
        keys = [key for name in names for key in _decisions(TECHNIQUES[name])]
        if len(keys) == len(set(keys)) and _find_conflict(names) is None:
            return tuple(names)


def merge_changes(techniques: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """All their changes together; of a section that several change, the union."""
    merged: dict[str, Any] = {}
    for name in techniques:
        for key, value in TECHNIQUES[name].items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def make_workload(shape: Shape, changes: Mapping[str, Any], *, sequence_multiple: int = 1) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=-(-shape.sequence_length // sequence_multiple) * sequence_multiple,
        global_batch_size=shape.global_batch_size,
        learning_rate=1e-4,
        eval_batches=1,
        **changes.get("work", {}),
    )


def make_training_plan(num_blocks: int, workload: TrainingWorkload, changes: Mapping[str, Any]) -> Plan:
    return make_plan_of(num_blocks, workload, **{key: value for key, value in changes.items() if key != "work"})


def _decisions(changes: Mapping[str, Any]) -> Iterator[str]:
    for key, value in changes.items():
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def _find_conflict(techniques: list[str]) -> InvalidPlan | None:
    """Why these cannot be carried out together; None where they can."""
    changes = merge_changes(techniques)
    spec = read_model_spec(make_config("llama", SHAPES["tiny"]))
    workload = make_workload(SHAPES["tiny"], changes)
    try:
        plan = make_training_plan(spec.num_blocks, workload, changes)
    except InvalidPlan as error:
        return error
    return plan.find_conflict(workload)
