"""A profile at one shape, as numbers: each part's bytes, peak, copies and time. What plans of that shape share is computed once.

A part is summed up by what it changes (``net``), the highest point inside it relative to its start (``rise``) and what
is in memory at that point. That is all a peak over parts needs, so pricing a plan costs one row per part, not one per op.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, Category, Link
from optimizer.estimate.categories.activations import (
    TRACED_TRIP,
    TracedCopy,
    Trip,
    count_copied_bytes,
    estimate_trip_ms,
    read_copy,
    redirect_changes,
)
from optimizer.estimate.kernels.cuda_kernels import call_of, holds_without_change
from optimizer.estimate.kernels.held import OpCall
from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.estimate.kernels.rise import rise_with_scratch
from optimizer.estimate.memo import Memo, Memos
from optimizer.estimate.ops.op_overhead import PartOps, is_done_again
from optimizer.estimate.ops.op_times import OpTimes
from optimizer.estimate.ops.priced_ops import KIND_SLOT, OpSizes, PricedOps, list_terms
from optimizer.estimate.tasks.change import FROM_PROLOGUE, NO_COPIES, Arrival, Change, Move, PartName
from optimizer.estimate.tasks.dropped import Dropped, drop_gradients
from optimizer.estimate.tasks.parts import PartBytes, PartTime, sum_changes
from optimizer.formats.op_costs import base_name
from optimizer.hardware.machine import Machine, Processor
from optimizer.hardware.rates import Rates
from optimizer.hardware.thread_wakeup import count_multithreaded
from optimizer.plan.activations import OFFLOADING, REBUILDING, BlockChoice
from optimizer.plan.plan import Plan
from optimizer.plan.weights import DTYPE_BYTES, WeightsPlan
from optimizer.profile.generation import ForwardRegime, Phase
from optimizer.profile.ops import Change as ProfileChange
from optimizer.profile.ops import Op, Part
from optimizer.profile.profile import Regime
from optimizer.profile.sizes import Shape, evaluate, monomials

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS, _TEMPORARIES, _LOGITS = _SLOT["gradients"], _SLOT["temporaries"], _SLOT["logits_and_loss"]
_STATE = _SLOT["optimizer_state"]
_MAX_CACHED = 64
_MAX_CACHED_PHASES = 2048
"""Most shapes of a generation's phases, which have few parts, and a shape for each length of the cache that is priced."""


class Traced(Protocol):
    """Anything that can be compiled: the profile of a step, or of one phase of a generation."""

    @property
    def ops(self) -> tuple[Op, ...]: ...
    @property
    def changes(self) -> tuple[ProfileChange, ...]: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...
    def regime(self, representation: str, shape: Shape) -> Regime: ...


class PlacedChange(NamedTuple):
    """A change at its place in a part."""

    change: Change
    op: int
    """Number of the op in its part; -1 is before the first."""
    storage: int
    """The storage's number, as in ``Move.storage``."""


class PartRequest(NamedTuple):
    """A part of a step, and all that decides what comes and goes in it."""

    name: PartName
    releases: tuple[tuple[int, int], ...] = ()
    """Shared storages that go during the part, as (index, after which op)."""
    trip: Trip | None = None
    dropped: Dropped | None = None
    """Fate of gradients; None keeps them."""
    arrivals: tuple[Arrival, ...] = ()
    own: tuple[bool, ...] = ()
    """For each gradient that is complete here, in order, whether this rank owns its tensor; it drops the others. Empty where it
    owns all."""


class PartKernels(NamedTuple):
    """Seconds and work of a part's kernels by kind, and seconds of its copies out and in."""

    seconds: NDArray[np.float64]
    work: NDArray[np.float64]
    copy_s: NDArray[np.float64]


class CompiledShape:
    """One regime of a profile at one micro-batch size and sequence length."""

    def __init__(self, profile: Traced, *, weights: WeightsPlan, shape: Shape, representation: str) -> None:
        """representation: of the profile's regime (``Plan.representation``)."""
        self.regime = profile.regime(representation, shape)
        self.shape = shape
        self.compute_dtype = weights.dtype if weights.autocast == "off" else weights.autocast
        # Not the profile itself: it is what decides how long this is kept.
        self._parts = profile.parts
        self._op_list = profile.ops
        self._ops = OpSizes(profile, shape, element_bytes=DTYPE_BYTES[self.compute_dtype])
        terms = list_terms(profile)
        self._change_places = terms.change_places
        self._change_bytes: list[int] = (terms.changes @ np.array(monomials(shape), dtype=np.int64)).tolist()
        self.memos = Memos()
        """Values that other modules keep and that depend on this shape."""
        self._bytes: Memo[PartRequest, PartBytes] = Memo()
        self._moves: Memo[PartRequest, tuple[Move, ...]] = Memo()
        self._rises: Memo[tuple[Processor, PartRequest], int] = Memo()
        self._times: Memo[tuple[PartName, str, Trip | None], PartTime] = Memo()
        self._kernels: Memo[tuple[int, str], PartKernels] = Memo()
        self._copied: Memo[tuple[PartName, Trip], Mapping[Link, int]] = Memo()
        self._traced_copies: Memo[int, list[TracedCopy]] = Memo()
        self._num_shared_gradients: Memo[tuple[PartName, tuple[bool, ...]], int] = Memo()
        self._scratch: Memo[Processor, Mapping[int, int]] = Memo()
        self._indexed_bytes: Memo[int, PartBytes] = Memo()
        self._indexed_rises: Memo[tuple[int, Processor], int] = Memo()
        self._calls: Memo[int, OpCall] = Memo()
        self._aliases: dict[PartName, PartName] = {}
        self._element_dtype = weights.dtype
        self._priced: dict[str, PricedOps] = {}

    def shared_bytes(self, index: int) -> tuple[int, Category]:
        shared = self.regime.shared[index]
        return evaluate(shared.num_bytes, self.shape), shared.category

    def part_bytes(self, request: PartRequest) -> PartBytes:
        """Bytes of a part, the same for parts that are alike."""
        name = self._alias(request.name)
        if name != request.name:
            request = request._replace(name=name)
        return self._bytes.obtain(
            request, lambda: sum_changes([placed.change for placed in self._place_changes(request)])
        )

    def part_moves(self, request: PartRequest) -> tuple[Move, ...]:
        """The changes that ``part_bytes`` sums up, one by one; the same object for equal requests."""
        ops = self._part(request.name).ops

        def make() -> tuple[Move, ...]:
            moves = [
                Move(*change, op, *self._name_call(ops[op] if op >= 0 else None, storage))
                for change, op, storage in self._place_changes(request)
            ]
            changing = {move.op for move in moves}
            silent = [
                Move("device", _TEMPORARIES, 0, place, *self._name_call(op, -1))
                for place, op in enumerate(ops)
                if place not in changing and holds_without_change(self._op_list[op])
            ]
            return tuple(sorted([*moves, *silent], key=lambda move: move.op)) if silent else tuple(moves)

        return self._moves.obtain(request, make)

    def _name_call(self, op: int | None, storage: int) -> tuple[str, int, OpCall | None]:
        """The last fields of a ``Move``. op: its number in the profile."""
        if op is None:
            return "", storage, None
        listed = self._op_list[op]
        call = self._calls.obtain(op, lambda: call_of(listed, self.shape, compute_dtype=self.compute_dtype))
        return listed.name, storage, call

    def part_rise(self, request: PartRequest, processor: Processor) -> int:
        """Highest point of what ``part_bytes`` sums up above its start, with what the CPU's kernels hold; 0 if they hold
        nothing.
        """

        def make() -> int:
            scratch = self._scratch_in(self._part(request.name), processor)
            if not scratch:
                return 0
            return rise_with_scratch([(placed.change, placed.op) for placed in self._place_changes(request)], scratch)

        return self._rises.obtain((processor, request), make)

    def indexed_rise(self, index: int, processor: Processor) -> int:
        """``part_rise`` of one of the profile's parts by its number, as traced."""

        def make() -> int:
            part = self._parts[index]
            changes = self._changes_of(part)
            return rise_with_scratch(list(zip(changes, part.changes_at, strict=True)), self._scratch_in(part, processor))

        return self._indexed_rises.obtain((index, processor), make)

    def _scratch_in(self, part: Part, processor: Processor) -> dict[int, int]:
        """Bytes of scratch by the op's number in the part; ops that hold nothing left out."""
        scratch = self._scratch.obtain(processor, lambda: self._list_scratch(processor))
        return {at: scratch[op] for at, op in enumerate(part.ops) if op in scratch}

    def _list_scratch(self, processor: Processor) -> dict[int, int]:
        """Bytes of scratch by the op's number in the profile."""
        kernels = find_kernels(processor)
        found = (kernels.hold(op, self.shape, compute_dtype=self.compute_dtype).scratch.value for op in self._op_list)
        return {index: num_bytes for index, num_bytes in enumerate(found) if num_bytes}

    def indexed_bytes(self, index: int) -> PartBytes:
        """``part_bytes`` of one of the profile's parts by its number, as traced."""
        return self._indexed_bytes.obtain(index, lambda: sum_changes(self._changes_of(self._parts[index])))

    def part_time(
        self, name: PartName, machine: Machine, *, rates_key: str, trip: Trip | None = None
    ) -> PartTime:
        """Time of a part on one machine.

        rates_key: differs where machines differ; they hold dicts and cannot be hashed themselves.
        """
        name = self._alias(name)
        return self._times.obtain(
            (name, rates_key, trip), lambda: self._sum_times(name, self._part(name), machine, rates_key, trip)
        )

    def evaluation_time(self, index: int, machine: Machine, *, rates_key: str) -> PartTime:
        """Time of a part of a forward without gradients, by its number in the profile. rates_key: as ``part_time``'s."""
        part = self._parts[index]
        return self._times.obtain(
            (f"evaluation {index}", rates_key, None),
            lambda: self._sum_times("evaluation", part, machine, rates_key, None),
        )

    def part_copies(self, name: PartName, *, trip: Trip | None) -> Mapping[Link, int]:
        """Bytes by link."""
        if trip is None:
            return NO_COPIES
        return self._copied.obtain(
            (name, trip), lambda: count_copied_bytes(self._copies(self._part(name)), trip=trip)
        )

    def num_shared_gradients(self, name: PartName, *, own: tuple[bool, ...] = ()) -> int:
        """Number of the gradients completed in a part that several threads copy together. own: as ``PartRequest``'s."""
        name = self._alias(name)

        def count() -> int:
            changes = self._changes_of(self._part(name))
            if own:
                completed = self._gradients_in(self._part(name))
                changes = [("device", _GRADIENTS, size) for (_, size), is_own in zip(completed, own, strict=True) if is_own]
            return self.count_shared_gradients(changes)

        return self._num_shared_gradients.obtain((name, own), count)

    def list_gradient_elements(self, name: PartName) -> list[int]:
        """Elements of the gradients that are complete in a part, in order."""
        return [num_bytes // DTYPE_BYTES[self._element_dtype] for _, num_bytes in self._gradients_in(self._part(name))]

    def list_completions(self, first: PartName, accumulate: PartName) -> list[tuple[int, int]]:
        """The places where gradients that are added to are complete: the op of the part and the bytes, in order.

        first, accumulate: the part where the gradients are new, and the same where they are there.
        """
        gradients = self._gradients_in(self._part(first))
        adds = [base_name(op.name) == "add_" for op in self._op_list]
        at = find_completions(self._part(first), self._part(accumulate), len(gradients), adds=adds)
        return [(op, num_bytes) for op, (_, num_bytes) in zip(at, gradients, strict=True)]

    def _gradients_in(self, part: Part) -> list[tuple[int, int]]:
        """The op and the bytes of each gradient that comes."""
        return [
            (op, num_bytes)
            for op, (tier, slot, num_bytes) in zip(part.changes_at, self._changes_of(part), strict=True)
            if tier == "device" and slot == _GRADIENTS and num_bytes > 0
        ]

    def count_shared_gradients(self, changes: Iterable[Change]) -> int:
        """Count the gradients that threads copy together. changes: of a part."""
        size = DTYPE_BYTES[self._element_dtype]
        return count_multithreaded(
            num_bytes // size for tier, slot, num_bytes in changes if tier == "device" and slot == _GRADIENTS
        )

    def num_ops(self, name: PartName) -> int:
        return len(self._part(name).ops)

    def _part(self, name: PartName) -> Part:
        if isinstance(name, str):
            return self._parts[self.regime.parts[name]]
        choice, template, which = name
        index: int = getattr(self.regime.templates_of(choice)[template], which)
        return self._parts[index]

    def _alias(self, name: PartName) -> PartName:
        """The first of the templates whose parts are the same, as far as bytes and time go."""
        if isinstance(name, str):
            return name
        if name not in self._aliases:
            choice, _, which = name
            alike = (other for other in self._aliases if not isinstance(other, str) and other[0] == choice and other[2] == which)
            parts = self._parts_behind(name)
            self._aliases[name] = next((other for other in alike if self._parts_behind(other) == parts), name)
        return self._aliases[name]

    def _parts_behind(self, name: "tuple[BlockChoice, int, str]") -> tuple[object, ...]:
        """Identify all that bytes and time of a block's part are worked out from."""
        choice, template, which = name
        made = self._copies(self._part((choice, template, "forward"))) if choice in OFFLOADING else ()
        kept = self._part(("keep", template, which)) if choice in REBUILDING else None
        return id(self._part(name)), id(kept), made

    def _copies(self, part: Part) -> list[TracedCopy]:
        return self._traced_copies.obtain(id(part), lambda: list(self._find_copies(part)))

    def _find_copies(self, part: Part) -> Iterator[TracedCopy]:
        for index in part.ops:
            op = self._op_list[index]
            if op.kind in ("copy_out", "copy_in"):
                copy = read_copy(op.kind, op.name, evaluate(op.written_bytes, self.shape))
                if copy is not None:
                    yield copy

    def _changes_of(self, part: Part) -> list[Change]:
        """Changes of a part, as traced."""
        places, num_bytes = self._change_places, self._change_bytes
        return [(*places[index], num_bytes[index]) for index in part.changes]

    def _place_changes(self, request: PartRequest) -> list[PlacedChange]:
        name, releases, trip, dropped, arrivals, own = request
        part = self._part(name)
        changes = self._changes_of(part)
        # As traced, copies go to the host as they are.
        if trip is not None and trip != TRACED_TRIP and not isinstance(name, str):
            made = self._copies(self._part((name[0], name[1], "forward")))
            changes = redirect_changes(changes, self._copies(part), trip=trip, made=made)
        at = list(part.changes_at)
        storages = list(part.storages) or [-1] * len(at)
        shared = [(after, *self.shared_bytes(index)) for index, after in releases]
        moves: list[Arrival] = [(after, category, -num_bytes) for after, num_bytes, category in shared]
        for storage, (after, category, num_bytes) in chain(zip(repeat(FROM_PROLOGUE), moves), zip(repeat(-1), arrivals)):
            place = sum(1 for other in at if other <= after)
            changes.insert(place, ("device", _SLOT[category], num_bytes))
            at.insert(place, after)
            storages.insert(place, storage)
        placed = list(map(PlacedChange, changes, at, storages))
        if dropped is None and not own:
            return placed
        flags = iter(own or repeat(object=True))
        region = _LOGITS if isinstance(name, str) and name.startswith("head") else _TEMPORARIES
        found: list[PlacedChange] = []
        for each in placed:
            slot = each.change[1]
            if slot != _GRADIENTS:
                found.append(each)
                continue
            is_complete = each.change[0] == "device" and each.change[2] > 0
            fate = dropped if not is_complete or next(flags) else Dropped()
            if fate is None:
                found.append(each)
                continue
            for kept in drop_gradients([each.change], fate, region=region):
                found.append(PlacedChange(kept, each.op, each.storage if kept[1] == slot else -1))
        return found

    def _sum_times(self, name: PartName, part: Part, machine: Machine, rates_key: str, trip: Trip | None) -> PartTime:
        priced = self._price_ops(machine.rates, rates_key)
        kernels_s, work, (out_s, in_s) = self._kernels.obtain(
            (id(part), rates_key), lambda: PartKernels(*priced.sum_of(part))
        )
        kinds_s = kernels_s.copy()
        copies = self._copies(part)
        moved = None
        if trip is not None and copies:
            moved = estimate_trip_ms(copies, trip=trip, rates=machine.rates, device_kind=machine.device.kind)
            kinds_s[_QUANTIZATION] += moved.compute_ms / 1000 * priced.times.factors["quantization"]
        kept = self._part(("keep", *name[1:])) if is_done_again(name) else None
        own = PartOps(name=name, part=part, kept=kept)
        beside = own.beside_kernels(
            priced.times,
            num_copies=len(copies),
            kernels_s=float(kinds_s.sum()),
            runs_ahead=machine.device.kind == "cuda",
        )
        kinds_s[_DISPATCH] += beside.dispatch_s + own.thread_wakeup_s(
            priced.times,
            machine.rates,
            is_multithreaded=priced.shared,
            kernels_s=priced.probed_seconds,
            is_copy=priced.is_copy,
        )
        kinds_s[_HOOKS] += beside.hooks_s
        kinds_ms = tuple((kinds_s * 1000).tolist())
        compute_ms = sum(kinds_ms)
        recomputed_ms = 0.0
        if kept is not None:
            kept_ms = self.part_time(("keep", *name[1:]), machine, rates_key=rates_key).compute_ms
            recomputed_ms = max(0.0, compute_ms - kept_ms)
        return PartTime(
            compute_ms=compute_ms,
            copy_out_ms=float(out_s) * 1000 if moved is None else moved.copy_out_ms,
            copy_in_ms=float(in_s) * 1000 if moved is None else moved.copy_in_ms,
            disk_ms=0.0 if moved is None else moved.disk_ms,
            network_ms=0.0 if moved is None else moved.network_ms,
            kinds_ms=kinds_ms,
            kinds_work=tuple(work.tolist()),
            recomputed_ms=recomputed_ms,
        )

    def _price_ops(self, rates: Rates, rates_key: str) -> PricedOps:
        if rates_key not in self._priced:
            generates = isinstance(self.regime, ForwardRegime)
            times = OpTimes(rates, self.compute_dtype, element_dtype=self._element_dtype, generates=generates)
            self._priced[rates_key] = self._ops.priced(times, rates)
        return self._priced[rates_key]


def find_completions(first: Part, accumulate: Part, num_gradients: int, *, adds: Sequence[bool]) -> list[int]:
    """The ops of a part after which gradients that are added to are complete, in order.

    adds: of the profile's ops, whether they add in place. What ``accumulate`` does more than ``first`` is to add each gradient to
    the one that is there.
    """
    extra: list[int] = []
    at = 0
    for place, op in enumerate(accumulate.ops):
        if at < len(first.ops) and first.ops[at] == op:
            at += 1
        elif adds[op]:
            extra.append(place)
        elif op in first.ops[at:]:
            # Between the two a gradient is copied where it is new.
            at = first.ops.index(op, at) + 1
    if len(extra) == num_gradients:
        return extra
    return [len(accumulate.ops) - 1] * num_gradients


_QUANTIZATION, _DISPATCH, _HOOKS = (KIND_SLOT[kind] for kind in ("quantization", "dispatch", "hooks"))


_compiled: dict[tuple[int, str, Shape], CompiledShape] = {}
_phases: dict[tuple[int, str, Shape], CompiledShape] = {}


def compile_shape(profile: Traced, weights: WeightsPlan, shape: Shape, *, representation: str = "") -> CompiledShape:
    """Raises InvalidWorkload beyond the position table. Kept while the profile lives, the oldest dropped where there are many.

    representation: of the profile's regime, where it is not the weights' alone (``Plan.representation``).
    """
    name = representation or weights.representation
    kept, most = (_phases, _MAX_CACHED_PHASES) if isinstance(profile, Phase) else (_compiled, _MAX_CACHED)
    key = (id(profile), name, shape)
    compiled = kept.get(key)
    if compiled is None:
        compiled = CompiledShape(profile, weights=weights, shape=shape, representation=name)
        # other threads search, too: a list is made at once, and what it names may be gone by now
        for oldest in list(kept)[: len(kept) + 1 - most]:
            kept.pop(oldest, None)
        kept[key] = compiled
        weakref.finalize(profile, kept.pop, key, None)
    return compiled


def compile_plan_shape(profile: Traced, plan: Plan, sequence_length: int) -> CompiledShape:
    """Compile the shape of a plan's micro-batches. Raises what ``compile_shape`` does."""
    shape = (plan.batch.micro_batch_size, sequence_length)
    return compile_shape(profile, plan.weights, shape, representation=plan.representation)
