"""Sizes of storages off the device, and of the memory that their trips need; runtime makes them and estimate predicts them.
Torch-free; ``runtime/tiers/compression.py`` does the packing.

Compression applies to storages of floating-point tensors that it makes smaller; all others travel as they are.
int8 follows Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), with a linear code.
"""

from typing import Final

from optimizer.base.units import KIB, MIB
from optimizer.plan.activations import Compression

SCALE_BLOCK_ELEMENTS: Final = 256
"""Elements that share one fp32 scale on an int8 trip."""
SCALE_BYTES: Final = 4
FLOAT_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by what torch calls the dtypes that compression applies to."""

SLAB_BYTES: Final = 2 * MIB
"""Size of one staging buffer, which is written to or read from a store at once."""
NUM_SLABS_EACH_WAY: Final = 4
"""Staging buffers for writing, and as many for reading."""
STAGING_BYTES: Final = 2 * NUM_SLABS_EACH_WAY * SLAB_BYTES
"""Host memory between the device and a store (disk, remote), however many bytes pass through it."""

ARENA_SLAB_BYTES: Final = 16 * MIB
"""Pinned host memory is taken in pieces of this size, from which copies are cut; a power of two, since torch rounds up to one."""

PIECE_ELEMENTS: Final = 1 << 20
"""Elements worked on or converted at once. A multiple of the 16 floats in which fused AdamW cuts its work, so that pieces give
the bits of the whole; small enough that a piece is still in the processor's cache when its gradient is scaled and used."""

_CHUNK_ELEMENTS: Final = {"cpu": 64 * KIB, "cuda": MIB}


def packed_bytes(num_bytes: int, *, dtype: str, compress: Compression) -> int:
    """Bytes off the device of a storage of ``num_bytes`` whose tensors are of ``dtype`` (``float32``, ``int64``, ...)."""
    size = FLOAT_BYTES.get(dtype)
    if compress == "none" or size is None or num_bytes % size:
        return num_bytes
    num_elements = num_bytes // size
    if compress == "bf16":
        return min(num_bytes, 2 * num_elements)
    return min(num_bytes, num_elements + SCALE_BYTES * -(-num_elements // SCALE_BLOCK_ELEMENTS))


def chunk_elements(device_kind: str) -> int:
    """Elements that are packed or unpacked at once: a multiple of SCALE_BLOCK_ELEMENTS that fits a slab once packed."""
    return _CHUNK_ELEMENTS[device_kind]


def scratch_bytes(compress: Compression, *, device_kind: str) -> int:
    """Device memory that packing and unpacking need for the whole run: one packed chunk, and for int8 one in fp32."""
    num_elements = chunk_elements(device_kind)
    if compress == "none":
        return 0
    if compress == "bf16":
        return 2 * num_elements
    return packed_bytes(4 * num_elements, dtype="float32", compress="int8") + 4 * num_elements
