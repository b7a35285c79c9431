"""Gradients that ranks exchange in backward: which of them a rank lets go of, and what compute waits for. Torch-free.

A rank exchanges each gradient as soon as it is complete (``runtime/ranks``). Here a block's are exchanged when its backward
has ended, one message for each tensor. Where ranks take steps alone there are none, and what they do every so many steps follows
the update.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from optimizer.estimate.categories.network import (
    Exchange,
    Network,
    estimate_sent_bytes,
    gradient_collective,
    overlaps,
    reduces_each_micro_batch,
)
from optimizer.estimate.categories.outer_step import OuterCosts
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import list_sent
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.shape.completed import CompletedGradients, OthersGradients, Place
from optimizer.estimate.step.update import exchange_task
from optimizer.estimate.tasks.tasks import NO_TIME, Task, add_legs, risen_bytes, single
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.plan import Plan

_NAME: Final = "gradient exchange"
_SENT: Final[Table[Hashable, tuple[int, ...]]] = Table()
_TASKS: Final[Table[tuple[Network, bool, int, bool, bool], dict[Place, Task]]] = Table()


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientExchange:
    """The exchange of one rank's gradients under one plan."""

    network: Network
    rank: int
    others: OthersGradients | None
    """None where every rank keeps every gradient."""
    in_each_micro_batch: bool
    """True after each micro-batch, False after the last alone."""
    tasks: dict[Place, Task]
    """The exchanges of each place, where any gradient is complete."""
    last_tasks: dict[Place, Task]
    """The same after the last micro-batch, when owners in several replicas sum theirs; else as ``tasks``."""
    rank_sent_bytes: tuple[int, ...]
    """Bytes that each rank sends in a step, norms and weights among them."""

    @classmethod
    def of(
        cls,
        compiled: CompiledShape,
        tensors: TensorList,
        *,
        plan: Plan,
        network: Network,
        device_kind: str,
        rank: int,
        trains_all: bool,
        dealt: Sequence[Exchange] = (),
    ) -> "GradientExchange":
        """tensors: all that are trained. trains_all: False under adapters. dealt: exchanges of blocks' weights, each time that
        a block runs; not among those whose new values are sent once.
        """
        layout = plan.layout
        others = None
        if layout.shares_state:
            others = OthersGradients.find(
                compiled, tensors, rank=layout.place_of(rank), num_ranks=layout.num_sharing
            )
        list_tasks = partial(_list_tasks, compiled, tensors, plan=plan, network=network, device_kind=device_kind)
        return cls(
            network=network,
            rank=rank,
            others=others,
            in_each_micro_batch=reduces_each_micro_batch(plan),
            tasks=list_tasks(crosses=plan.gradients.choice != "keep"),
            last_tasks=list_tasks(crosses=True),
            rank_sent_bytes=_SENT.obtain(
                tensors,
                (network, layout, tuple(dealt), trains_all, *_decisions_of(plan)),
                lambda: estimate_sent_bytes(
                    network,
                    tensors.num_elements,
                    plan,
                    are_summed=_are_summed(tensors, layout),
                    are_sent=list_sent(tensors, plan, trains_all=trains_all),
                    dealt=dealt,
                ),
            ),
        )

    @property
    def held_up_ms(self) -> float:
        """Milliseconds for which compute waits in each micro-batch that exchanges."""
        return sum(task.time.network_ms for task in self.last_tasks.values() if task.arrives)

    @property
    def beside_ms(self) -> float:
        """Milliseconds on the network beside backward."""
        return sum(task.time.network_ms for task in self.last_tasks.values() if task.leaves)

    @property
    def is_last_alike(self) -> bool:
        """True if the last micro-batch exchanges what every other one does."""
        return self.in_each_micro_batch and self.last_tasks is self.tasks

    def in_turn(
        self, behind: Sequence[Task], blocks: Sequence[Task], *, tasks_per_block: int, is_last: bool
    ) -> Iterator[Task]:
        """Backward with the exchanges. behind: of the head and of what is before it; blocks: last to first."""
        tasks = self.last_tasks if is_last else self.tasks
        for place, task in zip(("head", "norm"), behind, strict=True):
            yield task
            if place in tasks:
                yield tasks[place]
        for number, task in enumerate(blocks, start=1):
            yield task
            if number % tasks_per_block == 0 and task.block in tasks:
                yield tasks[task.block]


def list_outer_tasks(costs: OuterCosts) -> tuple[Task, ...]:
    """Tasks after the update in a step at whose end ranks that take steps alone are brought together."""
    return (
        _in_turn("weights to the host", costs.before),
        exchange_task("optimizer", "outer exchange", costs.exchange_ms),
        _in_turn("outer step", costs.after, host_bytes=costs.written_bytes),
    )


def _in_turn(name: str, legs: Legs, *, host_bytes: int = 0) -> Task:
    """Work on the host for which compute waits. host_bytes: there meanwhile."""
    return Task(
        phase="optimizer",
        block=-1,
        name=name,
        bytes=risen_bytes(single("weights", 0), host=host_bytes),
        time=add_legs(NO_TIME, legs),
        arrives=(Transfer(key=name, legs=legs, holds_up_cpu=True),),
    )


def _decisions_of(plan: Plan) -> tuple[Hashable, ...]:
    """Decisions that the bytes which ranks send depend on, beside the layout."""
    weights = plan.weights
    return weights.bytes_per_element, weights.place, plan.gradients.choice, plan.batch.accumulation_steps


def _list_tasks(
    compiled: CompiledShape, tensors: TensorList, *, plan: Plan, network: Network, device_kind: str, crosses: bool
) -> dict[Place, Task]:
    """crosses: whether owners in several replicas sum what is summed within each."""
    crosses = crosses and network.replicas > 1 and plan.layout.shares_state
    size, waits = plan.weights.bytes_per_element, not overlaps(plan, device_kind=device_kind)
    collective = gradient_collective(plan.layout)
    within = network.within if plan.layout.shares_state else network
    owners = tensors.owners(within.num_ranks)
    are_summed = _are_summed(tensors, plan.layout)

    def make() -> dict[Place, Task]:
        found: dict[Place, Task] = {}
        for place, indices in CompletedGradients.find(compiled, tensors).by_place.items():
            known = [index for index in indices if index >= 0 and are_summed[index]]
            if known:
                sizes = [size * tensors.num_elements[index] for index in known]
                own = [owners[index] for index in known]
                exchange_ms = within.sum_ms(collective, sizes, element_bytes=size, owners=own)
                # One after the other: ranks of a replica sum the next tensor together.
                exchange_ms += network.across.sum_ms("all_reduce", sizes, element_bytes=size) if crosses else 0.0
                found[place] = exchange_task("backward", _NAME, exchange_ms, waits=waits)
        return found

    return _TASKS.obtain(compiled, (network, plan.layout.shares_state, size, waits, crosses), make)


def _are_summed(tensors: TensorList, layout: DeviceLayout) -> list[bool]:
    """Flags of the tensors: true where ranks sum their gradients, which those that share each block do of a few."""
    return [not layout.shares_blocks or size.is_partial for size in tensors.sizes]
