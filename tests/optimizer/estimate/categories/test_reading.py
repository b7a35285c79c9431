"""Packing in pieces takes what is predicted, to the bits of packing at once."""

from itertools import product

import pytest
import torch

from optimizer.estimate.categories.reading import packing_bytes
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.trained import BaseSize
from optimizer.runtime.layers.quantize import pack, pack_in_pieces
from optimizer.runtime.meter.meter import Meter, count_allocations
from optimizer.runtime.step.weights import torch_dtype

SHAPES = [((48, 64), -1), ((64, 48), 0), ((50, 33), -1), ((3, 20, 32), -1), ((30, 1), -1), ((1200, 1500), -1), ((1500, 1200), 0)]
"""The last two are of more than a piece; the number is the dimension that products sum over."""


@pytest.mark.parametrize(("form", "dtype"), list(product(("int8", "int4", "nf4"), ("fp32", "bf16", "fp16"))))
def test_packing_takes_what_is_predicted(form: FrozenFormat, dtype: str) -> None:
    weights = WeightsPlan(dtype=dtype, frozen=form)
    for shape, input_dim in SHAPES:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch_dtype(weights))
        meter = Meter(device=torch.device("cpu"))
        with count_allocations(meter):
            packed, scales = pack_in_pieces(matrix, form, input_dim=input_dim)
        size = BaseSize(num_elements=matrix.numel(), packs=True, num_scales=matrix.numel() // shape[input_dim])
        assert meter.peak().device_bytes == packing_bytes(size, weights), shape
        whole = pack(matrix, form, input_dim=input_dim)
        for one, other in zip((packed, scales), whole[:2], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_of_a_large_matrix_the_result_is_there_once() -> None:
    large = BaseSize(num_elements=1 << 30, packs=True, num_scales=1 << 15)
    assert packing_bytes(large, WeightsPlan(frozen="int8")) < 1.01 * (1 << 30)
