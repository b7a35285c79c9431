"""Traces a model once and returns its Profile: what is traced, how far, and what the profile is made of.

The runtime's own step is run without data (``training_step.py``) and as if on the CPU (``meta_ops/meta_ops.py``), and a meter
writes down what happens (``recorder.py``). The model has as many blocks as show each distinct surrounding of a block, so that the
cost does not grow with depth. At one shape two micro-batches are run under each choice of the activations row, one with fresh
gradients and one that accumulates; at a few more shapes one of the plain plan, which shows how sizes grow. assemble.py turns the
events into parts and fits the sizes.

Nothing is allocated and nothing computed, but for the values of small integer tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from optimizer.base.errors import BlockNotCompiled, HeadroomError, InvalidModel
from optimizer.base.heap import without_collections
from optimizer.models.anatomy import find_anatomy
from optimizer.models.build import build_model
from optimizer.models.packing import check_packs
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import COMPILED, NOT_COMPILED, BlockChoice, BlockKernels
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.assemble.assemble import LikeBlocksShare, assemble_forward, assemble_regime
from optimizer.profile.assemble.merge import merge_profiles
from optimizer.profile.assemble.ranges import (
    SEQUENCE_LOW,
    ShapeRange,
    ShapesDiffer,
    lengths_without_question,
    plan_length,
    plan_ranges,
    witnesses_of,
)
from optimizer.profile.assemble.tables import PartTables
from optimizer.profile.extent import EVERYTHING, Extent, traced_representation
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.profile.meta_ops.meta_ops import Ops
from optimizer.profile.profile import (
    BLOCK_CHOICES,
    Profile,
    Regime,
    beyond_positions,
    not_in_blocks,
    not_profiled,
)
from optimizer.profile.trace.copies import map_in_copies
from optimizer.profile.trace.structure import sequence_limits, sequence_steps, shorten_model
from optimizer.profile.trace.sums import count_sums
from optimizer.profile.trace.tensor_sizes import list_base, list_tensors, mark_sparse, sum_frozen, sum_in_depth
from optimizer.profile.trace.training_step import Subject, trace_evaluation, trace_step
from optimizer.runtime.job.prepare import prepare_model
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import Adapter, TrainingObjective, TrainingWorkload

_CPU = torch.device("cpu")


@without_collections()
def profile_model(
    spec: ModelSpec,
    *,
    adapter: Adapter | None = None,
    is_padded: bool = False,
    is_packed: bool = False,
    objective: TrainingObjective = "next_token",
    extent: Extent = EVERYTHING,
    num_sharing: int = 1,
    num_processes: int = 1,
) -> Profile:
    """Trace each distinct block once in each representation. Seconds, whatever the depth and width; no weights are allocated.

    adapter: of the workload; the profile is then of the model with these adapters, its frozen weights packed or not.
    is_padded: every micro-batch has an attention mask that hides some token at the end of a sequence.
    is_packed: every row holds samples that do not attend to each other. Raises InvalidModel for a model that cannot part them.
    objective: of the training, whose loss is traced.
    extent: how much is traced; with less than everything the profile says so (``Profile.is_partial``).
    num_sharing: ranks that share each block, of which the model of one is traced; raises InvalidPlan where they cannot.
    num_processes: copies of this process, itself among them, which trace representations side by side; more than one only where
    no other thread runs. The profile is the same.
    Raises InvalidModel where an operation cannot be traced, or a size is no polynomial in micro-batch and sequence length,
    InvalidWorkload for adapters that the model cannot have, MissingExtra without peft.
    """
    if is_packed:
        check_packs(spec.model_type)
    asked = _Asked(spec, adapter, is_padded, is_packed, objective, extent, num_sharing, num_processes)
    try:
        return _trace_blocks(asked, _choose_ranges(spec, extent), is_partial=not extent.is_everything)
    except (ShapesDiffer, _FaultInModel):
        if spec.is_listed:
            raise
        # A scan in chunks, or token by token, has other ops at each length; a model may also be another one after a length, or
        # run at some lengths alone (Reformer's chunks).
        profiles = [_trace_blocks(asked, ranges, is_partial=True) for ranges in _choose_lengths(spec, extent)]
        return merge_profiles(*profiles)


class _FaultInModel(InvalidModel):
    """The model's own code failed; maybe only at lengths that nobody asked for."""


class _Asked(NamedTuple):
    """A model and how much of its profile is wanted."""

    spec: ModelSpec
    adapter: Adapter | None
    is_padded: bool
    is_packed: bool
    objective: TrainingObjective
    extent: Extent
    num_sharing: int
    num_processes: int


def _trace_blocks(asked: _Asked, chosen: Sequence[ShapeRange], *, is_partial: bool) -> Profile:
    """A model that is shortened to its distinct blocks, or the whole where like blocks hold what others of them make."""
    spec = asked.spec
    shortened = shorten_model(spec)
    try:
        return _trace_ranges(asked, chosen, shortened, is_partial=is_partial)
    except LikeBlocksShare:
        return _trace_ranges(asked, chosen, (spec, list(range(spec.num_blocks))), is_partial=is_partial)


def _trace_ranges(
    asked: _Asked, chosen: Sequence[ShapeRange], shortened: tuple[ModelSpec, list[int]], *, is_partial: bool
) -> Profile:
    ops, forms = Ops(), _list_representations(asked.adapter, asked.extent)
    profiles = map_in_copies(
        lambda form: _trace_form(form, asked, chosen, shortened, counts_sums=form == forms[0], ops=ops),
        forms,
        num_processes=asked.num_processes,
    )
    short_spec, _ = shortened
    plain = build_model(short_spec.of_rank(asked.num_sharing), device="meta")
    prepare_model(plain, weights=WeightsPlan(frozen="int8"), workload=TrainingWorkload(adapter=asked.adapter))
    merged = merge_profiles(*profiles)
    return replace(merged, is_partial=is_partial, base=list_base(plain, num_sharing=asked.num_sharing))


def _trace_form(
    form: tuple[WeightsPlan, BlockKernels],
    asked: _Asked,
    chosen: Sequence[ShapeRange],
    shortened: tuple[ModelSpec, list[int]],
    *,
    counts_sums: bool,
    ops: Ops,
) -> Profile:
    """Trace the model in one representation of its weights.

    counts_sums: counts what ranks sum that share each block, which is the same in each representation.
    """
    weights, kernels = form
    spec, adapter, is_padded, is_packed, objective, extent, num_sharing, _ = asked
    short_spec, instances = shortened
    # Shortened before: what the spec of a part says beside its own keys is not read again.
    spec, short_spec = spec.of_rank(num_sharing), short_spec.of_rank(num_sharing)
    choices = [choice for choice in BLOCK_CHOICES if extent.choices is None or choice in ("keep", *extent.choices)]
    lengths = sorted({length for _, length in extent.shapes or ()})
    tables = PartTables()
    model = build_model(short_spec, dtype=torch_dtype(weights), device="meta")
    prepare_model(model, weights=weights, workload=TrainingWorkload(adapter=adapter))
    row_elements = mark_sparse(model)
    has_plain_head = find_anatomy(model).is_chunkable
    subject = Subject(model, weights, adapter, tuple(instances), is_padded, set(), is_packed=is_packed, objective=objective)
    subject = subject._replace(kernels=kernels)
    with _naming_faults(spec, kernels):
        if not spec.is_listed:
            _check_witnesses(subject, chosen, lengths, ops=ops)
        possible = _possible(choices, kernels)
        regimes = tuple(
            _trace_range(subject, place, possible, is_listed=spec.is_listed, tables=tables, ops=ops) for place in chosen
        )
    sums = None
    if num_sharing > 1 and counts_sums:
        sums = count_sums(subject, chosen[0].shape, choices, num_ranks=num_sharing, ops=ops)
    tensors = list_tensors(
        model,
        instances,
        row_elements=row_elements,
        unused=subject.unused or (),
        whole=lambda: build_model(spec, device="meta"),
        num_sharing=num_sharing,
    )
    return Profile(
        model_fingerprint=profile_fingerprint(spec.fingerprint, adapter, is_packed=is_packed, objective=objective),
        model_type=spec.model_type,
        num_blocks=spec.num_blocks,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_length,
        is_partial=True,
        torch_version=torch.__version__,
        is_padded=is_padded,
        is_packed=is_packed,
        objective=objective,
        sequence_multiple=sequence_steps(spec)[0],
        has_plain_head=has_plain_head,
        clamps_fp16=spec.kind == "encoder_decoder",
        is_held_to_measurement=spec.is_listed,
        tensors=tensors,
        buffer_bytes={weights.dtype: sum_in_depth(model, [*model.buffers(), *_list_idle(subject)], instances)},
        frozen={} if adapter is None else {weights.representation: sum_frozen(model)},
        weights_dtype=str(spec.config.get("dtype") or ""),
        ops=tables.ops,
        changes=tables.changes,
        parts=tables.parts,
        regimes={weights.representation + (COMPILED if kernels == "compiled" else ""): regimes},
        sums=sums,
    )


@contextmanager
def _naming_faults(spec: ModelSpec, kernels: BlockKernels) -> Iterator[None]:
    """Report faults as the model's: with a model type that is not listed anything may go wrong, and so it may with compiled
    blocks.
    """
    try:
        yield
    except HeadroomError:
        raise
    except Exception as error:
        if kernels == "compiled":
            raise BlockNotCompiled(f"a block of type {spec.model_type}", _describe_fault(error)) from error
        if spec.is_listed:
            raise
        raise _FaultInModel(
            f"the model cannot be traced: {_describe_fault(error)}",
            field="config",
            value=spec.model_type,
            hint="Use a model type on the list, or a module of your own with its parts given (Anatomy).",
        ) from error


def _describe_fault(error: Exception) -> str:
    op = getattr(error, "func", None)
    if isinstance(error, DynamicOutputShapeException):
        return f"the size of what {op} returns depends on the values of its activations"
    if "unallocated storage" in str(error):
        return f"it decides by the values of its activations ({str(error).partition('(')[0]})"
    return f"{type(error).__name__}: {str(error)[:300]}"


def _possible(choices: Sequence[BlockChoice], kernels: BlockKernels) -> list[BlockChoice]:
    """Leave out what such blocks cannot do (``Plan.find_conflict``)."""
    return [choice for choice in choices if kernels != "compiled" or choice not in NOT_COMPILED]


def _list_representations(adapter: Adapter | None, extent: Extent) -> list[tuple[WeightsPlan, BlockKernels]]:
    """List the representations that a plan can choose on this machine, as far as they were asked for: nf4 is
    bitsandbytes' business. Compiled blocks take seconds for each shape, and are traced only where they are asked for by name.

    Raises InvalidPlan where one was asked for that is none.
    """
    forms: list[FrozenFormat] = ["same"]
    if adapter is not None:
        forms = [form for form in get_args(FrozenFormat) if form != "nf4" or find_spec("bitsandbytes") is not None]
    computed = [WeightsPlan(dtype="fp32"), WeightsPlan(dtype="bf16"), WeightsPlan(autocast="bf16")]
    listed = [replace(weights, frozen=form) for weights in computed for form in forms]
    if extent.representations is None:
        return [(weights, "memory_saving") for weights in listed]
    known = [weights.representation for weights in listed]
    wanted = [traced_representation(name) for name in extent.representations]
    for name in wanted:
        if name.removesuffix(COMPILED) not in known:
            raise not_profiled(name, known=known)
    kinds: tuple[tuple[BlockKernels, str], ...] = (("memory_saving", ""), ("compiled", COMPILED))
    return [
        (weights, kernels) for weights in listed for kernels, ending in kinds if weights.representation + ending in wanted
    ]


def _choose_ranges(spec: ModelSpec, extent: Extent) -> Sequence[ShapeRange]:
    """Choose the ranges in which some shape lies. Raises InvalidWorkload for one that lies in none."""
    multiple, shortest = sequence_steps(spec)
    high = spec.max_sequence_length
    ranges = plan_ranges(
        max_sequence_length=high, sequence_limits=sequence_limits(spec), multiple=multiple, shortest=shortest
    )
    if extent.shapes is None:
        return ranges
    chosen = []
    for shape in extent.shapes:
        found = [place for place in ranges if place.covers(shape)]
        if shape[1] % multiple:
            raise not_in_blocks(shape[1], multiple=multiple, high=high)
        if not found:
            raise beyond_positions(shape[1], low=min(place.sequence_low for place in ranges), high=high)
        chosen += found
    return [place for place in ranges if place in chosen]


def _choose_lengths(spec: ModelSpec, extent: Extent) -> list[list[ShapeRange]]:
    """The same for a model that is traced at each sequence length for itself, by length."""
    high = spec.max_sequence_length
    if extent.shapes is None:
        return [plan_length(length) for length in lengths_without_question(high)]
    for _, length in extent.shapes:
        if not SEQUENCE_LOW <= length <= high:
            raise beyond_positions(length, low=SEQUENCE_LOW, high=high)
    lengths = sorted({length for _, length in extent.shapes})
    return [[place for place in plan_length(length) if any(map(place.covers, extent.shapes))] for length in lengths]


def _check_witnesses(
    subject: Subject, chosen: Sequence[ShapeRange], lengths: Sequence[int], *, ops: Ops
) -> None:
    """Raise ShapesDiffer where a forward pass far from the shapes traced is not what they lead to expect: lengths close to each
    other may all have as many chunks.

    What is asked for comes first: a model may settle for one way of attention in its first pass (BigBird). Of a range of one
    length there is nothing else to check.
    """
    for place in chosen:
        if place.sequence_low == place.sequence_high:
            trace_evaluation(subject, place.shape, ops=ops)
            continue
        shapes = dict.fromkeys((*witnesses_of(place, lengths), place.shape, *place.more_shapes))
        runs = {shape: trace_evaluation(subject, shape, ops=ops).first for shape in shapes}
        assemble_forward(runs, shape=place.shape, tables=PartTables())


def _list_idle(subject: Subject) -> Iterator[nn.Parameter]:
    """Parameters that only take room: no step gives them a gradient, or, where all are to be trained, they are tables that the
    model does not train (sinusoidal positions).
    """
    for parameter in subject.model.parameters():
        if id(parameter) in (subject.unused or ()) or (subject.adapter is None and not parameter.requires_grad):
            yield parameter


def _trace_range(
    subject: Subject,
    place: ShapeRange,
    choices: Sequence[BlockChoice],
    *,
    is_listed: bool,
    tables: PartTables,
    ops: Ops,
) -> Regime:
    """The whole at one shape; at the others one micro-batch of the plain plan, which shows how every size grows.

    What a model does once, when training or evaluation begins (RWKV scales its weights), is left out: it comes before.
    """
    if not is_listed:
        trace_step(subject, place.shape, "keep", num_micro_batches=1, ops=ops)
    whole = {choice: trace_step(subject, place.shape, choice, num_micro_batches=2, ops=ops) for choice in choices}
    growth = {
        shape: trace_step(subject, shape, "keep", num_micro_batches=1, ops=ops, watches_holds=False)
        for shape in place.more_shapes
    }
    if not is_listed:
        trace_evaluation(subject, place.shape, ops=ops)
    evaluation = {shape: trace_evaluation(subject, shape, ops=ops) for shape in (place.shape, *place.more_shapes)}
    return assemble_regime(
        whole, growth, evaluation=evaluation, place=place, block_templates=subject.instances, tables=tables
    )
