"""All ops of a profile at one shape, as arrays: what each takes on one machine, by its kernels. Torch-free."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, Tier
from optimizer.estimate.ops.experts import unread_bytes
from optimizer.estimate.ops.op_times import OpTimes
from optimizer.formats.op_costs import OpKind
from optimizer.hardware.rates import Rates
from optimizer.hardware.thread_wakeup import runs_multithreaded
from optimizer.profile.ops import Change, Op, Part, compute_kind
from optimizer.profile.sizes import NUM_MONOMIALS, Shape, Terms, monomials
from optimizer.profile.time_kinds import COMPUTE_KINDS


class HasOps(Protocol):
    """Anything with ops to list: the profile of a step, or of one phase of a generation."""

    @property
    def ops(self) -> tuple[Op, ...]: ...
    @property
    def changes(self) -> tuple[Change, ...]: ...


_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
KIND_SLOT: Final = {kind: index for index, kind in enumerate(COMPUTE_KINDS)}
_LANES = ("compute", "copy_out", "copy_in")


class Sort(NamedTuple):
    """A sort of ops, all of which have one curve."""

    kind: OpKind
    name: str
    dtype: str
    form: str


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedTerms:
    """A profile's polynomials as arrays: what all its shapes share."""

    flops: NDArray[np.float64]
    written_bytes: NDArray[np.float64]
    read_bytes: NDArray[np.float64]
    changes: NDArray[np.int64]
    change_places: tuple[tuple[Tier, int], ...]
    """Tier of each change, and the place of its category."""
    alike: Mapping[Sort, NDArray[np.int64]]
    """Ops of one sort; a copy between tiers is named by its dtype, which decides nothing here."""


_listed: dict[int, ListedTerms] = {}


def list_terms(profile: HasOps) -> ListedTerms:
    """A profile's terms, made once for each profile and kept while it lives."""
    if id(profile) not in _listed:
        alike: dict[Sort, list[int]] = {}
        for index, op in enumerate(profile.ops):
            sort = Sort(op.kind, op.name if op.kind not in _LANES else "", op.dtype, op.form)
            alike.setdefault(sort, []).append(index)
        _listed[id(profile)] = ListedTerms(
            flops=_terms_of(op.flops for op in profile.ops),
            written_bytes=_terms_of(op.written_bytes for op in profile.ops),
            read_bytes=_terms_of(op.read_bytes for op in profile.ops),
            changes=np.array([change.num_bytes for change in profile.changes], dtype=np.int64).reshape(-1, NUM_MONOMIALS),
            change_places=tuple((change.tier, _SLOT[change.category]) for change in profile.changes),
            alike={sort: np.array(indices, dtype=np.int64) for sort, indices in alike.items()},
        )
        weakref.finalize(profile, _listed.pop, id(profile), None)
    return _listed[id(profile)]


class OpSizes:
    """All ops of a profile at one shape, as arrays."""

    def __init__(self, profile: HasOps, shape: Shape, *, element_bytes: int) -> None:
        """Evaluate the ops' sizes. element_bytes: of what is computed in."""
        values = np.array(monomials(shape), dtype=np.float64)
        terms = list_terms(profile)
        self._flops = terms.flops @ values
        self._written_bytes = terms.written_bytes @ values
        self._read_bytes = terms.read_bytes @ values
        self._read_bytes -= unread_bytes(profile.ops, shape, element_bytes=element_bytes)
        self._alike = terms.alike

    def priced(self, times: OpTimes, rates: Rates) -> "PricedOps":
        """Copies at the link's rate, the rest by their kernels."""
        num_ops = len(self._flops)
        seconds, work = np.zeros_like(self._flops), np.zeros_like(self._flops)
        slots = np.zeros(num_ops, dtype=np.int64)
        shared = np.zeros(self._flops.shape, dtype=bool)
        links = {"copy_out": rates.device_to_host_bytes_per_s, "copy_in": rates.host_to_device_bytes_per_s}
        for (op_kind, name, dtype, form), indices in self._alike.items():
            flops, read_bytes, written_bytes = (
                sizes[indices] for sizes in (self._flops, self._read_bytes, self._written_bytes)
            )
            if rates.wake_s:
                shared[indices] = runs_multithreaded(
                    op_kind, name, dtype, flops=flops, read_bytes=read_bytes, written_bytes=written_bytes
                )
            if op_kind in _LANES:
                seconds[indices] = written_bytes / links[op_kind]
                slots[indices] = len(COMPUTE_KINDS) + _LANES.index(op_kind) - 1
                continue
            kind = compute_kind(op_kind, name)
            seconds[indices] = times.kernels_s(
                kind,
                name,
                flops=flops,
                read_bytes=read_bytes,
                written_bytes=written_bytes,
                dtype=dtype,
                form=form,
            )
            work[indices] = flops if op_kind in ("matmul", "attention") else read_bytes + written_bytes
            slots[indices] = KIND_SLOT[times.charged_to(kind, dtype)]
        return PricedOps(times=times, seconds=seconds, work=work, slots=slots, shared=shared)


@dataclass(frozen=True, kw_only=True)
class PricedOps:
    """All ops of a profile at one shape on one machine, without their dispatch."""

    times: OpTimes
    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    slots: NDArray[np.int64]
    """Place in COMPUTE_KINDS; beyond them copies out, then in."""
    shared: NDArray[np.bool_]
    """Among the CPU device's threads (``hardware/thread_wakeup.py``); none where nobody has to be woken."""

    @cached_property
    def probed_seconds(self) -> NDArray[np.float64]:
        """Whatever finished runs say."""
        factors = np.array([*(self.times.factors[kind] for kind in COMPUTE_KINDS), 1.0, 1.0])
        found: NDArray[np.float64] = self.seconds / factors[self.slots]
        return found

    @cached_property
    def is_copy(self) -> NDArray[np.bool_]:
        """Ops that copy between tiers."""
        found: NDArray[np.bool_] = self.slots >= len(COMPUTE_KINDS)
        return found

    def sum_of(self, part: Part) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Seconds and work of each kind, and seconds of copies out and in."""
        indices = np.array(part.ops, dtype=np.int64)
        slots, num_kinds = self.slots[indices], len(COMPUTE_KINDS)
        seconds: NDArray[Any] = np.bincount(slots, weights=self.seconds[indices], minlength=num_kinds + 2)
        work: NDArray[Any] = np.bincount(slots, weights=self.work[indices], minlength=num_kinds + 2)
        return seconds[:num_kinds], work[:num_kinds], seconds[num_kinds:]


def _terms_of(sizes: Iterable[Terms]) -> NDArray[np.float64]:
    return np.array(list(sizes), dtype=np.float64).reshape(-1, NUM_MONOMIALS)
