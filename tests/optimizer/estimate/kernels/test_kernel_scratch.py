"""The seam chooses by device; the CPU's numbers stand as measured; each row of CUDA's table gives figures worked by hand."""

from dataclasses import replace

import pytest

from optimizer.base.intervals import exact_interval
from optimizer.base.units import MIB
from optimizer.estimate.cpu.cpu_scratch import scratch_of
from optimizer.estimate.kernels.cpu_kernels import CpuKernels, unmeasured_bytes
from optimizer.estimate.kernels.cuda_attention import count_splits
from optimizer.estimate.kernels.cuda_kernels import CudaKernels
from optimizer.estimate.kernels.cuda_rows import ROWS, find_row
from optimizer.estimate.kernels.held import NOTHING, Held, OpCall
from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.hardware.cuda_facts import find_workspaces, read_card
from optimizer.hardware.device_spec import Card
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Processor
from optimizer.profile.profile import Profile

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
TORCH = (2, 13)


def card_of(capability: tuple[int, int], num_multiprocessors: int) -> Card:
    return Card(capability, (num_multiprocessors,) * 3, TORCH)


def attention(
    heads: int,
    key_heads: int,
    length: int,
    width: int,
    dtype: str,
    *,
    name: str = BACKWARD,
    form: str = "",
    mask_bytes: int = 0,
) -> OpCall:
    """heads: of all sequences together."""
    query = heads * length * width * SIZES[dtype]
    keys = key_heads * length * width * SIZES[dtype]
    sums = 4 * heads * length
    is_backward = name == BACKWARD
    return OpCall(
        name,
        dtype,
        form,
        (length, length, width),
        read_bytes=(3 * query + 2 * keys + sums if is_backward else query + 2 * keys) + mask_bytes,
        written_bytes=query + 2 * keys if is_backward else query + sums,
    )


def hold(call: OpCall, card: Card, *, num_tokens: int = 1, is_kept: bool = False) -> Held:
    return CudaKernels(card).hold_call(call, num_tokens=num_tokens, is_kept=is_kept)


def test_the_seam_chooses_by_the_device() -> None:
    assert isinstance(find_kernels(Processor(num_threads=2)), CpuKernels)
    assert isinstance(find_kernels(card_of((8, 0), 108)), CudaKernels)


def test_the_cpus_numbers_are_those_of_its_frozen_arithmetic(profile: Profile) -> None:
    processor = Processor(num_threads=4, packs_bf16=True, packs_fp32=True)
    shape = (2, 64)
    numbers = [scratch_of(op, shape, is_half=True, processor=processor) for op in profile.ops]
    held = [find_kernels(processor).hold(op, shape, compute_dtype="bf16") for op in profile.ops]
    assert [each.scratch for each in held] == [exact_interval(number) for number in numbers]
    assert any(numbers)
    assert {each.certainty for each in held} == {"exact"}


def test_another_torch_keeps_the_cpus_numbers_and_widens_their_interval(profile: Profile) -> None:
    processor = Processor(num_threads=4)
    op = next(op for op in profile.ops if op.name == BACKWARD)
    measured = CpuKernels(processor).hold(op, (2, 64), compute_dtype="fp32")
    other = CpuKernels(processor).hold(op, (2, 64), compute_dtype="fp32", torch_version="2.14.0")
    assert other.scratch.value == measured.scratch.value > 0
    assert other.scratch.high == 2 * measured.scratch.high
    assert other.certainty == "bound"
    assert [unmeasured_bytes(7, torch_version=text) for text in ("2.13.0+cpu", "2.13", "2.1.3", "2.14.0")] == [0, 0, 7, 7]


@pytest.mark.parametrize(
    ("call", "num_multiprocessors", "mib"),
    [
        (attention(32, 8, 4096, 128, "bf16"), 108, 320.5),
        (attention(32, 8, 4096, 128, "bf16"), 132, 384.5),
        (attention(128, 128, 2048, 128, "bf16"), 108, 129.0),
        (attention(12, 12, 1024, 64, "bf16"), 40, 12.046875),
        (attention(32, 32, 512, 64, "fp16"), 132, 20.0625),
    ],
)
def test_flash_backward_sums_for_each_split_of_the_card(call: OpCall, num_multiprocessors: int, mib: float) -> None:
    held = hold(call, card_of((8, 0), num_multiprocessors))
    assert held.scratch == exact_interval(round(mib * MIB))
    assert held.certainty == "exact"


@pytest.mark.parametrize(
    ("call", "capability", "mib"),
    [
        (attention(16, 16, 2048, 64, "fp16"), (7, 5), 8.1328125),
        (attention(16, 16, 2048, 64, "fp32"), (8, 0), 8.1328125),
        (attention(16, 16, 2048, 128, "fp32"), (8, 0), 16.140625),
        (attention(64, 64, 1024, 128, "fp16"), (7, 5), 36.28125),
    ],
)
def test_efficient_backward_has_a_workspace_of_its_tiles(call: OpCall, capability: tuple[int, int], mib: float) -> None:
    held = hold(call, card_of(capability, 40))
    assert held.scratch.low <= held.scratch.value == held.scratch.high == round(mib * MIB)


@pytest.mark.parametrize(
    ("call", "capability"),
    [
        (attention(4, 2, 64, 18, "fp32", name=FORWARD), (8, 0)),
        (attention(4, 2, 64, 12, "fp16", name=FORWARD), (7, 5)),
        (attention(4, 4, 64, 16, "bf16", name=FORWARD), (7, 5)),
        (attention(4, 4, 64, 17, "fp32", name=FORWARD), (8, 0)),
    ],
)
def test_what_no_fused_kernel_takes_saves_all_its_scores(call: OpCall, capability: tuple[int, int]) -> None:
    held = hold(call, card_of(capability, 40), is_kept=True)
    width = call.sides[2]
    scores = 4 * 4 * 64 * 64
    assert held.kept == exact_interval(4 * 4 * 3 * 64 * width + scores)
    assert (held.scratch.low, held.scratch.high) == (scores, 4 * scores)


@pytest.mark.parametrize(("dtype", "capability"), [("fp32", (8, 0)), ("fp32", (7, 5)), ("fp16", (7, 5))])
def test_grouped_heads_that_no_fused_kernel_takes_are_repeated_while_one_runs(dtype: str, capability: tuple[int, int]) -> None:
    card = card_of(capability, 40)
    copies = 2 * 16 * 512 * 64 * SIZES[dtype]
    for name, times in ((FORWARD, 1), (BACKWARD, 2)):
        grouped = hold(attention(16, 4, 512, 64, dtype, name=name), card, is_kept=name == FORWARD)
        alike = hold(attention(16, 16, 512, 64, dtype, name=name), card, is_kept=name == FORWARD)
        assert grouped.kept == alike.kept
        assert grouped.scratch == alike.scratch + exact_interval(times * copies)


def test_from_torch_2_14_on_no_heads_are_repeated() -> None:
    call = attention(16, 4, 512, 64, "fp16")
    assert hold(call, Card((7, 5), (40,) * 3, (2, 14))).scratch.high < hold(call, card_of((7, 5), 40)).scratch.low


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    call = attention(4, 2, 64, 16, "fp32", name=FORWARD)
    assert hold(call, card_of((8, 0), 108)).kept == exact_interval(0)


def test_a_mask_keeps_flash_from_running_and_may_be_copied_for_each_layer() -> None:
    masked = attention(4, 4, 64, 16, "bf16", name=FORWARD, form="whole", mask_bytes=64 * 64 * 2)
    held = hold(masked, card_of((8, 0), 108), is_kept=True)
    assert (held.kept.low, held.kept.value) == (0, 64 * 64 * 2)
    assert held.certainty == "bound"
    plain = attention(4, 4, 64, 16, "bf16", name=FORWARD, form="whole")
    assert hold(plain, card_of((8, 0), 108), is_kept=True).kept == exact_interval(0)


def test_keys_are_split_where_few_rows_would_leave_a_card_idle() -> None:
    # Eight blocks on 216 places: 16 blocks of keys, each its own split.
    assert count_splits(8, 216, 16) == 16
    assert count_splits(200, 216, 16) == 1
    call = attention(8, 8, 2048, 128, "bf16", name=FORWARD)._replace(sides=(1, 2048, 128), written_bytes=8 * (256 + 4))
    call = call._replace(read_bytes=8 * 256 + 2 * 8 * 2048 * 256)
    assert hold(call, card_of((8, 0), 108)).scratch == exact_interval(4 * 16 * 8 * (1 + 128))


def test_a_card_nobody_knows_gets_an_interval_of_all_kernels() -> None:
    unknown = read_card(replace(table_machine("T4").device, compute_capability="", num_multiprocessors=None))
    call = attention(32, 8, 512, 64, "bf16")
    wide = hold(call, unknown).scratch
    for capability, count in (((8, 0), 108), ((7, 5), 40)):
        known = hold(call, card_of(capability, count)).scratch
        assert wide.low <= known.low <= known.high <= wide.high


def test_multiprocessors_come_from_the_table() -> None:
    assert read_card(table_machine("T4").device).multiprocessors == (40, 40, 40)
    alike = read_card(replace(table_machine("RTX 4090").device, num_multiprocessors=None)).multiprocessors
    assert alike[0] < 128 <= alike[2]


@pytest.mark.parametrize(
    ("num_tokens", "vocabulary", "width", "sums"),
    [(4096, 32_000, 4096, 4 * 4096 * (409 + 4096)), (16_384, 151_936, 2048, 4 * 2048 * (1638 + 16_384))],
)
def test_embeddings_backward_sums_parts_of_rows_in_fp32(
    num_tokens: int, vocabulary: int, width: int, sums: int
) -> None:
    call = OpCall(
        "aten.embedding_dense_backward.default", "bf16", read_bytes=num_tokens * (2 * width + 8),
        written_bytes=2 * vocabulary * width,
    )  # fmt: skip
    places = 8 * (5 * num_tokens + num_tokens // 10 + num_tokens) + 16
    assert hold(call, card_of((8, 0), 108), num_tokens=num_tokens).scratch == exact_interval(sums + places)
    assert hold(call, card_of((8, 0), 108), num_tokens=3072) == NOTHING


def test_norms_take_a_number_for_each_chunk_of_the_largest_tensor() -> None:
    held = CudaKernels(card_of((8, 0), 108)).hold_norms([525_000_000] + [4096] * 299)
    assert held.scratch == exact_interval(4 * 300 * 8011 + 512 * 300)
    assert CudaKernels(card_of((8, 0), 108)).hold_norms([]) == NOTHING


def test_sums_by_index_copy_their_source_and_sort() -> None:
    rows, width = 8192, 1024
    added = rows * (8 + 2 * width)
    call = OpCall("aten.index_add_.default", "bf16", read_bytes=1 << 24 | added, written_bytes=1 << 24)
    held = hold(call._replace(read_bytes=(1 << 24) + added), card_of((8, 0), 108), num_tokens=rows).scratch
    assert held.low <= 2 * rows * width + 48 * rows <= held.high
    assert held.value == 2 * rows * width + 48 * rows
    scattered = OpCall("aten.scatter_add_.default", "fp32", read_bytes=4096 + 12 * 1000, written_bytes=4096)
    assert hold(scattered, card_of((8, 0), 108)).scratch.low == 48_000


def test_norm_backward_of_very_many_narrow_rows_sums_in_parts() -> None:
    num_tokens, width = 131_072, 1024
    call = OpCall("aten.native_layer_norm_backward.default", "fp32", written_bytes=4 * width * (num_tokens + 2))
    assert hold(call, card_of((8, 0), 108), num_tokens=num_tokens).scratch.high == 8 * MIB
    assert hold(call, card_of((8, 0), 108), num_tokens=1024) == NOTHING


def test_a_convolutions_workspace_is_unknown() -> None:
    held = hold(OpCall("aten.convolution.default", "fp32"), card_of((8, 0), 108))
    assert held.certainty == "unknown"


def test_every_row_has_its_source_and_the_longest_beginning_wins() -> None:
    assert all(row.source for row in ROWS)
    assert find_row("addmm").begins == "addmm"
    assert find_row("nothing_like_it") is None


@pytest.mark.parametrize(
    ("torch_version", "low_mib", "high_mib"), [("2.11.0", 64, 66), ("2.13.0+cu130", 64, 64), ("2.14.0", 0, 64), ("", 0, 66)]
)
def test_workspaces_are_bounded_by_the_version_of_torch(torch_version: str, low_mib: int, high_mib: int) -> None:
    found = find_workspaces(table_machine("T4").device, torch_version=torch_version)
    assert (found.low, found.value, found.high) == (low_mib * MIB, 64 * MIB, high_mib * MIB)
