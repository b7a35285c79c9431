"""Curves of products, by shape, dtype and form, and of attention, by length, dtype and direction.

Each is run as a step runs it: products in their forward and both backward forms, each form timed by itself, because where a
processor has no instructions for a dtype one form may take ten times as long as another. Where a library makes the large ones
of a dtype (``runtime/layers/matmul_dispatch.py``), the small ones have curves of their own, and the library's are
without what each call takes.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimizer.base.units import MIB
from optimizer.formats.matmul_dispatch import uses_onednn
from optimizer.formats.op_costs import WHOLE, count_flops
from optimizer.hardware.curves import AttentionWay, Curve, MatmulSort, attention_curve_name, matmul_curve_name
from optimizer.hardware.probe.clock import TimeShare, as_curve, quartile_s, random_tensor
from optimizer.runtime.layers.matmul_dispatch import asking_library, asks_library

_MATMUL_SHAPES = {
    "cpu": (
        (256, 256, 256), (64, 64, 64), (512, 16, 512), (8, 512, 512), (512, 256, 4), (512, 4, 256), (128, 128, 128),
        (256, 128, 384), (256, 384, 128), (32, 512, 512), (512, 256, 768), (512, 512, 512), (1024, 768, 768), (512, 384, 8192),
    ),
    "cuda": (
        (2048, 2048, 2048), (256, 256, 256), (1024, 64, 1024), (16, 4096, 4096), (4096, 2048, 16), (4096, 16, 2048),
        (512, 512, 512), (256, 4096, 4096), (1024, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 4096), (2048, 2048, 32768),
    ),
}  # fmt: skip
"""Tokens, inputs, outputs; in the order in which they are worth their time. Thin ones as adapters have them, both ways: which
side is thin may decide the rate by five."""
_SMALL_SHAPES = {"cpu": ((64, 64, 64), (512, 4, 256), (512, 256, 4), (96, 96, 96), (32, 32, 32)), "cuda": ()}
"""Shapes of products that a library is not asked for."""
_BMM_SHAPES = {
    "cpu": ((24, 128, 64, 128), (8, 64, 16, 64), (16, 128, 32, 128), (24, 256, 64, 256), (4, 512, 64, 512)),
    "cuda": ((64, 512, 64, 512), (64, 128, 64, 128), (32, 1024, 64, 1024), (16, 2048, 128, 2048)),
}
"""Matrices, rows, inner, columns."""
_ATTENTION_SHAPES = {
    "cpu": ((4, 4, 128, 64), (4, 4, 32, 32), (4, 6, 256, 64), (2, 8, 512, 64), (1, 6, 1024, 64)),
    "cuda": ((8, 16, 1024, 64), (8, 16, 256, 64), (4, 16, 2048, 64), (2, 16, 4096, 128)),
}
"""Batch, heads, sequence, head size."""
_SHAPES_OF: Mapping[MatmulSort, Mapping[str, tuple[tuple[int, ...], ...]]] = {
    "mm": _MATMUL_SHAPES, "small": _SMALL_SHAPES, "bmm": _BMM_SHAPES,
}  # fmt: skip
_TINY_SIDE, _NUM_TINY = 24, 50
_LEAST_SHARE = 0.25
_RING_BYTES = {"cpu": 16 * MIB, "cuda": 512 * MIB}
"""Results that are kept while others are made, so that each is written to memory that no cache holds."""
_WEIGHTS = {"fp32": 2}
"""Weights by which dtypes share the time; 1 for the other dtypes."""

Point = tuple[float, float]
"""FLOPs for each byte, and FLOPs per second."""
Timed = tuple[Callable[[], object], float, float]
"""A call to run, its FLOPs and its bytes."""


def probe_matmuls(
    device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float, library_call_s: float = 0.0
) -> dict[str, Curve]:
    """Rates of products by FLOPs for each byte, under ``mm nt fp32`` and the like, and under ``mm fp32`` all forms
    together.
    """
    share = TimeShare(max_s)
    curves: dict[str, Curve] = {}
    librarys = {name for name, dtype in dtypes.items() if asks_library(torch.empty(0, device=device, dtype=dtype))}
    sorts = [(name, sort) for name in dtypes for sort in _list_sorts(is_library=name in librarys)]
    left = sum(_WEIGHTS.get(name, 1) for name, _ in sorts)
    for name, sort in sorts:
        weight = _WEIGHTS.get(name, 1)
        own = TimeShare(share.part_s(left) * weight)
        left -= weight
        make = _batched if sort == "bmm" else _products
        shapes: Sequence[tuple[int, ...]] = _SHAPES_OF[sort][device.type]
        is_library = sort == "mm" and name in librarys
        if is_library:
            shapes = [shape for shape in shapes if uses_onednn(*shape)]
        beside_s = library_call_s if is_library else 0.0
        for form, points in _points_by_form(shapes, make, device, dtypes[name], share=own, beside_s=beside_s).items():
            curves[matmul_curve_name(sort, form=form, dtype=name)] = as_curve(points)
    return curves


def _list_sorts(*, is_library: bool) -> tuple[MatmulSort, ...]:
    """List the sorts of products. is_library: a quicker library makes the large products of this dtype, so that small
    ones have curves of their own.
    """
    return ("mm", "bmm", "small") if is_library else ("mm", "bmm")


def probe_library_call_s(*, max_s: float) -> float:
    """Time of a product of the library that has next to nothing to multiply; 0 where no library is asked."""
    device = torch.device("cpu")
    one = random_tensor((_TINY_SIDE, _TINY_SIDE), device, torch.float32)
    if not asks_library(one):
        return 0.0

    def run() -> None:
        for _ in range(_NUM_TINY):
            with asking_library():
                one @ one

    return quartile_s(run, device, max_s=max_s) / _NUM_TINY


def probe_attention(device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """Rates of attention by FLOPs for each byte, forward and backward, causal and not."""
    share = TimeShare(max_s)
    points: dict[str, list[Point]] = {}
    shapes = _ATTENTION_SHAPES[device.type]
    for done, (name, dtype) in enumerate(dtypes.items()):
        own = TimeShare(share.part_s(len(dtypes) - done))
        for index, shape in enumerate(shapes):
            if index and not own.left_s:
                break
            max_each_s = own.part_s(4 * (len(shapes) - index))
            for is_causal in (True, False):
                for way, (run, flops, num_bytes) in _attentions(shape, device, dtype, is_causal=is_causal).items():
                    label = attention_curve_name(way, form="" if is_causal else WHOLE, dtype=name)
                    rate = flops / quartile_s(run, device, max_s=max_each_s)
                    points.setdefault(label, []).append((flops / num_bytes, rate))
    return {label: as_curve(found) for label, found in points.items()}


# Products.


def _points_by_form(
    shapes: Sequence[tuple[int, ...]],
    make: Callable[[tuple[int, ...], torch.device, torch.dtype], dict[str, Timed]],
    device: torch.device,
    dtype: torch.dtype,
    *,
    share: TimeShare,
    beside_s: float,
) -> dict[str, list[Point]]:
    """One point at least of each form; as many as there is time for, and none that would take all that is left. All forms
    together have the empty name, at the shapes that all of them ran. beside_s: what of a call is no part of its rate.
    """
    points: dict[str, list[Point]] = {}
    together: list[Point] = []
    for index, shape in enumerate(shapes):
        max_each_s = share.part_s(3 * (len(shapes) - index))
        seconds: list[float] = []
        forms = make(shape, device, dtype)
        for form, (run, flops, num_bytes) in forms.items():
            known = points.setdefault(form, [])
            if known and 2 * flops / min(rate for _, rate in known) > share.left_s / len(forms):
                continue
            seconds.append(without_call_s(beside_s, quartile_s(run, device, max_s=max_each_s)))
            known.append((flops / num_bytes, flops / seconds[-1]))
        if len(seconds) == len(forms):
            together.append((flops / num_bytes, len(forms) * flops / sum(seconds)))
    return {**points, "": together}


def _products(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Timed]:
    tokens, inputs, outputs = shape
    sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    x, weight, gradient = (random_tensor(size, device, dtype) for size in sizes)
    flops, num_bytes = 2.0 * tokens * inputs * outputs, float(x.nbytes + weight.nbytes + gradient.nbytes)
    ring: deque[Any] = deque(maxlen=max(1, 3 * _RING_BYTES[device.type] // int(3 * num_bytes)))

    products: dict[str, Callable[[], object]] = {
        "nt": lambda: ring.append(x @ weight.t()),
        "nn": lambda: ring.append(gradient @ weight),
        "tn": lambda: ring.append(gradient.t() @ x),
    }
    if asks_library(x) and uses_onednn(*shape):
        products = {form: asking_library()(multiply) for form, multiply in products.items()}
    return {form: (multiply, flops, num_bytes) for form, multiply in products.items()}


def _batched(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Timed]:
    number, rows, inner, columns = shape
    sizes = ((number, rows, inner), (number, columns, inner), (number, rows, columns))
    left, right, gradient = (random_tensor(size, device, dtype) for size in sizes)
    flops, num_bytes = 2.0 * number * rows * inner * columns, float(left.nbytes + right.nbytes + gradient.nbytes)
    return {
        "nt": (lambda: left @ right.transpose(1, 2), flops, num_bytes),
        "nn": (lambda: gradient @ right, flops, num_bytes),
        "tn": (lambda: gradient.transpose(1, 2) @ left, flops, num_bytes),
    }


def without_call_s(beside_s: float, seconds: float) -> float:
    """Time left of a call that takes so much in all; never less than a share of it, for both were measured."""
    return max(seconds - beside_s, seconds * _LEAST_SHARE)


# Attention.


def _attentions(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *, is_causal: bool
) -> dict[AttentionWay, Timed]:
    """Attention forward and backward."""
    query, key, value = (random_tensor(shape, device, dtype).requires_grad_() for _ in range(3))
    gradient = random_tensor(shape, device, dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(query, key, value, is_causal=is_causal)
    shapes = [shape] * 4
    name = "aten._scaled_dot_product_flash_attention"
    flops = [
        count_flops(f"{name}.default", shapes[:3], [], is_causal=is_causal),
        count_flops(f"{name}_backward.default", shapes, [], is_causal=is_causal),
    ]

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return {
        "forward": (lambda: attend(query, key, value, is_causal=is_causal), float(flops[0]), 4.0 * query.nbytes),
        "backward": (backward, float(flops[1]), 8.0 * query.nbytes),
    }
