"""Flat rates: one number each for large products, attention, ops that move bytes, and one op's launch.

What machines without curves have, and what stands in where a curve was not measured.
"""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from optimizer.hardware.probe.clock import quartile_s, random_tensor
from optimizer.runtime.layers.matmul_dispatch import making_products

_MATMUL_SHAPES = {
    "cpu": ((256, 384, 384), (512, 384, 1536), (1024, 768, 768), (512, 384, 8192)),
    "cuda": ((2048, 2048, 2048), (4096, 4096, 4096), (4096, 1024, 4096), (2048, 2048, 32768)),
}
"""Tokens, inputs, outputs; small ones first, so that a slow type is cut off early."""
_ATTENTION_SHAPES = {"cpu": ((2, 6, 256, 64), (1, 8, 512, 64)), "cuda": ((8, 16, 1024, 64), (4, 16, 2048, 64))}
"""Batch, heads, sequence, head size."""
_ATTENTION_MATMULS = 7
"""Two in forward, five in backward, as torch's own counter has it; the causal half is counted as if it were done."""
_ELEMENTWISE_SHAPE = {"cpu": (2048, 1024), "cuda": (8192, 4096)}
_NUM_TINY_OPS = 200


def probe_matmul_rate(device: torch.device, dtype: torch.dtype, *, max_s: float) -> float:
    def product(shape: tuple[int, ...]) -> tuple[Callable[[], object], float]:
        tokens, inputs, outputs = shape
        x, weight, gradient = (
            random_tensor(size, device, dtype) for size in ((tokens, inputs), (inputs, outputs), (tokens, outputs))
        )

        def run() -> None:
            with making_products(tokens, inputs, outputs, of=x):
                for left, right in ((x, weight), (gradient, weight.T), (x.T, gradient)):
                    left @ right

        return run, 6.0 * tokens * inputs * outputs

    return _rate_over_shapes(_MATMUL_SHAPES[device.type], product, device, max_s=max_s)


def probe_attention_rate(device: torch.device, dtype: torch.dtype, *, max_s: float) -> float:
    def attention(shape: tuple[int, ...]) -> tuple[Callable[[], object], float]:
        batch, heads, sequence, size = shape
        query, key, value = (random_tensor(shape, device, dtype).requires_grad_() for _ in range(3))
        gradient = random_tensor(shape, device, dtype)

        def run() -> object:
            output = scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(output, (query, key, value), gradient)

        return run, _ATTENTION_MATMULS * 2.0 * batch * heads * sequence * sequence * size

    return _rate_over_shapes(_ATTENTION_SHAPES[device.type], attention, device, max_s=max_s)


def probe_memory_rate(device: torch.device, *, max_s: float) -> float:
    """Bytes over time of a mix: an addition, an activation function, a normalization."""
    shape = _ELEMENTWISE_SHAPE[device.type]
    x, y = random_tensor(shape, device, torch.float32), random_tensor(shape, device, torch.float32)
    ops: list[tuple[Callable[[], object], int]] = [
        (lambda: x + y, 3),
        (lambda: gelu(x), 2),
        (lambda: layer_norm(x, shape[1:]), 2),
    ]
    seconds = sum(quartile_s(run, device, max_s=max_s / len(ops)) for run, _ in ops)
    return sum(passes for _, passes in ops) * x.nbytes / seconds


def probe_op_overhead_s(device: torch.device, *, max_s: float) -> float:
    start = torch.ones(8, device=device, requires_grad=True)

    def run() -> object:
        value = start
        for _ in range(_NUM_TINY_OPS):
            value = value * 1.0001
        return torch.autograd.grad(value, start, torch.ones_like(start))

    return quartile_s(run, device, max_s=max_s) / (2 * _NUM_TINY_OPS)


def _rate_over_shapes(
    shapes: tuple[tuple[int, ...], ...],
    make: Callable[[tuple[int, ...]], tuple[Callable[[], object], float]],
    device: torch.device,
    *,
    max_s: float,
) -> float:
    """FLOPs of all shapes over their time together; shapes that would not fit the time left are left out."""
    flops = seconds = 0.0
    started = time.perf_counter()
    for position, shape in enumerate(shapes):
        left_s = max_s - (time.perf_counter() - started)
        run, shape_flops = make(shape)
        too_slow = flops > 0 and shape_flops * seconds / flops * 2 > left_s
        if too_slow:
            break
        flops += shape_flops
        seconds += quartile_s(run, device, max_s=left_s / (len(shapes) - position))
    return flops / seconds
