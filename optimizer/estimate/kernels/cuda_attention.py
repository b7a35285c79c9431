"""Memory that CUDA's attention kernels hold: which of them runs, and its sums, workspaces and what it saves. Torch-free.

Sources, of torch 2.11 to 2.13: ``sdp_utils.cpp`` (the order: flash, efficient, math; cuDNN leaves where the runtime is
deterministic), ``flash_attn/flash_api.cpp`` (``mha_fwd``, ``mha_bwd``), ``mem_eff_attention/kernel_forward.h``,
``kernel_backward.h`` and ``cutlassB.h``, ``attention_backward.cu``, and ``attention.cpp``
(``_scaled_dot_product_attention_math``), which was not read at a release.

The deterministic mode is the one that the runtime runs in. *Not modelled*: packed sequences, dropout's mask of the math kernel.
"""

from typing import Literal, NamedTuple

from optimizer.base.intervals import ByteInterval, exact_interval
from optimizer.estimate.kernels.held import NO_BYTES, Held, OpCall, interval_of
from optimizer.formats.key_heads import FusedAttention
from optimizer.hardware.device_spec import Card

Backend = Literal["flash", "efficient", "repeated", "math"]
"""repeated: the memory-efficient kernel with key heads that the runtime repeats for it."""
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32_BYTES = 4
_NARROW_FLASH = ((8, 6), (8, 9), (12, 0))
"""Cards whose flash kernel trains no heads 193 to 224 wide."""
_ROWS_OF_FLASH, _WIDTHS_OF_FLASH = 128, 32
"""Rows, and widths, to whose multiples flash's backward's sums are rounded up."""
_FILLED = 0.8
_MOST_SPLITS = 128
_ROWS_OF_EFFICIENT = 32
_ACCUMULATED_WIDTH = 128
_ANY_WIDTH = 1 << 16
_Tile = tuple[int, int, int]
"""Queries, keys, and the widest head that the kernel takes."""
_HALF_TILES: tuple[tuple[int, tuple[_Tile, ...]], ...] = (
    (64, ((64, 64, 64),)),
    (128, ((128, 64, 128), (64, 64, 128))),
    (_ANY_WIDTH, ((128, 64, _ANY_WIDTH), (64, 64, _ANY_WIDTH))),
)
_AMPERE_HALF_TILES: tuple[tuple[int, tuple[_Tile, ...]], ...] = (
    (64, ((64, 64, 64),)),
    (96, ((128, 64, 96), (128, 128, 128), (64, 64, 128))),
    (128, ((128, 128, 128), (64, 64, 128))),
    (_ANY_WIDTH, ((128, 64, _ANY_WIDTH), (64, 64, _ANY_WIDTH))),
)
_FP32_TILES: tuple[tuple[int, tuple[_Tile, ...]], ...] = ((_ANY_WIDTH, ((64, 64, _ANY_WIDTH),)),)
_AMPERE_FP32_TILES: tuple[tuple[int, tuple[_Tile, ...]], ...] = (
    (64, ((64, 64, 64),)),
    (_ANY_WIDTH, ((128, 64, _ANY_WIDTH), (64, 64, _ANY_WIDTH))),
)
"""Tiles by the width of a head up to which they are taken: all that may be, since no source says which a card's shared
memory holds."""


class Attention(NamedTuple):
    """One call, in numbers."""

    num_heads: int
    """Batch times query heads."""
    num_key_heads: int
    query_length: int
    keys_length: int
    head_dim: int
    dtype: str
    mask_bytes: int = 0
    is_surely_grouped: bool = True
    """False where a mask hides from the profile whether key heads are fewer."""

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES.get(self.dtype, _FP32_BYTES)

    @property
    def is_grouped(self) -> bool:
        return self.num_key_heads < self.num_heads

    @property
    def query_elements(self) -> int:
        return self.num_heads * self.query_length * self.head_dim

    @property
    def scores_bytes(self) -> int:
        """Bytes of all scores in fp32."""
        return _FP32_BYTES * self.num_heads * self.query_length * self.keys_length


def read_attention(call: OpCall) -> Attention | None:
    """The call's heads from its bytes; None where a profile carries too little."""
    if len(call.sides) != 3 or call.dtype not in _ELEMENT_BYTES:
        return None
    rows, columns, width = call.sides
    size = _ELEMENT_BYTES[call.dtype]
    row_bytes, column_bytes = rows * width * size, columns * width * size
    sum_bytes = _FP32_BYTES * rows
    read_bytes = call.read_bytes
    if "backward" not in call.name:
        heads = call.written_bytes // (row_bytes + sum_bytes)
    else:
        heads = (read_bytes - call.written_bytes) // (2 * row_bytes + sum_bytes)
        keys_bytes = call.written_bytes - heads * row_bytes
        if call.form and (keys_bytes <= 0 or keys_bytes % (2 * column_bytes)):
            # A mask is among what is read: the heads follow from what is written, as if there were as many of keys.
            heads = call.written_bytes // (row_bytes + 2 * column_bytes)
        read_bytes -= heads * (2 * row_bytes + sum_bytes)
    if heads <= 0:
        return None
    rest = max(0, read_bytes - heads * row_bytes)
    key_heads, left = divmod(rest, 2 * column_bytes)
    if not call.form or (left == 0 and 0 < key_heads <= heads and heads % key_heads == 0):
        return Attention(heads, max(1, min(key_heads, heads)), rows, columns, width, call.dtype)
    mask_bytes = max(0, rest - 2 * heads * column_bytes)
    return Attention(heads, heads, rows, columns, width, call.dtype, mask_bytes or rest, is_surely_grouped=mask_bytes > 0)


def list_backends(attention: Attention, card: Card, *, is_training: bool) -> tuple[Backend, ...]:
    """Kernels that may run, the likeliest first: one, where the card and the heads are known."""
    found: list[Backend] = []
    for capability in [card.capability] if card.capability is not None else [(7, 5), (8, 0)]:
        for backend in _of_capability(attention, capability, card.torch_version, is_training=is_training):
            if backend not in found:
                found.append(backend)
    return tuple(found)


def _of_capability(
    attention: Attention, capability: tuple[int, int], torch_version: tuple[int, int] | None, *, is_training: bool
) -> tuple[Backend, ...]:
    width = attention.head_dim
    fused = FusedAttention(dtype=attention.dtype, head_dim=width, capability=capability, torch_version=torch_version)
    is_refused = is_training and capability in _NARROW_FLASH and 192 < width <= 224
    if fused.has_flash and not attention.mask_bytes and not is_refused:
        return ("flash",)
    if attention.is_grouped and not attention.mask_bytes and fused.repeats_key_heads:
        return ("repeated",)
    if not fused.is_efficient or (attention.is_grouped and not fused.takes_groups):
        return ("math",)
    return ("efficient",) if attention.is_surely_grouped else ("efficient", "math")


def hold_attention(call: OpCall, card: Card, *, is_kept: bool) -> Held:
    """Memory that one call holds. is_kept: a backward follows, so that what the kernel saves stays."""
    attention = read_attention(call)
    if attention is None:
        return Held(NO_BYTES, NO_BYTES, "unknown", f"{call.name}: the profile does not carry its heads")
    is_backward = "backward" in call.name
    backends = list_backends(attention, card, is_training=is_kept or is_backward)
    found = [_hold(backend, attention, card, is_backward=is_backward) for backend in backends]
    kept = _either([each.kept for each in found]) if is_kept else NO_BYTES
    scratch = _either([each.scratch for each in found])
    is_exact = scratch.low == scratch.high and kept.low == kept.high
    return Held(scratch, kept, "exact" if is_exact else "bound", " or ".join(each.source for each in found))


def _either(intervals: list[ByteInterval]) -> ByteInterval:
    """The interval of several kernels one of which runs; the first is the likeliest."""
    return interval_of(*(end for each in intervals for end in (each.low, each.high)), likely=intervals[0].value)


def _hold(backend: Backend, attention: Attention, card: Card, *, is_backward: bool) -> Held:
    if backend == "flash":
        scratch = _flash_backward(attention, card) if is_backward else _flash_forward(attention, card)
        return Held(scratch, _padded_heads(attention), "bound", "flash_api.cpp")
    if backend == "efficient":
        scratch = _efficient_backward(attention, card) if is_backward else exact_interval(_efficient_sums(attention))
        return Held(scratch, _efficient_kept(attention), "bound", "kernel_backward.h, kernel_forward.h")
    if backend == "repeated":
        return _repeated(attention, card, is_backward=is_backward)
    return Held(_math(attention, is_backward=is_backward), exact_interval(_math_kept(attention)), "bound", "attention.cpp")


# Flash.


def _flash_forward(attention: Attention, card: Card) -> ByteInterval:
    """Sums of keys that are split so that few rows fill a card."""
    fewest, likely, most = card.multiprocessors
    likely_bytes = _split_bytes(attention, likely)
    if fewest == most:
        return exact_interval(likely_bytes)
    most_splits = min(_MOST_SPLITS, 2 * most, _num_key_blocks(attention))
    return interval_of(0, _bytes_of_splits(attention, most_splits), likely=likely_bytes)


def _split_bytes(attention: Attention, num_multiprocessors: int) -> int:
    heads, rows = attention.num_heads, attention.query_length
    if rows == 1 and attention.is_grouped:
        heads, rows = attention.num_key_heads, attention.num_heads // attention.num_key_heads
    num_blocks, places = heads * -(-rows // 64), 2 * num_multiprocessors
    if num_blocks >= _FILLED * places:
        return 0
    return _bytes_of_splits(attention, count_splits(num_blocks, places, _num_key_blocks(attention)))


def count_splits(num_blocks: int, places: int, num_key_blocks: int) -> int:
    """``num_splits_heuristic``: the fewest splits whose last wave is at least 85 % as full as the best one's."""
    most = min(_MOST_SPLITS, places, num_key_blocks)
    filled: dict[int, float] = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-num_key_blocks // splits) != -(-num_key_blocks // (splits - 1)):
            waves = num_blocks * splits / places
            filled[splits] = waves / -(-num_blocks * splits // places)
    best = max(filled.values(), default=0.0)
    return next((splits for splits, share in filled.items() if share >= 0.85 * best), 1)


def _num_key_blocks(attention: Attention) -> int:
    block = 256 if attention.head_dim <= 64 else 128 if attention.head_dim <= 128 else 64
    return -(-attention.keys_length // block)


def _bytes_of_splits(attention: Attention, num_splits: int) -> int:
    if num_splits <= 1:
        return 0
    rows = attention.num_heads * attention.query_length
    return _FP32_BYTES * num_splits * rows * (1 + _up(attention.head_dim, _WIDTHS_OF_FLASH))


def _flash_backward(attention: Attention, card: Card) -> ByteInterval:
    """A number for each row, the query's gradient in fp32 for each split of the card, and every query head's keys and values."""
    rows = attention.num_heads * _up(attention.query_length, _ROWS_OF_FLASH)
    sum_bytes = _FP32_BYTES * rows * _up(attention.head_dim, _WIDTHS_OF_FLASH)
    expanded = 2 * attention.element_bytes * attention.num_heads * attention.keys_length * attention.head_dim
    fixed_bytes = _FP32_BYTES * rows + expanded * attention.is_grouped
    low, likely, high = (fixed_bytes + -(-count // attention.num_heads) * sum_bytes for count in card.multiprocessors)
    return ByteInterval(low=low, value=likely, high=high)


def _padded_heads(attention: Attention) -> ByteInterval:
    """Copies of heads whose width is no multiple of 8, of which it is not known how many are saved."""
    if attention.head_dim % 8 == 0:
        return NO_BYTES
    rows = attention.num_heads * attention.query_length + 2 * attention.num_key_heads * attention.keys_length
    most = attention.element_bytes * rows * _up(attention.head_dim, 8)
    return ByteInterval(low=0, value=most, high=most)


# Memory-efficient.


def _efficient_sums(attention: Attention) -> int:
    is_wide = attention.element_bytes < _FP32_BYTES and attention.head_dim > _ACCUMULATED_WIDTH
    return _FP32_BYTES * attention.query_elements * is_wide


def _efficient_kept(attention: Attention) -> ByteInterval:
    """Rows of the log-sum-exp that are filled up, and a mask that may be converted and padded for each layer."""
    filled = _up(attention.query_length, _ROWS_OF_EFFICIENT) - attention.query_length
    filled_bytes = _FP32_BYTES * attention.num_heads * filled
    padded = -(-attention.mask_bytes * _up(attention.keys_length, 16) // attention.keys_length)
    # A mask of flags takes a byte where the copy takes an element.
    return ByteInterval(low=filled_bytes, value=filled_bytes + padded, high=filled_bytes + padded * attention.element_bytes)


def _efficient_backward(attention: Attention, card: Card) -> ByteInterval:
    sizes = [_efficient_workspace(attention, tile) for tile in _list_tiles(attention, card)]
    delta_bytes = _FP32_BYTES * attention.num_heads * attention.query_length
    product_bytes = _FP32_BYTES * attention.query_elements if attention.element_bytes == _FP32_BYTES else 0
    held = [max(size + delta_bytes, product_bytes) for size in sizes]
    return interval_of(*held, likely=max(held))


def _list_tiles(attention: Attention, card: Card) -> tuple[_Tile, ...]:
    is_fp32 = attention.element_bytes == _FP32_BYTES
    tables = {
        (True, False): _FP32_TILES,
        (True, True): _AMPERE_FP32_TILES,
        (False, False): _HALF_TILES,
        (False, True): _AMPERE_HALF_TILES,
    }
    generations = (False, True) if card.capability is None else (card.capability >= (8, 0),)
    found = [
        next(tiles for widest, tiles in tables[is_fp32, is_new] if attention.head_dim <= widest) for is_new in generations
    ]
    return tuple(tile for tiles in found for tile in tiles)


def _efficient_workspace(attention: Attention, tile: _Tile) -> int:
    rows, columns, widest = tile
    width = attention.head_dim
    elements = -(-attention.query_length // rows) * -(-width // columns) * (4 + rows * columns)
    if attention.element_bytes < _FP32_BYTES and widest > rows:
        elements += 2 * columns * _up(width, rows)
    return _FP32_BYTES * attention.num_heads * _up(elements, 4)


def _repeated(attention: Attention, card: Card, *, is_backward: bool) -> Held:
    """Keys and values for each head of queries beside what the kernel holds, and in backward their gradients."""
    copies = 2 * attention.element_bytes * attention.num_heads * attention.keys_length * attention.head_dim
    alike = attention._replace(num_key_heads=attention.num_heads)
    held = _hold("efficient", alike, card, is_backward=is_backward)
    scratch = held.scratch + exact_interval(copies * (2 if is_backward else 1))
    return Held(scratch, held.kept, "bound", f"key heads repeated; {held.source}")


# Plain products.


def _math(attention: Attention, *, is_backward: bool) -> ByteInterval:
    """Squares of scores beside the softmax that is saved, at least; twice as many at most."""
    least = 2 if is_backward else 1
    scores = attention.scores_bytes
    return ByteInterval(low=least * scores, value=2 * scores, high=4 * scores)


def _math_kept(attention: Attention) -> int:
    """Scaled queries, keys and values in fp32, and the softmax."""
    heads = attention.num_heads * attention.head_dim
    return _FP32_BYTES * heads * (attention.query_length + 2 * attention.keys_length) + attention.scores_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
