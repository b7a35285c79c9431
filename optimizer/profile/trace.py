"""Traces a model once and returns its Profile: the one module of ``profile`` that needs torch.

The model is built and run under FakeTensorMode on the device ``cpu`` (fake ``cuda`` tensors with autograd abort a CPU build of
torch), with as many blocks as show each distinct surrounding of a block, so that the cost does not grow with depth. Three
micro-batches are run at each of a few small shapes: one with fresh gradients, one that accumulates, and one forward in which
nothing that a block saves survives; assemble.py turns their events into parts and fits the sizes.

A fake trace equals a real run, storage for storage, once two things are seen to: transformers asks whether its tensors are
fake and then materializes masks it otherwise leaves out (one logits-sized tensor too many, and another attention kernel), and it
decides by the values of position ids; so it is not told, and integers are computed for real beside their fakes.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from optimizer.categories import CATEGORIES, Tier
from optimizer.errors import InvalidModel
from optimizer.models.build import build_model, find_blocks
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.assemble import assemble_regime
from optimizer.profile.depth import shorten_blocks
from optimizer.profile.events import Allocated, Began, Event, Freed, Held, Input, Moved, Ran, Trace
from optimizer.profile.op_costs import classify_op, count_flops
from optimizer.profile.profile import BLOCK_CHOICES, Profile, Regime, Tensors, TensorSize
from optimizer.profile.ranges import ShapeRange, plan_ranges
from optimizer.profile.sizes import Shape
from optimizer.runtime.meter import NUM_CATEGORIES, Meter
from optimizer.runtime.step import Trainer
from optimizer.workload import TrainingWorkload

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MAX_SHADOW_ELEMENTS = 1 << 22
"""Largest integer tensor computed for real: enough for position ids and the tests made on them."""
_SHADOW_DTYPES = (torch.int64, torch.int32, torch.bool)
_CPU = torch.device("cpu")


def profile_model(spec: ModelSpec) -> Profile:
    """Trace each distinct block once, in fp32 and bf16. Seconds, whatever the depth and width; no weights are allocated.

    Raises InvalidModel where an operation cannot be traced, or a size is no polynomial in micro-batch and sequence length.
    """
    short_kinds, instances = shorten_blocks(_block_kinds(spec))
    short_spec = _with_blocks(spec, short_kinds)
    ranges = plan_ranges(max_sequence_length=spec.max_sequence_length, sequence_limits=_sequence_limits(spec))
    regimes: dict[str, tuple[Regime, ...]] = {}
    buffer_bytes: dict[str, int] = {}
    tensors: Tensors | None = None
    for name, dtype in _DTYPES.items():
        model = build_model(short_spec, dtype=dtype, device="meta")
        with _fake_run():
            _make_fake(model)
            regimes[name] = tuple(_trace_range(model, place, instances) for place in ranges)
            buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
            buffer_bytes[name] = sum(buffers.values())
            tensors = _list_tensors(model, instances)
    assert tensors is not None
    return Profile(
        model_fingerprint=spec.fingerprint,
        model_type=spec.model_type,
        num_blocks=spec.num_blocks,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_length,
        torch_version=torch.__version__,
        tensors=tensors,
        buffer_bytes=buffer_bytes,
        regimes=regimes,
    )


# A short model that shows every distinct block.


def _block_kinds(spec: ModelSpec) -> list[str]:
    config = spec.config
    given = config.get("layer_types")
    if given is None:
        # What a configuration class fills in by itself (Gemma 2 alternates) is read from it.
        given = getattr(build_model(spec, device="meta").config, "layer_types", None)
    return list(given) if given else ["block"] * spec.num_blocks


def _with_blocks(spec: ModelSpec, kinds: Sequence[str]) -> ModelSpec:
    config = spec.to_config()
    depth_key = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    config[depth_key] = len(kinds)
    if any(kind != "block" for kind in kinds):
        config["layer_types"] = list(kinds)
    return read_model_spec(config)


def _sequence_limits(spec: ModelSpec) -> list[int]:
    window = spec.config.get("sliding_window")
    # transformers leaves the mask out only while the sequence is shorter than the window.
    return [window - 1] if isinstance(window, int) and spec.config.get("use_sliding_window", True) else []


def _list_tensors(model: nn.Module, instances: Sequence[int]) -> Tensors:
    blocks = find_blocks(model)
    owner = {id(parameter): index for index, block in enumerate(blocks) for parameter in block.parameters()}
    before: list[TensorSize] = []
    after: list[TensorSize] = []
    by_block: list[list[TensorSize]] = [[] for _ in blocks]
    for parameter in model.parameters():
        size = TensorSize(num_elements=parameter.numel(), is_matrix=parameter.dim() >= 2)
        index = owner.get(id(parameter))
        if index is not None:
            by_block[index].append(size)
        else:
            (after if any(by_block) else before).append(size)
    return Tensors(
        before=tuple(before),
        by_block=tuple(tuple(sizes) for sizes in by_block),
        block_kinds=tuple(instances),
        after=tuple(after),
    )


# Fake tensors that do what real ones do.


@contextlib.contextmanager
def _fake_run() -> Iterator[None]:
    # Plain functions in place of others, here and below: a mock would remember the tensors it was called with.
    with mock.patch("transformers.utils.import_utils.is_fake_tensor", _is_never_fake), FakeTensorMode():
        yield


def _is_never_fake(value: Any) -> bool:
    return False


def _make_fake(model: nn.Module) -> None:
    """Parameters and buffers on ``meta`` become fake ones on ``cpu``, in place; tied ones stay tied."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (tensor, nn.Parameter(fake) if is_parameter else fake)
                named[name] = made[id(tensor)][1]  # type: ignore[assignment]


class _Recorder(Meter):  # type: ignore[no-untyped-call]
    """A meter that also writes down what it sees, so that both follow the same rules."""

    def __init__(self) -> None:
        super().__init__(device=_CPU)
        self.events: list[Event] = []
        self._is_recording = False
        self._numbers: dict[int, int] = {}
        self._num_storages = 0
        self._shadows: dict[int, tuple[Any, torch.Tensor]] = {}

    def start(self) -> None:
        self._is_recording = True

    def stop(self) -> None:
        self._is_recording = False

    def mark(self, phase: str, *, block_index: int = -1) -> None:
        super().mark(phase, block_index=block_index)
        self.events.append(Began(phase, block_index))

    def number_of(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def _see(self, tensor: torch.Tensor, slot: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        super()._see(tensor, slot)
        if self._is_recording:
            self._numbers[key] = self._num_storages
            tier: Tier = "device" if slot < NUM_CATEGORIES else "host"
            category = CATEGORIES[slot % NUM_CATEGORIES]
            self.events.append(Allocated(self._num_storages, storage.nbytes(), category, tier))
            self._num_storages += 1

    def _gone(self, reference: Any) -> None:
        number = self._numbers.pop(reference.key, None)
        super()._gone(reference)
        if number is not None:
            self.events.append(Freed(number))

    def _move(self, allocation: Any, slot: int) -> None:
        if allocation.slot != slot and allocation.key in self._numbers:
            self.events.append(Moved(self._numbers[allocation.key], CATEGORIES[slot]))
        super()._move(allocation, slot)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_scalar(inputs[0])
        result = _run_op(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._shadow(func, args, kwargs, inputs, outputs)
        if not self._is_recording:
            for output in outputs:
                self._see(output, self._slot)
            return result
        is_new = any(output.untyped_storage()._cdata not in self._live for output in outputs)
        if is_new or any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self.events.append(self._describe_op(func, args, inputs, outputs))
        for output in outputs:
            self._see(output, self._slot)
        return result

    def _describe_op(
        self, func: Any, args: tuple[Any, ...], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Ran:
        name = str(func)
        kind = classify_op(name)
        if func is torch.ops.aten.copy_.default:
            target_on_host, source_on_host = (self._is_on_host(tensor) for tensor in inputs[:2])
            if target_on_host or source_on_host:
                num_bytes = inputs[0].numel() * inputs[0].element_size()
                return Ran(name, "copy_out" if target_on_host else "copy_in", 0, num_bytes, num_bytes)
        is_causal = kind == "attention" and any(argument is True for argument in args)
        return Ran(
            name,
            kind,
            count_flops(name, [tuple(t.shape) for t in inputs], [tuple(t.shape) for t in outputs], is_causal=is_causal),
            sum(tensor.numel() * tensor.element_size() for tensor in inputs),
            sum(tensor.numel() * tensor.element_size() for tensor in outputs),
        )

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        allocation = self._live.get(tensor.untyped_storage()._cdata)
        return allocation is not None and allocation.slot >= NUM_CATEGORIES

    def _shadow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Compute integers for real, where all they come from is known, so that decisions made on them can be followed."""
        if not outputs or any(t.dtype not in _SHADOW_DTYPES or t.numel() > _MAX_SHADOW_ELEMENTS for t in outputs):
            return
        known = [self._shadow_of(tensor) for tensor in inputs]
        if any(value is None for value in known):
            return
        by_id = {id(tensor): value for tensor, value in zip(inputs, known, strict=True)}
        real_args, real_kwargs = tree_map(
            lambda leaf: by_id.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        with _disable_current_modes():
            results = [t for t in tree_leaves(func(*real_args, **real_kwargs)) if isinstance(t, torch.Tensor)]
        for fake, real in zip(outputs, results, strict=True):
            self._shadows[id(fake)] = (weakref.ref(fake), real)

    def _shadow_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        reference, real = self._shadows.get(id(tensor), (lambda: None, None))
        return real if reference() is tensor else None

    def _read_scalar(self, tensor: torch.Tensor) -> Any:
        real = self._shadow_of(tensor)
        if real is None:
            raise _untraceable("it decides by the values of its activations (Tensor.item)")
        with _disable_current_modes():
            return real.item()


def _run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
        # The fake kernel asks for bf16; the real one takes fp32 on the CPU. Strides are those of a fresh tensor.
        left, right = args[0], args[1]
        if right.dim() == 3:
            return left.new_empty((left.shape[0], right.shape[-1]))
        num_groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape[0]
        return left.new_empty((num_groups, left.shape[0], right.shape[-1]))
    return func(*args, **kwargs)


def _untraceable(reason: str) -> InvalidModel:
    return InvalidModel(
        f"the model cannot be traced: {reason}",
        field="config",
        hint="Use a model type and settings whose operations do not depend on the data.",
    )


# Running the step.


def _trace_range(model: nn.Module, place: ShapeRange, instances: Sequence[int]) -> Regime:
    """The whole at one shape; at the others one micro-batch of the plain plan, which shows how every size grows."""
    whole = {choice: _trace_step(model, place.shape, choice, num_micro_batches=2) for choice in BLOCK_CHOICES}
    growth = {shape: _trace_step(model, shape, "keep", num_micro_batches=1) for shape in place.more_shapes}
    return assemble_regime(whole, growth, place=place, block_templates=tuple(instances))


def _trace_step(model: nn.Module, shape: Shape, choice: BlockChoice, *, num_micro_batches: int) -> Trace:
    """One or two micro-batches through the runtime's own step."""
    batch, sequence = shape
    recorder = _Recorder()
    blocks = find_blocks(model)
    plan = Plan(
        batch=BatchPlan(micro_batch_size=batch, accumulation_steps=num_micro_batches),
        activations=ActivationsPlan(per_block=(choice,) * len(blocks)),
    )
    workload = TrainingWorkload(sequence_length=sequence, global_batch_size=num_micro_batches * batch)
    with _without_set():
        trainer = Trainer(model, plan=plan, workload=workload, device=_CPU, meter=recorder)
        handles = _watch_holds(blocks, recorder, choice)
        try:
            with trainer.metered():
                micro_batches = [
                    (torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
                    for _ in range(num_micro_batches)
                ]
                recorder.start()
                trainer._accumulate(micro_batches)
                recorder.stop()
                recorder.mark("end")
        finally:
            trainer.close()
            for handle in handles:
                handle.remove()
            for parameter in model.parameters():
                parameter.grad = None
    starts = [index for index, event in enumerate(recorder.events) if event == Began("forward", -1)]
    end = recorder.events.index(Began("end", -1))
    bounds = [*starts, end]
    return Trace(
        first=tuple(recorder.events[bounds[0] : bounds[1]]),
        accumulate=tuple(recorder.events[bounds[1] : bounds[2]]) if num_micro_batches == 2 else (),
    )


def _watch_holds(blocks: Sequence[nn.Module], recorder: _Recorder, choice: BlockChoice) -> list[Any]:
    """Note which storages made before a block it holds for its backward: all it is given, or what of that autograd saves.

    Offloaded blocks hold what kept ones do but for the hidden states; assemble.py draws that conclusion.
    """
    handles = []
    for index, block in enumerate(blocks):
        watcher = _HoldWatcher(index, recorder, choice)
        handles.append(block.register_forward_pre_hook(watcher.before, with_kwargs=True))
        handles.append(block.register_forward_hook(watcher.after))
    return handles


class _HoldWatcher:
    """Sees one block's inputs and what autograd saves in it."""

    def __init__(self, index: int, recorder: _Recorder, choice: BlockChoice) -> None:
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
        if self._choice == "recompute":
            self._recorder.events.extend(Held(self._index, number) for number in sorted(self._given))
        elif self._choice == "keep":
            self._hooks = saved_tensors_hooks(self._pack, _same)
            self._hooks.__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        number = self._recorder.number_of(tensor)
        if number in self._given:
            self._recorder.events.append(Held(self._index, number))
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def _without_set() -> Iterator[None]:
    """The runtime's copies between tiers without ``set_``: of a fake tensor it keeps the storage alive for good."""
    source = torch.empty(1, dtype=torch.uint8, device=_CPU)

    def as_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        return source

    with (
        mock.patch("optimizer.runtime.tiers._as_bytes", as_bytes),
        mock.patch("optimizer.runtime.activations.view_of", _view_of),
    ):
        yield


def _view_of(data: torch.Tensor, *, like: Any) -> torch.Tensor:
    """Same storage, same layout as the runtime's ``view_of`` gives."""
    return data.view(like.dtype).as_strided(like.size, like.stride, like.offset)
