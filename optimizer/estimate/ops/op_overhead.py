"""Costs of a part's ops beside their kernels: dispatch, the Python of techniques, waking of threads. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.estimate.ops.op_times import OpTimes
from optimizer.estimate.tasks.change import PartName
from optimizer.hardware.rates import PythonWork, Rates
from optimizer.hardware.thread_wakeup import BESIDE_KERNELS, thread_wakeup_s
from optimizer.plan.activations import OFFLOADING, REBUILDING, BlockChoice
from optimizer.profile.ops import EMBEDDING, Part

_ONCE: Final[Mapping[str, PythonWork]] = {"prologue": "micro-batch", EMBEDDING: "token"}
"""Python's work for a run through the model beside its ops, priced with its first part."""
_AGAIN: Final[Mapping[BlockChoice, PythonWork]] = {"recompute": "recompute op", "selective": "selective op"}
"""Work for each op that runs forward in a block that runs again (REBUILDING)."""


class OpOverhead(NamedTuple):
    """Seconds beside kernels."""

    dispatch_s: float
    hooks_s: float


@dataclass(frozen=True, kw_only=True)
class PartOps:
    """The ops of a part, and how the runtime comes to them."""

    name: PartName
    part: Part
    kept: Part | None
    """The part of the same block where it keeps everything, if this part begins with what the forward did already."""

    def beside_kernels(self, times: OpTimes, *, num_copies: int, kernels_s: float, runs_ahead: bool) -> OpOverhead:
        """Time of the ops beside their kernels, and of the part's technique.

        runs_ahead: the device computes while Python runs ahead, which then costs only what it takes longer.
        """
        name = self.name
        num_ops = _num_dispatched(self.part, times, num_copies=num_copies)
        forward_s, backward_s = times.dispatch_s
        num_forward = 0 if self._is_backward else num_ops
        hooks_s = num_copies * times.python_s("offload")
        if self.kept is not None:
            num_forward = max(0, num_ops - _num_dispatched(self.kept, times))
        if isinstance(name, str):
            hooks_s += times.python_s(_ONCE[name]) if name in _ONCE else 0.0
        elif name[0] in REBUILDING:
            hooks_s += num_forward * times.python_s(_AGAIN[name[0]])
        dispatch_s = num_forward * forward_s + (num_ops - num_forward) * backward_s
        if runs_ahead and times.counts_views:
            return OpOverhead(max(0.0, dispatch_s + hooks_s - kernels_s), 0.0)
        return OpOverhead(dispatch_s, hooks_s)

    def thread_wakeup_s(
        self,
        times: OpTimes,
        rates: Rates,
        *,
        is_multithreaded: NDArray[np.bool_],
        kernels_s: NDArray[np.float64],
        is_copy: NDArray[np.bool_],
    ) -> float:
        """Time the ops take longer because threads fell asleep before them; finished runs do not change how often they do.

        The arrays have an entry for each op of the profile. kernels_s: as probed, without what finished runs correct.
        """
        if not rates.wake_s:
            return 0.0
        name = self.name
        ops = np.array(self.part.ops, dtype=np.int64)
        forward_s, backward_s = times.probed_dispatch_s
        before_s = np.full(len(ops), backward_s if self._is_backward else forward_s)
        num_forward = 0 if self._is_backward else len(ops)
        if self.kept is not None:
            num_forward = max(0, len(ops) - len(self.kept.ops))
            before_s[:num_forward] = forward_s
        if not isinstance(name, str) and name[0] in REBUILDING:
            before_s[:num_forward] += BESIDE_KERNELS * rates.python_work_s(_AGAIN[name[0]])
        before_s *= _num_dispatched(self.part, times) / max(1, len(ops))
        if not isinstance(name, str) and name[0] in OFFLOADING:
            before_s += BESIDE_KERNELS * rates.python_work_s("offload") * is_copy[ops]
        seconds = thread_wakeup_s(is_multithreaded[ops], kernels_s[ops], before_s, wake_s=rates.wake_s)
        return seconds * times.factors["dispatch"]

    @property
    def _is_backward(self) -> bool:
        return "backward" in (self.name if isinstance(self.name, str) else self.name[2])


def op_overhead_s(
    part: Part, name: str, times: OpTimes, *, kernels_s: NDArray[np.float64], runs_ahead: bool
) -> NDArray[np.float64]:
    """Time of a part of a generation beside its kernels, at many shapes at once: dispatch and Python, as in ``PartOps``.

    runs_ahead: as there; kernels_s: by shape.
    """
    beside_s = _num_dispatched(part, times) * times.dispatch_s[0] + (times.python_s(_ONCE[name]) if name in _ONCE else 0.0)
    if runs_ahead and times.counts_views:
        return np.maximum(0.0, beside_s - kernels_s)
    return np.full_like(kernels_s, beside_s)


def is_done_again(name: PartName) -> bool:
    """True for a part that begins with what the forward did already."""
    return not isinstance(name, str) and name[0] in REBUILDING and name[2] != "forward"


def _num_dispatched(part: Part, times: OpTimes, *, num_copies: int = 0) -> int:
    """Ops whose dispatch is priced: where it was not measured, a copy's is in its lane, and views cost nothing."""
    return len(part.ops) + (part.num_views if times.counts_views else -num_copies)
