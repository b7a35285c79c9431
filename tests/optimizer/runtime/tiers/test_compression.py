"""Packing for a trip: what comes back, how far off it is, and that its sizes are those that the estimate uses."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.estimate.categories.activations import PACK_OPS, UNPACK_OPS
from optimizer.formats.transfer_sizes import SLAB_BYTES, chunk_elements, packed_bytes, scratch_bytes
from optimizer.runtime.tiers.compression import Packing, Scratch

CPU = torch.device("cpu")
SIZES = [1, 5, 255, 256, 257, 65_536, 65_537, 200_003]
INT8_BOUND = 1 / 253
"""Half a step of a 127th, and the rounding of the scale itself."""


def travel(tensor: torch.Tensor, compress: str) -> tuple[torch.Tensor, int]:
    """Out and back, through two pieces on the host."""
    scratch = Scratch(compress, device=CPU)
    packing = Packing(tensor.nbytes, dtype=tensor.dtype, compress=compress, scratch=scratch)
    middle = packing.packed_bytes // 3
    host = torch.empty(packing.packed_bytes, dtype=torch.uint8)
    pieces = (host[:middle], host[middle:])
    packing.pack(tensor.contiguous().view(-1).view(torch.uint8), pieces)
    back = torch.empty(tensor.nbytes, dtype=torch.uint8)
    packing.unpack(pieces, back)
    return back.view(tensor.dtype), packing.packed_bytes


@pytest.mark.parametrize("num_elements", SIZES)
def test_bf16_rounds_each_value_once(num_elements: int) -> None:
    values = torch.randn(num_elements) * 100
    back, num_bytes = travel(values, "bf16")
    assert torch.equal(back, values.bfloat16().float())
    assert num_bytes == 2 * num_elements


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_elements", [257, 65_537])
def test_int8_is_off_by_half_a_step_of_its_blocks_largest(num_elements: int, dtype: torch.dtype) -> None:
    values = (torch.randn(num_elements) * torch.linspace(0.01, 10, num_elements)).to(dtype)
    back, num_bytes = travel(values, "int8")
    padded = torch.nn.functional.pad(values.double(), (0, -num_elements % 256)).view(-1, 256)
    largest = padded.abs().amax(dim=1).repeat_interleave(256)[:num_elements]
    rounding = back.double().abs() * torch.finfo(dtype).eps
    assert bool(((back.double() - values.double()).abs() <= largest * INT8_BOUND + rounding).all())
    assert num_bytes == num_elements + 4 * -(-num_elements // 256)


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_zeros_stay_zeros_and_what_is_no_number_stays_so(compress: str) -> None:
    values = torch.zeros(1024)
    values[300] = float("nan")
    back, _ = travel(values, compress)
    assert torch.equal(back[:256], torch.zeros(256))
    assert back[300].isnan()


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_a_mask_still_masks_and_lets_through_what_it_let_through(compress: str, lowest: float) -> None:
    mask = torch.zeros(1024).masked_fill(torch.arange(1024) % 3 == 0, lowest)
    back, _ = travel(mask, compress)
    assert torch.equal(back.softmax(0), mask.softmax(0))


def test_a_row_that_is_masked_throughout_stays_finite_in_int8() -> None:
    back, _ = travel(torch.full((512,), torch.finfo(torch.float32).min), "int8")
    assert back.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_what_is_no_floating_point_number_travels_as_it_is(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (5000,)).to(dtype)
    back, num_bytes = travel(values, "int8")
    assert torch.equal(back, values)
    assert num_bytes == values.nbytes


def test_what_would_not_become_smaller_travels_as_it_is() -> None:
    values = torch.randn(1000).bfloat16()
    back, _ = travel(values, "bf16")
    assert torch.equal(back, values)
    lone = torch.randn(1)
    assert torch.equal(travel(lone, "int8")[0], lone)


def test_a_storage_is_cut_only_between_chunks() -> None:
    scratch = Scratch("int8", device=CPU)
    packing = Packing(40_000_004, dtype=torch.float32, compress="int8", scratch=scratch)
    units = packing.units(SLAB_BYTES)
    assert [unit.start for unit in units[1:]] == [unit.end for unit in units[:-1]]
    assert [unit.packed_start for unit in units[1:]] == [unit.packed_end for unit in units[:-1]]
    assert (units[-1].end, units[-1].packed_end) == (packing.num_bytes, packing.packed_bytes)
    assert all(unit.packed_end - unit.packed_start <= SLAB_BYTES for unit in units)
    assert all(unit.start % (4 * chunk_elements("cpu")) == 0 for unit in units)


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_a_packed_chunk_fits_a_slab(compress: str, device_kind: str) -> None:
    num_elements = chunk_elements(device_kind)
    assert packed_bytes(4 * num_elements, dtype="float32", compress=compress) <= SLAB_BYTES
    assert packed_bytes(8 * num_elements, dtype="float64", compress=compress) <= SLAB_BYTES


class Counter(TorchDispatchMode):
    """Counts the ops that write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type[torch.Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        self.num_writes += func._schema.is_mutable
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_a_chunk_takes_as_many_ops_as_the_estimate_counts(compress: str) -> None:
    num_elements = chunk_elements("cpu") + 1
    packing = Packing(4 * num_elements, dtype=torch.float32, compress=compress, scratch=Scratch(compress, device=CPU))
    host = (torch.empty(packing.packed_bytes, dtype=torch.uint8),)
    source = torch.zeros(4 * num_elements, dtype=torch.uint8)
    with Counter() as packed:
        packing.pack(source, host)
    with Counter() as unpacked:
        packing.unpack(host, source)
    # Two chunks, each with its copy.
    assert (packed.num_writes, unpacked.num_writes) == (2 * (PACK_OPS[compress] + 1), 2 * (UNPACK_OPS[compress] + 1))


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_the_scratch_is_what_the_estimate_counts(compress: str) -> None:
    scratch = Scratch(compress, device=CPU)
    assert scratch.packed.nbytes + scratch.wide.nbytes == scratch_bytes(compress, device_kind="cpu")
