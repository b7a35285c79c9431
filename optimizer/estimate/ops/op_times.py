"""Seconds of ops at a machine's rates: each by its own curve where the machine has one, else by the flat rate. Torch-free.

Products and attention go by FLOPs, at a rate that depends on how many FLOPs there are for each byte; the rest goes by bytes,
at a rate that depends on how many there are, which decides the cache they come from. More bytes never take less time, whatever
a noisy measurement says. Without curves it is the longer of computing and moving bytes at the flat rates.

A generation's products of few rows, and its attention of one token, have curves of their own, where they were measured. So have
small products in fp32 where a library makes the large ones alone.

An op's own dtype decides where the profile noted it, for not all that autocast runs is in its dtype; else what is computed in.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.formats.matmul_dispatch import LEAST_FLOPS, LEAST_FLOPS_PER_BYTE
from optimizer.formats.op_costs import ALLOCATIONS, GROUPED_PRODUCT, base_name
from optimizer.hardware.curves import AttentionWay, Curve, MatmulSort
from optimizer.hardware.rates import PythonWork, Rates
from optimizer.hardware.thread_wakeup import BESIDE_KERNELS
from optimizer.profile.time_kinds import COMPUTE_KINDS, ComputeKind

Values = NDArray[np.float64]

_HALVES: Final = ("fp16", "bf16")
_BATCHED: Final = ("bmm", "baddbmm")


class OpTimes:
    """Prices ops at one machine's rates in one dtype of computing.

    element_dtype: of element-wise ops whose own is not known: under autocast most stay in fp32. generates: nothing is noted for
    a backward.
    """

    def __init__(self, rates: Rates, dtype: str, *, element_dtype: str = "fp32", generates: bool = False) -> None:
        self._rates = rates
        self._dtype = dtype
        self._element_dtype = element_dtype
        self._generates = generates
        self._computes_fp16 = "fp16" in (dtype, element_dtype)
        self.factors = {kind: rates.time_factor(kind) for kind in COMPUTE_KINDS}

    @property
    def counts_views(self) -> bool:
        """True where an op's dispatch was measured; it then costs the same for ops that move no bytes."""
        return self._rates.forward_dispatch_s is not None

    @property
    def dispatch_s(self) -> tuple[float, float]:
        """Dispatch of an op forward and backward, beside its kernel."""
        forward, backward = self.probed_dispatch_s
        return forward * self.factors["dispatch"], backward * self.factors["dispatch"]

    @property
    def probed_dispatch_s(self) -> tuple[float, float]:
        """Seconds of dispatch as probed, whatever finished runs say. Of the CPU device between the kernels of a real
        model (``hardware/thread_wakeup.py``).
        """
        rates = self._rates
        slower = BESIDE_KERNELS if rates.cache_bytes is not None and self.counts_views else 1.0
        forward = rates.op_overhead_s if rates.forward_dispatch_s is None else rates.forward_dispatch_s
        if self._generates and rates.pass_dispatch_s is not None:
            forward = rates.pass_dispatch_s
        backward = rates.op_overhead_s if rates.backward_dispatch_s is None else rates.backward_dispatch_s
        return forward * slower, backward * slower

    def python_s(self, work: PythonWork) -> float:
        return python_s(self._rates, work)

    def kernels_s(
        self,
        kind: ComputeKind,
        name: str,
        *,
        flops: Values,
        read_bytes: Values,
        written_bytes: Values,
        dtype: str = "",
        form: str = "",
    ) -> Values:
        """Time of ops of one kind and name (``aten.mm.default``), without their dispatch. dtype, form: as ``Op`` has them."""
        moved_bytes = read_bytes + written_bytes
        flat_s = moved_bytes / self._rates.memory_bytes_per_s
        if self._is_free(base_name(name)):
            return np.zeros_like(flops)
        # A step in fp16 has the profile of bf16.
        dtype = "fp16" if dtype == "bf16" and self._computes_fp16 else dtype
        if kind == "attention":
            seconds = self._attention_s(base_name(name), dtype or self._dtype, form, flops, moved_bytes, written_bytes)
        elif kind == "matmul":
            seconds = self._products_s(base_name(name), dtype or self._dtype, form, flops, moved_bytes)
        else:
            curve = self._memory_curve(kind, base_name(name), dtype or self._element_dtype)
            # What gathers rows reads as much as it writes, however large the table.
            counted_bytes = 2 * written_bytes if kind == "gather" else moved_bytes
            seconds = flat_s if curve is None else seconds_by_bytes(counted_bytes, curve)
        return seconds * self.factors[self.charged_to(kind, dtype)]

    def charged_to(self, kind: ComputeKind, dtype: str = "") -> ComputeKind:
        """The kind under which the time of an op is shown and corrected. dtype: its own, where it is known."""
        is_product = kind == "matmul" or kind == "attention"
        return "half_precision" if is_product and (dtype or self._dtype) in _HALVES else kind

    def kernel_s(
        self,
        kind: ComputeKind,
        name: str,
        *,
        flops: float = 0.0,
        read_bytes: float = 0.0,
        written_bytes: float = 0.0,
        form: str = "",
    ) -> float:
        """Time of one op."""
        sizes = [np.array([size], dtype=np.float64) for size in (flops, read_bytes, written_bytes)]
        seconds = self.kernels_s(kind, name, flops=sizes[0], read_bytes=sizes[1], written_bytes=sizes[2], form=form)
        return float(seconds[0])

    def _attention_s(
        self, base: str, dtype: str, form: str, flops: Values, moved_bytes: Values, written_bytes: Values
    ) -> Values:
        way: AttentionWay = "backward" if base.endswith("backward") else "forward"
        rates = self._rates
        curve = rates.attention_curve(way, form=form, dtype=dtype) or rates.attention_curve(way, dtype=dtype)
        if curve is None:
            return self._flat_s(rates.attention_flops_per_s, dtype, flops, moved_bytes)
        seconds = seconds_by_flops(flops, moved_bytes, curve)
        token = rates.attention_curve("token", dtype=dtype) if self._generates else None
        if token is None:
            return seconds
        return _token_s(flops, moved_bytes, written_bytes, usual_s=seconds, curve=curve, token=token)

    def _products_s(self, base: str, dtype: str, form: str, flops: Values, moved_bytes: Values) -> Values:
        small_s = self._by_curves(("small",), "small rows", dtype, form, flops, moved_bytes)
        if base in _BATCHED or (base == GROUPED_PRODUCT and small_s is not None):
            # A library is asked for layers' products alone.
            rows: MatmulSort | None = "small rows" if base == GROUPED_PRODUCT else None
            seconds = self._by_curves(("bmm", "mm"), rows, dtype, form, flops, moved_bytes)
            small_s = None
        else:
            seconds = self._by_curves(("mm",), "rows", dtype, form, flops, moved_bytes)
        if seconds is None:
            return self._flat_s(self._rates.matmul_flops_per_s, dtype, flops, moved_bytes)
        if small_s is None:
            return seconds
        is_small = (flops < LEAST_FLOPS) | (flops < LEAST_FLOPS_PER_BYTE * moved_bytes)
        return np.where(is_small, small_s, seconds + self._rates.library_call_s)

    def _by_curves(
        self, sorts: Sequence[MatmulSort], rows: MatmulSort | None, dtype: str, form: str, flops: Values, moved_bytes: Values
    ) -> Values | None:
        """Products by the first curve that there is; in a generation, by the curve of few rows as far as it goes."""
        find = self._rates.matmul_curve
        found = (find(sort, form=each, dtype=dtype) for sort in sorts for each in (form, ""))
        curve = next((curve for curve in found if curve is not None), None)
        if curve is None:
            return None
        seconds = seconds_by_flops(flops, moved_bytes, curve)
        decoding = find(rows, form=form, dtype=dtype) if self._generates and rows is not None else None
        if decoding is None:
            return seconds
        has_few = flops <= decoding[-1][0] * np.maximum(moved_bytes, 1.0)
        return np.where(has_few, seconds_by_flops(flops, moved_bytes, decoding), seconds)

    def _flat_s(self, flops_per_s: Mapping[str, float], dtype: str, flops: Values, moved_bytes: Values) -> Values:
        rate = flops_per_s.get(dtype, flops_per_s["fp32"])
        return np.maximum(flops / rate, moved_bytes / self._rates.memory_bytes_per_s)

    def _is_free(self, base: str) -> bool:
        """True for ops that cost dispatch alone: memory that is taken and not touched."""
        return bool(self._rates.op_curves) and base in ALLOCATIONS

    def _memory_curve(self, kind: ComputeKind, base: str, dtype: str) -> Curve | None:
        dtypes = (*_HALVES, "fp32") if dtype == "fp16" else dict.fromkeys((dtype, "fp32"))
        found = (self._rates.op_curve(name, dtype=each) for name in (base.rstrip("_"), kind) for each in dtypes)
        return next((curve for curve in found if curve is not None), None)


def python_s(rates: Rates, work: PythonWork) -> float:
    """Seconds of one piece of work beside ops, as finished runs correct it."""
    return rates.python_work_s(work) * rates.time_factor("hooks")


def weights_python_s(rates: Rates, *, generates: bool, is_stored: bool) -> float:
    """Time of each tensor of weights that comes: a generation has its own where it was measured. is_stored: from beyond the
    host.
    """
    own: tuple[PythonWork, ...] = ("stored weights", "weights of a pass") if is_stored else ("weights of a pass",)
    return python_s(rates, next((name for name in own if generates and name in rates.python_s), "weights"))


def keys_and_values_python_s(rates: Rates, *, is_stored: bool) -> float:
    """Time of a block's keys and values that come and go. is_stored: as for weights."""
    own: PythonWork = "stored keys and values"
    return python_s(rates, own if is_stored and own in rates.python_s else "keys and values")


def _token_s(
    flops: Values, moved_bytes: Values, written_bytes: Values, *, usual_s: Values, curve: Curve, token: Curve
) -> Values:
    """Attention by that of one token where it has fewer FLOPs for each byte than anything on its own curve: its rate then hangs
    on how much of the cache is read for each query.
    """
    intensity = flops / np.maximum(moved_bytes, 1.0)
    ratios, rates = (np.log(np.array(values)) for values in zip(*token, strict=True))
    read_for_each = np.log(np.maximum(moved_bytes, 1.0) / np.maximum(written_bytes, 1.0))
    return np.where(intensity < curve[0][0], moved_bytes / np.exp(np.interp(read_for_each, ratios, rates)), usual_s)


def seconds_by_bytes(num_bytes: Values, curve: Curve) -> Values:
    """Time of so many bytes, or of whatever else the curve counts: between two sizes along the line through their times, in
    logarithms; outside at the rate of the nearest. Never less for more.
    """
    sizes = np.array([size for size, _ in curve])
    times = np.maximum.accumulate(np.array([size / rate for size, rate in curve]))
    inside = np.exp(np.interp(np.log(np.maximum(num_bytes, 1.0)), np.log(sizes), np.log(times)))
    below, above = times[0] * num_bytes / sizes[0], times[-1] * num_bytes / sizes[-1]
    seconds: Values = np.where(num_bytes < sizes[0], below, np.where(num_bytes > sizes[-1], above, inside))
    return seconds


def seconds_by_flops(flops: Values, moved_bytes: Values, curve: Curve) -> Values:
    """The rate between two intensities along the line through theirs, in logarithms; under the lowest in proportion, as where
    bytes decide; over the highest that of the highest.
    """
    intensity = np.maximum(flops, 1e-9) / np.maximum(moved_bytes, 1.0)
    lowest = curve[0][0]
    intensities, rates = (np.log(np.array(values)) for values in zip(*curve, strict=True))
    attained = np.exp(np.interp(np.log(intensity), intensities, rates)) * np.minimum(intensity / lowest, 1.0)
    seconds: Values = flops / attained
    return seconds


