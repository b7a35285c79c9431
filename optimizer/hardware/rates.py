"""Rates of one machine, and the work that each of them prices. Torch-free."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from optimizer.hardware.curves import (
    AttentionWay,
    Curve,
    MatmulSort,
    PackedForm,
    PackingWay,
    attention_curve_name,
    matmul_curve_name,
    op_curve_name,
    packing_curve_name,
    with_cold_in_place,
)
from optimizer.optimizers import UpdateRate
from optimizer.profile.time_kinds import TimeKind

RateSource = Literal["measured", "table"]
PythonWork = Literal[
    "recompute op",
    "selective op",
    "offload",
    "step",
    "micro-batch",
    "token",
    "update many",
    "update one",
    "update 8-bit",
    "gradients",
    "state",
    "state at home",
    "weights",
    "weights of a pass",
    "keys and values",
    "stored weights",
    "stored keys and values",
]
"""Work that Python does beside ops; see ``Rates.python_s``."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Attained rates, not peaks. Floating-point operations count a multiply-add as two."""

    matmul_flops_per_s: dict[str, float]
    """FLOPs per second of large matrix products, by dtype (fp32, bf16)."""
    attention_flops_per_s: dict[str, float]
    """FLOPs per second of fused attention kernels, by dtype."""
    memory_bytes_per_s: float
    """Element-wise kernels: bytes read plus written, per second."""
    op_overhead_s: float
    """Fixed cost of one op: dispatch on the CPU device, launch on CUDA."""
    device_to_host_bytes_per_s: float
    host_to_device_bytes_per_s: float
    optimizer_elements_per_s: dict[UpdateRate, float]
    """Parameters updated per second on the device."""
    source: RateSource
    host_optimizer_elements_per_s: float | None = None
    """AdamW with 32-bit state on the host; None where unknown."""
    disk_write_bytes_per_s: float | None = None
    """Sequential, of the disk that holds the scratch folder; None where unknown, as are the next four."""
    disk_read_bytes_per_s: float | None = None
    """Rate of reading past the system's page cache."""
    disk_cached_read_bytes_per_s: float | None = None
    """Rate of reading what the page cache holds."""
    remote_write_bytes_per_s: float | None = None
    """Rate of writing to the store of the remote tier."""
    remote_read_bytes_per_s: float | None = None
    remote_round_trip_s: float | None = None
    """Time of a read of a few bytes there; None where unknown. What is as large as a staging buffer has it in its rate."""
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    """FLOPs per second by FLOPs for each byte moved, under ``mm nt fp32``, ``bmm nn bf16`` (``profile.Op.form``), and all forms
    together under ``mm fp32``; the flat rate where there is none. Of a generation's products of few rows those under ``rows nt
    fp32`` and, of weights that come from memory, ``rows nt fp32 cold``, where there are any. Where a quicker library makes the
    large ones (``formats/matmul_dispatch.py``), the others under ``small nt fp32`` and ``small rows nt fp32``."""
    library_call_s: float = 0.0
    """Seconds that each product of that library takes beside its rate."""
    attention_curves: dict[str, Curve] = field(default_factory=dict)
    """Rates of attention likewise, under ``forward fp32``, ``backward fp32``, causal, and ``forward whole fp32``, not
    causal (``formats.op_costs.WHOLE``); longer sequences have more FLOPs for each byte. Under ``token fp32``, of a
    generation's tokens, bytes per second by bytes moved for each that is written."""
    op_curves: dict[str, Curve] = field(default_factory=dict)
    """Bytes read and written per second by their number, under an op's name (``tanh``), and with its dtype where it is not
    fp32 (``tanh bf16``). An op that is not there takes that of its kind (``elementwise``), else the flat rate. Under ``draw``
    scores per second by their number, of one sequence that draws its token."""
    packing_curves: dict[str, Curve] = field(default_factory=dict)
    """Elements per second by the number of a storage's elements, under ``pack int8``, ``unpack bf16``: to compress what is
    offloaded and to undo that, without the copy."""
    host_attention_curves: dict[str, Curve] = field(default_factory=dict)
    """Attention to keys and values on the host, by their dtype: FLOPs per second by FLOPs for each byte of them, of
    which there are more where more queries share them. A share of what the host's memory gives where there is none."""
    forward_dispatch_s: float | None = None
    """Seconds that an op costs in the runtime's own step beside its kernel: Python, autograd, the meter. None where it
    was not measured: each op that moves bytes then costs ``op_overhead_s``."""
    backward_dispatch_s: float | None = None
    pass_dispatch_s: float | None = None
    """Seconds that an op costs beside its kernel in a generation, which notes nothing for a backward; as forward in a
    step where it was not measured."""
    python_s: dict[PythonWork, float] = field(default_factory=dict)
    """Work beside ops: ``recompute op`` and ``selective op`` for an op that runs forward in such a block, the first time or
    again, ``offload`` for a copy, ``step`` once, ``micro-batch`` and ``token`` (of a generation) for a run through the model,
    for each tensor one of ``update many``, ``update one``, ``gradients`` (on the host), ``state`` (there too), ``state at
    home`` (of weights that stream), beside it ``update 8-bit`` of states in 8 bits, ``weights`` for each time that a tensor of
    a block comes (``weights of a pass`` in a generation), and ``keys and values`` for each time that a block's come and go; of
    a generation whose own are in a store beyond the host ``stored weights`` and ``stored keys and values``."""
    cache_bytes: int | None = None
    """The processor's largest cache, which weights read in turn do not stay in if they are more; None where it is not known."""
    wake_s: float = 0.0
    """Seconds that an op takes longer that the CPU device's threads share, where the others have fallen asleep since
    the last one."""
    fresh_bytes_per_s: float | None = None
    """Memory that the process does not have yet, touched for the first time: pages that the system finds and clears."""
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Copies as they were probed: alone, beside compute, both ways at once; for people."""
    probe_slowdown: float = 1.0
    """Factor by which the machine may have been slower than by itself when this was measured, because others used it
    (``probe/disturbance.py``); 1 where it was left alone, and for rates of the table."""
    time_factors: dict[TimeKind, float] = field(default_factory=dict)
    """Factors by which finished runs correct each kind of time (``calibration.py``); 1 for those not named."""

    @cached_property
    def fingerprint(self) -> str:
        """Differs where any rate does; made once, and short, since it is part of many keys."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @cached_property
    def with_cold_weights(self) -> "Rates":
        """These rates for passes whose weights come from memory each time."""
        return replace(self, matmul_curves=with_cold_in_place(self.matmul_curves))

    @cached_property
    def with_page_cache(self) -> "Rates":
        """These rates for what is read from the disk's page cache."""
        return replace(self, disk_read_bytes_per_s=self.disk_cached_read_bytes_per_s or self.disk_read_bytes_per_s)

    def time_factor(self, kind: TimeKind) -> float:
        """Factor by which finished runs correct a kind of time; 1 until some have finished."""
        return self.time_factors.get(kind, 1.0)

    def python_work_s(self, work: PythonWork) -> float:
        """Seconds of one piece of work, as probed; 0 where it was not measured.

        Machines of the table have measured none: what Python does there is part of ``op_overhead_s``.
        """
        return self.python_s.get(work, 0.0)

    def matmul_curve(self, sort: MatmulSort, *, dtype: str, form: str = "") -> Curve | None:
        """The curve of a product; None where it was not measured, as for the next three."""
        return self.matmul_curves.get(matmul_curve_name(sort, dtype=dtype, form=form))

    def attention_curve(self, way: AttentionWay, *, dtype: str, form: str = "") -> Curve | None:
        """FLOPs per second by FLOPs for each byte; of ``token`` bytes per second by bytes moved for each that is written."""
        return self.attention_curves.get(attention_curve_name(way, dtype=dtype, form=form))

    def op_curve(self, op: str, *, dtype: str = "fp32") -> Curve | None:
        """Bytes per second by bytes, of an op or a kind of ops; of ``DRAW`` scores per second by scores."""
        return self.op_curves.get(op_curve_name(op, dtype=dtype))

    def packing_curve(self, way: PackingWay, form: PackedForm) -> Curve | None:
        """Elements per second by elements."""
        return self.packing_curves.get(packing_curve_name(way, form))

    @cached_property
    def corrected(self) -> dict[tuple[tuple[TimeKind, float], ...], "Rates"]:
        """These rates under calibrations, by their factors: a search asks for the same ones hundreds of times."""
        return {}
