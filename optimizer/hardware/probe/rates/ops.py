"""Curves of the ops that differ by the bytes they move, under their names and dtypes.

Each is run as a step runs it, its results in memory that was not just used. A step's fixed cost for each op is
``probe/steps.py``'s business and is taken off here.
"""

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from optimizer.base.units import MIB
from optimizer.hardware.curves import Curve, op_curve_name
from optimizer.hardware.probe.clock import TimeShare, as_curve, quartile_s, random_tensor
from optimizer.profile.ops import compute_kind
from optimizer.profile.time_kinds import ComputeKind
from optimizer.runtime.layers.quantize import NF4_BLOCK_ELEMENTS, pack

_ELEMENTS = {"cpu": (1 << 14, 1 << 18, 1 << 21), "cuda": (1 << 16, 1 << 20, 1 << 23, 1 << 26)}
"""Elements of one operand; rows of 512."""
_ROW = 512
_RING_BYTES = {"cpu": 16 * MIB, "cuda": 512 * MIB}
"""Results that are kept while others are made, so that each is written to memory that no cache holds."""


def probe_ops(device: torch.device, dtypes: Mapping[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """Rates of ops by bytes, under each op's name, and each kind's under that of the op that stands for it."""
    share = TimeShare(max_s)
    points: dict[str, list[tuple[float, float]]] = {}
    fixed_s = _fixed_s(device, max_s=share.left_s / 20)
    cases = [(num, name, dtype) for num in _ELEMENTS[device.type] for name, dtype in dtypes.items()]
    for done, (num_elements, dtype_name, dtype) in enumerate(cases):
        if done and not share.left_s:
            break
        own = TimeShare(share.part_s(len(cases) - done))
        ops = list(_ops(num_elements, device, dtype))
        for index, (name, run) in enumerate(ops):
            num_bytes, seconds = _time_op(name, run, device, max_s=own.part_s(len(ops) - index))
            own_points = points.setdefault(op_curve_name(name, dtype=dtype_name), [])
            own_points.append((num_bytes, num_bytes / max(seconds - fixed_s, seconds / 20)))
    curves = {name: as_curve(found) for name, found in points.items()}
    stand_ins: dict[ComputeKind, str] = {"elementwise": "add", "reduction": "sum", "gather": "embedding"}
    return curves | {
        op_curve_name(kind, dtype=dtype): curves[op_curve_name(op, dtype=dtype)]
        for kind, op in stand_ins.items()
        for dtype in dtypes
        if op_curve_name(op, dtype=dtype) in curves
    }


def _fixed_s(device: torch.device, *, max_s: float) -> float:
    x = torch.ones(8, device=device)
    return quartile_s(lambda: [x + x for _ in range(100)], device, max_s=max_s) / 100


def _time_op(name: str, run: Callable[[], Any], device: torch.device, *, max_s: float) -> tuple[float, float]:
    """Bytes as a profile counts them, and seconds."""
    result, inputs = run(), _inputs_of(run)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    written = sum(value.nbytes for value in outputs if isinstance(value, torch.Tensor))
    is_gather = compute_kind("memory", f"aten.{name}.default") == "gather"
    num_bytes = 2 * written if is_gather else written + sum(tensor.nbytes for tensor in inputs)
    ring: deque[Any] = deque(maxlen=max(1, _RING_BYTES[device.type] // max(written, 1)))
    del result, outputs
    # Small ones in batches, which a clock can distinguish.
    batch = max(1, min(50, 2_000_000 // max(num_bytes, 1)))

    def run_all() -> None:
        for _ in range(batch):
            ring.append(run())

    return float(num_bytes), quartile_s(run_all, device, max_s=max_s) / batch


def _inputs_of(run: Callable[[], Any]) -> list[torch.Tensor]:
    arguments: tuple[Any, ...] = run.args  # type: ignore[attr-defined]
    flat = [item for value in arguments for item in (value if isinstance(value, list) else [value])]
    return [value for value in flat if isinstance(value, torch.Tensor)]


def _ops(num_elements: int, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Callable[[], Any]]]:
    """Names as in a profile."""
    aten = torch.ops.aten
    rows = num_elements // _ROW
    x, y = (random_tensor((rows, _ROW), device, dtype) for _ in range(2))
    weight = torch.ones(_ROW, device=device, dtype=dtype)
    half = torch.full((rows, _ROW), 0.5, device=device, dtype=dtype)
    other_dtype = torch.bfloat16 if dtype == torch.float32 else torch.float32
    ids = torch.arange(rows, device=device) % 1024
    labels = ids % _ROW
    table = random_tensor((1024, _ROW), device, dtype)
    is_on = x > 0
    statistics = aten.native_layer_norm(x, [_ROW], weight, weight, 1e-5)
    softmax, log_softmax = x.softmax(-1), x.log_softmax(-1)
    counted = torch.tensor(float(rows), device=device, dtype=dtype)
    scalar = torch.tensor(1.0, device=device, dtype=dtype)
    arguments: dict[str, tuple[Any, ...]] = {
        "add": (aten.add, x, y),
        "mul": (aten.mul, x, y),
        "neg": (aten.neg, x),
        "div": (aten.div, x, 3.0),
        "pow": (aten.pow, x, 2),
        "exp": (aten.exp, x),
        "tanh": (aten.tanh, x),
        "sigmoid": (aten.sigmoid, x),
        "gelu": (aten.gelu, x),
        "silu": (aten.silu, x),
        "relu": (aten.relu, x),
        "bernoulli": (aten.bernoulli_.float, half, 0.9),
        "tanh_backward": (aten.tanh_backward, x, y),
        "gelu_backward": (aten.gelu_backward, x, y),
        "silu_backward": (aten.silu_backward, x, y),
        "threshold_backward": (aten.threshold_backward, x, y, 0),
        "where": (aten.where, is_on, x, y),
        "clone": (aten.clone, x),
        "cat": (aten.cat, [x, y], -1),
        "_to_copy": (aten.to.dtype, x, other_dtype),
        "fill": (aten.fill_, y.clone(), 0.0),
        "sum": (aten.sum.dim_IntList, x, [-1]),
        "mean": (aten.mean.dim, x, [-1]),
        "_softmax": (aten._softmax, x, -1, False),
        "_safe_softmax": (aten._safe_softmax, x, -1),
        "_softmax_backward_data": (aten._softmax_backward_data, x, softmax, -1, dtype),
        "_log_softmax": (aten._log_softmax, x, -1, False),
        "_log_softmax_backward_data": (aten._log_softmax_backward_data, x, log_softmax, -1, dtype),
        "native_layer_norm": (aten.native_layer_norm, x, [_ROW], weight, weight, 1e-5),
        "native_layer_norm_backward": (
            aten.native_layer_norm_backward, y, x, [_ROW], statistics[1], statistics[2], weight, weight, [True] * 3,
        ),
        "embedding": (aten.embedding, table, ids),
        "embedding_dense_backward": (aten.embedding_dense_backward, x, ids, rows, -1, False),
        "nll_loss_backward": (aten.nll_loss_backward, scalar, log_softmax, labels, None, 1, -100, counted),
        "slice_backward": (aten.slice_backward, x[:, : _ROW // 2], [rows, _ROW], 1, 0, _ROW // 2, 1),
        "index": (aten.index, x, [ids % rows]),
        "index_put": (aten.index_put, y, [ids % rows], x, True),
    }  # fmt: skip
    if dtype == torch.float32:
        arguments |= _unpackings(x)
    for name, (op, *values) in arguments.items():
        yield name, _Call(op, tuple(values))


def _unpackings(x: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """Ops that unpack frozen weights (``runtime/layers/quantize.py``), the bytes they read being packed."""
    packed, scales, form = pack(x, "int8")
    calls: dict[str, tuple[Any, ...]] = {"_to_copy int8": (torch.ops.aten.to.dtype, packed, x.dtype)}
    if importlib.util.find_spec("bitsandbytes") is not None:
        packed, scales, form = pack(x, "nf4")
        blocks = (scales.numel(), NF4_BLOCK_ELEMENTS)
        calls["dequantize_4bit"] = (
            torch.ops.bitsandbytes.dequantize_4bit, packed, scales, NF4_BLOCK_ELEMENTS, "nf4", blocks, form.dtype,
        )  # fmt: skip
    return calls


class _Call:
    """An op with its arguments, which can be asked for."""

    def __init__(self, op: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._op = op
        self.args = arguments

    def __call__(self) -> Any:
        return self._op(*self.args)
