"""Part ``regret``: jobs drawn by chance, and how much slower the chosen plan is than the best that a sweep of real runs finds.

A job is a model, a shape, a budget between the smallest that is feasible and plain training's peak, and what is forbidden.
Rivals of the chosen plan are plans that fit the budget: those predicted fastest, points of the frontier, baselines, and plans
drawn by chance. All are run in turn; the two fastest then run against the chosen one for longer, so that none wins by luck.

The seed names the jobs: those of the default one were never looked at while the search was written.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.alternatives import Job, Ours
from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, clear, goal
from benchmarks.search.rivals.racing import LOSSLESS, Calibrated, Stage, calibrated_machine, max_kept, peak_of_plan
from benchmarks.search.subjects import Subject, gpt2, opt, rotary, setup_for, subject
from benchmarks.search.sweep import BLOCKS_ONLY
from benchmarks.search.sweep_summary import ratio
from benchmarks.training.plans import describe
from optimizer.base.errors import HeadroomError, InvalidPlan
from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.runtime.meter.device import prepared_device
from optimizer.search.answer.smallest import find_smallest
from optimizer.search.problem import SearchProblem
from optimizer.search.search import search_plans
from optimizer.search.solver.levers import variants_of
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.training import training_problem

NAME = "regret"
NUM_JOBS = 20
REGRET_GOAL = 0.05
NUM_RIVALS = 8
FORBIDDEN: tuple[tuple[Technique, ...], ...] = (
    BLOCKS_ONLY,
    (),
    ("accumulate",),
    ("offload",),
    ("offload", "accumulate", "stream_weights"),
    ("recompute", "disk"),
)
"""Techniques that jobs forbid, each set as likely as another."""
_MAX_DRAWN = 200
_SCREENING_ROUNDS, _FINAL_ROUNDS = 3, 9
_NUM_FINAL = 2


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """One job, before its budget is known in bytes."""

    subject: Subject
    share: float
    """Position of the budget between the smallest feasible one (0) and plain training's peak (1)."""
    forbid: tuple[Technique, ...]


def draw_job(seed: int, index: int, *, is_small: bool = False) -> DrawnJob:
    chance = random.Random(f"regret {seed} {index}")
    hidden = chance.choice((64, 96) if is_small else (128, 160, 192, 224))
    blocks = chance.randint(3, 4) if is_small else chance.randint(4, 10)
    vocabulary = chance.choice((512, 1024) if is_small else (1024, 2048, 4096, 8192))
    batch_size = chance.choice((2, 4) if is_small else (2, 4, 6, 8))
    tokens = chance.choice((128, 192) if is_small else (384, 512, 640))
    family = chance.choice(("llama", "gpt2", "qwen2", "opt", "phi3", "mistral", "qwen3"))
    if family == "gpt2":
        config = gpt2(hidden, blocks, vocabulary)
    elif family == "opt":
        config = opt(hidden, blocks, vocabulary)
    else:
        own: dict[str, dict[str, Any]] = {"phi3": {"pad_token_id": 0}, "qwen3": {"head_dim": hidden // 4}}
        more = own.get(family, {})
        config = rotary(family, hidden, blocks, vocabulary, tie_word_embeddings=chance.random() < 0.5, **more)
    return DrawnJob(
        subject=subject(family, config, batch_size, tokens // batch_size),
        share=round(chance.random(), 3),
        forbid=chance.choice(FORBIDDEN),
    )


def measure(options: Options) -> Iterator[Row]:
    setup = setup_for(options)
    with prepared_device(options.device):
        calibrated = calibrated_machine(setup, options.device, file=options.machine)
        for index in range(2 if options.quick else NUM_JOBS):
            if options.wants(index):
                drawn = draw_job(options.seed, index, is_small=options.quick)
                yield {"job": index, **measure_job(drawn, calibrated, options, seed=index)}
                clear()


def measure_job(drawn: DrawnJob, calibrated: Calibrated, options: Options, *, seed: int) -> Row:
    """seed: of the plans drawn by chance."""
    subject, device = drawn.subject, options.device
    job = Job(spec=subject.spec, workload=subject.workload, device=device)
    profile = obtain_profile(subject.spec, extent=LOSSLESS)
    circumstances: dict[str, Any] = {
        "workload": subject.workload,
        "machine": calibrated.machine,
        "calibration": calibrated.calibration,
    }
    problem = training_problem(profile, goal=Goal(device_budget_bytes=2**50, forbid=drawn.forbid), **circumstances)
    low_bytes = find_smallest(problem)[1].device_peak_high_bytes
    book = PriceBook(problem)
    high_bytes = book.price(*_plain(problem)).device_peak_high_bytes
    budget_bytes = low_bytes + int(drawn.share * max(0, high_bytes - low_bytes))
    row: Row = {
        "part": NAME,
        "what": "job",
        "model": subject.name,
        "shape": f"{subject.spec.num_blocks} blocks, {subject.batch_size} x {subject.sequence_length}",
        "forbid": " ".join(drawn.forbid),
        "share": drawn.share,
        "budget_bytes": budget_bytes,
    }
    wanted = Goal(device_budget_bytes=budget_bytes, forbid=drawn.forbid)
    try:
        result = search_plans(profile, goal=wanted, **circumstances)
        chosen = result.chosen.plan
        peak_bytes = peak_of_plan(job, chosen, budget_bytes=budget_bytes)["peak_bytes"]
    except HeadroomError as error:
        return {**row, "finished": False, "error": str(error)}
    known = [point.plan for point in (*reversed(result.frontier), *result.baselines.values())]
    rivals = pick_plans(problem.with_budget(budget_bytes), chosen, known, seed=seed)
    plans = {"chosen": chosen, **{f"rival {index}": plan for index, plan in enumerate(rivals)}}
    room = max_kept(job, calibrated.machine, at_once=1 + NUM_RIVALS)
    stage = Stage(max_kept=room, processor_time=options.processor_time)
    try:
        row |= _race(stage, job, plans)
    finally:
        stage.close()
    return {**row, "finished": True, "plan": describe(chosen), "peak_bytes": peak_bytes, "num_rivals": len(rivals)}


def _plain(problem: SearchProblem) -> Any:
    from optimizer.search.answer.baselines import keep_all

    return keep_all(problem)


def pick_plans(problem: SearchProblem, chosen: Plan, known: Sequence[Plan], *, seed: int) -> list[Plan]:
    """Rivals that are permitted and fit: half of them those predicted fastest, of the known ones and of many drawn by chance;
    a quarter each of the known and of the drawn ones as they come."""
    drawn = [plan for plan in _draw_plans(problem, seed=seed) if plan != chosen]
    fitting = [plan for plan in dict.fromkeys(known) if plan != chosen and _fits(problem, plan)]
    by_time = sorted({*fitting, *drawn}, key=lambda plan: (problem.price(plan).step_ms, repr(plan)))
    quarter = NUM_RIVALS // 4
    picked = dict.fromkeys([*by_time[: 2 * quarter], *fitting[:quarter], *drawn[:quarter], *by_time])
    return list(picked)[:NUM_RIVALS]


def _draw_plans(problem: SearchProblem, *, seed: int) -> list[Plan]:
    """Draw plans by chance: half near what fits (runs of equal choices), half anywhere."""
    chance = random.Random(f"plans {seed}")
    book = PriceBook(problem)
    settings = [variant for base in problem.settings() for variant in variants_of(book, base)]
    found: dict[Plan, None] = {}
    for index in range(_MAX_DRAWN):
        choices = chance.choices(problem.choices, k=problem.num_blocks)
        per_block = tuple(sorted(choices, key=problem.choices.index, reverse=True)) if index % 2 else tuple(choices)
        try:
            plan = chance.choice(settings).plan(per_block)
        except InvalidPlan:
            continue
        if _fits(problem, plan):
            found[plan] = None
    return list(found)


def _fits(problem: SearchProblem, plan: Plan) -> bool:
    return problem.permits(plan) and problem.fits(problem.price(plan))


def _race(stage: Stage, job: Job, plans: dict[str, Plan]) -> Row:
    for name, plan in plans.items():
        stage.add(name, lambda meter, plan=plan: Ours(job, plan, meter))  # type: ignore[misc]
    if len(plans) == 1:
        return {"regret": 0.0, "best": None}
    times = stage.race(list(plans), num_rounds=_SCREENING_ROUNDS)
    rivals = sorted((name for name in plans if name != "chosen"), key=lambda name: statistics.median(times[name]))
    finals = stage.race(["chosen", *rivals[:_NUM_FINAL]], num_rounds=_FINAL_ROUNDS)
    best = min(rivals[:_NUM_FINAL], key=lambda name: statistics.median(finals[name]))
    over_best = ratio(finals["chosen"], finals[best])
    return {
        "ms": round(statistics.median(finals["chosen"]), 1),
        "best": describe(plans[best]),
        "over_best": over_best,
        "regret": round(max(0.0, over_best - 1), 4),
    }


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge peaks and regret; a job without a plan misses both."""
    jobs = [row for row in rows if row.get("what") == "job"]
    finished = [row for row in jobs if row["finished"]]
    within = [row for row in finished if row["peak_bytes"] <= row["budget_bytes"]]
    worst = max((row["regret"] for row in finished), default=None)
    good = sum(row["regret"] <= REGRET_GOAL for row in finished)
    fits, low = f"{len(within)} of {len(jobs)}", f"{good} of {len(jobs)}"
    return {
        "regret: measured peaks within the budget": goal(fits if jobs else None, "all", met=len(within) == len(jobs)),
        "regret: jobs whose plan is within 5 % of the best found": goal(
            f"{low}, worst {worst}" if jobs else None, "all", met=good == len(jobs), needs="full size"
        ),
    }


PART = Part(name=NAME, measure=measure, summarize=summarize, case="job")
