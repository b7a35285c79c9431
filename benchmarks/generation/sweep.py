"""Plans at a budget, run for real: how far off the estimates are, and how much slower the chosen plan is than the best of them.

Beside the chosen plan run those predicted fastest after it, the baselines that fit, and plans drawn by chance, all of them
predicted within three times of it. The machine was probed, and corrected by runs of other models, some of them with the disk.
All plans run in turn, there and back; then, twice as often again, those that could be the fastest. Each time a plan's turn comes
it runs once untimed: libraries prepare kernels for shapes that they have not seen, and memory and files are new, which a job of
many passes meets in the first of them. Times are medians over all rounds.

The machine's pace changes by a quarter within minutes, of memory more than of arithmetic, and a run takes a second. So on the CPU
device each run's time is divided by the pace in that moment: how long a small generation, always the same, took right before and
right after it, over how long it usually took while other models' runs calibrated the machine (``_Clock``). The same pace divides
every run. Rows also have the time as the clock had it.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, at_most, clear, goal, none_of
from benchmarks.generation.alternatives import Job, Ours
from benchmarks.generation.subjects import REFERENCE, Subject, setup_of, wanted_of
from benchmarks.generation.throughput import weight_bytes
from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.calibration import TimedRun, fit_calibration
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import make_prompts, measure_generation
from optimizer.search.generation.levers import list_arrangements
from optimizer.search.generation.one_device import generation_problem
from optimizer.search.generation.search import search_generation_plans
from optimizer.workload import GenerationWorkload

NAME = "sweep"
SHARES = (0.4, 1.5)
"""Budgets, of the weights: weights must stream, and all of it has room."""
WITHIN = 3.0
"""Times the chosen plan's predicted time. Slower plans are not run: they would take most of the hour and be no best."""
_NEAR = 1.3
"""Times the fastest time so far; plans within it after the first rounds run in the others too. Runs of a second scatter by a
fifth."""
_MORE_ROUNDS = 2
_NUM_REPEATS = 2
"""Timed runs of a plan each time that its turn comes."""
PEAK_GOAL, RATE_GOAL, REGRET_GOAL = 0.02, 0.15, 0.05
_REPRESENTATIONS = ("fp32",)
_REFERENCE_PLAN = GenerationPlan(weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(place="host"), batch_size=16)
"""All kinds of work that plans without the disk differ in."""


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """One model with its profile and machine, shared by all of its plans."""

    job: Job
    profile: GenerationProfile
    machine: Machine

    def estimate(self, plan: GenerationPlan, calibration: Mapping[str, Any] | None) -> GenerationPrediction:
        return estimate_generation(
            self.profile, plan=plan, workload=self.job.workload, machine=self.machine, calibration=calibration
        )


def measure(options: Options) -> Iterator[Row]:
    setup = setup_of(options)
    chance = random.Random(options.seed)
    machine = probe_machine(device=str(options.device), max_s=setup.probe_s)
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder, _Clock(options.device, Path(folder)) as clock:
        scratch = Path(folder)
        calibration = _calibrate(setup.calibration_subjects, machine, options, scratch, chance, setup.num_plans, clock)
        for subject in wanted_of(setup.subjects, options):
            made = _make(subject, machine, options, scratch)
            for share in SHARES[: 1 if options.quick else None]:
                yield from _sweep(
                    subject.name, made, calibration, share, chance, setup.num_plans, setup.num_swept_rounds, clock
                )
                clear()


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    run = [row for row in rows if row.get("what") == "run"]
    if not run:
        return {"plans that were swept": goal(None, "> 0", met=False)}
    peak = max(abs(row["peak_error"]) for row in run)
    rates = sorted(abs(row["rate_error"]) for row in run)
    regrets = [row["regret"] for row in rows if row.get("what") == "regret"]
    over = sum(row["peak_bytes"] > row["budget_bytes"] for row in run)
    median = round(statistics.median(rates), 4)
    return {
        "peak error, worst": at_most(round(peak, 6), PEAK_GOAL),
        "peaks over the budget": none_of(over, run),
        "throughput error, median": at_most(median, RATE_GOAL, needs="full size"),
        "throughput error, worst": at_most(rates[-1], RATE_GOAL, needs="full size"),
        "regret, worst": at_most(max(regrets), REGRET_GOAL, needs="full size"),
    }


PART = Part(name=NAME, measure=measure, summarize=summarize, case="model")


def _make(subject: Subject, machine: Machine, options: Options, scratch: Path) -> _Subject:
    job = Job(spec=subject.spec, workload=subject.swept_workload, device=options.device, scratch=scratch)
    profile = profile_generation(subject.spec, representations=_REPRESENTATIONS)
    return _Subject(job=job, profile=profile, machine=machine)


def _calibrate(
    subjects: Sequence[Subject],
    machine: Machine,
    options: Options,
    scratch: Path,
    chance: random.Random,
    num_plans: int,
    clock: "_Clock",
) -> dict[str, Any]:
    """Fit a calibration to finished runs of other models."""
    finished: list[tuple[_Subject, GenerationPlan, list[_Run]]] = []
    for subject in subjects:
        made = _make(subject, machine, options, scratch)
        plans = _candidates(made, budget_bytes=weight_bytes(made.profile), calibration=None, chance=chance, count=num_plans)
        plans += _on_disk(made, chance)
        finished += [(made, plan, runs) for plan, runs in _race(made, plans, num_rounds=2, clock=clock).items()]
    clock.settle()
    return fit_calibration(
        timed_run(made.estimate(plan, None), made.job.workload, total_ms=clock.median_s(runs) * 1000)
        for made, plan, runs in finished
    )


def _on_disk(made: _Subject, chance: random.Random) -> list[GenerationPlan]:
    """One plan that reads its weights from the disk and one that keeps its cache there.

    Drawn plans may lack both, and the time of the disk's lane, which the kernel's page cache shortens, is learnt from runs
    that use it.
    """
    everywhere = GenerationGoal(device_budget_bytes=2 * weight_bytes(made.profile))
    problem = generation_problem(made.profile, workload=made.job.workload, goal=everywhere, machine=made.machine)
    arrangements = list_arrangements(problem)
    found = []
    for is_there in (_has_weights_on_disk, _has_cache_on_disk):
        drawn = [replace(plan, batch_size=made.job.workload.num_sequences) for plan in arrangements if is_there(plan)]
        chance.shuffle(drawn)
        found += [plan for plan in drawn if problem.permits(plan) and problem.fits(problem.price(plan))][:1]
    return found


def _has_weights_on_disk(plan: GenerationPlan) -> bool:
    return plan.weights.place == "disk" and plan.kv_cache.place == "device"


def _has_cache_on_disk(plan: GenerationPlan) -> bool:
    return plan.weights.place == "device" and plan.kv_cache.place == "disk"


def timed_run(prediction: GenerationPrediction, workload: GenerationWorkload, *, total_ms: float) -> TimedRun:
    """A whole workload as one run to calibrate with; its passes are of the prediction's kinds, as many as its total says."""
    kinds = dict(prediction.prefill_by_kind_ms)
    for kind, kind_ms in prediction.decode_by_kind_ms.items():
        kinds[kind] = kinds.get(kind, 0.0) + kind_ms
    scale = prediction.total_s * 1000 / sum(kinds.values())
    return TimedRun(predicted_ms={kind: kind_ms * scale for kind, kind_ms in kinds.items()}, measured_ms=total_ms)


def _sweep(
    name: str,
    made: _Subject,
    calibration: Mapping[str, Any],
    share: float,
    chance: random.Random,
    num_plans: int,
    num_rounds: int,
    clock: "_Clock",
) -> Iterator[Row]:
    budget_bytes = int(share * weight_bytes(made.profile))
    head: Row = {"part": NAME, "model": name, "share": share, "budget_bytes": budget_bytes}
    try:
        plans = _candidates(made, budget_bytes=budget_bytes, calibration=calibration, chance=chance, count=num_plans)
    except NoFeasiblePlan as error:
        yield {**head, "what": "infeasible", "error": str(error)}
        return
    runs = _race(made, plans, num_rounds=num_rounds, clock=clock)
    quickest_s = min(map(clock.median_s, runs.values()))
    near = [plan for plan in plans if plan is plans[0] or clock.median_s(runs[plan]) <= _NEAR * quickest_s]
    for plan, more in _race(made, near, num_rounds=_MORE_ROUNDS * num_rounds, clock=clock).items():
        runs[plan] += more
    seconds = {plan: clock.median_s(runs[plan]) for plan in plans}
    for plan in plans:
        measured = measure_generation(
            made.job.spec, plan=plan, workload=made.job.workload, device=made.job.device, scratch=made.job.scratch
        )
        prediction = made.estimate(plan, calibration)
        yield {
            **head,
            "what": "run",
            "is_chosen": plan is plans[0],
            "plan": plan.to_json(),
            "peak_bytes": measured.device_peak_bytes,
            "peak_error": prediction.device_peak_bytes / measured.device_peak_bytes - 1,
            "num_rounds": len(runs[plan]),
            "total_s": round(seconds[plan], 4),
            "as_timed_s": round(statistics.median(run.seconds for run in runs[plan]), 4),
            "predicted_s": round(prediction.total_s, 4),
            "rate_error": round(seconds[plan] / prediction.total_s - 1, 4),
        }
    best = min(seconds, key=seconds.__getitem__)
    yield {
        **head,
        "what": "regret",
        "regret": round(seconds[plans[0]] / seconds[best] - 1, 4),
        "best": best.to_json(),
        "num_plans": len(plans),
    }


def _candidates(
    made: _Subject,
    *,
    budget_bytes: int,
    calibration: Mapping[str, Any] | None,
    chance: random.Random,
    count: int,
) -> list[GenerationPlan]:
    """The chosen plan first; then baselines and points of the frontier that fit, and drawn ones up to ``count``."""
    goal_ = GenerationGoal(device_budget_bytes=budget_bytes)
    asked: dict[str, Any] = {
        "workload": made.job.workload, "goal": goal_, "machine": made.machine, "calibration": calibration,
    }  # fmt: skip
    result = search_generation_plans(made.profile, **asked)
    problem = generation_problem(made.profile, **asked)
    named = [result.chosen, *sorted((*result.frontier, *result.baselines.values()), key=lambda each: each.prediction.total_s)]
    longest_s = WITHIN * result.chosen.prediction.total_s

    def is_swept(prediction: GenerationPrediction) -> bool:
        return problem.fits(prediction) and prediction.total_s <= longest_s

    found = list(dict.fromkeys(each.plan for each in named if is_swept(each.prediction)))[: count // 2]
    arrangements = list_arrangements(problem)
    for _ in range(50 * count):
        if len(found) >= count:
            break
        drawn = replace(chance.choice(arrangements), batch_size=chance.randint(1, made.job.workload.num_sequences))
        if drawn not in found and problem.permits(drawn) and is_swept(problem.price(drawn)):
            found.append(drawn)
    return found


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run of the whole workload."""

    seconds: float
    """Time by the clock."""
    beside_s: float
    """Mean time of the reference right before and right after it."""


class _Clock:
    """Times runs beside a small generation that is always the same."""

    def __init__(self, device: torch.device, scratch: Path) -> None:
        job = Job(spec=REFERENCE.spec, workload=REFERENCE.workload, device=device, scratch=scratch)
        # It says how fast the processor is; what runs on a card hardly waits for that.
        self._reference = Ours(job, _REFERENCE_PLAN, None) if device.type == "cpu" else None
        self._prompts = make_prompts(job.spec.vocab_size, job.workload)
        self._readings_s: list[float] = []
        self._usual_s = 1.0

    def __enter__(self) -> "_Clock":
        self._read_s()
        self._readings_s.clear()
        return self

    def __exit__(self, *error: object) -> None:
        if self._reference is not None:
            self._reference.close()

    def time(self, run: Callable[[], None], *, num_times: int) -> list[_Run]:
        """Time runs one after the other, with the reference before, between and after."""
        runs: list[_Run] = []
        before_s = self._read_s()
        for _ in range(num_times):
            seconds, after_s = _seconds_of(run), self._read_s()
            runs.append(_Run(seconds=seconds, beside_s=(before_s + after_s) / 2))
            before_s = after_s
        return runs

    def settle(self) -> None:
        """Take the median of the reference's times so far as its usual time."""
        self._usual_s = statistics.median(self._readings_s)

    def median_s(self, runs: Sequence[_Run]) -> float:
        """Median time at the machine's usual pace."""
        return statistics.median(run.seconds * self._usual_s / run.beside_s for run in runs)

    def _read_s(self) -> float:
        reference = self._reference
        reading_s = 1.0 if reference is None else _seconds_of(lambda: reference.generate(self._prompts))
        self._readings_s.append(reading_s)
        return reading_s


def _seconds_of(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _race(
    made: _Subject, plans: Sequence[GenerationPlan], *, num_rounds: int, clock: _Clock
) -> dict[GenerationPlan, list[_Run]]:
    """Run the whole workload with each plan in turn, there and back: each time once untimed, then twice."""
    prompts = make_prompts(made.job.spec.vocab_size, made.job.workload)
    runs: dict[GenerationPlan, list[_Run]] = {plan: [] for plan in plans}
    for index in range(num_rounds):
        for plan in plans if index % 2 == 0 else list(reversed(plans)):
            contender = Ours(made.job, plan, None)
            try:
                generate = partial(_generate, contender, prompts, made.job.device)
                generate()
                runs[plan] += clock.time(generate, num_times=_NUM_REPEATS)
            finally:
                contender.close()
    return runs


def _generate(contender: Ours, prompts: torch.Tensor, device: torch.device) -> None:
    contender.generate(prompts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
