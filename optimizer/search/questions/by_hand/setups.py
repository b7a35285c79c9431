"""Setups of several devices that people write by hand, as far as frameworks offer them: all devices, equal shares, and each the
same way with every block but for which of them run again.

Each stands with no blocks recomputed, with all, and with as few as have to be. *Not here*: shares by speed, and anything else
that differs from block to block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.layout import DataParallel, DeviceLayout, RankShare
from optimizer.plan.logits_and_loss import MAX_CHUNKS
from optimizer.search.arrangements import PerBlock
from optimizer.search.cutting import even_cut
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.grid import TOKENS_PER_CHUNK

Recompute = Literal["none", "full", "some"]
RECOMPUTES: Final[dict[Recompute, tuple[str, str]]] = {
    "none": ("", "no block recomputed"),
    "full": ("_recompute", "every block recomputed"),
    "some": ("_some_recompute", "as few blocks recomputed as have to be"),
}
"""The end of a label, and words for it."""
PARTS: Final = 8
"""Recomputed blocks are counted in eighths of a stage."""
_BLOCKS_OF_POOL: Final = 2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to share training among devices."""

    label: str
    words: str
    sharing: DataParallel | Literal["blocks", "cut", "pool"]
    """The devices share the batch, with more and more of the state shared out; or each block; or the model's blocks, cut once or
    into many stages that the devices take in turn."""
    updates_on_host: bool = False
    """Gradients and optimizer state are there."""
    streams: bool = False
    """Weights are there too."""
    is_hybrid: bool = False
    """Each machine has all that is shared out, where a network joins several."""

    @property
    def deals_out(self) -> bool:
        """True if each device has sequences of its own."""
        return self.sharing not in ("blocks", "cut", "pool")

    def layout(
        self, *, num_devices: int, num_blocks: int, ranks: tuple[RankShare, ...] = (), replicas: int = 1
    ) -> DeviceLayout:
        """The layout on so many devices, 2 or more. ranks: where they are of several kinds. replicas: that fit inside a machine
        each. Raises InvalidPlan where the model has too few blocks.
        """
        if self.sharing == "blocks":
            return DeviceLayout(num_devices=num_devices, tensor=num_devices, ranks=ranks)
        if self.sharing == "cut" or self.sharing == "pool":
            rounds = num_blocks // (num_devices * _BLOCKS_OF_POOL) if self.sharing == "pool" else 1
            return DeviceLayout(
                num_devices=num_devices,
                stage_blocks=even_cut(num_blocks, num_devices * max(1, rounds)),
                schedule="breadth_first" if self.sharing == "pool" else "1f1b",
                ranks=ranks,
            )
        # No memory of the host is in two machines.
        has_replicas = (self.is_hybrid or self.streams) and replicas < num_devices
        return DeviceLayout(num_devices=num_devices, data=self.sharing, ranks=ranks, replicas=replicas if has_replicas else 1)

    def setting(self, formats: OuterPlan, layout: DeviceLayout, *, size: int, count: int, num_chunks: int) -> OuterPlan:
        """All that is decided outside the blocks. formats: whose number formats and kernels it has, but for 8-bit state, which
        the host cannot update. size, count: of micro-batches.
        """
        return replace(
            formats.base,
            bits=32 if self.updates_on_host else formats.bits,
            micro_batch_size=size,
            accumulation_steps=count,
            num_chunks=num_chunks,
            gradients="host" if self.updates_on_host else "keep",
            state_place="host" if self.updates_on_host else "device",
            weights_place="host" if self.streams else "device",
            layout=layout,
        )


SETUPS: Final = (
    Setup(label="ddp", words="DDP: everything on each device", sharing="replicated"),
    Setup(label="zero1", words="ZeRO-1: optimizer state shared out", sharing="zero1"),
    Setup(label="zero2", words="ZeRO-2: optimizer state and gradients shared out", sharing="zero2"),
    Setup(label="fsdp", words="FSDP (ZeRO-3): weights, gradients and state shared out", sharing="zero3"),
    Setup(
        label="hsdp",
        words="HSDP (hybrid ZeRO-3): weights, gradients and state shared out within each machine",
        sharing="zero3",
        is_hybrid=True,
    ),
    Setup(
        label="zero_offload",
        words="ZeRO-Offload: gradients and state shared out, on the host",
        sharing="zero2",
        updates_on_host=True,
    ),
    # The nearest here to what FSDP does when it offloads: the host has the weights once for all devices.
    Setup(
        label="fsdp_offload",
        words="FSDP with CPU offload: weights, gradients and state on the host",
        sharing="zero2",
        updates_on_host=True,
        streams=True,
    ),
    Setup(label="tensor", words="tensor parallel: a part of each block on each device", sharing="blocks"),
    Setup(label="1f1b", words="pipeline of an even cut (1F1B)", sharing="cut"),
    Setup(
        label="pooled",
        words="pooled: the host has all, each device works on two blocks in turn",
        sharing="pool",
        updates_on_host=True,
        streams=True,
    ),
)


def list_labels() -> Iterator[tuple[str, str]]:
    """The label of each setup with each way to recompute, and words for it."""
    for setup in SETUPS:
        for ending, words in RECOMPUTES.values():
            yield setup.label + ending, f"{setup.words}; {words}"


def most_chunks(size: int, sequence_length: int) -> int:
    """Chunks that the loss of a micro-batch is cut into where it is cut."""
    return min(MAX_CHUNKS, -(-size * sequence_length // TOKENS_PER_CHUNK[0]))


def recomputing(stage_blocks: Sequence[int], eighths: int) -> PerBlock:
    """The first eighths of the blocks of every stage, rounded up, are recomputed. stage_blocks: all blocks as one stage where the
    model is not cut.
    """
    found: list[BlockChoice] = []
    for size in stage_blocks:
        number = -(-size * eighths // PARTS)
        found += ["recompute" if index < number else "keep" for index in range(size)]
    return tuple(found)
