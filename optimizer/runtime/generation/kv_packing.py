"""Packs keys and values into records and unpacks them; what a record is, ``optimizer/formats/kv_packing.py`` says.

Nothing is allocated: results go where they belong, and what is computed in between goes to memory that is lent. A record is
written once, from the tokens themselves, and read as often as attention asks: no error grows.

Error of one element: half a step, and the rounding of scales, steps, lows and the result to the weights' dtype. A step is a
127th of the largest of a token's head (int8), or a 15th of what a channel spans over 64 tokens, or a token's group of values
over its channels (int4). An infinity or a NaN spoils all that share its step.
"""

from math import prod

import torch

from optimizer.formats.kv_packing import KV_BLOCK_TOKENS, PACKED_AT_ONCE, WIDE_BYTES, KvLayout, PackedHalf

_LARGEST_INT8 = 127
_LARGEST_INT4 = 15
_SMALLEST_STEP = 2.0**-126
"""The smallest normal fp32 number, in place of 0."""
_HALF_BLOCK = KV_BLOCK_TOKENS // 2


class KvPacker:
    """Packs one block's cache."""

    def __init__(self, layout: KvLayout, dtype: torch.dtype) -> None:
        """dtype: of keys and values."""
        self._layout = layout
        self._dtype = dtype

    def pack(
        self, keys: torch.Tensor, values: torch.Tensor, *, records: torch.Tensor, lent: torch.Tensor
    ) -> None:
        """keys, values: [tokens, sequences, heads, channels], whole blocks, with any strides. records: [blocks, bytes] that are
        written. lent: bytes that may be overwritten, ``wide_block_bytes`` for each of up to ``PACKED_AT_ONCE`` blocks.
        """
        for start in range(0, len(records), PACKED_AT_ONCE):
            some = records[start : start + PACKED_AT_ONCE]
            first = start * KV_BLOCK_TOKENS
            tokens = slice(first, first + len(some) * KV_BLOCK_TOKENS)
            for source, half in ((keys, self._layout.keys), (values, self._layout.values)):
                self._pack_half(source[tokens], half, some, lent)

    def unpack(self, records: torch.Tensor, *, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Whole blocks' into ``keys`` and ``values``: [tokens, sequences, heads, channels], contiguous, of the weights' dtype."""
        for target, half in ((keys, self._layout.keys), (values, self._layout.values)):
            numbers = self._numbers(half, records)
            codes = self._codes(half, records)
            out = target.view(len(records), KV_BLOCK_TOKENS, *target.shape[1:])
            if self._layout.dtype == "int8":
                out.copy_(codes)
                out.mul_(numbers[0])
            else:
                _split_codes(codes, out)
                grouped = out.view(_grouped(half, len(records), numbers[0]))
                steps, lows = (_spread(each, half) for each in numbers)
                torch.addcmul(lows, grouped, steps, out=grouped)

    def _pack_half(self, source: torch.Tensor, half: PackedHalf, records: torch.Tensor, lent: torch.Tensor) -> None:
        num_blocks = len(records)
        blocks = source.view(num_blocks, KV_BLOCK_TOKENS, *source.shape[1:])
        wide, rest = _take(lent, blocks.shape)
        wide.copy_(blocks)
        numbers, codes = self._numbers(half, records), self._codes(half, records)
        step, rest = _take(rest, numbers[0].shape)
        if self._layout.dtype == "int8":
            # As in ``tiers/compression.py``: absolute in place, and copied again.
            torch.amax(wide.abs_(), dim=-1, keepdim=True, out=step)
            wide.copy_(blocks)
            step.mul_(1 / _LARGEST_INT8)
            numbers[0].copy_(step)
            step.copy_(numbers[0]).clamp_(min=_SMALLEST_STEP)
            wide.div_(step).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
            codes.copy_(wide)
            return
        low, _ = _take(rest, numbers[1].shape)
        grouped = wide.view(_grouped(half, num_blocks, numbers[0]))
        over = 1 if half.numbers[0] == 1 else -1
        torch.amin(grouped, dim=over, keepdim=True, out=_spread(low, half))
        torch.amax(grouped, dim=over, keepdim=True, out=_spread(step, half))
        step.sub_(low).mul_(1 / _LARGEST_INT4)
        for number, made in zip(numbers, (step, low), strict=True):
            number.copy_(made)
            made.copy_(number)
        step.clamp_(min=_SMALLEST_STEP)
        grouped.sub_(_spread(low, half)).div_(_spread(step, half)).round_().clamp_(0, _LARGEST_INT4)
        wide[:, :_HALF_BLOCK].add_(wide[:, _HALF_BLOCK:], alpha=_LARGEST_INT4 + 1)
        codes.copy_(wide[:, :_HALF_BLOCK])

    def _codes(self, half: PackedHalf, records: torch.Tensor) -> torch.Tensor:
        """[blocks, tokens or half of them, sequences, heads, channels], a view."""
        shape = self._layout.shape
        flat = records[:, half.start : half.steps_start]
        num_rows = KV_BLOCK_TOKENS if self._layout.dtype == "int8" else _HALF_BLOCK
        if self._layout.dtype == "int8":
            flat = flat.view(torch.int8)
        return flat.view(len(records), num_rows, shape.batch_size, shape.num_heads, half.dim)

    def _numbers(self, half: PackedHalf, records: torch.Tensor) -> list[torch.Tensor]:
        """Scales, or steps and lows; views."""
        starts = (half.steps_start, half.lows_start) if half.has_lows else (half.steps_start,)
        return [
            records[:, start : start + half.numbers_bytes].view(self._dtype).view(len(records), *half.numbers)
            for start in starts
        ]


def _take(lent: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous fp32 tensor from the front of the bytes, and the bytes behind it."""
    num_bytes = WIDE_BYTES * prod(shape)
    return lent[:num_bytes].view(torch.float32).view(shape), lent[num_bytes:]


def _grouped(half: PackedHalf, num_blocks: int, numbers: torch.Tensor) -> tuple[int, ...]:
    """Shape of keys or values in which each group of channels has a dimension of its own; that of keys as they are."""
    sizes = (num_blocks, KV_BLOCK_TOKENS, *numbers.shape[2:4])
    if half.numbers[0] == 1:
        return (*sizes, half.dim)
    return (*sizes, numbers.shape[-1], half.dim // numbers.shape[-1])


def _spread(numbers: torch.Tensor, half: PackedHalf) -> torch.Tensor:
    """Shape the scales so that they multiply the groups."""
    return numbers if half.numbers[0] == 1 else numbers.unsqueeze(-1)


def _split_codes(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Both elements of each byte, as whole numbers in a dtype of floats that holds all of a byte's exactly."""
    low, high = out[:, :_HALF_BLOCK], out[:, _HALF_BLOCK:]
    high.copy_(codes)
    low.copy_(codes)
    high.mul_(1 / (_LARGEST_INT4 + 1)).floor_()
    low.sub_(high, alpha=_LARGEST_INT4 + 1)
