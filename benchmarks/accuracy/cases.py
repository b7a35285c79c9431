"""The cases of ``benchmarks.accuracy``: models, techniques alone and together, declared and drawn with a fixed seed.

A case is named by what it is (``llama/tiny/recompute+8bit``), so that its name says all, and a fifth of the cases, chosen by
a hash of the name and ``HOLDOUT_SEED``, is held back: nothing is fitted to it, and its errors are reported apart. Adding cases
moves none from one part to the other.

``configs.py`` says what the models are, ``modules.py`` what plain modules, ``techniques.py`` what each technique changes.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.accuracy.configs import BRIEF, BRIEF_SHARE, MODELS, SHAPES, WITHOUT_CACHE, make_config
from benchmarks.accuracy.modules import PLAIN_MODULES, Module
from benchmarks.accuracy.techniques import (
    GENERATION,
    GENERATIONS,
    IMPOSSIBLE,
    TECHNIQUES,
    draw_techniques,
    make_training_plan,
    make_workload,
    merge_changes,
)
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter, GenerationWorkload, TrainingWorkload

Option = TypeVar("Option")

HOLDOUT_SEED = "held back, 2026-11"
DRAWN_SEED = 20261121
"""Seed of the combinations of techniques."""
NUM_DRAWN = 5
"""Combinations per model that are not timed."""
NUM_ALONE = 9
"""Techniques alone per model; models take turns, so that together they have all."""
GENERATED: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("int8",),
    ("streamed",),
    ("nf4", "streamed-ahead"),
    ("streamed-disk",),
    ("bf16", "int8"),
    ("bf16", "streamed"),
    ("nf4",),
)
"""Techniques of generation, of which each model takes some in turn beside plain generation."""
NUM_GENERATED = 4
PROMPTS: tuple[tuple[int, int, int], ...] = ((24, 16, 1), (8, 24, 3), (40, 4, 2), (16, 9, 3), (32, 1, 1))
"""Prompt length, new tokens and batch; cases take turns. Windows are 16 and 12, and our decoder's blocks 8 tokens."""
TIMED_GENERATIONS: tuple[tuple[str, ...], ...] = ((), ("int8",), ("streamed",), ("nf4",))
TIMED_PROMPT = (128, 32, 4)
TIMED: tuple[tuple[str, ...], ...] = (
    (),
    ("recompute",),
    ("offload",),
    ("selective",),
    ("accumulate",),
    ("chunks",),
    ("8bit",),
    ("sgd",),
    ("host-state",),
    ("qlora-nf4",),
    ("streamed",),
    ("lora", "recompute"),
    ("offload-int8",),
    ("part-disk-state",),
    ("qlora-int8", "selective"),
    ("recompute", "8bit", "chunks"),
    ("offload", "host-state", "accumulate"),
    ("mixed", "host-gradients"),
    ("consume",),
)
"""Plans of which each model takes some in turn, on a shape that can be timed."""
NUM_TIMED = 7
TIMED_SLOW: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("autocast",),
    ("fp16", "recompute"),
    ("autocast-fp16", "offload"),
)
PADDED_MODELS = ("gpt2", "llama", "gemma2", "mixtral", "bert", "headroom_decoder")
PADDED: tuple[tuple[str, ...], ...] = (
    (),
    ("recompute",),
    ("offload", "accumulate"),
    ("selective", "bf16"),
    ("host-state", "chunks"),
)
MODULE_TECHNIQUES: tuple[tuple[str, ...], ...] = (
    (),
    ("recompute",),
    ("selective",),
    ("offload",),
    ("offload-disk",),
    ("offload-int8",),
    ("accumulate",),
    ("consume",),
    ("part-host-state",),
    ("disk-state",),
    ("streamed",),
    ("8bit",),
    ("sgd",),
    ("bf16",),
    ("autocast",),
    ("recompute", "8bit", "accumulate"),
    ("offload", "host-state"),
    ("mixed", "unclipped"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one model: real steps of it are held against what was predicted."""

    name: str
    model: str
    shape: str
    techniques: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    workload: TrainingWorkload | GenerationWorkload = field(repr=False)
    plan: Plan | GenerationPlan = field(repr=False)
    is_timed: bool = False
    is_padded: bool = False
    """Each micro-batch's last sequence ends before the others."""

    @property
    def module(self) -> Module | None:
        """The module of a case without a config."""
        return PLAIN_MODULES.get(self.model)

    @property
    def adapter(self) -> Adapter | None:
        return self.workload.adapter if isinstance(self.workload, TrainingWorkload) else None

    @property
    def is_held_back(self) -> bool:
        return is_held_back(self.name)

    @property
    def is_carried_out(self) -> bool:
        """True if the verdict is put to the test under a cap: one case in three, of those that are not timed."""
        return not self.is_timed and _hash(f"carried out:{self.name}") % 3 == 0

    @property
    def num_blocks(self) -> int:
        return self.spec.num_blocks if self.module is None else self.module.num_blocks

    @property
    def spec(self) -> ModelSpec:
        return read_model_spec(dict(self.config))


def is_held_back(name: str) -> bool:
    """True for the names of the fifth of cases that nothing is fitted to."""
    return _hash(f"{HOLDOUT_SEED}:{name}") % 5 == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def list_cases() -> list[Case]:
    """All, in a fixed order: model by model, bytes first, then those that are also timed; then padded batches, then modules."""
    cases = [case for index, model in enumerate(MODELS) for case in _cases_of(model, index)]
    cases += [
        make_case(model, "tiny", names, is_padded=True)
        for model, names in itertools.product(PADDED_MODELS, PADDED)
        if IMPOSSIBLE.get(model, frozenset()).isdisjoint(names)
    ]
    cases += [make_module_case(name, names) for name in PLAIN_MODULES for names in MODULE_TECHNIQUES]
    names = [case.name for case in cases]
    if len(names) != len(set(names)):
        raise ValueError("two cases have one name")
    return cases


def _cases_of(model: str, index: int) -> Iterator[Case]:
    shape = ("tiny", "odd")
    yield make_case(model, "tiny", ())
    yield make_case(model, "odd", ())
    share = BRIEF_SHARE if model in BRIEF else 1
    impossible = IMPOSSIBLE.get(model, frozenset())
    alone = [name for name in TECHNIQUES if name not in impossible]
    for turn, name in enumerate(taken_in_turn(alone, index, NUM_ALONE // share)):
        yield make_case(model, shape[turn % 2], (name,))
    generator = random.Random(f"{DRAWN_SEED}:{model}")
    seen: set[tuple[str, ...]] = set()
    while len(seen) < NUM_DRAWN // share:
        techniques = draw_techniques(generator)
        if techniques not in seen and impossible.isdisjoint(techniques):
            seen.add(techniques)
            yield make_case(model, shape[len(seen) % 2], techniques)
    timed = [names for names in TIMED if impossible.isdisjoint(names)]
    for turn, techniques in enumerate(taken_in_turn(timed, index, NUM_TIMED // share)):
        yield make_case(model, ("small", "long")[turn % 2], techniques, is_timed=True)
    if model not in BRIEF:
        (techniques,) = taken_in_turn([names for names in TIMED_SLOW if impossible.isdisjoint(names)], index, 1)
        yield make_case(model, "slow", techniques, is_timed=True)
    if model not in WITHOUT_CACHE:
        yield from _generations_of(model, index, shape, number=NUM_GENERATED // share)


def _generations_of(model: str, index: int, shape: tuple[str, str], *, number: int) -> Iterator[Case]:
    for turn, generated in enumerate([(), *taken_in_turn(GENERATED, index, number)]):
        yield make_generation_case(model, shape[turn % 2], generated, prompt=PROMPTS[(index + turn) % len(PROMPTS)])
    (generated,) = taken_in_turn(TIMED_GENERATIONS, index, 1)
    yield make_generation_case(model, "long", generated, prompt=TIMED_PROMPT, is_timed=True)


def taken_in_turn(options: Sequence[Option], index: int, number: int) -> list[Option]:
    """Those that the model of this index takes, the next ones being the next model's."""
    return [options[(index * number + turn) % len(options)] for turn in range(number)]


def make_module_case(name: str, techniques: tuple[str, ...]) -> Case:
    """The case of a plain module."""
    changes = merge_changes(techniques)
    workload = make_workload(SHAPES["tiny"], changes)
    return Case(
        name=f"{name}/module/{'+'.join(techniques) or 'plain'}",
        model=name,
        shape="module",
        techniques=techniques,
        config={},
        workload=workload,
        plan=make_training_plan(PLAIN_MODULES[name].num_blocks, workload, changes),
    )


def make_case(
    model: str, shape: str, techniques: tuple[str, ...], *, is_timed: bool = False, is_padded: bool = False
) -> Case:
    """The case of one model, one shape and some techniques, which must go together."""
    config = make_config(model, SHAPES[shape])
    spec = read_model_spec(config)
    changes = merge_changes(techniques)
    # Attention in blocks takes whole ones; of other models a length need not be a multiple of anything.
    block = config.get("attention_block", 1)
    workload = make_workload(SHAPES[shape], changes, sequence_multiple=block)
    plan = make_training_plan(spec.num_blocks, workload, changes)
    return Case(
        name=f"{model}/{shape}/{'padded ' if is_padded else ''}{'+'.join(techniques) or 'plain'}",
        model=model,
        shape=shape,
        techniques=techniques,
        config=config,
        workload=workload,
        plan=plan,
        is_timed=is_timed,
        is_padded=is_padded,
    )


def make_generation_case(
    model: str,
    shape: str,
    techniques: tuple[str, ...],
    *,
    prompt: tuple[int, int, int] = PROMPTS[0],
    is_timed: bool = False,
) -> Case:
    """The case of one model that generates, its weights held in some way. prompt: its length, the new tokens, the batch."""
    prompt_length, num_new_tokens, batch_size = prompt
    config = make_config(model, SHAPES[shape])
    if model == "headroom_decoder":
        # A linear layer keeps a state, which is no cache of keys and values.
        config["layer_types"] = ["full" if kind == "linear" else kind for kind in config["layer_types"]]
        prompt_length = max(16, prompt_length)
    weights: dict[str, Any] = {}
    for name in techniques:
        weights |= GENERATIONS[name]
    names = (GENERATION, *techniques)
    return Case(
        name=f"{model}/{shape}/{'+'.join(names)} {prompt_length}+{num_new_tokens}x{batch_size}",
        model=model,
        shape=shape,
        techniques=names,
        config=config,
        workload=GenerationWorkload(
            prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=batch_size
        ),
        plan=GenerationPlan(batch_size=batch_size, weights=WeightsPlan(**weights)),
        is_timed=is_timed,
    )
