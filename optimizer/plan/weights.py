"""Decisions about weights: the representation they are trained in, and where blocks keep theirs between uses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.plan.knob import Condition, Face, Knob, Package, TechniqueDeclaration, Use, differs, equals

WeightsDtype = Literal["fp32", "bf16", "fp16"]
Autocast = Literal["off", "bf16", "fp16"]
WeightsPlace = Literal["device", "host", "disk", "remote"]
FrozenFormat = Literal["same", "int8", "int4", "nf4"]
MasterFormat = Literal["fp32", "none"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class PackedSizes:
    """Bytes of a packed format."""

    bits: int
    """For each element."""
    block_elements: int = 0
    """Elements that share their scales; 0 where each row of a matrix has one scale, in the plan's dtype."""
    block_scale_bytes: int = 0
    scale_element_bytes: int = 0
    """Bytes of one number of the scales; 0: of the plan's dtype."""

    def count_bytes(self, num_elements: int, *, num_rows: int, bytes_per_element: int) -> int:
        """A packed matrix with its scales; bytes_per_element: of the plan's dtype."""
        if not self.block_elements:
            return num_elements * self.bits // 8 + num_rows * bytes_per_element
        num_blocks = -(-num_elements // self.block_elements)
        return self.code_bytes(num_elements) + num_blocks * self.block_scale_bytes

    def code_bytes(self, num_elements: int) -> int:
        """The same without its scales."""
        block = self.block_elements or 1
        return -(-num_elements // block) * block * self.bits // 8


PACKED_SIZES: Mapping[FrozenFormat, PackedSizes] = {
    "int8": PackedSizes(bits=8),
    "int4": PackedSizes(bits=4, block_elements=64, block_scale_bytes=4, scale_element_bytes=2),
    "nf4": PackedSizes(bits=4, block_elements=64, block_scale_bytes=4, scale_element_bytes=4),
}
"""Every format but ``same``. A block of nf4 has one fp32 scale, one of int4 two numbers in fp16."""
ROUNDING_PIECE_ELEMENTS: Final = 1 << 20
"""Elements that are rounded at random with one draw of bits."""


def rounding_scratch_bytes(num_elements: int) -> int:
    """The random bits that rounding a tensor holds: 16 for each element of a piece, in words of 64."""
    return 8 * -(-min(num_elements, ROUNDING_PIECE_ELEMENTS) // 4)


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """Representation and place of the weights."""

    dtype: WeightsDtype = "fp32"
    """Dtype of weights, gradients and activations. Below fp32 the optimizer keeps fp32 master weights in its state, unless
    ``master`` is none."""
    master: MasterFormat = "fp32"
    """none, with ``dtype`` bf16: updates work on an fp32 copy of one tensor at a time, which is rounded back at random
    (``runtime/updates/stochastic_rounding.py``), and no copy of the weights is kept."""
    autocast: Autocast = "off"
    """Products and attention run in this dtype on fp32 weights, which are cast as they are used. Needs ``dtype`` fp32."""
    place: WeightsPlace = "device"
    """Tier of each block's weights between uses; they are brought to the device for the block's forward and backward.
    Weights of no block (embedding, final norm, head) stay on the device."""
    prefetch: int = 1
    """Blocks fetched ahead of the one that computes, where weights are not on the device, or on other devices (``zero3``)."""
    frozen: FrozenFormat = "same"
    """Format of the matrices that are not trained (under adapters); they are unpacked to ``dtype`` for each product. nf4 needs
    bitsandbytes; int4 needs only torch and takes as many bytes."""

    def __post_init__(self) -> None:
        if self.autocast != "off" and self.dtype != "fp32":
            raise InvalidPlan(
                f"plan.weights.autocast is {self.autocast} with {self.dtype} weights; allowed: fp32 weights, or off",
                field="plan.weights.autocast",
                value=self.autocast,
                allowed="off, unless plan.weights.dtype is fp32",
            )
        if self.master == "none" and self.dtype != "bf16":
            raise InvalidPlan(
                f"plan.weights.master is none with {self.dtype} weights; allowed: bf16 weights, or fp32",
                field="plan.weights.master",
                value=self.master,
                allowed="fp32, unless plan.weights.dtype is bf16",
            )
        if not 0 <= self.prefetch <= 8:
            raise InvalidPlan(
                f"plan.weights.prefetch is {self.prefetch}; allowed: 0 to 8",
                field="plan.weights.prefetch",
                value=self.prefetch,
                allowed={"minimum": 0, "maximum": 8},
            )

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of trained weights and their gradients."""
        return DTYPE_BYTES[self.dtype]

    @property
    def master_bytes_per_element(self) -> int:
        """Bytes of the optimizer's copy beside each trained weight below fp32; 0 where it has none."""
        return DTYPE_BYTES["fp32"] if self.dtype != "fp32" and self.master == "fp32" else 0

    @property
    def updated_bytes_per_element(self) -> int:
        """Bytes of a trained weight as updates find and leave it between steps: the master's, where there is one."""
        return self.master_bytes_per_element or self.bytes_per_element

    @property
    def widens_updates(self) -> bool:
        """True if an update works on fp32 copies, so that tensors are updated one by one."""
        return self.dtype != "fp32"

    @property
    def computes_in_fp16(self) -> bool:
        return "fp16" in (self.dtype, self.autocast)

    @property
    def scales_loss(self) -> bool:
        """True if gradients may underflow, so that the loss is scaled and steps that overflow are skipped."""
        return self.computes_in_fp16

    @property
    def without_prefetch(self) -> "WeightsPlan":
        """The same weights in the same place, however they come."""
        return replace(self, prefetch=0)

    @property
    def representation(self) -> str:
        """The name of a profile's regime: ``fp32``, ``bf16``, ``fp32+bf16`` for autocast, ``bf16/nf4`` for frozen."""
        computed = self.dtype if self.autocast == "off" else f"{self.dtype}+{self.autocast}"
        return computed if self.frozen == "same" else f"{computed}/{self.frozen}"


@dataclass(frozen=True, kw_only=True)
class WeightsPins:
    """Decisions of ``WeightsPlan`` that are made beforehand; None leaves one free."""

    dtype: WeightsDtype | None = None
    master: MasterFormat | None = None
    autocast: Autocast | None = None
    place: WeightsPlace | None = None
    prefetch: int | None = None
    frozen: FrozenFormat | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="stream_weights",
        label="stream weights block by block",
        sentence="Keeps the blocks' weights on the host, on disk or in a remote store; each block's come to the device to run.",
        group="Gradients, optimizer state and weights",
        searches=("training", "generation"),
        lowers=("weights",),
    ),
    TechniqueDeclaration(
        name="bf16",
        label="bf16 weights",
        sentence="Keeps weights, gradients and activations in bf16; training keeps fp32 master weights in the optimizer's state.",
        group="Number formats",
        searches=("training", "generation"),
        loss="rounding",
        lowers=("weights",),
    ),
    TechniqueDeclaration(
        name="no_master_weights",
        label="bf16 weights without fp32 masters",
        sentence="Trains bf16 weights without fp32 master weights: each update is rounded to bf16 at random, so that small ones "
        "arrive on average.",
        explanation="there are no fp32 master weights: updates are rounded to bf16 at random",
        group="Number formats",
        loss="rounding",
        lowers=("optimizer_state",),
    ),
    TechniqueDeclaration(
        name="fp16",
        label="fp16 weights",
        sentence="The same in fp16, whose range is small: training scales the loss and leaves out steps that overflow.",
        group="Number formats",
        searches=("training", "generation"),
        loss="rounding",
        lowers=("weights",),
    ),
    TechniqueDeclaration(
        name="autocast",
        label="autocast (products in bf16 or fp16)",
        sentence="Keeps fp32 weights and casts them as they are used: products and attention run in 16 bits.",
        group="Number formats",
        loss="rounding",
    ),
    TechniqueDeclaration(
        name="quantize_frozen",
        label="weights in 8 or 4 bits under adapters",
        sentence="Packs matrices that are not trained into int8, int4 or nf4 and brings each back for its product.",
        group="Number formats",
        searches=("training", "generation"),
        loss="any",
        lowers=("weights",),
    ),
)
KNOBS: Final = (
    Knob(
        path="weights.dtype",
        plain="fp32",
        uses=(Use(technique="bf16", asks=equals("bf16")), Use(technique="fp16", asks=equals("fp16"))),
        brings={dtype: {"weights.autocast": "off", "weights.master": "fp32"} for dtype in get_args(WeightsDtype)},
        training=Face(label="Weights in", change="{value} weights"),
        generation=Face(label="Weights in", change="weights in {value}"),
    ),
    Knob(
        path="weights.master",
        plain="fp32",
        words={"fp32": "in fp32", "none": "none, rounded at random"},
        uses=(Use(technique="no_master_weights", asks=equals("none")),),
        brings={"none": {"weights.dtype": "bf16", "weights.autocast": "off"}},
        matters_where=(Condition(path="weights.dtype", holds=differs("fp32")),),
        training=Face(
            label="Master weights",
            help="beside weights below fp32; none with bf16 alone",
            change="bf16 weights without fp32 masters",
            changes={"fp32": "fp32 master weights"},
        ),
    ),
    Knob(
        path="weights.autocast",
        plain="off",
        words={"off": "the weights' own dtype"},
        uses=(Use(technique="autocast", asks=differs("off")),),
        brings={dtype: {"weights.dtype": "fp32", "weights.master": "fp32"} for dtype in get_args(Autocast)},
        training=Face(
            label="Products in",
            help="autocast, beside fp32 weights",
            change="autocast to {value}",
            changes={"off": "fp32 weights"},
        ),
    ),
    Knob(
        path="weights.place",
        plain="device",
        words={"remote": "remote store"},
        uses=(
            Use(technique="stream_weights", asks=differs("device")),
            Use(technique="disk", asks=equals("disk")),
            Use(technique="remote", asks=equals("remote")),
        ),
        training=Face(label="Weights live on"),
        generation=Face(
            label="Weights live on", change="weights on the {value}", changes={"remote": "weights in the remote store"}
        ),
    ),
    Knob(
        path="weights.prefetch",
        plain=1,
        matters_where=(Condition(path="weights.place", holds=differs("device")),),
        or_where=(Condition(path="layout.data", holds=equals("zero3")),),
        training=Face(label="Fetched ahead", help="blocks, of weights that are away"),
        generation=Face(
            label="Fetched ahead",
            help="blocks, of weights that are away",
            change="weights of {value} blocks ahead instead of {before}",
        ),
    ),
    Knob(
        path="weights.frozen",
        plain="same",
        words={"same": "as they are"},
        uses=(Use(technique="quantize_frozen", asks=differs("same")),),
        packages=(Package(name="bitsandbytes", asks=equals("nf4")),),
        training=Face(
            label="Frozen weights in",
            help="under adapters",
            change="frozen weights in {value}",
            changes={"same": "frozen weights as they are"},
        ),
        generation=Face(
            label="Matrices in",
            help="of the blocks",
            change="the blocks' matrices in {value}",
            changes={"same": "the blocks' matrices as the other weights are"},
        ),
    ),
)
