"""Part ``sweep``: plans at budgets from the smallest feasible to plain training's peak, against what torch offers, on real steps.

Each model is run in this process. The machine is probed and calibrated by short runs of other models, as the product has it
after some jobs. The search is asked twice: with the blocks alone to decide about (what the baselines decide about too), and with
every lossless lever, as a user's goal leaves it. Budgets are spread evenly between the smallest at which deciding about blocks is
enough and the plain loop's measured peak; below them are some that need the other levers, down to the smallest of all.

Peaks are of counted steps, by one meter for all (``racing.peak_of_baseline`` says what of compiled graphs). Times are of steps
that are not counted, taken in turn: plain, full recompute, ours, and the fastest baselines whose measured peak is within the
budget, as a race of all of them said before. Ratios are medians of pairs of one round. What comes out within 2 % of the goal, on
either side, runs again for twice as long, and all its rounds count. Each way of saving memory has its whole ladder.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, get_args

import torch

from benchmarks.common.alternatives import DoesNotRun, Job, Ours
from benchmarks.common.paired import paired_ratio
from benchmarks.common.parts import Options, Part
from benchmarks.common.record import Row, clear, failure
from benchmarks.search.rivals.contenders import FULL, PLAIN, Baseline, list_baselines
from benchmarks.search.rivals.racing import (
    LOSSLESS,
    Calibrated,
    Stage,
    allocator_peak,
    calibrated_machine,
    max_kept,
    peak_of_baseline,
    peak_of_plan,
)
from benchmarks.search.subjects import Setup, Subject, setup_for
from benchmarks.search.sweep_summary import (
    BELOW,
    Rival,
    compare,
    group_races,
    is_near_goal,
    race_of,
    spread_budgets,
    summarize,
)
from benchmarks.training.plans import describe
from optimizer.base.errors import HeadroomError
from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.profile import Profile
from optimizer.runtime.meter.device import prepared_device
from optimizer.search.answer.smallest import find_smallest
from optimizer.search.search import search_plans
from optimizer.search.training import training_problem

NAME, PEAKS = "sweep", "peaks"
MAX_AT_ONCE = 6
"""Contenders that have room beside each other in any case: plain, full recompute, ours, two rivals, one with fused kernels."""
_AGAIN = 2.0
"""Factor by which races near the goal run longer the second time."""
BLOCKS_ONLY: tuple[Technique, ...] = tuple(
    technique for technique in get_args(Technique) if technique not in ("recompute", "offload")
)
LEVERS: dict[str, tuple[Technique, ...]] = {"blocks": BLOCKS_ONLY, "all": ()}
"""Techniques that each set of levers forbids."""


def measure(options: Options) -> Iterator[Row]:
    """Rows of each subject: one for the machine, one for each baseline, one for each budget."""
    known = _read_peaks(options)
    for bench in _benches(options):
        yield bench.machine_row
        yield from bench.rows(bench.own(known))


def measure_peaks(options: Options) -> Iterator[Row]:
    """Measure the peaks of the sweep, which need no quiet machine; without a calibrated machine those of the baselines alone."""
    with_plans = options.machine is not None and options.machine.exists()
    known = _read_peaks(options)
    for bench in _benches(options, needs_machine=with_plans):
        for row in bench.peaks(bench.own(known), with_plans=with_plans):
            yield {**row, "part": PEAKS}


def _read_peaks(options: Options) -> list[Row]:
    if options.peaks is None or not options.peaks.exists():
        return []
    rows: list[Row] = json.loads(options.peaks.read_text())["rows"]
    return [row for row in rows if row.get("part") == PEAKS]


def _benches(options: Options, *, needs_machine: bool = True) -> Iterator["_Bench"]:
    setup, device = setup_for(options), options.device
    with prepared_device(device):
        calibrated = calibrated_machine(setup, device, file=options.machine) if needs_machine else None
        for subject in setup.subjects:
            if options.wants(subject.name):
                yield _Bench(setup, subject, calibrated, device)


class _Bench:
    """One subject's contenders."""

    def __init__(self, setup: Setup, subject: Subject, calibrated: Calibrated | None, device: torch.device) -> None:
        self.setup = setup
        self.subject = subject
        self._calibrated = calibrated
        self.job = Job(spec=subject.spec, workload=subject.workload, device=device, draws_quickly=setup.draws_quickly)
        self.profile: Profile = obtain_profile(subject.spec, extent=LOSSLESS)
        self.baselines = list_baselines(
            self.job, num_policies=setup.num_policies, budgets=setup.budgets, fused=setup.fused_budgets
        )
        self.names: dict[str, str] = {}
        """Names of the plans on the stage."""

    @property
    def calibrated(self) -> Calibrated:
        if self._calibrated is None:
            raise RuntimeError("plans are searched for on a calibrated machine, and there is none")
        return self._calibrated

    @cached_property
    def stage(self) -> Stage:
        room = max_kept(self.job, self.calibrated.machine, at_once=MAX_AT_ONCE)
        return Stage(max_kept=room, processor_time=self.setup.processor_time)

    @property
    def machine_row(self) -> Row:
        return {
            **self.head,
            "what": "machine",
            "num_threads": torch.get_num_threads(),
            "timed_by": "processor time" if self.setup.processor_time else "clock",
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "rates": self.calibrated.machine.to_json()["rates"],
            "calibration": self.calibrated.calibration,
        }

    @property
    def head(self) -> Row:
        return {"part": NAME, "model": self.subject.name}

    def own(self, rows: Sequence[Row]) -> list[Row]:
        """Those of this subject."""
        return [row for row in rows if row.get("model") == self.subject.name]

    def peaks(self, known: Sequence[Row] = (), *, with_plans: bool = True) -> Iterator[Row]:
        """Measure unknown peaks of every baseline and of the search's choice at every budget. Nothing is timed."""
        baselines = [row for row in known if row["what"] != "point"] or [self._peak_row(baseline) for baseline in self.baselines]
        yield from baselines
        sizes = {row["name"]: row["peak_bytes"] for row in baselines if "peak_bytes" in row}
        if not {PLAIN, FULL} <= set(sizes):
            raise RuntimeError("neither plans nor baselines can be judged without plain training and full recompute")
        if with_plans:
            yield from [row for row in known if row["what"] == "point"] or self._points(sizes[PLAIN])

    def rows(self, known: Sequence[Row]) -> Iterator[Row]:
        """All peaks before all times: a cap on a card holds for whatever else is on it. known: what ``peaks`` gave before."""
        try:
            found = [{**row, **self.head} for row in self.peaks(known)]
            measured = {row["name"]: row for row in found if row["what"] == "baseline" and "peak_bytes" in row}
            points = [row for row in found if row["what"] == "point"]
            yield from (row for row in found if row["what"] != "point" and row.get("name") not in measured)
            self._put_on_stage(measured, points)
            over_plain = self._screen(list(measured))
            for name, row in measured.items():
                yield {**row, "over_plain": over_plain[name]}
            rivals = [self._rival(baseline, measured, over_plain) for baseline in self.baselines if baseline.name in measured]
            yield from self._point_rows(points, rivals)
        finally:
            self.stage.close()

    def _put_on_stage(self, measured: Mapping[str, Row], points: Sequence[Row]) -> None:
        for baseline in self.baselines:
            if baseline.name in measured:
                self.stage.add(baseline.name, baseline.make)
        for point in points:
            if point["finished"]:
                plan = Plan.from_json(point["plan_json"])
                self.stage.add(point["contender"], partial(Ours, self.job, plan))

    # Baselines.

    def _peak_row(self, baseline: Baseline) -> Row:
        row = {**self.head, "what": "baseline", "name": baseline.name, "family": baseline.family, "knob": baseline.knob}
        try:
            found = self._peak_of(baseline)
        except DoesNotRun as error:
            return {**row, "why_not": str(error)}
        except Exception as error:
            return {**row, **failure(baseline.name, error)}
        finally:
            clear()
        return {**row, "peak_bytes": found["peak_bytes"], "loss": found["losses"][-1]}

    def _peak_of(self, baseline: Baseline) -> Row:
        """Measure one peak. A compiled baseline that will race stays built where memory allows, since compiling takes longest."""
        if not baseline.is_compiled or self._calibrated is None or self.job.device.type != "cpu":
            return peak_of_baseline(baseline, self.job)
        self.stage.add(baseline.name, baseline.make)
        contender = self.stage.get(baseline.name)
        return {"peak_bytes": allocator_peak(contender, self.job.device), "losses": [self.stage.losses[baseline.name]]}

    def _screen(self, names: Sequence[str]) -> dict[str, float]:
        """Each one's time over that of plain, a few at a time."""
        ratios = {PLAIN: 1.0}
        others = [name for name in names if name != PLAIN]
        for start in range(0, len(others), MAX_AT_ONCE - 1):
            group = others[start : start + MAX_AT_ONCE - 1]
            times = self.stage.race([PLAIN, *group], num_rounds=self.setup.screening_rounds)
            ratios |= {name: paired_ratio(times[name], times[PLAIN]) for name in group}
        return ratios

    def _rival(self, baseline: Baseline, measured: Mapping[str, Row], over_plain: Mapping[str, float]) -> Rival:
        return Rival(
            name=baseline.name,
            peak_bytes=measured[baseline.name]["peak_bytes"],
            over_plain=over_plain[baseline.name],
            is_fused=baseline.is_fused,
            accumulates=baseline.accumulates,
        )

    # Plans.

    def _points(self, plain_bytes: int) -> Iterator[Row]:
        """The search's choice at every budget with its measured peak, not yet timed."""
        smallest_bytes = self._smallest_bytes("blocks", plain_bytes)
        budgets = spread_budgets(smallest_bytes, plain_bytes, count=self.setup.num_budgets)
        below = spread_budgets(self._smallest_bytes("all", plain_bytes), smallest_bytes, count=self.setup.num_below + 1)
        for name, levers, chosen in (("blocks", "blocks", budgets), ("all", "all", budgets), (BELOW, "all", below[:-1])):
            for budget_bytes in chosen:
                head = {**self.head, "what": "point", "levers": name, "budget_bytes": budget_bytes}
                head["share"] = round(budget_bytes / plain_bytes, 3)
                try:
                    yield {**head, **self._point(levers, budget_bytes)}
                except HeadroomError as error:
                    yield {**head, "finished": False, "error": str(error)}
                clear()

    def _smallest_bytes(self, levers: str, plain_bytes: int) -> int:
        problem = training_problem(self.profile, goal=self._goal(levers, plain_bytes), **self._circumstances)
        return find_smallest(problem)[1].device_peak_high_bytes

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
        return {
            "finished": True,
            "plan": describe(plan),
            "plan_json": plan.to_json(),
            "contender": name,
            "peak_bytes": measured["peak_bytes"],
            "predicted_peak_bytes": prediction.device_peak_bytes,
            "host_peak_bytes": measured["host_peak_bytes"],
            "loss": measured["losses"][-1],
            "predicted_ms": round(prediction.step_ms, 1),
            "predicted_over_plain": round(prediction.step_ms / result.baselines["keep_all"].prediction.step_ms, 4),
            "search_s": round(searched_s, 2),
        }

    def _point_rows(self, points: Sequence[Row], rivals: Sequence[Rival]) -> Iterator[Row]:
        """The same with times: all who are compared run in turn, as many as have room at once."""
        races = {index: race_of(point, rivals) for index, point in enumerate(points) if point["finished"]}
        yield from (point for index, point in enumerate(points) if index not in races)
        groups = group_races(races, room=self.stage.max_kept)
        num_steps = sum(len(names) for _, names in groups)
        for indices, names in groups:
            seconds = self.setup.race_s * len(names) / num_steps
            times = self._raced(names, seconds=seconds)
            own = {index: {name: times[name] for name in races[index]} for index in indices}
            near = [index for index in indices if is_near_goal(compare(points[index], own[index], rivals))]
            if near:
                again = list(dict.fromkeys(name for index in near for name in races[index]))
                more = self._raced(again, seconds=_AGAIN * seconds)
                own |= {index: {name: own[index][name] + more[name] for name in races[index]} for index in near}
            for index in indices:
                described = {name: value for name, value in points[index].items() if name != "plan_json"}
                yield {**described, "num_rounds": len(own[index][PLAIN]), **compare(described, own[index], rivals)}

    def _raced(self, names: Sequence[str], *, seconds: float) -> dict[str, list[float]]:
        """Run as many rounds as there is time for, after one that shows how long they take."""
        first = self.stage.race(names, num_rounds=1)
        round_s = sum(times[0] for times in first.values()) / 1000
        num_rounds = min(max(int(seconds / round_s) - 1, self.setup.min_rounds), self.setup.max_rounds)
        return self.stage.race(names, num_rounds=num_rounds)


PART = Part(name=NAME, measure=measure, summarize=summarize, case="model")
PEAKS_PART = Part(name=PEAKS, measure=measure_peaks, summarize=lambda _: {}, case="model", is_extra=True)
