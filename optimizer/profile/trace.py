"""Traces a model once and returns its Profile: with its two helpers, the one part of ``profile`` that needs torch.

The runtime's own step is run without data and as if on the CPU (``dataless.py``), and a meter writes down what happens
(``recorder.py``). The model has as many blocks as show each distinct surrounding of a block, so that the cost does not grow
with depth. At one shape two micro-batches are run under each choice of the activations row, one with fresh gradients and one
that accumulates; at a few more shapes one of the plain plan, which shows how sizes grow. assemble.py turns the events into
parts and fits the sizes.

Nothing is allocated and nothing computed, but for the values of small integer tensors.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from optimizer.errors import HeadroomError, InvalidModel
from optimizer.models.anatomy import Anatomy, find_anatomy, find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.assemble import assemble_regime
from optimizer.profile.dataless import Ops, pretend_cpu
from optimizer.profile.events import Began, Event, Held, Input, Trace
from optimizer.profile.extent import EVERYTHING, Extent, traced_representation
from optimizer.profile.profile import (
    BLOCK_CHOICES,
    FrozenBytes,
    Profile,
    Regime,
    Tensors,
    TensorSize,
    beyond_positions,
    not_in_blocks,
    not_profiled,
    profile_fingerprint,
)
from optimizer.profile.ranges import ShapeRange, plan_ranges
from optimizer.profile.recorder import Recorder
from optimizer.profile.sizes import Shape
from optimizer.profile.structure import sequence_limits, sequence_steps, shorten_model
from optimizer.profile.tables import PartTables
from optimizer.runtime.prepare import prepare_model
from optimizer.runtime.sparse_gradients import find_sparse
from optimizer.runtime.step import MicroBatch, Trainer
from optimizer.runtime.weights import torch_dtype
from optimizer.workload import Adapter, TrainingWorkload

_CPU = torch.device("cpu")


def profile_model(
    spec: ModelSpec, *, adapter: Adapter | None = None, is_padded: bool = False, extent: Extent = EVERYTHING
) -> Profile:
    """Trace each distinct block once in each representation. Seconds, whatever the depth and width; no weights are allocated.

    adapter: of the workload; the profile is then of the model with these adapters, its frozen weights packed or not.
    is_padded: every micro-batch has an attention mask that hides some token at the end of a sequence.
    extent: how much is traced; with less than everything the profile says so (``Profile.is_partial``).
    Raises InvalidModel where an operation cannot be traced, or a size is no polynomial in micro-batch and sequence length,
    InvalidWorkload for adapters that the model cannot have, MissingExtra without peft.
    """
    short_spec, instances = shorten_model(spec)
    multiple, shortest = sequence_steps(spec)
    ranges = plan_ranges(
        max_sequence_length=spec.max_sequence_length,
        sequence_limits=sequence_limits(spec),
        multiple=multiple,
        shortest=shortest,
    )
    chosen = _choose_ranges(ranges, extent, multiple=multiple, max_sequence_length=spec.max_sequence_length)
    choices = [choice for choice in BLOCK_CHOICES if extent.choices is None or choice in ("keep", *extent.choices)]
    regimes: dict[str, tuple[Regime, ...]] = {}
    buffer_bytes: dict[str, int] = {}
    frozen: dict[str, FrozenBytes] = {}
    tensors: Tensors | None = None
    tables, ops = PartTables(), Ops()
    workload = TrainingWorkload(adapter=adapter)
    for weights in _list_representations(adapter, extent):
        model = build_model(short_spec, dtype=torch_dtype(weights), device="meta")
        prepare_model(model, weights=weights, workload=workload)
        row_elements = _mark_sparse(model)
        has_plain_head = find_anatomy(model).is_chunkable
        subject = _Subject(model, weights, adapter, tuple(instances), is_padded, set())
        name = weights.representation
        with _naming_faults(spec):
            regimes[name] = tuple(_trace_range(subject, place, choices, tables=tables, ops=ops) for place in chosen)
        buffer_bytes[weights.dtype] = _storage_bytes([*model.buffers(), *_list_idle(subject)])
        tensors = _list_tensors(
            model,
            instances,
            row_elements=row_elements,
            unused=subject.unused or (),
            whole=lambda: build_model(spec, device="meta"),
        )
        if adapter is not None:
            frozen[name] = _frozen_bytes(model)
    assert tensors is not None
    return Profile(
        model_fingerprint=profile_fingerprint(spec.fingerprint, adapter),
        model_type=spec.model_type,
        num_blocks=spec.num_blocks,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_length,
        is_partial=not extent.is_everything,
        torch_version=torch.__version__,
        is_padded=is_padded,
        sequence_multiple=multiple,
        has_plain_head=has_plain_head,
        clamps_fp16=spec.kind == "encoder_decoder",
        is_held_to_measurement=spec.is_listed,
        tensors=tensors,
        buffer_bytes=buffer_bytes,
        frozen=frozen,
        ops=tables.ops,
        changes=tables.changes,
        parts=tables.parts,
        regimes=regimes,
    )


@contextmanager
def _naming_faults(spec: ModelSpec) -> Iterator[None]:
    """Of a model type that is not listed anything may go wrong; that is then the model's fault, and told as one."""
    try:
        yield
    except HeadroomError:
        raise
    except Exception as error:
        if spec.is_listed:
            raise
        raise InvalidModel(
            f"the model cannot be traced: {type(error).__name__}: {str(error)[:300]}",
            field="config",
            value=spec.model_type,
            hint="Use a model type on the list, or a module of your own with its parts given (Anatomy).",
        ) from error


def _list_representations(adapter: Adapter | None, extent: Extent) -> list[WeightsPlan]:
    """Those that a plan can choose on this machine, as far as they were asked for: nf4 is bitsandbytes' business.

    Raises InvalidPlan where one was asked for that is none.
    """
    forms: list[FrozenFormat] = ["same"]
    if adapter is not None:
        forms = [form for form in get_args(FrozenFormat) if form != "nf4" or find_spec("bitsandbytes") is not None]
    computed = [WeightsPlan(dtype="fp32"), WeightsPlan(dtype="bf16"), WeightsPlan(autocast="bf16")]
    listed = [replace(weights, frozen=form) for weights in computed for form in forms]
    if extent.representations is None:
        return listed
    known = [weights.representation for weights in listed]
    wanted = [traced_representation(name) for name in extent.representations]
    for name in wanted:
        if name not in known:
            raise not_profiled(name, known=known)
    return [weights for weights in listed if weights.representation in wanted]


def _choose_ranges(
    ranges: Sequence[ShapeRange], extent: Extent, *, multiple: int, max_sequence_length: int
) -> Sequence[ShapeRange]:
    """Those in which some shape lies. Raises InvalidWorkload for one that lies in none."""
    if extent.shapes is None:
        return ranges
    chosen = []
    for shape in extent.shapes:
        found = [place for place in ranges if place.covers(shape)]
        if shape[1] % multiple:
            raise not_in_blocks(shape[1], multiple=multiple, high=max_sequence_length)
        if not found:
            low = min(place.sequence_low for place in ranges)
            raise beyond_positions(shape[1], low=low, high=max_sequence_length)
        chosen += found
    return [place for place in ranges if place in chosen]


class _Subject(NamedTuple):
    """What is traced."""

    model: nn.Module
    weights: WeightsPlan
    adapter: Adapter | None
    instances: tuple[int, ...]
    """For each block of the whole model, which block of this one it is like."""
    is_padded: bool = False
    unused: set[int] | None = None
    """Ids of the parameters that no step gives a gradient: found as the model is traced, where they are asked for."""
    anatomy: Anatomy | None = None
    """Where it is not what ``find_anatomy`` finds, as of a plain module."""
    make_inputs: Callable[[Shape], MicroBatch] | None = None
    """A micro-batch of what is no token ids."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return find_blocks(self.model) if self.anatomy is None else self.anatomy.blocks


def _list_idle(subject: _Subject) -> Iterator[nn.Parameter]:
    """Parameters that only take room: no step gives them a gradient, or, where all are to be trained, they are tables that the
    model does not train (sinusoidal positions).
    """
    for parameter in subject.model.parameters():
        if id(parameter) in (subject.unused or ()) or (subject.adapter is None and not parameter.requires_grad):
            yield parameter


def _mark_sparse(model: nn.Module) -> dict[int, int]:
    """Make embeddings with sparse gradients dense ones that ``Recorder`` knows by their mark; returns the elements in a row,
    by the id of the table.
    """
    sparse = {id(parameter): parameter.shape[1] for parameter in find_sparse(model).values()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in sparse:
            module.sparse, module.scale_grad_by_freq = False, True
    return sparse


def _list_tensors(
    model: nn.Module,
    instances: Sequence[int],
    *,
    row_elements: Mapping[int, int],
    unused: Collection[int],
    whole: Callable[[], nn.Module],
) -> Tensors:
    """Trained tensors that several blocks share belong to none of them: they are listed ahead of the blocks.

    model: short; row_elements: of its tables with sparse gradients; unused: ids of those that never have a gradient;
    whole: makes the model in its full depth, which alone has
    every shared tensor.
    """
    blocks = find_blocks(model)
    owner = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    shared = _shared_between(blocks)
    before: list[TensorSize] = []
    outside: dict[int, list[TensorSize]] = {}
    last_met = -1
    by_block: list[list[TensorSize]] = [[] for _ in blocks]
    for parameter in model.parameters():
        index = owner.get(id(parameter))
        last_met = max(last_met, -1 if index is None else index)
        if not parameter.requires_grad or id(parameter) in shared or id(parameter) in unused:
            continue
        if index is not None:
            by_block[index].append(_size_of(parameter))
        else:
            size = replace(_size_of(parameter), row_elements=row_elements.get(id(parameter), 0))
            (before if last_met < 0 else outside.setdefault(last_met, [])).append(size)
    if shared:
        every = whole()
        in_all = _shared_between(find_blocks(every))
        before += [_size_of(parameter) for parameter in every.parameters() if id(parameter) in in_all]
    return Tensors(
        before=tuple(before),
        by_block=tuple(tuple(sizes) for sizes in by_block),
        block_kinds=tuple(instances),
        after=tuple(outside.pop(len(blocks) - 1, ())),
        **_between_stacks(outside, instances),
    )


def _between_stacks(outside: Mapping[int, list[TensorSize]], instances: Sequence[int]) -> dict[str, Any]:
    """outside: by the block of the short model that they follow."""
    if not outside:
        return {}
    if len(outside) > 1:
        raise InvalidModel("the model cannot be traced: it has parameters between more than two stacks", field="config")
    ((before, sizes),) = outside.items()
    return {"between": tuple(sizes), "num_before_between": instances.index(before) + 1}


def _size_of(parameter: nn.Parameter) -> TensorSize:
    return TensorSize(num_elements=parameter.numel(), is_matrix=parameter.dim() >= 2)


def _shared_between(blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that more than one block has."""
    counts = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    return {key for key, count in counts.items() if count > 1}


def _frozen_bytes(model: nn.Module) -> FrozenBytes:
    blocks = find_blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return FrozenBytes(
        outside=_storage_bytes(p for p in model.parameters() if not p.requires_grad and id(p) not in in_blocks),
        by_block=tuple(_storage_bytes(p for p in block.parameters() if not p.requires_grad) for block in blocks),
    )


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# Running the step.


def _trace_range(
    subject: _Subject, place: ShapeRange, choices: Sequence[BlockChoice], *, tables: PartTables, ops: Ops
) -> Regime:
    """The whole at one shape; at the others one micro-batch of the plain plan, which shows how every size grows."""
    whole = {choice: _trace_step(subject, place.shape, choice, num_micro_batches=2, ops=ops) for choice in choices}
    growth = {
        shape: _trace_step(subject, shape, "keep", num_micro_batches=1, ops=ops, watches_holds=False)
        for shape in place.more_shapes
    }
    evaluation = {shape: _trace_evaluation(subject, shape, ops=ops) for shape in (place.shape, *place.more_shapes)}
    return assemble_regime(
        whole, growth, evaluation=evaluation, place=place, block_templates=subject.instances, tables=tables
    )


def _trace_step(
    subject: _Subject,
    shape: Shape,
    choice: BlockChoice,
    *,
    num_micro_batches: int,
    ops: Ops,
    watches_holds: bool = True,
) -> Trace:
    """One or two micro-batches through the runtime's own step.

    watches_holds: notes what blocks hold; of kept blocks by hooks on what autograd saves, which cost views of their own.
    """
    batch, sequence = shape
    model = subject.model
    recorder = Recorder(ops)
    blocks = subject.blocks
    plan = Plan(
        batch=BatchPlan(micro_batch_size=batch, accumulation_steps=num_micro_batches),
        weights=subject.weights,
        activations=ActivationsPlan(per_block=(choice,) * len(blocks)),
    )
    workload = TrainingWorkload(
        sequence_length=sequence, global_batch_size=num_micro_batches * batch, adapter=subject.adapter
    )
    with pretend_cpu(ops):
        trainer = Trainer(
            model, plan=plan, workload=workload, device=_CPU, meter=recorder, anatomy=subject.anatomy
        )
        handles = _watch_holds(blocks, recorder, choice) if watches_holds else []
        try:
            with trainer.metered():
                micro_batches = [_make_micro_batch(subject, shape) for _ in range(num_micro_batches)]
                recorder.start()
                trainer.accumulate(micro_batches)
                recorder.stop()
                recorder.mark("end")
        finally:
            trainer.close()
            for handle in handles:
                handle.remove()
            for parameter in model.parameters():
                if subject.unused is not None and parameter.requires_grad and parameter.grad is None:
                    subject.unused.add(id(parameter))
                parameter.grad = None
    starts = [index for index, event in enumerate(recorder.events) if event == Began("forward", -1)]
    end = recorder.events.index(Began("end", -1))
    _check_order(recorder.events[starts[0] : end], num_blocks=len(blocks), num_micro_batches=num_micro_batches)
    bounds = [*starts, end]
    return Trace(
        first=tuple(recorder.events[bounds[0] : bounds[1]]),
        accumulate=tuple(recorder.events[bounds[1] : bounds[2]]) if num_micro_batches == 2 else (),
        constants=frozenset(recorder.constants),
    )


def _check_order(events: Sequence[Event], *, num_blocks: int, num_micro_batches: int) -> None:
    """Everything here rests on it that each block runs once, in the order found."""
    ran = [event.block for event in events if isinstance(event, Began) and event.phase == "forward" and event.block >= 0]
    if ran != list(range(num_blocks)) * num_micro_batches:
        raise InvalidModel(
            f"the model cannot be traced: its {num_blocks} blocks do not run once each and in order, but as "
            f"{', '.join(str(block + 1) for block in ran[:12])}",
            field="config",
        )


def _make_micro_batch(subject: _Subject, shape: Shape) -> MicroBatch:
    if subject.make_inputs is not None:
        return subject.make_inputs(shape)
    ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    if not subject.is_padded:
        return ids, labels
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -1] = 0
    return ids, labels, mask


def _trace_evaluation(subject: _Subject, shape: Shape, *, ops: Ops) -> Trace:
    """A forward as ``Trainer.evaluate`` runs it, but for reading the loss."""
    recorder = Recorder(ops)
    model = subject.model
    choice: BlockChoice = "keep"
    plan = Plan(
        batch=BatchPlan(micro_batch_size=shape[0], accumulation_steps=1),
        weights=subject.weights,
        activations=ActivationsPlan(per_block=(choice,) * len(subject.blocks)),
    )
    workload = TrainingWorkload(sequence_length=shape[1], global_batch_size=shape[0], adapter=subject.adapter)
    with pretend_cpu(ops):
        trainer = Trainer(
            model, plan=plan, workload=workload, device=_CPU, meter=recorder, anatomy=subject.anatomy
        )
        model.eval()
        try:
            with trainer.metered(), torch.no_grad():
                ids, labels, *masks = _make_micro_batch(subject, shape)
                recorder.start()
                trainer.compute_loss(ids, labels, attention_mask=masks[0] if masks else None)
                recorder.stop()
        finally:
            model.train()
            trainer.close()
    return Trace(first=tuple(recorder.events), accumulate=())


def _watch_holds(blocks: Sequence[nn.Module], recorder: Recorder, choice: BlockChoice) -> list[Any]:
    """Note which storages a block holds for its backward: all it is given, or, where it is kept, what autograd saves.

    What offloaded blocks hold follows from what kept ones do; sharing.py draws that conclusion.
    """
    handles = []
    for index, block in enumerate(blocks):
        watcher = _HoldWatcher(index, recorder, choice)
        handles.append(block.register_forward_pre_hook(watcher.before, with_kwargs=True))
        handles.append(block.register_forward_hook(watcher.after))
    return handles


class _HoldWatcher:
    """Sees one block's inputs and what autograd saves in it."""

    def __init__(self, index: int, recorder: Recorder, choice: BlockChoice) -> None:
        self._index = index
        self._recorder = recorder
        self._choice = choice
        self._given: set[int] = set()
        self._hooks: saved_tensors_hooks | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        number_of = self._recorder.number_of
        if (hidden_number := number_of(hidden)) is not None:
            self._recorder.events.append(Input(self._index, hidden_number))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._given = {number for tensor in tensors if (number := number_of(tensor)) is not None}
        if self._choice in ("recompute", "selective"):
            self._recorder.events.extend(Held(self._index, number, is_given=True) for number in sorted(self._given))
        elif self._choice == "keep":
            self._hooks = saved_tensors_hooks(self._pack, _same)
            self._hooks.__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._recorder.number_of(tensor)
        if number is not None:
            self._recorder.events.append(Held(self._index, number, is_given=number in self._given))
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
