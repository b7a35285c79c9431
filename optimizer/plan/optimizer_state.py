"""Decisions about optimizer state: in how many bits moments are kept, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from optimizer.base.errors import InvalidPlan
from optimizer.plan.knob import Condition, Face, Knob, Package, TechniqueDeclaration, Use, differs, equals

QUANTIZATION_BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale in 8-bit state (Dettmers et al., 8-bit Optimizers via Block-wise Quantization)."""

UPDATE_PIECE_ELEMENTS = 1 << 18
"""Elements of 8-bit state that the CPU device updates at once: whole blocks. A CUDA device updates a tensor at once."""
MIN_8BIT_ELEMENTS = 4096
"""Smaller tensors stay in 32 bits: bitsandbytes' own default."""
_NUM_COPIES = {8: 5, 32: 3}
_FP32_BYTES = 4
_SCALARS_BYTES = 12

StatePlace = Literal["device", "host", "disk", "remote"]


def update_scratch_bytes(num_elements: int, *, bits: int) -> int:
    """Bytes that an update of this many elements by bitsandbytes holds on the CPU device while it runs.

    8 bits: two moments, the gradient, a root and a quotient, each in fp32; 32 bits: the gradient, a root and a sum. And two
    numbers (bitsandbytes, backends/cpu/ops.py).
    """
    return _NUM_COPIES[bits] * _FP32_BYTES * num_elements + _SCALARS_BYTES


@dataclass(frozen=True, kw_only=True)
class OptimizerStatePlan:
    """Bits and place of the moments that the workload's optimizer keeps: AdamW's two, SGD's one or none. Weights below fp32 add
    fp32 master weights, and so does state that is not on the device.
    """

    bits: Literal[32, 8] = 32
    """32 keeps fp32 moments (lossless); 8 keeps one byte per element and one fp32 scale per block, for AdamW only and only on
    the device."""
    place: StatePlace = "device"
    """Tier of the offloaded part of the state; its update runs on the host, wherever the weights are."""
    fraction: float = 1.0
    """Share of the trained elements whose state is at ``place``, in whole tensors (``split_state``); the rest is on the
    device."""

    def __post_init__(self) -> None:
        if self.place != "device" and self.bits == 8:
            raise InvalidPlan(
                f"plan.optimizer_state.place is {self.place} with 8 bits; 8-bit state is updated on the device",
                field="plan.optimizer_state.place",
                value=self.place,
                allowed="device, unless plan.optimizer_state.bits is 32",
            )
        if not 0 < self.fraction <= 1:
            raise InvalidPlan(
                f"plan.optimizer_state.fraction is {self.fraction}; allowed: above 0, at most 1",
                field="plan.optimizer_state.fraction",
                value=self.fraction,
                allowed={"minimum": 0, "maximum": 1},
            )


def split_state(plan: OptimizerStatePlan, num_elements: Sequence[int]) -> list[bool]:
    """List, for each trained tensor in the model's order, true if its state leaves the device.

    Tensors are taken from the first on, as long as they do not exceed the share; one that would is passed over.
    """
    if plan.place == "device":
        return [False] * len(num_elements)
    left = round(plan.fraction * sum(num_elements))
    leaves = []
    for size in num_elements:
        leaves.append(size <= left)
        left -= size if size <= left else 0
    return leaves


@dataclass(frozen=True, kw_only=True)
class OptimizerStatePins:
    """Decisions of ``OptimizerStatePlan`` that are made beforehand; None leaves one free."""

    bits: Literal[32, 8] | None = None
    place: StatePlace | None = None
    fraction: float | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="offload_optimizer",
        label="optimizer state on the host",
        sentence="Keeps the optimizer's state, or a share of it, on the host, on disk or in a remote store; the host updates it.",
        group="Gradients, optimizer state and weights",
        lowers=("optimizer_state",),
    ),
    TechniqueDeclaration(
        name="8bit_optimizer",
        label="8-bit optimizer state",
        sentence="Keeps AdamW's moments in one byte an element, with a scale for each 256 elements.",
        group="Gradients, optimizer state and weights",
        loss="rounding",
        lowers=("optimizer_state",),
    ),
)
KNOBS: Final = (
    Knob(
        path="optimizer_state.bits",
        plain=32,
        uses=(Use(technique="8bit_optimizer", asks=equals(8)),),
        packages=(Package(name="bitsandbytes", asks=equals(8)),),
        training=Face(label="State in", help="bits", change="{value}-bit optimizer state"),
    ),
    Knob(
        path="optimizer_state.place",
        plain="device",
        words={"remote": "remote store"},
        uses=(
            Use(technique="offload_optimizer", asks=differs("device")),
            Use(technique="disk", asks=equals("disk")),
            Use(technique="remote", asks=equals("remote")),
        ),
        training=Face(label="State lives on"),
    ),
    Knob(
        path="optimizer_state.fraction",
        plain=1.0,
        matters_where=(Condition(path="optimizer_state.place", holds=differs("device")),),
        training=Face(label="Share of it that is away", help="from 0 to 1"),
    ),
)
