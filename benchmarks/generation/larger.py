"""Weights and keys and values of four times what the device has room for: from host memory, and from the disk.

The cap is enforced, and the run ends with the tokens of plain generation.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, clear, goal, none_of
from benchmarks.generation.alternatives import Job, Theirs
from benchmarks.generation.subjects import setup_of, wanted_of
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.probe.probe import probe_machine
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import make_prompts, measure_generation
from optimizer.search.generation.search import search_generation_plans

NAME = "larger"
TIMES = 4
_HOST_BYTES_WITH_DISK = 2**25
"""Too few for weights or cache: what leaves the device goes to the disk."""
_NUM_COMPARED = 8
"""Sequences that plain generation continues as well."""


def measure(options: Options) -> Iterator[Row]:
    setup = setup_of(options)
    machine = probe_machine(device=str(options.device), max_s=setup.probe_s)
    for subject in wanted_of(setup.subjects, options):
        profile = profile_generation(subject.spec, representations=["fp32"])
        workload = subject.larger_workload
        plain = GenerationPlan(batch_size=workload.num_sequences)
        whole = estimate_generation(profile, plan=plain, workload=workload, machine=machine)
        held_bytes = whole.device_bytes_by_category["weights"] + whole.kv_cache_bytes
        for place, host_bytes in (("host", None), ("disk", _HOST_BYTES_WITH_DISK)):
            goal_ = GenerationGoal(device_budget_bytes=held_bytes // TIMES, host_budget_bytes=host_bytes)
            chosen = search_generation_plans(profile, workload=workload, goal=goal_, machine=machine).chosen
            with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
                job = Job(spec=subject.spec, workload=workload, device=options.device, scratch=Path(folder))
                measured = measure_generation(
                    subject.spec,
                    plan=chosen.plan,
                    workload=workload,
                    device=options.device,
                    cap_bytes=goal_.device_budget_bytes,
                    host_cap_bytes=host_bytes,
                    scratch=Path(folder),
                )
            yield {
                "part": NAME,
                "what": "larger",
                "model": subject.name,
                "place": place,
                "held_bytes": held_bytes,
                "budget_bytes": goal_.device_budget_bytes,
                "times": round(held_bytes / measured.device_peak_bytes, 2),
                "plan": chosen.plan.to_json(),
                "peak_bytes": measured.device_peak_bytes,
                "predicted_peak_bytes": chosen.prediction.device_peak_bytes,
                "host_peak_bytes": measured.host_peak_bytes,
                "disk_peak_bytes": measured.disk_peak_bytes,
                "tokens_per_s": round(measured.tokens_per_s, 1),
                "predicted_tokens_per_s": round(chosen.prediction.tokens_per_s, 1),
                "equals_plain": _equals_plain(job, measured.tokens),
            }
            clear()


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    run = [row for row in rows if row.get("what") == "larger"]
    over = sum(row["peak_bytes"] > row["budget_bytes"] for row in run)
    wrong = sum(not row["equals_plain"] for row in run)
    places = sorted({row["place"] for row in run})
    wanted = ["disk", "host"]
    return {
        "weights and cache of four times the budget: runs that finished": goal(places or None, wanted, met=places == wanted),
        "of these, peaks over the budget": none_of(over, run),
        "of these, other tokens than transformers'": none_of(wrong, run),
    }


PART = Part(name=NAME, measure=measure, summarize=summarize, case="model")


def _equals_plain(job: Job, tokens: torch.Tensor) -> bool:
    """Compare some sequences, one by one."""
    prompts = make_prompts(job.spec.vocab_size, job.workload)[:_NUM_COMPARED]
    plain = Theirs(job, None)
    try:
        expected = torch.cat([plain.generate(prompt) for prompt in torch.split(prompts, 1)])
    finally:
        plain.close()
    return bool(torch.equal(tokens[:_NUM_COMPARED], expected))
