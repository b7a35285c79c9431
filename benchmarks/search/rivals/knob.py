"""Torch's own knob over its range, on real steps: what ``activation_memory_budget`` comes to in bytes and in ops, at 15 settings.

The same steps as the sweep's first model takes, blocks compiled one by one. A step's time is judged by what it does, which is the
same each time: operations of its products, as torch's profiler counts them, and how many ops it runs.
"""

from collections.abc import Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.common.alternatives import Job
from benchmarks.common.parts import Options
from benchmarks.common.record import Row, clear
from benchmarks.search.rivals.contenders import compiled
from benchmarks.search.rivals.racing import allocator_peak
from benchmarks.search.subjects import full_setup, quick_setup

NUM_SETTINGS = 15
QUICK_SETTINGS = 3
_BACKEND = "aot_eager_decomp_partition"
"""Takes torch's decision and runs the same ops as everyone else."""


def knob_rows(options: Options) -> Iterator[Row]:
    setup = quick_setup() if options.quick else full_setup()
    subject = setup.subjects[0]
    job = Job(spec=subject.spec, workload=subject.workload, device=options.device)
    number = QUICK_SETTINGS if options.quick else NUM_SETTINGS
    highest_bytes = 0
    fewest_flops: int | None = None
    for index in range(number):
        share = index / (number - 1)
        found = _measured(job, share)
        yield {
            "what": "knob",
            "model": subject.name,
            "activation_memory_budget": round(share, 4),
            **found,
            "peaks_below_a_lower_setting": found["peak_bytes"] < highest_bytes,
            "works_more_than_a_lower_setting": fewest_flops is not None and found["flops"] > fewest_flops,
        }
        highest_bytes = max(highest_bytes, found["peak_bytes"])
        fewest_flops = found["flops"] if fewest_flops is None else min(fewest_flops, found["flops"])


def _measured(job: Job, share: float) -> Row:
    contender: Any = compiled(job, _BACKEND, share).make(None)
    try:
        for _ in range(2):
            contender.step()
        peak_bytes = allocator_peak(contender, job.device)
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
            contender.step()
        events = list(profiler.key_averages())
        num_ops = sum(event.count for event in events if event.key.startswith("aten::"))
        return {"peak_bytes": peak_bytes, "flops": sum(event.flops for event in events), "num_ops": num_ops}
    finally:
        contender.close()
        del contender
        clear()
