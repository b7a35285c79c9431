"""Plans drawn by chance over several tiny models: each runs under a cap of its predicted peak, and moves the predicted bytes.

Nothing is rounded: device, host and disk bytes, those in a remote store where there is one, and the bytes over every link, are
those that the estimate names. Under a cap one byte lower the same plan is refused, so the cap bites.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy.configs import MODELS, SHAPES, WITHOUT_CACHE, make_config
from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, clear, goal, none_of
from benchmarks.common.remote_store import remote_store
from optimizer.base.errors import HeadroomError, OutOfDeviceMemory
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.search.generation.levers import list_arrangements
from optimizer.search.generation.one_device import generation_problem
from optimizer.workload import GenerationWorkload

NAME = "plans"
NUM_PLANS, LEAST_PLANS = 72, 60
_AMPLE_BYTES = 2**40
_QUICK_REPRESENTATIONS = ("fp32", "fp32/int4")
_WITH_STATE = frozenset({"headroom_decoder"})
"""Keeps a state in some layers, which is no cache of keys and values."""
_WORKLOADS = (
    GenerationWorkload(prompt_length=24, num_new_tokens=9, num_sequences=6),
    GenerationWorkload(prompt_length=70, num_new_tokens=5, num_sequences=5),
    GenerationWorkload(prompt_length=8, num_new_tokens=72, num_sequences=4),
)


def measure(options: Options) -> Iterator[Row]:
    with remote_store():
        yield from _measure(options)


def _measure(options: Options) -> Iterator[Row]:
    machine = probe_machine(device=str(options.device), max_s=1.0)
    names = [name for name in MODELS if name not in WITHOUT_CACHE | _WITH_STATE]
    num_plans = 8 if options.quick else NUM_PLANS
    models = names[:1] if options.quick else names
    for index, name in enumerate(models):
        if not options.wants(name):
            continue
        chance = random.Random(f"{options.seed} {name}")
        spec = read_model_spec(make_config(name, SHAPES["tiny"]))
        profile = profile_generation(spec, representations=_QUICK_REPRESENTATIONS if options.quick else None)
        share = num_plans // len(models) + (index < num_plans % len(models))
        for plan, workload in _draw(profile, machine, chance, count=share):
            yield _run(name, spec, profile, machine, plan=plan, workload=workload, options=options)
        clear()


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    run = [row for row in rows if row.get("what") == "plan"]
    wanted = {
        "peaks over the predicted one": "is_over",
        "peaks that are not the predicted ones to the byte": "is_off",
        "bytes moved, on the host or on the disk that are not the formula's": "is_moved_off",
        "caps one byte lower that did not bite": "is_loose",
    }
    counts = {label: sum(row[key] for row in run) for label, key in wanted.items()}
    found = {label: none_of(count, run) for label, count in counts.items()}
    found["plans"] = goal(len(run), f">= {LEAST_PLANS}", met=len(run) >= LEAST_PLANS, needs="all cases")
    return found


PART = Part(name=NAME, measure=measure, summarize=summarize, case="model")


def _draw(
    profile: GenerationProfile, machine: Machine, chance: random.Random, *, count: int
) -> Iterator[tuple[GenerationPlan, GenerationWorkload]]:
    """Distinct plans that the machine can carry out, each with one of the workloads."""
    seen: set[tuple[GenerationPlan, GenerationWorkload]] = set()
    goal_ = GenerationGoal(device_budget_bytes=_AMPLE_BYTES, allow_lossy=True)
    while len(seen) < count:
        workload = chance.choice(_WORKLOADS)
        problem = generation_problem(profile, workload=workload, goal=goal_, machine=machine)
        # What comes ahead in vain comes right all the same.
        problem = replace(problem, has_copies_beside=True)
        plan = chance.choice(list_arrangements(problem))
        drawn = (replace(plan, batch_size=chance.randint(1, workload.num_sequences)), workload)
        if drawn not in seen and problem.permits(drawn[0]):
            seen.add(drawn)
            yield drawn


def _run(
    name: str,
    spec: ModelSpec,
    profile: GenerationProfile,
    machine: Machine,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    options: Options,
) -> Row:
    prediction = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    head = {
        "part": NAME,
        "what": "plan",
        "model": name,
        "prompt_length": workload.prompt_length,
        "plan": plan.to_json(),
    }
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        run: dict[str, Any] = {"plan": plan, "workload": workload, "device": options.device, "scratch": Path(folder)}
        try:
            measured = measure_generation(spec, cap_bytes=prediction.device_peak_bytes, **run)
        except OutOfDeviceMemory as error:
            return {**head, "error": str(error), "is_over": True, "is_off": True, "is_moved_off": False, "is_loose": False}
        try:
            measure_generation(spec, cap_bytes=prediction.device_peak_bytes - 1, **run)
            is_loose = options.device.type == "cpu"
        except HeadroomError:
            is_loose = False
    elsewhere, predicted = (
        (each.host_peak_bytes, each.disk_peak_bytes, each.remote_peak_bytes, each.copied_bytes)
        for each in (measured, prediction)
    )
    return {
        **head,
        "peak_bytes": measured.device_peak_bytes,
        "predicted_peak_bytes": prediction.device_peak_bytes,
        "copied_bytes": measured.copied_bytes,
        "is_over": measured.device_peak_bytes > prediction.device_peak_bytes,
        "is_off": measured.device_peak_bytes != prediction.device_peak_bytes and options.device.type == "cpu",
        "is_moved_off": elsewhere != predicted,
        "is_loose": is_loose,
    }
