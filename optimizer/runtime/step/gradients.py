"""Carries out the gradients row of a plan, and clips: what becomes of ``param.grad`` between backward and the update.

keep      stays on the device until the step ends; sparse ones as ``sparse_gradients.py`` says.
host      when a parameter's gradient of one micro-batch is complete, it is copied to the host and the device's is dropped. Where
          a stage of a cut model does all micro-batches before the next one, it stays until the last of them has added to it.
consume   when a parameter's gradient is complete, the optimizer steps that parameter and the gradient is dropped.

A gradient is complete where autograd has added up all uses of its parameter, in its post-accumulate hook; it has the
parameter's dtype and shape (n elements), and is dropped before the hook returns.

What is allocated, in order:

host      at construction and until the end, on the host, as gradients: a buffer of n for each trained tensor, in the model's
          order; where it adds up micro-batches ``NUM_STAGING[is_threaded]`` buffers of the largest tensor's bytes; 4 bytes a
          tensor for norms. Hooks and clipping allocate nothing. Copies per tensor and micro-batch, or of the last: n, device to
          host.
consume   at construction and until the end, on the device, as gradients: 4 bytes a tensor for norms. In the hook what the
          update allocates (``optimizer_state.py``).

Of several ranks each has the gradients that ``runtime/ranks/reduction.py`` leaves it, and where state is shared moves or consumes
those of the tensors that it owns; buffers and norms above are of these.

Clipping a step's gradients needs the norm of each first: one fp32 number per tensor. Those that stand on the device are scaled
by clipping, those on the host by the update, piece by piece, so that they are read once less.
"""

import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import LossNotFinite
from optimizer.runtime.step.sparse_gradients import SparseGradients
from optimizer.runtime.tiers.background_thread import BackgroundThread
from optimizer.runtime.tiers.copies import Copy
from optimizer.runtime.tiers.homes import on_host
from optimizer.runtime.tiers.tiers import Tiers

AllNorms = Callable[[torch.Tensor, Sequence[str]], torch.Tensor]
"""Gives the norms of all trained tensors of a run that shares them among ranks, from those that this rank has, by name
(``runtime/ranks/shared_step.py``)."""
NUM_STAGING = {False: 1, True: 2}
"""Gradients of later micro-batches that wait on the host to be added, by whether a thread adds them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Clipped:
    """The norm that clipping found, and the scaling it left to do."""

    norm: torch.Tensor
    """Global norm before clipping, of the gradients without their loss scale; a scalar in fp32."""
    factor: torch.Tensor | None
    """Factor that the update must still apply to gradients, in fp32; None where that is done."""


class Gradients:
    """The gradients of one model's trained parameters, where they are kept on the device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        sparse: SparseGradients | None = None,
        names: Sequence[str] = (),
        all_norms: AllNorms | None = None,
    ) -> None:
        """sparse: of those of the parameters whose gradients are. names: of the parameters, needed where ``all_norms`` is given,
        as it is to one rank of several.
        """
        self._parameters = parameters
        self._sparse = sparse
        self._parameter_names = names
        self._all_norms = all_norms

    def watch(self) -> list[RemovableHandle]:
        """Hooks that do what the plan says with each gradient as it is complete."""
        return [] if self._sparse is None else self._sparse.watch()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Before the backward of each micro-batch of a step."""

    def clear(self) -> None:
        """Forget the step's gradients, once they were used or are not to be."""
        if self._sparse is not None:
            self._sparse.clear()

    def clip_(self, max_norm: float | None, *, loss_scale: float = 1.0) -> Clipped:
        """Scale all gradients in place so that their global norm is at most ``max_norm`` and their loss scale gone.

        Exact, and without a second copy of any gradient: norms are one fp32 number per tensor, the scaling is one pass in place.
        fp16 gradients are left as they are, since small ones would vanish; the update gets the factor.
        """
        if self._sparse is not None:
            self._sparse.join()
        gradients = [_values(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return self._clip_none(max_norm, loss_scale)
        # In fp32, since the norm of scaled gradients is beyond fp16, and bf16 would keep two digits of it.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        clipped = _combine(self._shared(torch.stack(norms), self._names_with_gradient()), max_norm, loss_scale)
        if clipped.factor is None or any(gradient.dtype == torch.float16 for gradient in gradients):
            return clipped
        torch._foreach_mul_(gradients, clipped.factor)
        return Clipped(norm=clipped.norm, factor=None)

    def _clip_none(self, max_norm: float | None, loss_scale: float) -> Clipped:
        """Return the norm of what others have, where this rank has no gradient."""
        norm = torch.zeros(())
        if self._all_norms is not None:
            norm = _combine(self._all_norms(self._parameters[0].new_empty(0, dtype=torch.float32), ()), max_norm, loss_scale).norm
        return Clipped(norm=norm, factor=None)

    def _names_with_gradient(self) -> list[str]:
        named = zip(self._parameter_names, self._parameters, strict=False)
        return [name for name, parameter in named if parameter.grad is not None]

    def _shared(self, norms: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        return norms if self._all_norms is None else self._all_norms(norms, names)


class ConsumedGradients(Gradients):
    """Each is used up as soon as it is complete. Numbers that are not finite are found before their tensor is touched, on
    CUDA and by several ranks at the end of the step; tensors are updated by then.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        tiers: Tiers,
        step_one: Callable[[str], None],
        all_norms: AllNorms | None = None,
    ) -> None:
        super().__init__(list(named.values()), names=list(named), all_norms=all_norms)
        self._named = named
        self._step_one = step_one
        # Ranks find out together, at the end of the step: one that stopped in its backward would leave the others waiting.
        self._is_synchronous = not tiers.is_asynchronous and all_norms is None
        self._norms = torch.zeros(len(named), dtype=torch.float32, device=tiers.device)
        if tiers.meter is not None:
            tiers.meter.assign(self._norms, "gradients")
        self._consumed: dict[str, int] = {}

    def watch(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._consume, name, index))  # type: ignore[no-untyped-call]
            for index, (name, parameter) in enumerate(self._named.items())
        ]

    def clear(self) -> None:
        self._consumed.clear()

    def clip_(self, max_norm: float | None, *, loss_scale: float = 1.0) -> Clipped:
        """The norm of what was consumed; nothing can be scaled any more. Raises LossNotFinite."""
        indices = sorted(self._consumed.values())
        norms = self._shared(_select(self._norms, indices), [self._parameter_names[index] for index in indices])
        if not self._is_synchronous and not bool(norms.isfinite().all()):
            faulty = (n for n, i in self._consumed.items() if not math.isfinite(float(self._norms[i])))
            raise _not_finite(next(faulty, "a tensor of another rank"))
        return _combine(norms, None, 1.0)

    def _consume(self, name: str, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        with torch.no_grad():
            torch.linalg.vector_norm(gradient, dtype=torch.float32, out=self._norms[index])
        if self._is_synchronous and not math.isfinite(float(self._norms[index])):
            raise _not_finite(name)
        del gradient
        self._step_one(name)
        parameter.grad = None
        self._consumed[name] = index


class HostGradients(Gradients):
    """Each moves to the host as it appears, and is added up there; or as the last micro-batch has added to it."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        tiers: Tiers,
        worker: BackgroundThread,
        accumulates: bool,
        waits_for_last: bool = False,
        begin_update: Callable[[str], bool] | None = None,
        update: Callable[[str, Callable[[str], torch.Tensor]], None] | None = None,
        all_norms: AllNorms | None = None,
    ) -> None:
        """worker: adds, and takes norms. The update of the step before no longer needs a buffer: forward has waited for it.
        accumulates: whether there is more than one micro-batch to add up. waits_for_last: whether they add up on the device.

        begin_update, update: for updates during backward. The first says, on backward's thread, whether the tensor's
        complete gradient is to be used at once; the second then uses it, on the worker, and asks the function that it is given
        for the gradient, which raises LossNotFinite where that is not finite.
        """
        super().__init__(list(named.values()), names=list(named), all_norms=all_norms)
        self._named = named
        self._tiers = tiers
        self._worker = worker
        self._waits_for_last = waits_for_last
        self._begin_update = begin_update
        self._update = update
        self._buffers = {
            name: tiers.host_buffer(parameter.shape, dtype=parameter.dtype, category="gradients")
            for name, parameter in named.items()
        }
        largest_bytes = max((buffer.nbytes for buffer in self._buffers.values()), default=0)
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(NUM_STAGING[worker.is_threaded] if accumulates and not waits_for_last else 0):
            self._staging.put(tiers.host_buffer(largest_bytes, dtype=torch.uint8, category="gradients"))
        self._norms = tiers.host_buffer(len(named), dtype=torch.float32, category="gradients", pinned=False)
        self._index = {name: index for index, name in enumerate(named)}
        self._arrived: set[str] = set()
        self._complete: set[str] = set()
        self._used: set[str] = set()
        self._is_last = False

    def watch(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._leave, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._named.items()
        ]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def clear(self) -> None:
        self._arrived.clear()
        self._complete.clear()
        self._used.clear()

    def clip_(self, max_norm: float | None, *, loss_scale: float = 1.0) -> Clipped:
        """The norm, and the factor for the update; waits until all gradients are on the host."""
        for name in self._named:
            # Of no use in the last micro-batch, but in one before.
            if name in self._arrived and name not in self._complete:
                self._worker.submit(partial(self._take_norm, name))
        self._worker.join()
        arrived = [name for name in self._named if name in self._arrived]
        norms = _select(self._norms, [self._index[name] for name in arrived])
        with on_host(self._tiers, "temporaries"):
            clipped = _combine(self._shared(norms, arrived), max_norm, loss_scale)
        if clipped.factor is not None and float(clipped.factor) == 1.0:
            return Clipped(norm=clipped.norm, factor=None)
        return clipped

    # For the optimizer.

    def arrived(self) -> set[str]:
        """Tensors that have a gradient in this step."""
        return self._arrived.copy()

    def is_used(self, name: str) -> bool:
        """Report whether the tensor was updated, or is being, during backward."""
        return name in self._used

    def on_the_host(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    @contextmanager
    def on_device(self, name: str, factor: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
        """Inside, the parameter's ``grad`` is its gradient, scaled; gives what is still to be multiplied, after widening."""
        buffer, parameter = self._buffers[name], self._named[name]
        widens_first = buffer.dtype == torch.float16
        meter = self._tiers.meter
        with nullcontext() if meter is None else meter.region("gradients"):
            gradient = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._tiers.device)
        self._tiers.copy_to_device(buffer, gradient).wait()
        if factor is not None and not widens_first:
            # Here, not on the host, whose memory is the slower one.
            gradient.mul_(factor)
        parameter.grad = gradient
        del gradient
        yield factor if widens_first else None
        parameter.grad = None

    # Arriving.

    def _leave(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or (self._waits_for_last and not self._is_last):
            return
        if name in self._arrived:
            staging = self._staging.get()
            part = staging[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
            copy = self._tiers.copy_to_host(gradient, part)
            self._worker.submit(partial(self._add, name, part, staging, copy))
        else:
            self._arrived.add(name)
            copy = self._tiers.copy_to_host(gradient, self._buffers[name])
            self._worker.submit(copy.finish)
        parameter.grad = None
        if not self._is_last:
            return
        self._complete.add(name)
        self._worker.submit(partial(self._take_norm, name))
        if self._begin_update is not None and self._update is not None and self._begin_update(name):
            self._used.add(name)
            self._worker.submit(partial(self._use, name))

    def _add(self, name: str, part: torch.Tensor, staging: torch.Tensor, copy: Copy) -> None:
        try:
            copy.finish()
            self._buffers[name].add_(part)
        finally:
            # Backward waits for it, whatever happened here.
            self._staging.put(staging)

    def _take_norm(self, name: str) -> None:
        torch.linalg.vector_norm(self._buffers[name], dtype=torch.float32, out=self._norms[self._index[name]])

    def _use(self, name: str) -> None:
        assert self._update is not None
        self._update(name, self._finite)

    def _finite(self, name: str) -> torch.Tensor:
        if not math.isfinite(float(self._norms[self._index[name]])):
            raise _not_finite(name)
        return self._buffers[name]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers that the norm is of: for a sparse gradient the rows that are not zero."""
    return gradient._values() if gradient.is_sparse else gradient


def _combine(norms: torch.Tensor, max_norm: float | None, loss_scale: float) -> Clipped:
    """The global norm from the norm of each tensor."""
    norm = torch.linalg.vector_norm(norms) / loss_scale
    factor = None
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / loss_scale
    elif loss_scale != 1.0:
        factor = torch.full_like(norm, 1 / loss_scale)
    return Clipped(norm=norm, factor=factor)


def _select(norms: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """All are there in nearly every step; then nothing is copied."""
    if not indices:
        return norms[:0]
    return norms if len(indices) == len(norms) else torch.stack([norms[index] for index in indices])


def _not_finite(name: str) -> LossNotFinite:
    return LossNotFinite(
        f"the gradient of {name} became infinite or not a number",
        hint="Lower the learning rate, or clip gradients, which needs a plan that keeps them until the step ends.",
        tensor=name,
    )
