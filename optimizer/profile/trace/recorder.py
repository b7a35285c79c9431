"""A meter that also writes down what it sees, and runs every op without data (``meta_ops/meta_ops.py``).

Being a meter, it follows the runtime's own rules of what counts as what. Small integer tensors are computed for real beside
their stand-ins, because models decide by the values of position ids.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from optimizer.base.categories import CATEGORIES, Tier
from optimizer.base.errors import InvalidModel
from optimizer.formats.op_costs import FUSED_KERNEL, classify_op, count_flops
from optimizer.profile.events import Allocated, Began, Event, Freed, Moved, Ran, Viewed
from optimizer.profile.meta_ops.meta_ops import Ops, OpTraits, tensors_in, without_devices
from optimizer.profile.meta_ops.op_layout import dtype_of, form_of
from optimizer.profile.meta_ops.op_scratch import read_scratch
from optimizer.runtime.meter.ledger import NUM_CATEGORIES
from optimizer.runtime.meter.meter import Meter

_MAX_SHADOW_ELEMENTS = 1 << 22
"""Largest integer tensor computed for real: enough for position ids and the tests made on them."""
_SCALES_BY_FREQUENCY = 4
"""Argument of ``embedding_dense_backward`` that marks embeddings with sparse gradients, which have no kernel without data:
``trace.py`` makes them dense and sets it. No supported model uses it otherwise."""
_VIEWED = Viewed()
_SHADOW_DTYPES = frozenset({torch.int64, torch.int32, torch.bool})
_CONSTANTS = frozenset({"aten.ones.default", "aten.zeros.default", "aten.full.default"})
"""Masks of floats begin as one of these (BART)."""
_COPIES = frozenset({"aten.copy_.default", "aten.clone.default"})


class Recorder(Meter):  # type: ignore[no-untyped-call]
    """Notes events from ``start`` to ``stop``; counts always.

    ops: may be shared by recorders, so that what one has learnt the next knows.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(device=torch.device("cpu"))
        self.events: list[Event] = []
        self._ops_without_data = ops
        self.constants: set[int] = set()
        """Bytes of tensors that no op made and yet are saved: an index written in the model's code (Falcon)."""
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

    def note_kernel(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Note a fused kernel of compiled code, which no dispatch mode sees."""
        if self._is_recording:
            self.events.append(
                Ran(
                    FUSED_KERNEL,
                    "memory",
                    sum(tensor.numel() for tensor in written),
                    sum(tensor.nbytes for tensor in read),
                    sum(tensor.nbytes for tensor in written),
                    dtype=dtype_of(read, written),
                )
            )

    def number_of(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_scalar(args[0])
        traits = self._ops_without_data.traits(func)
        result = self._ops_without_data.run(func, args, kwargs)
        if func is torch.ops.aten.embedding_dense_backward.default and args[_SCALES_BY_FREQUENCY]:
            _hold_rows_only(result, num_tokens=args[1].numel())
        outputs = [result] if isinstance(result, torch.Tensor) else tensors_in((result,), {})
        if outputs and (outputs[0].dtype in _SHADOW_DTYPES or traits.name in _CONSTANTS):
            self._shadow(func, args, kwargs, outputs, sets_view=traits.sets_view)
        # What is made without bytes, and what only changes a tensor's view of them (``set_``), is only counted.
        new = [output for output in outputs if traits.makes and self._is_new(output.untyped_storage())]
        if self._is_recording:
            moves_bytes = bool(new) or (traits.writes and not traits.sets_view)
            given = (*args, *kwargs.values())
            self.events.append(
                self._describe_op(traits, given, tensors_in(args, kwargs), outputs) if moves_bytes else _VIEWED
            )
        for output in new:
            self._see(output, self._slot)
        return result

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata not in self._live and storage.nbytes() > 0

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

    def _describe_op(
        self,
        traits: OpTraits,
        args: tuple[Any, ...],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> Ran:
        name = traits.name
        kind = classify_op(name)
        if name in _COPIES:
            is_new = len(inputs) == 1
            target, source = (outputs[0], inputs[0]) if is_new else inputs[:2]
            target_on_host = self._slot >= NUM_CATEGORIES if is_new else self._is_on_host(target)
            source_on_host = self._is_on_host(source)
            if target_on_host or source_on_host:
                num_bytes = target.nbytes
                if source.untyped_storage()._cdata not in self._live:
                    self.constants.add(num_bytes)
                # By dtype, which decides what compression would make of it.
                name = f"copy.{str(target.dtype).removeprefix('torch.')}"
                return Ran(name, "copy_out" if target_on_host else "copy_in", 0, num_bytes, num_bytes)
        is_causal = kind == "attention" and any(argument is True for argument in args)
        return Ran(
            name,
            kind,
            count_flops(name, [t.shape for t in inputs], [t.shape for t in outputs], is_causal=is_causal),
            sum(tensor.nbytes for tensor in inputs),
            sum(tensor.nbytes for tensor in outputs),
            *read_scratch(name, inputs, outputs, args=args),
            dtype=dtype_of(inputs, outputs),
            form=form_of(name, inputs, is_causal=is_causal),
        )

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        allocation = self._live.get(tensor.untyped_storage()._cdata)
        return allocation is not None and allocation.slot >= NUM_CATEGORIES

    def _shadow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        *,
        sets_view: bool,
    ) -> None:
        """Compute integers for real, where all they come from is known, so that decisions made on them can be followed."""
        known = {id(tensor): self._shadow_of(tensor) for tensor in tensors_in(args, kwargs)}
        for output in outputs:
            self._shadows.pop(id(output), None)
        if sets_view or any(real is None for real in known.values()):
            return
        if any(t.numel() > _MAX_SHADOW_ELEMENTS for t in outputs):
            return
        if any(t.dtype not in _SHADOW_DTYPES for t in outputs) and str(func) not in _CONSTANTS:
            return
        real_args = [_real_value(value, known) for value in args]
        real_kwargs = {name: _real_value(value, known) for name, value in kwargs.items()}
        result = func(*real_args, **real_kwargs)
        for output, real in zip(outputs, tensors_in((result,), {}), strict=True):
            self._shadows[id(output)] = (weakref.ref(output), real)

    def _shadow_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_meta:
            return tensor
        reference, real = self._shadows.get(id(tensor), (lambda: None, None))
        return real if reference() is tensor else self._ops_without_data.read_index(tensor)

    def _read_scalar(self, tensor: torch.Tensor) -> Any:
        real = self._shadow_of(tensor)
        if real is None:
            raise InvalidModel(
                "the model cannot be traced: it decides by the values of its activations (Tensor.item)",
                field="config",
                hint="Use a model type and settings whose operations do not depend on the data.",
            )
        return real.item()


def _hold_rows_only(gradient: torch.Tensor, *, num_tokens: int) -> None:
    """Give the gradient of a whole table the bytes of a sparse one: a row and its int64 index for each token.

    An upper bound: the real one takes over the hidden states' gradient and the token ids, which are counted beside it here.
    """
    row_bytes = gradient.shape[1] * gradient.element_size() + 8
    gradient.untyped_storage().resize_(num_tokens * row_bytes)


def _real_value(value: Any, known: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(value, torch.Tensor):
        return known[id(value)]
    if isinstance(value, list | tuple):
        return [_real_value(item, known) for item in value]
    return without_devices(value)
