"""Sees each op of a thread: those inside ``on`` a side stream are queued, all others are done and their accesses noted."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from optimizer.base.categories import CATEGORIES
from optimizer.runtime.meter.ledger import NUM_CATEGORIES
from optimizer.runtime.meter.meter import Meter
from tests.hostile_device.footprint import kind_of, name_of, poison, span_of, split_arguments
from tests.hostile_device.races import COMPUTE, HOST
from tests.hostile_device.streams import HostileStream, Queues

_SYNCHRONIZES = "aten::_local_scalar_dense"
"""A number of the device is asked for: the host waits for compute."""


class _Mode(TorchDispatchMode):
    def __init__(self, queues: Queues) -> None:
        super().__init__()
        self._queues = queues

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind in ("view", "metadata"):
            return func(*args, **kwargs)
        return self._run(func, args, kwargs, kind)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
        raise NotImplementedError


class SideStreamMode(_Mode):
    """Queues what writes to memory that is there. What would allocate is a fault: the block would belong to the side stream."""

    def __init__(self, queues: Queues, stream: HostileStream) -> None:
        super().__init__(queues)
        self._stream = stream

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
        if kind != "write":
            raise AssertionError(f"{func} allocates on {self._stream.name}")
        read, written = split_arguments(func, args, kwargs)
        label = _label(func, [*written, *read])
        queues = self._queues
        with queues.lock:
            queues.races.access(
                self._stream.name, label, reads=map(span_of, read), writes=map(span_of, written)
            )
            queues.queue(self._stream, func, args, kwargs, written=written, label=label)
        returned = len(func._schema.returns)
        return None if not returned else written[0] if returned == 1 else tuple(written)


class HostMode(_Mode):
    """For threads of the host, which queue nothing on compute: notes what they do to pinned memory."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
        read, written = split_arguments(func, args, kwargs)
        races = self._queues.races
        with self._queues.lock:
            pinned = [[span_of(t) for t in part if races.is_pinned(t.untyped_storage())] for part in (read, written)]
            if any(pinned):
                races.access(HOST, _label(func, [*written, *read]), reads=pinned[0], writes=pinned[1])
        return func(*args, **kwargs)


class ComputeMode(_Mode):
    """For the thread that queues compute."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Any:
        queues, races = self._queues, self._queues.races
        queues.roll()
        read, written = split_arguments(func, args, kwargs)
        tensors = [*read, *written]
        for tensor in tensors:
            if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
                return func(*args, **kwargs)
            if not tensor.is_cpu or tensor.is_sparse:
                return func(*args, **kwargs)
        label = _label(func, [*written, *read])
        with queues.lock:
            pinned = [races.is_pinned(tensor.untyped_storage()) for tensor in tensors]
            is_on_host = bool(pinned) and all(pinned)
            is_copy = name_of(func) == "aten::copy_"
            races.access(
                HOST if is_on_host else COMPUTE, label, reads=map(span_of, read), writes=map(span_of, written)
            )
            if any(pinned) and not is_on_host:
                queues.do_what_touches(queues.compute, tensors)
                if not is_copy:
                    races.faults.append(f"{label} takes tensors of the device and of the host")
                elif not (args[2:] and args[2]):
                    queues.compute.synchronize()
                elif races.is_pinned(args[0].untyped_storage()):
                    # On the device compute goes on before the host has the numbers.
                    with _disable_current_modes():
                        taken = args[1].detach().clone()
                    queues.queue(queues.compute, func, (args[0], taken), {}, written=written, label=label, kept=taken)
                    return args[0]
            if name_of(func) == _SYNCHRONIZES:
                queues.compute.synchronize()
        result = func(*args, **kwargs)
        if kind == "factory" and type(result) is torch.Tensor and result.device.type == "cpu" and result.numel():
            with _disable_current_modes(), torch.no_grad():
                poison(result)
            with queues.lock:
                queues.made(result)
        return result


class _Label:
    """An op in words, put together where they are read: most never are."""

    __slots__ = ("_func", "_tensors")

    def __init__(self, func: Any, tensors: list[tuple[Any, ...]]) -> None:
        self._func, self._tensors = func, tensors

    def __str__(self) -> str:
        parts = (
            f"{tuple(shape)} {str(dtype).removeprefix('torch.') if slot is None else CATEGORIES[slot % NUM_CATEGORIES]}"
            for shape, dtype, slot in self._tensors
        )
        return f"{self._func} of {' and '.join(parts)}"


def _label(func: Any, tensors: list[torch.Tensor]) -> _Label:
    meter = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Meter)), None)
    return _Label(func, [(tensor.shape, tensor.dtype, _slot_of(tensor, meter)) for tensor in tensors[:2]])


def _slot_of(tensor: torch.Tensor, meter: Meter | None) -> int | None:
    """The category, as the meter has it that is entered."""
    allocation = None if meter is None else meter._live.get(tensor.untyped_storage()._cdata)
    return None if allocation is None else allocation.slot
