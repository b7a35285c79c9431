"""Part ``sweep``: plans at budgets from the smallest feasible to plain training's peak, against what torch offers, on real steps.

Each model is run in this process. The machine is probed and calibrated by short runs of other models, as the product has it
after some jobs. The search is asked twice: with the blocks alone to decide about (what the baselines decide about too), and with
every lossless lever; each over budgets spread evenly between the smallest that it finds feasible and the plain loop's measured
peak. Micro-batches are the baselines', the whole batch at once, but where a plan accumulates.

Peaks are of counted steps, by one meter for all (``racing.peak_of_baseline`` says what of compiled graphs). Times are of steps
that are not counted, taken in turn: plain, full recompute, ours, and the fastest baselines whose measured peak is within the
budget, as a race of all of them said before. Ratios are medians of pairs of one round. Each way of saving memory has its whole
ladder.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch

from benchmarks.alternatives import DoesNotRun, Job, Ours
from benchmarks.paired import paired_ratio
from benchmarks.record import Row, clear
from benchmarks.search.contenders import FULL, PLAIN, Baseline, list_baselines
from benchmarks.search.part import Options, Part
from benchmarks.search.racing import Calibrated, Stage, calibrate_machine, max_kept, peak_of_baseline, peak_of_plan
from benchmarks.search.subjects import Setup, Subject, cuda_setup, full_setup, quick_setup
from benchmarks.search.sweep_summary import Rival, compare, pick_rivals, spread_budgets, summarize
from benchmarks.training.plans import describe
from optimizer.errors import HeadroomError
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model
from optimizer.runtime.device import prepared_device
from optimizer.runtime.train import set_num_threads
from optimizer.search.search import search_plans, training_problem
from optimizer.search.smallest import find_smallest
from optimizer.workload import Goal, Technique

NAME = "sweep"
MAX_AT_ONCE = 6
"""Contenders of one race: plain, full recompute, ours, two rivals, one with fused kernels."""
BLOCKS_ONLY: tuple[Technique, ...] = tuple(
    technique for technique in get_args(Technique) if technique not in ("recompute", "offload")
)
LEVERS: dict[str, tuple[Technique, ...]] = {"blocks": BLOCKS_ONLY, "all": ()}
"""What is forbidden."""


def measure(options: Options) -> Iterator[Row]:
    set_num_threads()
    if options.device.type == "cuda":
        yield from measure_sweep(cuda_setup(quick=options.quick), options.device)
    else:
        yield from measure_sweep(quick_setup() if options.quick else full_setup(), options.device)


def measure_sweep(setup: Setup, device: torch.device) -> Iterator[Row]:
    """A row for the machine, for each baseline of each subject, and for each budget."""
    with prepared_device(device):
        started_s = time.monotonic()
        calibrated = calibrate_subjects(setup.calibration_subjects, device, probe_s=setup.probe_s)
        yield {
            "part": NAME,
            "what": "machine",
            "calibrating_s": round(time.monotonic() - started_s, 1),
            "num_threads": torch.get_num_threads(),
            "rates": calibrated.machine.to_json()["rates"],
            "calibration": calibrated.calibration,
        }
        for subject in setup.subjects:
            yield from _Bench(setup, subject, calibrated, device).rows()


def calibrate_subjects(subjects: Sequence[Subject], device: torch.device, *, probe_s: float) -> Calibrated:
    jobs = [(subject.spec, subject.batch_size, subject.sequence_length) for subject in subjects]
    return calibrate_machine(device, jobs, probe_s=probe_s)


class _Bench:
    """One subject's contenders."""

    def __init__(self, setup: Setup, subject: Subject, calibrated: Calibrated, device: torch.device) -> None:
        self.setup = setup
        self.subject = subject
        self.calibrated = calibrated
        self.job = Job(spec=subject.spec, workload=subject.workload, device=device, draws_quickly=setup.draws_quickly)
        self.profile: Profile = profile_model(subject.spec)
        self.stage = Stage(max_kept=max_kept(self.job, calibrated.machine, at_once=MAX_AT_ONCE))
        self.rivals: list[Rival] = []
        self.names: dict[str, str] = {}
        """Of plans on the stage."""

    @property
    def head(self) -> Row:
        return {"part": NAME, "model": self.subject.name}

    def rows(self) -> Iterator[Row]:
        try:
            yield from self._baseline_rows()
            if not self.rivals or self.rivals[0].name != PLAIN:
                raise RuntimeError("the plain loop does not run")
            yield from self._point_rows([point for levers in LEVERS for point in self._points(levers)])
        finally:
            self.stage.close()

    # Baselines.

    def _baseline_rows(self) -> Iterator[Row]:
        measured: dict[str, Row] = {}
        baselines = self._listed()
        for baseline in baselines:
            row = {**self.head, "what": "baseline", "name": baseline.name, "family": baseline.family, "knob": baseline.knob}
            try:
                peak = peak_of_baseline(baseline, self.job)
            except DoesNotRun as error:
                yield {**row, "why_not": str(error)}
            except Exception as error:
                yield {**row, "what": "failed", "of": baseline.name, "error": str(error), "traceback": traceback.format_exc()}
            else:
                self.stage.add(baseline.name, baseline.make)
                measured[baseline.name] = {**row, "peak_bytes": peak["peak_bytes"], "loss": peak["losses"][-1]}
            clear()
        ratios = self._screen(list(measured))
        for baseline in baselines:
            if baseline.name in measured:
                row = {**measured[baseline.name], "over_plain": ratios[baseline.name]}
                self.rivals.append(
                    Rival(
                        name=baseline.name,
                        peak_bytes=row["peak_bytes"],
                        over_plain=row["over_plain"],
                        is_fused=baseline.is_fused,
                        accumulates=baseline.accumulates,
                    )
                )
                yield row

    def _listed(self) -> list[Baseline]:
        setup = self.setup
        return list_baselines(
            self.job, num_policies=setup.num_policies, budgets=setup.budgets, fused=setup.fused_budgets
        )

    def _screen(self, names: Sequence[str]) -> dict[str, float]:
        """Each one's time over that of plain, a few at a time."""
        ratios = {PLAIN: 1.0}
        others = [name for name in names if name != PLAIN]
        for start in range(0, len(others), MAX_AT_ONCE - 1):
            group = others[start : start + MAX_AT_ONCE - 1]
            times = self.stage.race([PLAIN, *group], num_rounds=self.setup.screening_rounds)
            ratios |= {name: paired_ratio(times[name], times[PLAIN]) for name in group}
        return ratios

    # Plans.

    def _points(self, levers: str) -> Iterator[Row]:
        """What the search chooses at every budget, with its measured peak; not yet timed."""
        plain_bytes = self.rivals[0].peak_bytes
        problem = training_problem(self.profile, goal=self._goal(levers, plain_bytes), **self._circumstances)
        smallest_bytes = find_smallest(problem)[1].device_peak_high_bytes
        for budget_bytes in spread_budgets(smallest_bytes, plain_bytes, count=self.setup.num_budgets):
            head = {
                **self.head,
                "what": "point",
                "levers": levers,
                "budget_bytes": budget_bytes,
                "share": round(budget_bytes / plain_bytes, 3),
            }
            try:
                yield {**head, **self._point(levers, budget_bytes)}
            except HeadroomError as error:
                yield {**head, "finished": False, "error": str(error)}
            clear()

    @property
    def _circumstances(self) -> dict[str, Any]:
        return {
            "workload": self.subject.workload,
            "machine": self.calibrated.machine,
            "calibration": self.calibrated.calibration,
        }

    def _goal(self, levers: str, budget_bytes: int) -> Goal:
        return Goal(device_budget_bytes=budget_bytes, forbid=LEVERS[levers])

    def _point(self, levers: str, budget_bytes: int) -> Row:
        started_s = time.monotonic()
        result = search_plans(self.profile, goal=self._goal(levers, budget_bytes), **self._circumstances)
        searched_s = time.monotonic() - started_s
        plan, prediction = result.chosen.plan, result.chosen.prediction
        measured = peak_of_plan(self.job, plan, budget_bytes=budget_bytes)
        name = self.names.setdefault(repr(plan), f"plan {len(self.names)}")
        self.stage.add(name, lambda meter: Ours(self.job, plan, meter))
        return {
            "finished": True,
            "plan": describe(plan),
            "contender": name,
            "peak_bytes": measured["peak_bytes"],
            "predicted_peak_bytes": prediction.device_peak_bytes,
            "host_peak_bytes": measured["host_peak_bytes"],
            "loss": measured["losses"][-1],
            "predicted_ms": round(prediction.step_ms, 1),
            "predicted_over_plain": round(prediction.step_ms / result.baselines["keep_all"].prediction.step_ms, 4),
            "search_s": round(searched_s, 2),
        }

    def _point_rows(self, points: Sequence[Row]) -> Iterator[Row]:
        """The same with times. A plan that is chosen at several budgets is raced once for each set of rivals."""
        races = [self._race_of(point) if point["finished"] else () for point in points]
        num_left = len({race for race in races if race})
        done: dict[tuple[str, ...], dict[str, list[float]]] = {}
        started_s = time.monotonic()
        for point, race in zip(points, races, strict=True):
            if not race:
                yield point
                continue
            if race not in done:
                left_s = self.setup.race_s - (time.monotonic() - started_s)
                done[race] = self._raced(race, seconds=left_s / num_left)
                num_left -= 1
            times = done[race]
            yield {**point, "num_rounds": len(times[PLAIN]), **compare(point, times, self.rivals)}

    def _race_of(self, point: Row) -> tuple[str, ...]:
        rivals = pick_rivals(self.rivals, budget_bytes=point["budget_bytes"], accumulates=point["levers"] == "all")
        return tuple(dict.fromkeys([PLAIN, FULL, point["contender"], *rivals]))

    def _raced(self, names: Sequence[str], *, seconds: float) -> dict[str, list[float]]:
        """As many rounds as there is time for; one before them, to know how long they take."""
        first = self.stage.race(names, num_rounds=1)
        round_s = sum(times[0] for times in first.values()) / 1000
        num_rounds = min(max(int(seconds / round_s) - 1, self.setup.min_rounds), self.setup.max_rounds)
        return self.stage.race(names, num_rounds=num_rounds)


PART = Part(name=NAME, measure=measure, summarize=summarize)
