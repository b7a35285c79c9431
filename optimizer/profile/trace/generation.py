"""Traces a model's prefill and decode once and returns its GenerationProfile, as ``trace.py`` does for a training step.

The runtime's own ``Generator.advance`` is run without data on a model of as few blocks as show each distinct one, at four
shapes for each range of batches and lengths over which the ops are the same. A decode is traced with a cache that says it
holds what came before, so that no prompt need be run. Keys and values are taken out of the events and reported apart. A decode
with attention on the host is traced as the device runs it, where no cache is; not of models that attend in code of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Literal, get_args

import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.base.heap import without_collections
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.spec import ModelSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.assemble.assemble import assemble_forward
from optimizer.profile.assemble.ranges import ShapeRange, plan_ranges
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.events import Allocated, Began, Event, Freed, Ran
from optimizer.profile.generation import (
    EndBytes,
    ForwardRegime,
    GenerationProfile,
    HostAttended,
    KvTensors,
    Phase,
    WeightBytes,
    block_part,
)
from optimizer.profile.meta_ops.meta_ops import Ops, pretend_cpu
from optimizer.profile.ops import EMBEDDING, HEAD
from optimizer.profile.profile import not_profiled
from optimizer.profile.sizes import Shape
from optimizer.profile.trace.depth import shorten_blocks
from optimizer.profile.trace.rebuild import RebuildTrace
from optimizer.profile.trace.recorder import Recorder
from optimizer.profile.trace.structure import list_block_kinds, sequence_steps, with_blocks
from optimizer.profile.trace.tensor_sizes import find_shared, list_base, sum_storages
from optimizer.runtime.generation.cut import find_ends
from optimizer.runtime.generation.generator import Generator, prepare_for_generation
from optimizer.runtime.generation.kv_cache import find_windows
from optimizer.runtime.generation.kv_host_attention import HostAttendedKvLayer
from optimizer.runtime.generation.kv_layer import KvLayer
from optimizer.runtime.step.weights import torch_dtype

_CPU = torch.device("cpu")
_SHORTEST = 2
"""A prompt of one token runs other ops: it is what decode is."""
_SPARE_TOKENS = 2
"""Room in the traced caches beyond the tokens that are in, so that what is handed out is a view, as it mostly is."""
_TRACED = "traced"
"""The phase's name in the events."""
_PhaseName = Literal["prefill", "decode", "decode on host"]
_ON_HOST = KvCachePlan(place="host", attention="host")


@without_collections()
def profile_generation(spec: ModelSpec, *, representations: Sequence[str] | None = None) -> GenerationProfile:
    """Trace each distinct block once in each representation. No weights are allocated, and depth costs nothing.

    representations: as ``WeightsPlan.representation`` names them (``bf16``, ``fp32/int8``); None for all that this machine
    can carry out. Raises InvalidModel for models that keep anything but keys and values between tokens, where an operation
    cannot be traced, or a size is no polynomial in batch and length; MissingExtra for nf4 without bitsandbytes.
    """
    short_kinds, instances = shorten_blocks(list_block_kinds(spec))
    short_spec = with_blocks(spec, short_kinds)
    ops = Ops()
    tables: dict[_PhaseName, PartTables] = {name: PartTables() for name in get_args(_PhaseName)}
    regimes: dict[_PhaseName, dict[str, tuple[ForwardRegime, ...]]] = {name: {} for name in get_args(_PhaseName)}
    queries: tuple[tuple[int, bool], ...] | None = None
    weights: dict[str, WeightBytes] = {}
    kv: tuple[KvTensors, ...] = ()
    rebuilding = RebuildTrace(spec, instances=tuple(instances), ops=ops)
    for plan in _list_representations(representations):
        model = _build(short_spec, plan)
        name = plan.representation
        ranges = _plan_ranges(spec, find_windows(model))
        weights[name] = _weight_bytes(model, whole=partial(_build, spec, plan))
        subject = _Subject(model=model, weights=plan, phase="prefill", instances=tuple(instances), ops=ops)
        if not regimes["prefill"]:
            queries = _find_queries(subject, ranges["decode on host"][0])
        for phase in get_args(_PhaseName):
            if phase == "decode on host" and queries is None:
                continue
            subject = replace(subject, phase=phase)
            traced = [_trace_range(subject, place, tables=tables[phase]) for place in ranges[phase]]
            regimes[phase][name] = tuple(regime for regime, _ in traced)
            if phase == "prefill":
                kv = _kv_tensors(subject, traced[0][1], ranges[phase][0].shape)
        rebuilding.add(model, plan, kv=kv)
    return GenerationProfile(
        model_fingerprint=spec.fingerprint,
        model_type=spec.model_type,
        num_blocks=spec.num_blocks,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_length,
        torch_version=torch.__version__,
        block_kinds=tuple(instances),
        kv=kv,
        weights=weights,
        prefill=_phase(tables["prefill"], regimes["prefill"], length_multiple=sequence_steps(spec)[0]),
        decode=_phase(tables["decode"], regimes["decode"]),
        on_host=None
        if queries is None
        else HostAttended(
            decode=_phase(tables["decode on host"], regimes["decode on host"]),
            num_query_heads=tuple(num_heads for num_heads, _ in queries),
            caps_scores=tuple(caps for _, caps in queries),
        ),
        rebuild=rebuilding.phase,
        base=list_base(_build(short_spec, WeightsPlan(frozen="int8"))),
        weights_dtype=str(spec.config.get("dtype") or ""),
    )


def _build(spec: ModelSpec, weights: WeightsPlan) -> nn.Module:
    model = build_model(spec, dtype=torch_dtype(weights), device="meta")
    prepare_for_generation(model, weights=weights)
    return model


def _phase(
    tables: PartTables, regimes: dict[str, tuple[ForwardRegime, ...]], *, length_multiple: int = 1
) -> Phase:
    return Phase(
        ops=tables.ops, changes=tables.changes, parts=tables.parts, regimes=regimes, length_multiple=length_multiple
    )


def _plan_ranges(spec: ModelSpec, windows: Sequence[int | None]) -> dict[_PhaseName, list[ShapeRange]]:
    """Ranges of each phase: from a sequence as long as a window on, transformers writes masks out, and a cache drops
    tokens; a device whose cache is on the host learns of neither.
    """
    limits = sorted({window - 1 for window in windows if window is not None})
    multiple, shortest = sequence_steps(spec)
    if multiple > 1:
        # With a single block some copies are not made.
        shortest = max(shortest, 2 * multiple)
    return {
        "prefill": plan_ranges(
            max_sequence_length=spec.max_sequence_length,
            sequence_limits=() if spec.model_type == DECODER_TYPE else limits,
            multiple=multiple,
            shortest=shortest,
            lowest=_SHORTEST,
        ),
        "decode": plan_ranges(
            max_sequence_length=spec.max_sequence_length, sequence_limits=limits, lowest=_SHORTEST + 1
        ),
        "decode on host": plan_ranges(
            max_sequence_length=spec.max_sequence_length, sequence_limits=(), lowest=_SHORTEST + 1
        ),
    }


def _list_representations(names: Sequence[str] | None) -> list[WeightsPlan]:
    forms = [form for form in get_args(FrozenFormat) if form != "nf4" or find_spec("bitsandbytes") is not None]
    every = [WeightsPlan(dtype=dtype, frozen=form) for dtype, form in product(("fp32", "bf16"), forms)]  # type: ignore[arg-type]
    if names is None:
        return every
    known = {plan.representation: plan for plan in every}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise not_profiled(unknown[0], known=list(known))
    return [known[name] for name in names]


# Running a forward pass.


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The subject of a trace."""

    model: nn.Module
    weights: WeightsPlan
    phase: _PhaseName
    instances: tuple[int, ...]
    ops: Ops


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One forward pass at one shape."""

    events: tuple[Event, ...]
    """Events without keys and values."""
    kv_bytes: tuple[int, ...]
    """Bytes of keys and values together, by block."""
    kv_after: tuple[int, ...]
    """The op after which keys and values came, by block."""
    kv_heads: tuple[tuple[int, int], ...] = ()
    """Number of heads, and the channels of a head's keys, by block."""
    queries: tuple[tuple[int, bool], ...] = ()
    """Heads of the queries of each block where attention is on the host, and whether scores have a soft cap."""


def _trace_range(
    subject: _Subject, place: ShapeRange, *, tables: PartTables
) -> tuple[ForwardRegime, _Run]:
    """The run is that of the range's first shape."""
    runs = {shape: _trace_forward(subject, shape) for shape in (place.shape, *place.more_shapes)}
    parts = assemble_forward({shape: run.events for shape, run in runs.items()}, shape=place.shape, tables=tables)
    run = runs[place.shape]
    regime = ForwardRegime(
        micro_batch_low=place.micro_batch_low,
        micro_batch_high=place.micro_batch_high,
        sequence_low=place.sequence_low,
        sequence_high=place.sequence_high,
        parts={_part_name(*key): index for key, index in parts.items()},
        shared=(),
        templates={},
        block_templates=subject.instances,
        kv_after=run.kv_after,
    )
    return regime, run


def _find_queries(subject: _Subject, place: ShapeRange) -> tuple[tuple[int, bool], ...] | None:
    """Heads of queries by block; None where the model does not let others attend."""
    try:
        return _trace_forward(replace(subject, phase="decode on host"), place.shape).queries
    except InvalidModel:
        return None


def _part_name(phase: str, block: int) -> str:
    if block >= 0:
        return block_part(block)
    return EMBEDDING if phase == _TRACED else HEAD


def _kv_tensors(subject: _Subject, run: _Run, shape: Shape) -> tuple[KvTensors, ...]:
    """A token's share of what each block made at one shape."""
    windows = find_windows(subject.model)
    batch, length = shape
    size = batch * subject.weights.bytes_per_element
    kept = [length + _SPARE_TOKENS if window is None else min(length + _SPARE_TOKENS, window) for window in windows]
    return tuple(
        KvTensors(
            elements_per_token=num_bytes // (size * num_tokens), window=window, num_heads=num_heads, key_dim=key_dim
        )
        for num_bytes, num_tokens, window, (num_heads, key_dim) in zip(
            run.kv_bytes, kept, windows, run.kv_heads, strict=True
        )
    )


def _trace_forward(subject: _Subject, shape: Shape) -> _Run:
    """A prefill of so long a prompt, or the decode of the token that is the last of so many."""
    batch, length = shape
    recorder = Recorder(subject.ops)
    cache_plan = _ON_HOST if subject.phase == "decode on host" else KvCachePlan()
    plan = GenerationPlan(batch_size=batch, weights=subject.weights, kv_cache=cache_plan)
    with pretend_cpu(subject.ops):
        generator = Generator(subject.model, plan=plan, device=_CPU, meter=recorder)
        try:
            with torch.no_grad(), generator.metered():
                num_given = length if subject.phase == "prefill" else 1
                ids = torch.zeros((batch, num_given), dtype=torch.long)
                into = torch.zeros(batch, dtype=torch.long)
                cache = generator.make_cache(capacity=length + _SPARE_TOKENS, num_seen=length - num_given)
                recorder.start()
                generator.advance(ids, cache=cache, phase=_TRACED, into=into)
                recorder.stop()
                recorder.mark("end")
        finally:
            generator.close(keep_weights=False)
    events = recorder.events
    run = _without_kv(events[events.index(Began(_TRACED, -1)) : events.index(Began("end", -1))])
    shapes = [layer.keys.shape for layer in cache.layers if isinstance(layer, KvLayer) and layer.keys is not None]
    attended = [layer for layer in cache.layers if isinstance(layer, HostAttendedKvLayer)]
    return replace(
        run,
        kv_after=run.kv_after or (-1,) * len(attended),
        kv_heads=tuple((shape[1], shape[3]) for shape in shapes),
        queries=tuple(
            (layer.query_shape[1], layer.caps_scores) for layer in attended if layer.query_shape is not None
        ),
    )


def _without_kv(events: Sequence[Event]) -> _Run:
    """Take out keys and values, and the ops that made room for them."""
    kept: list[Event] = []
    kv: set[int] = set()
    kv_bytes: dict[int, int] = {}
    kv_after: dict[int, int] = {}
    block, num_ops = -1, 0
    for event in events:
        if isinstance(event, Began):
            block, num_ops = event.block, 0
        elif isinstance(event, Ran):
            num_ops += 1
        elif isinstance(event, Allocated) and event.category == "kv_cache":
            assert isinstance(kept.pop(), Ran)
            num_ops -= 1
            kv.add(event.storage)
            kv_bytes[block] = kv_bytes.get(block, 0) + event.num_bytes
            kv_after[block] = num_ops - 1
            continue
        elif isinstance(event, Freed) and event.storage in kv:
            continue
        kept.append(event)
    in_order = sorted(kv_bytes)
    return _Run(
        events=tuple(kept),
        kv_bytes=tuple(kv_bytes[block] for block in in_order),
        kv_after=tuple(kv_after[block] for block in in_order),
    )


# Weights.


def _weight_bytes(model: nn.Module, *, whole: Callable[[], nn.Module]) -> WeightBytes:
    """Bytes of all weights. model: short; whole: makes the model in its full depth, which alone has everything that
    blocks share.
    """
    blocks = find_blocks(model)
    shared = find_shared(blocks)
    in_blocks = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    outside = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in in_blocks]
    outside_bytes = sum_storages(outside)
    if shared:
        every = whole()
        in_all = find_shared(find_blocks(every))
        outside_bytes += sum_storages(parameter for parameter in every.parameters() if id(parameter) in in_all)
    return WeightBytes(
        outside=outside_bytes,
        tensors=tuple(tuple(p.nbytes for p in block.parameters() if id(p) not in shared) for block in blocks),
        staying_by_block=tuple(sum_storages(block.buffers()) for block in blocks),
        ends=None if shared else _end_bytes(model),
    )


def _end_bytes(model: nn.Module) -> EndBytes:
    ends = find_ends(model)
    embeddings = [embedding.weight for embedding in ends.embeddings]
    head = ends.head_weights
    return EndBytes(
        embeddings=sum_storages(embeddings),
        embedding_rows=sum(weight[:1].nbytes for weight in embeddings),
        head=sum_storages(head),
        head_row=sum(weight[:1].nbytes for weight in head),
        is_tied=ends.is_tied,
    )
