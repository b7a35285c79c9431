"""The ops that packing and unpacking keys and values run, as ``runtime/generation/kv_packing.py`` has them, and their
time. Torch-free.

A test holds the list to what the runtime does, op for op and byte for byte.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from optimizer.estimate.ops.op_times import OpTimes
from optimizer.formats.kv_packing import KV_BLOCK_TOKENS, PACKED_AT_ONCE, WIDE_BYTES, KvLayout, PackedHalf
from optimizer.profile.ops import compute_kind


class KvOp(NamedTuple):
    """Bytes as a profile's ops have them."""

    name: str
    read_bytes: float
    written_bytes: float


def list_pack_ops(layout: KvLayout, num_blocks: int) -> Iterator[KvOp]:
    """Ops that pack so many blocks, given together."""
    for start in range(0, num_blocks, PACKED_AT_ONCE):
        for half in (layout.keys, layout.values):
            yield from _pack_half(layout, half, min(PACKED_AT_ONCE, num_blocks - start))


def list_unpack_ops(layout: KvLayout, num_blocks: float) -> Iterator[KvOp]:
    """Ops that unpack a run of so many blocks; a fraction of one, on average."""
    if num_blocks <= 0:
        return
    for half in (layout.keys, layout.values):
        out, codes, numbers = (num_blocks * size for size in (_own_bytes(layout, half), half.codes_bytes, half.numbers_bytes))
        if layout.dtype == "int8":
            yield _op("copy_.default", out + codes, out)
            yield _op("mul_.Tensor", out + numbers, out)
            continue
        part = out / 2
        yield _op("copy_.default", part + codes, part)
        yield _op("copy_.default", part + codes, part)
        yield _op("mul_.Tensor", part, part)
        yield _op("floor_.default", part, part)
        yield _op("sub_.Tensor", 2 * part, part)
        yield _op("addcmul.out", 2 * out + 2 * numbers, out)


def list_copy_ops(layout: KvLayout, num_tokens: float) -> Iterator[KvOp]:
    """Copies of keys and of values of so many tokens, on the device."""
    shape = layout.shape
    for dim in (shape.key_dim, shape.value_dim):
        num_bytes = num_tokens * shape.num_rows * dim * shape.element_bytes
        yield _op("copy_.default", 2 * num_bytes, num_bytes)


def estimate_ops_s(ops: Iterator[KvOp], times: OpTimes) -> tuple[float, float]:
    """Seconds in kernels, and beside them."""
    kernels_s, num_ops = 0.0, 0
    for op in ops:
        kind = compute_kind("memory", op.name)
        kernels_s += times.kernel_s(kind, op.name, read_bytes=op.read_bytes, written_bytes=op.written_bytes)
        num_ops += 1
    return kernels_s, num_ops * times.dispatch_s[0]


def _pack_half(layout: KvLayout, half: PackedHalf, num_blocks: int) -> Iterator[KvOp]:
    wide = num_blocks * WIDE_BYTES * KV_BLOCK_TOKENS * layout.shape.num_rows * half.dim
    made = num_blocks * WIDE_BYTES * prod(half.numbers)
    kept, codes = num_blocks * half.numbers_bytes, num_blocks * half.codes_bytes
    yield _op("copy_.default", wide + num_blocks * _own_bytes(layout, half), wide)
    if layout.dtype == "int8":
        yield _op("abs_.default", wide, wide)
        yield _op("amax.out", wide + made, made)
        yield _op("copy_.default", wide + num_blocks * _own_bytes(layout, half), wide)
    else:
        yield _op("amin.out", wide + made, made)
        yield _op("amax.out", wide + made, made)
        yield _op("sub_.Tensor", 2 * made, made)
    yield _op("mul_.Tensor", made, made)
    for _ in range(1 + half.has_lows):
        yield _op("copy_.default", kept + made, kept)
        yield _op("copy_.default", kept + made, made)
    yield _op("clamp_.default", made, made)
    if layout.dtype == "int4":
        yield _op("sub_.Tensor", wide + made, wide)
    yield _op("div_.Tensor", wide + made, wide)
    yield _op("round_.default", wide, wide)
    yield _op("clamp_.default", wide, wide)
    if layout.dtype == "int4":
        yield _op("add_.Tensor", wide, wide // 2)
        wide //= 2
    yield _op("copy_.default", codes + wide, codes)


def _op(name: str, read_bytes: float, written_bytes: float) -> KvOp:
    return KvOp(f"aten.{name}", read_bytes, written_bytes)


def _own_bytes(layout: KvLayout, half: PackedHalf) -> int:
    """Bytes of a block's keys or values in the weights' dtype."""
    return KV_BLOCK_TOKENS * layout.shape.num_rows * half.dim * layout.shape.element_bytes
