"""Random small problems: peaks and times that grow with the batch as the estimator's do, dips of measured curves included."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.goal import GenerationGoal
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import passes_of
from optimizer.search.generation.levers import list_arrangements, list_families
from optimizer.search.generation.problem import GenerationProblem
from optimizer.search.generation.solve import largest_of
from optimizer.workload import GenerationWorkload

OBJECTIVES = ("throughput", "first_token", "largest_batch")
_PREDICTION = GenerationPrediction(
    device_peak_bytes=0,
    device_peak_low_bytes=0,
    device_peak_high_bytes=0,
    device_bytes_by_category={},
    peak_moment="prefill",
    kv_cache_bytes=0,
    host_peak_bytes=0,
    disk_peak_bytes=0,
    copied_bytes={},
    copied_bytes_per_pass={},
    copied_bytes_per_token={},
    prefill_ms=0.0,
    prefill_low_ms=0.0,
    prefill_high_ms=0.0,
    decode_ms=0.0,
    decode_low_ms=0.0,
    decode_high_ms=0.0,
    decode=(),
    tokens_per_s=0.0,
    total_s=0.0,
    lane_busy_ms={},
    exposed_ms={},
    prefill_by_kind_ms={},
    decode_by_kind_ms={},
    timeline=(),
    time_source="table",
)
MAX_FAMILIES = 25
_TECHNIQUES = (
    "stream_weights", "disk", "remote", "bf16", "fp16", "quantize_frozen", "offload_kv", "host_attention", "quantize_kv",
)  # fmt: skip
_KV = {"same": 1.0, "int8": 0.5, "int4": 0.3}
_WEIGHT = {"same": 1.0, "int8": 0.5, "int4": 0.3, "nf4": 0.3}


def make_problem(seed: int, *, num_sequences: int | None = None, has_dips: bool = True) -> GenerationProblem:
    """Make a problem with a random goal; some have no plan that fits."""
    draw = random.Random(seed)
    workload = GenerationWorkload(
        prompt_length=8, num_new_tokens=draw.randint(1, 5), num_sequences=num_sequences or draw.randint(1, 14)
    )
    weights_bytes, kv_bytes = draw.randint(200, 2000), draw.randint(1, 200)
    bend = draw.randint(1, 12)
    fixed_ms, each_ms = draw.uniform(0.1, 20), draw.uniform(0.1, 5)
    rates = {dtype: draw.uniform(0.5, 2) for dtype in ("fp32", "bf16", "fp16")}
    unpacking = {"same": 0.0, "int8": draw.uniform(0, 5), "int4": draw.uniform(0, 8), "nf4": draw.uniform(0, 8)}
    link_ms = {"device": 0.0, "host": draw.uniform(0, 60)}
    link_ms["disk"] = link_ms["host"] + draw.uniform(0, 140)
    link_ms["remote"] = link_ms["host"] + draw.uniform(0, 140)
    act_bytes = draw.randint(0, 100)
    hidden = [draw.uniform(0, 1) for _ in range(9)]
    dips = [draw.uniform(0.9, 1.0) if has_dips else 1.0 for _ in range(workload.num_sequences + 1)]

    def held_bytes(plan: GenerationPlan) -> int:
        size = 1.0 if plan.weights.dtype == "fp32" else 0.5
        return int(weights_bytes * size * _WEIGHT[plan.weights.frozen])

    def pass_ms(plan: GenerationPlan, sizes: list[int]) -> float:
        """Time of a pass with micro-batches of these sizes."""
        weights = plan.weights
        compute_ms = 0.0
        for size in sizes:
            each = fixed_ms + unpacking[weights.frozen] + each_ms / rates[weights.dtype] * max(size, bend)
            compute_ms += each * dips[size]
        cache = plan.kv_cache
        for size in sizes:
            on_link = host_attention if cache.attention == "host" else kv_link[cache.place] * _KV[cache.dtype]
            compute_ms += size * (kv_unpacking[cache.dtype] + on_link)
        return compute_ms + link_ms[weights.place] * _WEIGHT[weights.frozen] * hidden[weights.prefetch]

    def price(plan: GenerationPlan) -> GenerationPrediction:
        held = held_bytes(plan)
        is_here = plan.weights.place == "device"
        here = held if is_here else held * (1 + plan.weights.prefetch) // 10
        shapes = passes_of(plan, workload)
        passes = [([each.batch_size for each in shape], shape[0].num_steps, count) for shape, count in shapes]
        prefill = shapes[0][0][0].prompt_length / workload.prompt_length
        kv_here = int(kv_bytes * _KV[plan.kv_cache.dtype])
        kv_here = kv_here if plan.kv_cache.place == "device" else kv_here // 4
        kv_away = 0 if plan.kv_cache.place == "device" else int(sum(passes[0][0]) * kv_bytes * _KV[plan.kv_cache.dtype])
        peak = here + sum(passes[0][0]) * kv_here + int(plan.batch_size * prefill * act_bytes)
        prefill_ms = (1 + prefill) * pass_ms(plan, passes[0][0])
        return replace(
            _PREDICTION,
            device_peak_bytes=peak,
            device_peak_high_bytes=peak + peak // 20,
            **{
                f"{tier}_peak_bytes": held * (plan.weights.place == tier) + kv_away * (plan.kv_cache.place == tier)
                for tier in ("host", "disk", "remote")
            },
            prefill_ms=prefill_ms,
            decode_ms=pass_ms(plan, passes[0][0]) if passes[0][1] > 1 else 0.0,
            total_s=sum(count * (prefill + steps) * pass_ms(plan, sizes) for sizes, steps, count in passes) / 1000,
        )

    slack, chance = draw.choice([0.0, 0.02, 0.5]), random.Random(seed)

    def floors(plan: GenerationPlan, sizes: Sequence[int], micro_batches: Sequence[int]) -> Floors:
        """Up to so much less than the price of each; of micro-batches that would be empty nothing is asked."""
        found = np.zeros((7, len(micro_batches), len(sizes)))
        for row, number in enumerate(micro_batches):
            for column, size in enumerate(sizes):
                asked = replace(plan, batch_size=size, num_micro_batches=number)
                if size <= largest_of(asked, workload.num_sequences):
                    priced = known(asked)
                    exact = (priced.total_s, priced.total_s, priced.prefill_ms, priced.device_peak_high_bytes,
                             priced.host_peak_bytes, priced.disk_peak_bytes, priced.remote_peak_bytes)  # fmt: skip
                    found[:, row, column] = [value * (1 - slack * chance.random()) for value in exact]
        return Floors(*found)

    known = cache(price)
    forbid = tuple(name for name in ("stream_weights", "disk", "bf16", "fp16", "quantize_frozen") if draw.random() < 0.2)
    goal = GenerationGoal(
        device_budget_bytes=draw.randint(20, 2000),
        objective=draw.choice(OBJECTIVES),
        allow_lossy=draw.random() < 0.6,
        forbid=forbid,
    )
    budgets = {f"{tier}_budget_bytes": draw.choice([0, 500, 10_000]) for tier in ("host", "disk", "remote")}
    kv_unpacking = {"same": 0.0, "int8": draw.uniform(0, 1), "int4": draw.uniform(0, 1)}
    kv_link = {"device": 0.0, "host": draw.uniform(0, 5)}
    kv_link["disk"] = kv_link["host"] + draw.uniform(0, 15)
    kv_link["remote"] = kv_link["host"] + draw.uniform(0, 15)
    host_attention = draw.uniform(0, 5)
    problem = GenerationProblem(
        workload=workload,
        goal=replace(goal, forbid=forbid),
        price=known,
        floors=floors,
        can_cut_prompts=draw.random() < 0.3,
        has_copies_beside=draw.random() < 0.7,
        **budgets,
    )
    return _with_few_plans(problem, draw)


def _with_few_plans(problem: GenerationProblem, draw: random.Random) -> GenerationProblem:
    """Forbid so many techniques that trying all plans takes milliseconds."""
    others = draw.sample(_TECHNIQUES, k=len(_TECHNIQUES))
    while len(list_families(problem)) > MAX_FAMILIES:
        problem = replace(problem, goal=replace(problem.goal, forbid=(*problem.goal.forbid, others.pop())))
    return problem


def list_every_plan(problem: GenerationProblem) -> list[GenerationPlan]:
    """All that the goal allows, of every batch."""
    return [
        replace(plan, batch_size=size)
        for plan in list_arrangements(problem)
        for size in range(1, largest_of(plan, problem.workload.num_sequences) + 1)
    ]
