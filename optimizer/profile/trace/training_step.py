"""Runs the runtime's own step, or its evaluation, on a model without data, and notes what happens in it.

What to run, and what becomes of the notes, is the business of ``trace.py`` (language models) and ``module.py`` (any module).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import InvalidModel
from optimizer.models.anatomy import Anatomy, find_blocks
from optimizer.plan.activations import ActivationsPlan, BlockChoice, BlockKernels, KernelsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.events import Began, Event, HeldStorage, Input, Trace
from optimizer.profile.meta_ops.meta_ops import Ops, pretend_cpu, stop_pretending
from optimizer.profile.sizes import Shape
from optimizer.profile.trace.recorder import Recorder
from optimizer.runtime.compiled.without_kernels import without_kernels
from optimizer.runtime.device.backends import in_place_of_its_device
from optimizer.runtime.device.cpu import CpuBackend
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter, Packing, TrainingObjective, TrainingWorkload

_CPU = torch.device("cpu")


class Subject(NamedTuple):
    """The subject of a trace."""

    model: nn.Module
    weights: WeightsPlan
    adapter: Adapter | None
    instances: tuple[int, ...]
    """Block of the traced model that each block of the whole model is like."""
    is_padded: bool = False
    unused: set[int] | None = None
    """Ids of the parameters that no step gives a gradient: found as the model is traced, where they are asked for."""
    anatomy: Anatomy | None = None
    """The anatomy where it is not what ``find_anatomy`` finds, as of a plain module."""
    make_inputs: Callable[[Shape], MicroBatch] | None = None
    """A micro-batch of what is no token ids."""
    is_packed: bool = False
    objective: TrainingObjective = "next_token"
    kernels: BlockKernels = "memory_saving"
    """The code that runs the blocks."""

    def workload(self, shape: Shape, *, num_micro_batches: int) -> TrainingWorkload:
        """The training that is traced, at micro-batches of a shape."""
        batch, sequence = shape
        has_pairs = self.objective != "next_token"
        packing: Packing = "off" if has_pairs else "wrapped"
        return TrainingWorkload(
            sequence_length=sequence,
            global_batch_size=num_micro_batches * batch,
            adapter=self.adapter,
            packing="best_fit" if self.is_packed else packing,
            loss_on="assistant" if has_pairs else "all",
            objective=self.objective,
        )

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return find_blocks(self.model) if self.anatomy is None else self.anatomy.blocks


@contextmanager
def traced_device(ops: Ops) -> Iterator[None]:
    """While entered, steps run on ``meta`` as on a CPU device, which does everything at once, whatever stands in its place."""
    with pretend_cpu(ops), in_place_of_its_device(CpuBackend(_CPU)):
        yield


def trace_step(
    subject: Subject,
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
    model = subject.model
    recorder = Recorder(ops)
    blocks = subject.blocks
    plan = Plan(
        batch=BatchPlan(micro_batch_size=shape[0], accumulation_steps=num_micro_batches),
        weights=subject.weights,
        activations=ActivationsPlan(per_block=(choice,) * len(blocks)),
        kernels=KernelsPlan(blocks=subject.kernels),
    )
    workload = subject.workload(shape, num_micro_batches=num_micro_batches)
    with traced_device(ops), _compiling_for(subject, recorder):
        trainer = Trainer(
            model, plan=plan, workload=workload, device=_CPU, meter=recorder, anatomy=subject.anatomy, is_trace=True
        )
        try:
            with trainer.metered(), _watch_holds(blocks if watches_holds else (), recorder, choice):
                micro_batches = [_make_micro_batch(subject, shape) for _ in range(num_micro_batches)]
                recorder.start()
                trainer.accumulate(micro_batches)
                recorder.stop()
                recorder.mark("end")
        finally:
            trainer.close()
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
        inputs=_sizes_of(micro_batches[0]) if subject.make_inputs is not None else (),
        constants=frozenset(recorder.constants),
    )


def _compiling_for(subject: Subject, recorder: Recorder) -> AbstractContextManager[None]:
    return without_kernels(recorder.note_kernel, capturing=stop_pretending) if subject.kernels == "compiled" else nullcontext()


def _sizes_of(micro_batch: MicroBatch) -> tuple[int, ...]:
    inputs, *_ = micro_batch
    return tuple(tensor.nbytes for tensor in (inputs if isinstance(inputs, tuple) else (inputs,)))


def _check_order(events: Sequence[Event], *, num_blocks: int, num_micro_batches: int) -> None:
    """Everything here rests on it that each block runs once, in the order found."""
    ran = [event.block for event in events if isinstance(event, Began) and event.phase == "forward" and event.block >= 0]
    if ran != list(range(num_blocks)) * num_micro_batches:
        raise InvalidModel(
            f"the model cannot be traced: its {num_blocks} blocks do not run once each and in order, but as "
            f"{', '.join(str(block + 1) for block in ran[:12])}",
            field="config",
        )
    began = {(event.phase, event.block) for event in events if isinstance(event, Began)}
    for part in (("head and loss", -1), *(("backward", block) for block in range(num_blocks))):
        if part not in began:
            what = f"{part[0]} of block {part[1] + 1}" if part[1] >= 0 else part[0]
            raise InvalidModel(f"the model cannot be traced: its {what} is not run by a module of its own", field="config")


def _make_micro_batch(subject: Subject, shape: Shape) -> MicroBatch:
    if subject.make_inputs is not None:
        return subject.make_inputs(shape)
    if subject.objective != "next_token":
        shape = (2 * shape[0], shape[1])
    ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    if subject.is_packed:
        half = shape[1] // 2
        positions = torch.cat((torch.arange(half), torch.arange(shape[1] - half)))
        return ids, labels, positions.expand(shape).contiguous()
    if not subject.is_padded:
        return ids, labels
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -1] = 0
    return ids, labels, mask


def trace_evaluation(subject: Subject, shape: Shape, *, ops: Ops) -> Trace:
    """A forward as ``Trainer.evaluate`` runs it, but for reading the loss."""
    recorder = Recorder(ops)
    model = subject.model
    choice: BlockChoice = "keep"
    plan = Plan(
        batch=BatchPlan(micro_batch_size=shape[0], accumulation_steps=1),
        weights=subject.weights,
        activations=ActivationsPlan(per_block=(choice,) * len(subject.blocks)),
    )
    workload = subject.workload(shape, num_micro_batches=1)
    with traced_device(ops):
        trainer = Trainer(
            model, plan=plan, workload=workload, device=_CPU, meter=recorder, anatomy=subject.anatomy, is_trace=True
        )
        model.eval()
        try:
            with trainer.metered(), torch.no_grad():
                micro_batch = _make_micro_batch(subject, shape)
                recorder.start()
                trainer.forward.loss_of(micro_batch)
                recorder.stop()
        finally:
            model.train()
            trainer.close()
    return Trace(first=tuple(recorder.events), accumulate=())


@contextmanager
def _watch_holds(blocks: Sequence[nn.Module], recorder: Recorder, choice: BlockChoice) -> Iterator[None]:
    """Note which storages a block holds for its backward: all it is given, or, where it is kept, what autograd saves.

    What offloaded blocks hold follows from what kept ones do; sharing.py draws that conclusion.
    """
    watchers = [_HoldWatcher(index, recorder, choice) for index in range(len(blocks))]
    handles: list[RemovableHandle] = []
    for block, watcher in zip(blocks, watchers, strict=True):
        handles.append(block.register_forward_pre_hook(watcher.before, with_kwargs=True))
        handles.append(block.register_forward_hook(watcher.after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for watcher in watchers:
            watcher.leave()


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
            self._recorder.events.extend(HeldStorage(self._index, number, is_given=True) for number in sorted(self._given))
        elif self._choice == "keep":
            self._hooks = saved_tensors_hooks(self._pack, _same)
            self._hooks.__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """Remove the hooks, also where the block's forward raised: hooks that stay would be those of all that this
        process runs from then on, and would keep for ever what a step saves that never gets to its backward.
        """
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._recorder.number_of(tensor)
        if number is not None:
            self._recorder.events.append(HeldStorage(self._index, number, is_given=number in self._given))
        # With its graph, one that is written to after it was saved would hold itself.
        return tensor if tensor.grad_fn is None else tensor.detach()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
