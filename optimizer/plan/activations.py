"""Decisions about activations: which code runs blocks, and so what autograd saves in them; for each block, whether that is kept,
rebuilt or moved.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from optimizer.base.categories import BlockChoice as BlockChoice
from optimizer.plan.knob import Condition, Face, Knob, TechniqueDeclaration, Use, differs, equals, names

Compression = Literal["none", "bf16", "int8"]

OFFLOADING: Final[tuple[BlockChoice, ...]] = ("offload", "offload_disk", "offload_remote")
REBUILDING: Final[tuple[BlockChoice, ...]] = ("recompute", "selective")
BlockKernels = Literal["memory_saving", "compiled"]
COMPILED: Final = "@compiled"
"""Ending of a profile's regimes whose blocks run compiled."""

NOT_COMPILED: Final[tuple[BlockChoice, ...]] = ("selective",)
"""Choices that a compiled block does not have: it is one op, whose parts cannot be kept and run again apart."""


@dataclass(frozen=True, kw_only=True)
class ActivationsPlan:
    """One choice for each block, first to last.

    keep            the tensors that autograd saves stay on the device until the block's backward.
    recompute       only the block's inputs stay; the block runs forward again just before its backward.
    selective       as recompute, but the results of products and attention stay: only the cheap ops run again.
    offload         saved tensors are copied to the host as they appear, and back before the block's backward.
    offload_disk    the same, to a file.
    offload_remote  the same, to the memory of another machine (a store that speaks the Redis protocol).
    """

    per_block: tuple[BlockChoice, ...]
    compress: Compression = "none"
    """Format in which floating-point tensors travel, to any place: unchanged, bf16, or int8 with one fp32 scale for each 256
    elements. Lossy, except for bf16 tensors that travel as bf16."""

    def count(self, *choices: BlockChoice) -> int:
        return sum(map(self.per_block.count, choices))

    @property
    def num_offloaded(self) -> int:
        """Blocks whose saved tensors leave the device, wherever they go."""
        return self.count(*OFFLOADING)


def keep_elsewhere(per_block: Sequence[BlockChoice], blocks: Collection[int]) -> tuple[BlockChoice, ...]:
    """Choices of the blocks as a device has them that runs some: the others, which are not there, keep."""
    own = frozenset(blocks)
    return tuple(choice if block in own else "keep" for block, choice in enumerate(per_block))


@dataclass(frozen=True, kw_only=True)
class ActivationsPins:
    """Decisions of ``ActivationsPlan`` that are made beforehand; None leaves one free."""

    per_block: tuple[BlockChoice, ...] | None = None
    """One choice stands for every block, however many there are; more than one name each block."""
    compress: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class KernelsPlan:
    """The code that runs blocks."""

    blocks: BlockKernels = "memory_saving"
    """memory_saving: the model's own ops, with norms and capped attention that save less (``runtime/layers/``). compiled: each
    kind of block as one graph that torch's compiler made code of (``runtime/compiled/``)."""


@dataclass(frozen=True, kw_only=True)
class KernelsPins:
    """Decisions of ``KernelsPlan`` that are made beforehand; None leaves one free."""

    blocks: BlockKernels | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="recompute",
        label="recompute activations",
        sentence="Drops what a block's forward saved, or the cheap part of it, and runs that again before the block's backward.",
        group="Activations",
        lowers=("activations",),
    ),
    TechniqueDeclaration(
        name="offload",
        label="offload activations",
        sentence="Moves what a block's forward saved to the host, the disk or a remote store, and back before its backward.",
        group="Activations",
        lowers=("activations",),
    ),
    TechniqueDeclaration(
        name="compress",
        label="compress offloaded activations",
        sentence="Packs what is moved away into bf16 or int8 for the trip: fewer bytes over the link, and rounding.",
        group="Activations",
        loss="any",
    ),
    TechniqueDeclaration(
        name="compile_blocks",
        label="compiled blocks",
        sentence="Has torch's compiler fuse the ops of each kind of block, which saves fewer tensors and reads memory less "
        "often; compiling takes its time once, and sums are rounded in another order.",
        explanation="blocks run as compiled code, which is made before the first step",
        group="Kernels",
        loss="rounding",
        lowers=("activations",),
    ),
)
KNOBS: Final = (
    Knob(
        path="activations.per_block",
        plain="keep",
        uses=(
            Use(technique="recompute", asks=names(*REBUILDING)),
            Use(technique="offload", asks=names(*OFFLOADING)),
            Use(technique="disk", asks=names("offload_disk")),
            Use(technique="remote", asks=names("offload_remote")),
        ),
        training=Face(label="Each block", help="recompute for all, or such as recompute*8, keep*4"),
    ),
    Knob(
        path="activations.compress",
        plain="none",
        words={"none": "as they are"},
        uses=(Use(technique="compress", asks=differs("none")),),
        matters_where=(Condition(path="activations.per_block", holds=names(*OFFLOADING)),),
        training=Face(
            label="Offloaded ones in",
            change="offloaded activations travel in {value}",
            changes={"none": "offloaded activations travel as they are"},
        ),
    ),
    Knob(
        path="kernels.blocks",
        plain="memory_saving",
        words={"memory_saving": "op by op", "compiled": "compiled"},
        uses=(Use(technique="compile_blocks", asks=equals("compiled")),),
        training=Face(
            label="Blocks run",
            help="compiled: fused by torch's compiler, after some time to compile",
            change="compiled blocks",
            changes={"memory_saving": "blocks op by op"},
        ),
    ),
)
