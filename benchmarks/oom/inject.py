"""Makes a real run on the CPU device need more memory than was predicted, at the seam where each cause would show itself.

Methods of the runtime are wrapped for the length of a ``with``; the program itself has no switch for it. What is held is
counted by the run's own meter, under its own cap, so that everything from the failing allocation on is what a job would do.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from optimizer.base.categories import Category, Tier
from optimizer.base.errors import OutOfDeviceMemory
from optimizer.estimate.job.causes import Cause
from optimizer.runtime.job import train as training
from optimizer.runtime.job.export import artifacts
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import forward, preference
from optimizer.runtime.step.batch import BatchReader
from optimizer.runtime.step.forward import Forward
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer

LONGER = 1.5
"""Length of a longer batch over the workload's."""


class HostKilled(BaseException):
    """Stands for SIGKILL by the host's killer: no handler of the run sees it."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One cause, and how much it takes."""

    cause: Cause
    num_bytes: int
    """Bytes held beside the run's own; of ``host_killed`` the most that device and host may take together; of ``longest_batch``
    nothing, whose batches are ``LONGER``."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The next run inside, and those after it, meet it."""
        with ExitStack() as stack:
            for owner, name, wrapper in _SEAMS[self.cause](self.num_bytes):
                stack.enter_context(patch.object(owner, name, wrapper(getattr(owner, name))))
            yield


Part = Trainer | Forward
"""The object whose method is a seam; it has a meter and a model."""
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Seam = tuple[Any, str, Wrapper]
_HELD = "held_by_injection"


def hold(meter: Meter | None, num_bytes: int, category: Category, *, tier: Tier = "device") -> torch.Tensor:
    """Bytes that the meter counts until the tensor is let go; not touched, so they cost the machine nothing."""
    # not made by an op of torch's: the meter would count it where it is, before it is said what it is
    tensor = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))
    if meter is not None:
        meter.assign(tensor, category, tier=tier)
    return tensor


def _during(
    num_bytes: int, category: Category, *, tier: Tier = "device", when: Callable[[Part], bool] = lambda part: True
) -> Wrapper:
    """Held while the wrapped function, whose first argument is the trainer or its forward, runs."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(part: Part, *args: Any, **kwargs: Any) -> Any:
            held = hold(part.meter, num_bytes, category, tier=tier) if when(part) else None
            try:
                return original(part, *args, **kwargs)
            finally:
                del held

        return wrapped

    return wrap


def _from_here(num_bytes: int, category: Category, *, when: Callable[[Part], bool]) -> Wrapper:
    """Held from the wrapped method on, until ``_let_go``."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(part: Part, *args: Any, **kwargs: Any) -> Any:
            if when(part) and not hasattr(part, _HELD):
                setattr(part, _HELD, hold(part.meter, num_bytes, category))
            return original(part, *args, **kwargs)

        return wrapped

    return wrap


def _let_go(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        for holder in (trainer, trainer.forward):
            holder.__dict__.pop(_HELD, None)
        return original(trainer, *args, **kwargs)

    return wrapped


def _is_training(part: Part) -> bool:
    return part.model.training


def _state_is_on_device(trainer: Trainer) -> bool:
    return trainer.plan.optimizer_state.place == "device"


def _larger_state(num_bytes: int) -> Wrapper:
    """The update leaves more state than it should, once and for the rest of the run."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            original(trainer, *args, **kwargs)
            if _state_is_on_device(trainer) and not hasattr(trainer, _HELD):
                setattr(trainer, _HELD, hold(trainer.meter, num_bytes, "optimizer_state"))

        return wrapped

    return wrap


def _longer_batches(original: Callable[..., list[MicroBatch]]) -> Callable[..., Any]:
    def wrapped(reader: BatchReader, step: int) -> list[MicroBatch]:
        return [tuple(_longer(tensor) for tensor in batch) for batch in original(reader, step)]

    return wrapped


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    num_more = int(tensor.shape[1] * (LONGER - 1))
    return torch.cat([tensor, tensor[:, :num_more]], dim=1)


def _less_room(num_bytes: int, *, in_gaps: bool) -> Wrapper:
    """From the first step on the device has so much less room. in_gaps: the allocator itself has it, in gaps."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            meter = trainer.meter
            if meter is not None and meter.cap_bytes is not None and not hasattr(trainer, _HELD):
                setattr(trainer, _HELD, True)
                meter._limit_bytes = meter.cap_bytes - num_bytes
                if not in_gaps:
                    meter.cap_bytes -= num_bytes
            return original(trainer, *args, **kwargs)

        return wrapped

    return wrap


def _report_gaps(num_bytes: int) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> OutOfDeviceMemory:
            error: OutOfDeviceMemory = original(*args)
            error.fields |= {"slack_bytes": num_bytes, "budget_bytes": error.fields["budget_bytes"] - num_bytes}
            return error

        return wrapped

    return wrap


def _kill_above(num_bytes: int) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            result = original(trainer, *args, **kwargs)
            peak = trainer.meter.peak() if trainer.meter is not None else None
            if peak is not None and peak.device_bytes + peak.host_bytes > num_bytes:
                raise HostKilled
            return result

        return wrapped

    return wrap


def _disk_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    return wrapped


_SEAMS: dict[Cause, Callable[[int], list[Seam]]] = {
    "load": lambda size: [(Trainer, "_prepare", _during(size, "weights"))],
    "resume": lambda size: [(training, "import_trainer", _during(size, "temporaries"))],
    "first_update": lambda size: [(Trainer, "_update", _larger_state(size))],
    "longest_batch": lambda size: [(BatchReader, "read", _longer_batches)],
    "logits": lambda size: [
        (Forward, "_backbone_ends", _from_here(size, "logits_and_loss", when=_is_training)),
        (Trainer, "end_backward", _let_go),
    ],
    "save": lambda size: [(training, "export_trainer", _during(size, "temporaries", tier="host"))],
    "export": lambda size: [(artifacts, "_leave_model", _held_on_host(size))],
    "evaluation": lambda size: [
        (Forward, "loss_of", _during(size, "activations", when=lambda part: not part.model.training))
    ],
    "reference_model": lambda size: [(Forward, "_score_reference", _during_reference(size))],
    "fragmentation": lambda size: [
        (Trainer, "step", _less_room(size, in_gaps=True)),
        (Meter, "_device_full", _report_gaps(size)),
    ],
    "another_process": lambda size: [(Trainer, "step", _less_room(size, in_gaps=False))],
    "kernel_scratch": lambda size: [
        (Trainer, "begin_backward", _from_here(size, "temporaries", when=_is_training)),
        (Trainer, "end_backward", _let_go),
    ],
    "pinned_memory": lambda size: [(Trainer, "step", _during(size, "activations", tier="host"))],
    "host_killed": lambda size: [(Trainer, "step", _kill_above(size))],
    "disk": lambda size: [(training, "write_checkpoint", _disk_full)],
    "step": lambda size: [
        (Forward, "compute_loss", _from_here(size, "activations", when=_is_training)),
        (Trainer, "end_backward", _let_go),
    ],
}


def _held_on_host(num_bytes: int) -> Wrapper:
    """The seam is a function that is given what is exported, not the trainer."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made = torch.empty(num_bytes, dtype=torch.uint8)  # counted by the meter that is entered around it
            try:
                return original(*args, **kwargs)
            finally:
                del made

        return wrapped

    return wrap


def _during_reference(num_bytes: int) -> Wrapper:
    """Held in the forward of the reference, after the moment was named."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(part: Forward, *args: Any, **kwargs: Any) -> Any:
            def held_there(*given: Any, **named: Any) -> Any:
                held = hold(part.meter, num_bytes, "activations")
                try:
                    return scored(*given, **named)
                finally:
                    del held

            scored = preference.score_rows
            if not part.model.training:
                return original(part, *args, **kwargs)
            with patch.object(forward, "score_rows", held_there):
                return original(part, *args, **kwargs)

        return wrapped

    return wrap
