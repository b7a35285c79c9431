"""Costs of head and loss when they are made in chunks: bytes and time in place of the profile's three head parts.

The number of chunks is no polynomial in micro-batch and sequence, so these parts are not traced but written down from what
``runtime/step/logits_and_loss.py`` allocates, in its order; what the head is like (width, bias, soft cap, frozen, tied)
is read off the traced ones. Every tensor counts, small ones too, so that the bytes are the meter's. One chunk is the traced head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from optimizer.base.categories import CATEGORIES, Category
from optimizer.estimate.kernels.cpu_kernels import CpuKernels
from optimizer.estimate.ops.op_times import OpTimes
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.tasks.parts import PartBytes, PartTime
from optimizer.hardware.machine import Machine, Processor
from optimizer.plan.logits_and_loss import WIDE_COPY_ELEMENTS
from optimizer.plan.plan import Plan
from optimizer.profile.ops import Op, Part
from optimizer.profile.profile import Profile
from optimizer.profile.sizes import evaluate
from optimizer.profile.time_kinds import COMPUTE_KINDS, ComputeKind

HEAD_PARTS: Final = ("head", "head_backward_first", "head_backward_accumulate")
"""Parts of a profile's regime that are replaced."""

ByteChange = tuple[Category, int]
"""Bytes that come (positive) or go on the device."""

_WIDE_BYTES = 4
_LABEL_BYTES = _COUNT_BYTES = 8
_BF16_BYTES = 2
_SMALL_OPS_PER_CHUNK = 20
"""Ops on one number per token each, and views: they cost their dispatch."""
_SMALL_OPS_BACKWARD = 6


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output projection and what comes before and after it in a micro-batch of one shape."""

    num_tokens: int
    width: int
    vocabulary: int
    product_bytes: int
    """Bytes per element of the product's dtype; less than ``hidden_element_bytes`` under autocast."""
    hidden_element_bytes: int
    weight_element_bytes: int
    has_cap: bool
    has_bias: bool
    trains_weight: bool
    trains_bias: bool
    is_tied: bool
    """The weight's gradient waits for the embedding's."""

    @property
    def rounds_shares(self) -> bool:
        """True where a chunk's share of the weight's gradient is made in a buffer first, and added in fp32."""
        return self.trains_weight and self.product_bytes < self.wide_bytes

    @property
    def is_autocast(self) -> bool:
        return self.product_bytes != self.hidden_element_bytes

    @property
    def wide_bytes(self) -> int:
        """Bytes per element of sums."""
        return max(_WIDE_BYTES, self.product_bytes)

    @property
    def logit_bytes(self) -> int:
        """Bytes per element of what the softmax works on."""
        return self.wide_bytes if self.is_autocast else self.product_bytes

    @property
    def hidden_bytes(self) -> int:
        return self.num_tokens * self.width * self.hidden_element_bytes

    @property
    def weight_elements(self) -> int:
        return self.width * self.vocabulary


class Product(NamedTuple):
    """One of a chunk's, at the moment when it is made."""

    level_bytes: int
    """Bytes above the part's start."""
    sides: tuple[int, int, int]
    form: str
    dtype: str
    is_added: bool

    def allocated_bytes(self, processor: Processor) -> int:
        """Bytes above the part's start, with what is held while it is made."""
        sides = (1, *self.sides)
        kernels = CpuKernels(processor)
        return self.level_bytes + kernels.hold_product(sides, self.form, dtype=self.dtype, is_added=self.is_added)


@dataclass(frozen=True, kw_only=True)
class ChunkedHead:
    """Prices of the three parts that replace the traced ones of the same names."""

    changes: dict[str, tuple[ByteChange, ...]]
    """Changes of each of HEAD_PARTS; in order, all on the device."""
    products: tuple["Product", ...]
    """Products of the forward, which makes every product."""
    bytes: dict[str, PartBytes]
    time: dict[str, PartTime]
    loss_bytes: int
    """Bytes of the loss, which like backward's root goes after these parts."""


def estimate_chunked_head(profile: Profile, compiled: CompiledShape, *, plan: Plan, machine: Machine) -> ChunkedHead | None:
    """The head parts of one micro-batch; None for one chunk, where the traced parts hold.

    *Not modelled*: what a kernel allocates and frees inside itself; an embedding whose gradient is sparse.
    """
    num_chunks = plan.logits_and_loss.num_chunks
    if num_chunks == 1 or profile.input_bytes is not None:
        # A plain module's loss is the caller's, which nobody can cut.
        return None
    head = read_head(profile, compiled, weight_element_bytes=plan.weights.bytes_per_element)
    forward = list_forward(head, num_chunks)
    changes: dict[str, tuple[ByteChange, ...]] = {
        "head": tuple(forward.changes),
        "head_backward_first": tuple(list_backward(head, adds=False)),
        "head_backward_accumulate": tuple(list_backward(head, adds=True)),
    }
    times = OpTimes(machine.rates, compiled.compute_dtype, element_dtype=plan.weights.dtype)
    runs_ahead = machine.device.kind == "cuda"
    return ChunkedHead(
        changes=changes,
        products=tuple(forward.products),
        bytes={name: _sum_changes(found) for name, found in changes.items()},
        time={
            "head": _forward_time(head, num_chunks, times, runs_ahead=runs_ahead),
            "head_backward_first": _backward_time(head, times, adds=False, runs_ahead=runs_ahead),
            "head_backward_accumulate": _backward_time(head, times, adds=True, runs_ahead=runs_ahead),
        },
        loss_bytes=head.wide_bytes,
    )


def chunk_length(num_tokens: int, num_chunks: int) -> int:
    """Tokens of every chunk but the last."""
    return math.ceil(num_tokens / num_chunks)


# What the head is like.


def read_head(profile: Profile, compiled: CompiledShape, *, weight_element_bytes: int) -> Head:
    """Read the head from the traced parts, at the shape of ``compiled``."""
    regime, shape = compiled.regime, compiled.shape
    num_tokens = shape[0] * shape[1]
    forward, first = (profile.parts[regime.parts[name]] for name in ("head", "head_backward_first"))
    product = next(op for op in _ops(profile, forward) if op.kind == "matmul")
    width = evaluate(product.flops, shape) // (2 * num_tokens * profile.vocab_size)
    product_bytes = evaluate(product.written_bytes, shape) // (num_tokens * profile.vocab_size)
    hidden_bytes = -sum(_changes(profile, part, compiled, "activations") for part in (forward, first))
    num_products = sum(op.kind == "matmul" for op in _ops(profile, first))
    gradient_bytes = _changes(profile, first, compiled, "gradients")
    weight_bytes = width * profile.vocab_size * weight_element_bytes
    has_bias = product.name.startswith("aten.addmm")
    trains_weight = num_products == 2
    return Head(
        num_tokens=num_tokens,
        width=width,
        vocabulary=profile.vocab_size,
        product_bytes=product_bytes,
        hidden_element_bytes=hidden_bytes // (num_tokens * width) or weight_element_bytes,
        weight_element_bytes=weight_element_bytes,
        has_cap=any(op.name.startswith("aten.tanh.") for op in _ops(profile, forward)),
        has_bias=has_bias,
        trains_weight=trains_weight,
        trains_bias=has_bias and trains_weight,
        is_tied=trains_weight and gradient_bytes < weight_bytes,
    )


def _ops(profile: Profile, part: Part) -> list[Op]:
    return [profile.ops[index] for index in part.ops]


def _changes(profile: Profile, part: Part, compiled: CompiledShape, category: Category) -> int:
    """Bytes that a part leaves behind in one category on the device."""
    changes = (profile.changes[index] for index in part.changes)
    return sum(
        evaluate(change.num_bytes, compiled.shape)
        for change in changes
        if change.category == category and change.tier == "device"
    )


# Bytes, in the order of the runtime.


class _Ledger:
    """Changes in order, written as tensors that come and go by name."""

    def __init__(self) -> None:
        self.changes: list[ByteChange] = []
        self.products: list[Product] = []
        self._live: dict[str, int] = {}

    def take(self, **sizes: int) -> None:
        for name, num_bytes in sizes.items():
            if num_bytes:
                self._live[name] = num_bytes
                self.changes.append(("logits_and_loss", num_bytes))

    def free(self, *names: str) -> None:
        """Let go of buffers; those that were never taken are passed over."""
        for name in names:
            num_bytes = self._live.pop(name, 0)
            if num_bytes:
                self.changes.append(("logits_and_loss", -num_bytes))

    def multiply(self, head: Head, *sides: int, form: str, is_added: bool = False) -> None:
        level_bytes = sum(num_bytes for _, num_bytes in self.changes)
        dtype = "bf16" if head.product_bytes == _BF16_BYTES else "fp32"
        rows, depth, columns = sides
        self.products.append(Product(level_bytes, (rows, depth, columns), form, dtype, is_added))

    def free_since(self, mark: set[str]) -> None:
        self.free(*(name for name in list(self._live) if name not in mark))

    def mark(self) -> set[str]:
        return set(self._live)


def list_forward(head: Head, num_chunks: int) -> _Ledger:
    length = chunk_length(head.num_tokens, num_chunks)
    wide = head.wide_bytes
    ledger = _Ledger()
    ledger.take(loss_sum=wide, num_counted=_COUNT_BYTES)
    ledger.take(hidden_gradient=head.hidden_bytes, weight_sum=head.weight_elements * wide * head.trains_weight)
    ledger.take(bias_sum=head.vocabulary * wide * head.trains_bias)
    before = ledger.mark()
    _take_buffers(ledger, head, length)
    _run_chunk(ledger, head, length)
    ledger.free_since(before)
    ledger.take(loss=wide)
    ledger.changes.append(("activations", -head.hidden_bytes))
    ledger.take(divided_loss=wide)
    ledger.free("loss")
    return ledger


def list_evaluation(head: Head, num_chunks: int) -> list[ByteChange]:
    """The forward where no gradient is wanted: the same but for what is made of the probabilities."""
    bare = replace(head, trains_weight=False, trains_bias=False)
    length = chunk_length(head.num_tokens, num_chunks)
    ledger = _Ledger()
    ledger.take(loss_sum=head.wide_bytes, num_counted=_COUNT_BYTES)
    _take_buffers(ledger, bare, length)
    _run_chunk(ledger, bare, length, makes_gradients=False)
    ledger.take(loss=head.wide_bytes)
    ledger.free_since(set())
    ledger.changes.append(("activations", -head.hidden_bytes))
    return ledger.changes


def _take_buffers(ledger: _Ledger, head: Head, length: int) -> None:
    """Buffers that all chunks of a micro-batch share."""
    size = head.product_bytes
    logits = length * head.vocabulary
    if head.is_autocast:
        ledger.take(weight=head.weight_elements * size, bias=head.vocabulary * size * head.has_bias)
    ledger.take(logits=logits * size)
    if head.is_autocast:
        ledger.take(probabilities=logits * head.wide_bytes)
    elif head.has_cap:
        ledger.take(probabilities=logits * size)
    ledger.take(one=size * head.has_cap)
    if head.rounds_shares and _found_spare_elements(head, logits) < head.width:
        ledger.take(spare=size * _new_spare_elements(head, logits))


def _found_spare_elements(head: Head, logits: int) -> int:
    """Room for a share of the weight's gradient in buffers that are free by then."""
    if head.is_autocast:
        return logits * head.wide_bytes // head.product_bytes
    return logits if head.has_cap else 0


def _new_spare_elements(head: Head, logits: int) -> int:
    return min(max(logits, head.width), head.weight_elements)


def _share_elements(head: Head, logits: int) -> int:
    """Elements of the weight's gradient that a buffer has room for at once."""
    found = _found_spare_elements(head, logits)
    return found if found >= head.width else _new_spare_elements(head, logits)


def _wide_share_bytes(head: Head, logits: int) -> int:
    """Bytes of the copy by which the CPU adds a share to the sum; a card adds without one."""
    if not head.rounds_shares:
        return 0
    num_rows = min(_share_elements(head, logits) // head.width, head.vocabulary, max(1, WIDE_COPY_ELEMENTS // head.width))
    return num_rows * head.width * head.wide_bytes


def _run_chunk(ledger: _Ledger, head: Head, length: int, *, makes_gradients: bool = True) -> None:
    """A chunk of full length; none that is shorter is higher."""
    wide, logit = head.wide_bytes, head.logit_bytes
    is_narrow = logit < wide
    hidden_bytes = length * head.width * head.product_bytes
    ledger.take(hidden=hidden_bytes * head.is_autocast)
    ledger.multiply(head, length, head.width, head.vocabulary, form="nt", is_added=head.has_bias)
    inside = ledger.mark()
    ledger.take(counts=length, labels=length * _LABEL_BYTES, target=length * logit)
    if is_narrow:
        ledger.take(wide_target=length * wide)
        ledger.free("target")
    ledger.take(highest=length * logit, total=length * wide, losses=length * wide)
    ledger.take(ignored=length)
    ledger.free("ignored")
    ledger.take(sum=wide)
    ledger.free("sum")
    ledger.take(count=_COUNT_BYTES)
    ledger.free("count")
    if not makes_gradients:
        ledger.free_since(inside)
        ledger.free("hidden")
        return
    ledger.take(scale=length * logit * (logit == _BF16_BYTES))
    ledger.free("scale")
    ledger.take(at_label=length * logit, ones=length * logit)
    ledger.free_since(inside)
    ledger.take(hidden_share=hidden_bytes * head.is_autocast)
    ledger.multiply(head, length, head.vocabulary, head.width, form="nn")
    ledger.free("hidden_share")
    if head.trains_weight:
        logits = length * head.vocabulary
        num_rows = min(_share_elements(head, logits) // head.width, head.vocabulary) if head.rounds_shares else head.vocabulary
        ledger.multiply(head, num_rows, length, head.width, form="tn", is_added=not head.rounds_shares)
    ledger.take(wide_share=_wide_share_bytes(head, length * head.vocabulary))
    ledger.free("wide_share")
    ledger.take(bias_share=head.vocabulary * wide * head.trains_bias)
    ledger.free("bias_share", "hidden")


def list_backward(head: Head, *, adds: bool) -> list[ByteChange]:
    """List the changes of the head's backward. adds: the weight has a gradient already."""
    wide, size = head.wide_bytes, head.weight_element_bytes
    weight_bytes = head.weight_elements * size * head.trains_weight
    bias_bytes = head.vocabulary * size * head.trains_bias
    own: list[ByteChange] = [("logits_and_loss", wide)] * 3  # the root, the quotient's gradient, the factor
    if size < wide:
        own += [("logits_and_loss", weight_bytes), ("logits_and_loss", bias_bytes)]
        own.append(("logits_and_loss", -(head.weight_elements * head.trains_weight + bias_bytes // size) * wide))
    own.append(("logits_and_loss", -3 * wide - _COUNT_BYTES))  # all but the root, and the two sums of the forward
    for became in (0 if head.is_tied else weight_bytes, bias_bytes):
        own.append(("logits_and_loss", -became))
        if not adds:
            own.append(("gradients", became))
    return [change for change in own if change[1]]


def _sum_changes(changes: Sequence[ByteChange]) -> PartBytes:
    levels = np.zeros((len(changes) + 1, len(CATEGORIES)), dtype=np.int64)
    for row, (category, num_bytes) in enumerate(changes, start=1):
        levels[row, CATEGORIES.index(category)] = num_bytes
    levels = levels.cumsum(axis=0)
    totals = levels.sum(axis=1)
    top = int(totals.argmax())
    return PartBytes(net=levels[-1], rise=int(totals[top]), at_rise=levels[top], host_net=0, host_rise=0)


# Time: each op at the rates of the traced parts.


class _Clock:
    """Adds up what ops take, by kind, and what they do."""

    def __init__(self, times: OpTimes) -> None:
        self._times = times
        self._seconds = dict.fromkeys(COMPUTE_KINDS, 0.0)
        self._work = dict.fromkeys(COMPUTE_KINDS, 0.0)

    def add_product(
        self, rows: int, inner: int, columns: int, *, form: str, moved_bytes: int, times: int = 1
    ) -> None:
        """A product ``[rows, inner] @ [inner, columns]``."""
        flops = 2.0 * rows * inner * columns
        seconds = self._times.kernel_s("matmul", "aten.mm", flops=flops, read_bytes=moved_bytes, form=form)
        kind = self._times.charged_to("matmul")
        self._seconds[kind] += times * seconds
        self._work[kind] += times * flops
        self.add_small(times)

    def add_pass(self, kind: ComputeKind, name: str, num_bytes: int, *, times: int = 1) -> None:
        """Ops that read and write so many bytes, each."""
        self._seconds[kind] += times * self._times.kernel_s(kind, name, read_bytes=num_bytes)
        self._work[kind] += times * num_bytes
        self.add_small(times)

    def add_small(self, num_ops: float) -> None:
        """Ops that cost their dispatch."""
        self._seconds["dispatch"] += num_ops * self._times.dispatch_s[0]

    def total(self, *, runs_ahead: bool) -> PartTime:
        """The time of the part. runs_ahead: the device computes while Python runs ahead, as of the traced parts
        (``compiled.py``).
        """
        if runs_ahead and self._times.counts_views:
            kernels_s = sum(seconds for kind, seconds in self._seconds.items() if kind != "dispatch")
            self._seconds["dispatch"] = max(0.0, self._seconds["dispatch"] - kernels_s)
        return PartTime(
            compute_ms=sum(self._seconds.values()) * 1000,
            kinds_ms=tuple(seconds * 1000 for seconds in self._seconds.values()),
            kinds_work=tuple(self._work.values()),
        )


def _forward_time(head: Head, num_chunks: int, times: OpTimes, *, runs_ahead: bool) -> PartTime:
    length = chunk_length(head.num_tokens, num_chunks)
    num_full, last = divmod(head.num_tokens, length)
    clock = _Clock(times)
    _add_chunk(clock, head, length, times=num_full)
    if last:
        _add_chunk(clock, head, last, times=1)
    return clock.total(runs_ahead=runs_ahead)


def _add_chunk(clock: _Clock, head: Head, length: int, *, times: int) -> None:
    size, logit, width, vocabulary = head.product_bytes, head.logit_bytes, head.width, head.vocabulary
    product_bytes = (length * width + width * vocabulary + length * vocabulary) * size
    logits = length * vocabulary
    clock.add_pass("reduction", "amax", logits * logit, times=times)
    clock.add_pass("elementwise", "sub", 2 * logits * logit, times=times)
    clock.add_pass("elementwise", "exp", 2 * logits * logit, times=times)
    clock.add_pass("reduction", "sum", logits * logit, times=times)
    clock.add_pass("elementwise", "mul", 2 * logits * logit, times=times)
    if head.has_cap:
        clock.add_pass("elementwise", "tanh", 2 * logits * size, times=times)
        clock.add_pass("elementwise", "mul", 2 * logits * size, times=3 * times)
        clock.add_pass("elementwise", "mul", 3 * logits * logit, times=times)
    if head.is_autocast:
        clock.add_pass("elementwise", "_to_copy", logits * (size + logit), times=2 * times)
    clock.add_small(_SMALL_OPS_PER_CHUNK * times)
    clock.add_product(length, width, vocabulary, form="nt", moved_bytes=product_bytes, times=times)
    clock.add_product(length, vocabulary, width, form="nn", moved_bytes=product_bytes, times=times)
    if head.trains_weight:
        share_bytes = product_bytes if head.rounds_shares else product_bytes + head.weight_elements * size
        clock.add_product(vocabulary, length, width, form="tn", moved_bytes=share_bytes, times=times)
    if head.rounds_shares:
        clock.add_pass("elementwise", "add", head.weight_elements * (2 * head.wide_bytes + size), times=times)


def _backward_time(head: Head, times: OpTimes, *, adds: bool, runs_ahead: bool) -> PartTime:
    clock = _Clock(times)
    clock.add_pass("elementwise", "mul", 2 * head.hidden_bytes)
    if head.trains_weight:
        clock.add_pass("elementwise", "mul", 2 * head.weight_elements * head.wide_bytes)
        if head.weight_element_bytes < head.wide_bytes:
            clock.add_pass("elementwise", "_to_copy", head.weight_elements * (head.wide_bytes + head.weight_element_bytes))
        if adds and not head.is_tied:
            clock.add_pass("elementwise", "add", 3 * head.weight_elements * head.weight_element_bytes)
    clock.add_small(_SMALL_OPS_BACKWARD)
    return clock.total(runs_ahead=runs_ahead)
