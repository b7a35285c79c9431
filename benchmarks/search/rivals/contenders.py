"""The rivals of plans in the sweep: training loops with one of torch's ways of saving memory, each with a ladder of its knob.

Blocks recomputed are wrapped in ``torch.utils.checkpoint``, as transformers does. ``activation_memory_budget`` is torch's knob
of what a compiled graph saves; blocks are compiled one by one, as torchtitan does, since a whole model compiled gave higher
peaks and takes minutes. It is tried with inductor, which also fuses ops, and op by op (as ``aot_eager_decomp_partition``), which
takes the same decision and runs what everyone else does: against that plans are compared, against the former plans and kernels.

All but those with inductor make products as the runtime does, or every plan would be ahead by what a library is. Plain loops,
recomputed blocks and ``save_on_cpu`` run its light layers too; policies of single ops and what is compiled run the model as
transformers has it.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.common.alternatives import Factory, Job, Loop
from benchmarks.search.rivals import sac
from optimizer.models.anatomy import find_blocks
from optimizer.runtime.layers.matmul_dispatch import interrupting, making_products
from optimizer.runtime.meter.meter import Meter

PLAIN, FULL = "plain", "full recompute"
EVERY = (2, 3, 4)
BUDGETS = (0.0, 0.5, 1.0)
"""Settings of ``activation_memory_budget``: shares of what the graph would save."""
FUSED_BUDGETS = (0.5,)
"""Settings that are compiled with inductor, which takes long."""
NUM_POLICIES = 4
_MAX_COMPILED = 256


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One loop that a plan is held against."""

    name: str
    family: str
    make: Factory
    is_compiled: bool = False
    """Its memory is seen by torch's profiler only."""
    is_fused: bool = False
    """Runs other kernels than everyone else."""
    accumulates: bool = False
    """Takes the step in micro-batches."""
    knob: float | None = None


class Wrapped(Loop):
    """Contender with some blocks' forward replaced. wrap: from a block's index and forward to another, or None to leave it."""

    def __init__(
        self, job: Job, meter: Meter | None, *, wrap: Callable[[int, Any], Any], **options: bool
    ) -> None:
        super().__init__(job, meter, **options)
        for index, block in enumerate(find_blocks(self.model)):
            wrapped = wrap(index, block.forward)
            if wrapped is not None:
                block.forward = wrapped


def list_baselines(
    job: Job, *, num_policies: int = NUM_POLICIES, budgets: tuple[float, ...] = BUDGETS, fused: tuple[float, ...] = ()
) -> list[Baseline]:
    """The plain loop first, full recompute second. fused: budgets that inductor compiles for."""
    statistics = sac.collect_statistics(job) if num_policies else None
    ladder = sac.policy_ladder(statistics, count=num_policies) if statistics is not None else ()
    return [
        Baseline(name=PLAIN, family=PLAIN, make=_loop(job)),
        Baseline(name=FULL, family=FULL, make=_checkpointing(job, lambda index: True)),
        *_every(job),
        Baseline(name="save_on_cpu", family="save_on_cpu", make=_loop(job, saves_on_cpu=True)),
        *_accumulating(job),
        *(_selective(job, share, policy) for share, policy in ladder),
        *(compiled(job, "aot_eager_decomp_partition", budget) for budget in budgets),
        *(compiled(job, "inductor", budget) for budget in fused),
    ]


def _loop(job: Job, **options: Any) -> Factory:
    return lambda meter: Loop(job, meter, quick_products=True, light_layers=True, **options)


def _every(job: Job) -> Iterator[Baseline]:
    for every in EVERY:
        if every <= job.spec.num_blocks:
            make = _checkpointing(job, partial(_is_multiple, every))
            yield Baseline(name=f"1 of {every} blocks recomputed", family="every k-th", make=make, knob=float(every))


def _accumulating(job: Job) -> Iterator[Baseline]:
    """Baselines beside plans that may accumulate too: half the batch, and one sequence at a time."""
    batch = job.workload.global_batch_size
    for cut in sorted({2, batch}):
        if 1 < cut <= batch and batch % cut == 0:
            for recomputes in (False, True):
                words = f"{cut} micro-batches" + (", full recompute" if recomputes else "")
                make = _loop(job, num_micro_batches=cut, checkpointing=recomputes)
                yield Baseline(name=words, family="micro-batches", make=make, accumulates=True, knob=float(cut))


def _is_multiple(every: int, index: int) -> bool:
    return (index + 1) % every == 0


def _checkpointing(job: Job, is_recomputed: Callable[[int], bool]) -> Factory:
    def wrap(index: int, forward: Any) -> Any:
        return _checkpointed(forward) if is_recomputed(index) else None

    return lambda meter: Wrapped(job, meter, wrap=wrap, quick_products=True, light_layers=True)


def _selective(job: Job, share: float, policy: sac.Policy) -> Baseline:
    def wrap(index: int, forward: Any) -> Any:
        saves = policy.saves[index]
        if saves is None:
            return None
        return _checkpointed(forward, context_fn=partial(sac.selective_contexts, policy.names[index], saves))

    name = f"sac_milp {share:.2f}"
    return Baseline(
        name=name, family="sac_milp", make=lambda meter: Wrapped(job, meter, wrap=wrap, quick_products=True), knob=share
    )


def _checkpointed(forward: Any, **options: Any) -> Any:
    interrupted = interrupting(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(interrupted, *args, use_reentrant=False, **options, **kwargs)

    return run


def compiled(job: Job, backend: str, budget: float) -> Baseline:
    """Blocks compiled one by one under ``activation_memory_budget``."""
    compiler = _compiler(backend, budget)

    def make(meter: Meter | None) -> Loop:
        def wrap(index: int, forward: Any) -> Any:
            return torch.compile(forward, backend=compiler, dynamic=False)

        return Wrapped(job, meter, wrap=wrap)

    is_fused = backend == "inductor"
    family = "activation_memory_budget" + (", inductor" if is_fused else "")
    return Baseline(
        name=f"{family} {budget:g}", family=family, make=make, is_compiled=True, is_fused=is_fused, knob=budget
    )


def _compiler(backend: str, budget: float) -> Callable[..., Any]:
    """The backend under that budget, one for each: what it compiled is found again by the backend alone."""
    import torch._dynamo as dynamo
    import torch._functorch.config as settings

    torch._dynamo.config.recompile_limit = _MAX_COMPILED
    torch._dynamo.config.accumulated_recompile_limit = _MAX_COMPILED
    compile_graph = dynamo.lookup_backend(backend) if backend == "inductor" else _run_op_by_op

    def compiler(graph: Any, inputs: Any) -> Any:
        with settings.patch(activation_memory_budget=budget):
            return compile_graph(graph, inputs)

    return compiler


def _run_op_by_op(graph: Any, inputs: Any) -> Any:
    """Backend like ``aot_eager_decomp_partition``, with matrix products made as the runtime makes them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    compile_graph: Any = aot_autograd(
        fw_compiler=_with_quick_products,
        bw_compiler=_with_quick_products,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    return compile_graph(graph, inputs)


def _with_quick_products(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import boxed_nop

    quick = {torch.ops.aten.mm.default: _quick_mm, torch.ops.aten.addmm.default: _quick_addmm}
    for node in graph.graph.nodes:
        node.target = quick.get(node.target, node.target)
    return boxed_nop(graph, inputs)


def _quick_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    with making_products(left.shape[0], *right.shape, of=left):
        return torch.mm(left, right)


def _quick_addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scales: Any) -> torch.Tensor:
    with making_products(left.shape[0], *right.shape, of=left):
        return torch.addmm(bias, left, right, **scales)
