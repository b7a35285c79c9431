"""The cases of ``benchmarks.accuracy``: models, techniques alone and together, declared and drawn with a fixed seed.

A case is named by what it is (``llama/tiny/recompute+8bit``), so that its name says all, and a fifth of the cases, chosen by
a hash of the name and ``HOLDOUT_SEED``, is held back: nothing is fitted to it, and its errors are reported apart. Adding cases
moves none from one part to the other.

Tiny models serve bytes alone, since bookkeeping does not depend on size; ``small`` ones take steps long enough to be timed.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.training.plans import make_plan
from optimizer.errors import InvalidPlan
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.inference import InferencePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter, InferenceWorkload, TrainingWorkload

Option = TypeVar("Option")

HOLDOUT_SEED = "held back, 2026-11"
DRAWN_SEED = 20261121
"""Of the combinations of techniques."""
NUM_DRAWN = 5
"""Combinations per model that are not timed."""
NUM_ALONE = 9
"""Techniques alone per model; models take turns, so that together they have all."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a case's model and batch are."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_key_value_heads: int
    vocab_size: int
    sequence_length: int
    global_batch_size: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        hidden_size=96,
        intermediate_size=256,
        num_blocks=4,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        sequence_length=64,
        global_batch_size=4,
    ),
    "odd": Shape(
        hidden_size=80,
        intermediate_size=208,
        num_blocks=3,
        num_heads=5,
        num_key_value_heads=5,
        vocab_size=1031,
        sequence_length=47,
        global_batch_size=4,
    ),
    "small": Shape(
        hidden_size=256,
        intermediate_size=704,
        num_blocks=4,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        sequence_length=128,
        global_batch_size=4,
    ),
    "long": Shape(
        hidden_size=192,
        intermediate_size=512,
        num_blocks=6,
        num_heads=6,
        num_key_value_heads=6,
        vocab_size=1024,
        sequence_length=256,
        global_batch_size=4,
    ),
    "slow": Shape(
        hidden_size=128,
        intermediate_size=352,
        num_blocks=2,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        sequence_length=64,
        global_batch_size=4,
    ),
}
"""slow: for dtypes that a CPU multiplies many times slower than fp32."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {},
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "headroom_decoder": {"attention_block": 8, "local_window": 12},
    "bert": {},
    "t5": {},
    "bart": {},
    "roberta": {},
    "falcon": {},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
}
"""By model type, what differs from the common keys (``make_config``)."""
BRIEF = frozenset({"roberta", "falcon", "gpt_neox", "phi", "starcoder2", "gemma3_text", "qwen3_moe"})
"""Cousins of others: fewer cases."""
BRIEF_SHARE = 3
"""By which their numbers of cases are divided."""
WITHOUT_CACHE = frozenset({"bert", "roberta", "t5", "bart"})
"""No decoders alone, which generate nothing here."""
_NO_CHUNKS = frozenset({"chunks"})
IMPOSSIBLE: dict[str, frozenset[str]] = {
    "bert": _NO_CHUNKS,
    "roberta": _NO_CHUNKS,
    "t5": _NO_CHUNKS | {"fp16", "autocast-fp16"},
    "bart": _NO_CHUNKS | {"fp16", "autocast-fp16"},
}
"""Techniques that a model cannot have: heads that are no plain projection, values clamped in fp16 alone."""

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
"""What each changes of plain training: of the workload under ``work``, the rest by the names that ``make_plan`` takes."""
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
"""Of inference, what each changes of fp32 weights on the device."""
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
"""Of which each model takes some in turn, beside plain generation."""
NUM_GENERATED = 4
PROMPTS: tuple[tuple[int, int, int], ...] = ((24, 16, 1), (8, 24, 3), (40, 4, 2), (16, 9, 3), (32, 1, 1))
"""Prompt length, new tokens and batch; cases take turns. Windows are 16 and 12, and our decoder's blocks 8 tokens."""
TIMED_GENERATIONS: tuple[tuple[str, ...], ...] = ((), ("int8",), ("streamed",), ("nf4",))
TIMED_PROMPT = (128, 32, 4)
REMOTE = frozenset({"offload-remote"})
"""Techniques that need a store at ``HEADROOM_REMOTE_URL``."""
SLOW = frozenset({"bf16", "fp16", "autocast", "autocast-fp16"})
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
"""Of which each model takes some in turn, on a shape that can be timed."""
NUM_TIMED = 7
TIMED_SLOW: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("autocast",),
    ("fp16", "recompute"),
    ("autocast-fp16", "offload"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one model: real steps of it are held against what was predicted."""

    name: str
    model: str
    shape: str
    techniques: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    workload: TrainingWorkload | InferenceWorkload = field(repr=False)
    plan: Plan | InferencePlan = field(repr=False)
    is_timed: bool = False

    @property
    def adapter(self) -> Adapter | None:
        return self.workload.adapter if isinstance(self.workload, TrainingWorkload) else None

    @property
    def is_held_back(self) -> bool:
        return is_held_back(self.name)

    @property
    def is_carried_out(self) -> bool:
        """Whether the verdict on it is put to the test under a cap: one case in three, those that are not timed."""
        return not self.is_timed and _hash(f"carried out:{self.name}") % 3 == 0

    @property
    def spec(self) -> ModelSpec:
        return read_model_spec(dict(self.config))


def is_held_back(name: str) -> bool:
    """Whether a case of this name belongs to the fifth that nothing is fitted to."""
    return _hash(f"{HOLDOUT_SEED}:{name}") % 5 == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def list_cases() -> list[Case]:
    """All, in a fixed order: model by model, bytes first, then those that are also timed."""
    cases = [case for index, model in enumerate(MODELS) for case in _cases_of(model, index)]
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


def draw_techniques(generator: random.Random) -> tuple[str, ...]:
    """Two to four that can be carried out together, none of which undoes another's choice."""
    while True:
        names = sorted(generator.sample(list(TECHNIQUES), generator.randint(2, 4)), key=list(TECHNIQUES).index)
        keys = [key for name in names for key in _decisions(TECHNIQUES[name])]
        if len(keys) == len(set(keys)) and _find_conflict(names) is None:
            return tuple(names)


def make_case(model: str, shape: str, techniques: tuple[str, ...], *, is_timed: bool = False) -> Case:
    """The case of one model, one shape and some techniques, which must go together."""
    config = make_config(model, SHAPES[shape])
    spec = read_model_spec(config)
    changes = merge_changes(techniques)
    # Attention in blocks takes whole ones; of other models a length need not be a multiple of anything.
    block = config.get("attention_block", 1)
    workload = _make_workload(SHAPES[shape], changes, sequence_multiple=block)
    plan = _make_plan(spec, workload, changes)
    return Case(
        name=f"{model}/{shape}/{'+'.join(techniques) or 'plain'}",
        model=model,
        shape=shape,
        techniques=techniques,
        config=config,
        workload=workload,
        plan=plan,
        is_timed=is_timed,
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
        workload=InferenceWorkload(
            prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=batch_size
        ),
        plan=InferencePlan(batch_size=batch_size, weights=WeightsPlan(**weights)),
        is_timed=is_timed,
    )


def merge_changes(techniques: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """All their changes together; of a section that several change, the union."""
    merged: dict[str, Any] = {}
    for name in techniques:
        for key, value in TECHNIQUES[name].items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def make_config(model: str, shape: Shape) -> dict[str, Any]:
    """A config.json of this type and shape."""
    if model == "gpt2":
        return {
            "model_type": model,
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_blocks,
            "n_head": shape.num_heads,
            "n_inner": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "n_positions": 2 * shape.sequence_length,
        }
    common: dict[str, Any] = {
        "model_type": model,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_blocks,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 2 * shape.sequence_length,
    }
    if model == "opt":
        return {**common, "word_embed_proj_dim": shape.hidden_size, "ffn_dim": shape.intermediate_size}
    if model == "bart":
        return {
            "model_type": model,
            "vocab_size": shape.vocab_size,
            "d_model": shape.hidden_size,
            "encoder_layers": shape.num_blocks // 2,
            "decoder_layers": shape.num_blocks - shape.num_blocks // 2,
            "encoder_attention_heads": shape.num_heads,
            "decoder_attention_heads": shape.num_heads,
            "encoder_ffn_dim": shape.intermediate_size,
            "decoder_ffn_dim": shape.intermediate_size,
            "max_position_embeddings": 2 * shape.sequence_length,
        }
    if model == "t5":
        return {
            "model_type": model,
            "vocab_size": shape.vocab_size,
            "d_model": shape.hidden_size,
            "d_kv": shape.hidden_size // shape.num_heads,
            "d_ff": shape.intermediate_size,
            "num_layers": shape.num_blocks // 2,
            "num_decoder_layers": shape.num_blocks - shape.num_blocks // 2,
            "num_heads": shape.num_heads,
            "feed_forward_proj": "gated-gelu",
        }
    common |= {"intermediate_size": shape.intermediate_size, "num_key_value_heads": shape.num_key_value_heads}
    if model in ("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe"):
        common["head_dim"] = shape.hidden_size // shape.num_heads
    if model == "headroom_decoder":
        kinds = ["full", "local", "linear", "full", "local", "full"]
        common["layer_types"] = kinds[: shape.num_blocks]
    return {**common, **MODELS[model]}


def _make_workload(shape: Shape, changes: Mapping[str, Any], *, sequence_multiple: int = 1) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=-(-shape.sequence_length // sequence_multiple) * sequence_multiple,
        global_batch_size=shape.global_batch_size,
        learning_rate=1e-4,
        eval_batches=1,
        **changes.get("work", {}),
    )


def _make_plan(spec: ModelSpec, workload: TrainingWorkload, changes: Mapping[str, Any]) -> Plan:
    return make_plan(spec, workload, **{key: value for key, value in changes.items() if key != "work"})


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
    workload = _make_workload(SHAPES["tiny"], changes)
    try:
        plan = _make_plan(spec, workload, changes)
    except InvalidPlan as error:
        return error
    return plan.find_conflict(workload)
