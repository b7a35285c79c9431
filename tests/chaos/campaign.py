"""Round after round of faults while people use the service, and a look at every promise once all has come to rest."""

import json
import math
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import redis

from tests.chaos import faults, leaks, promises
from tests.chaos.crowd import Crowd
from tests.chaos.faults import Fault, Missed
from tests.chaos.quick import work
from tests.chaos.world import SERVICES, World
from tests.worker.processes import wait_for

WORKLOAD = {
    "sequence_length": 32,
    "global_batch_size": 2,
    "num_steps": work.NUM_STEPS,
    "checkpoint_every_steps": work.CHECKPOINT_EVERY,
    "eval_every_steps": 0,
    "eval_batches": 1,
}
BUDGET = "200 MiB"
DRAINED_WITHIN_S = 240.0
LOOK_EVERY = 25
"""Rounds between two looks at what is left when all is at rest."""
_TRIES = 20
_NOTHING_TO_HIT = (redis.RedisError, psycopg.OperationalError, sqlite3.OperationalError)
"""Answers of a server that another fault keeps from being struck."""


@dataclass(kw_only=True)
class Report:
    """The outcome of a campaign: every promise that was broken, and what was done to break it."""

    rounds: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    """Faults that hit something, by kind."""
    missed: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=dict)
    ended_alone: list[str] = field(default_factory=list)
    """Services that no fault had ended, and that had to be started again."""
    num_accepted: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    drained_s: list[float] = field(default_factory=list)
    """From the last heal until every job had ended."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "struck": dict(self.struck.most_common()),
            "missed": dict(self.missed),
        }


def run_campaign(
    world: World,
    *,
    rounds: int,
    seed: int,
    profile_file: Path,
    num_people: int = 2,
    pause_s: float = 0.1,
    most_waiting: int = 60,
    limit_s: float = math.inf,
    most_at_once: int = 5,
    only: Sequence[str] = (),
    is_to_end: Callable[[], bool] = lambda: False,
    report_line: Callable[[str], None] = print,
) -> Report:
    """num_people: who submit side by side. pause_s: between two submissions of one person. most_waiting: jobs in the queue, past
    which nobody submits for a while. limit_s: no round begins later than that. most_at_once: faults of one round. only: parts of
    the names of kinds, where others are to be left out. is_to_end: asked before each round; once True, what was done until then
    is judged. report_line: called with a line on each round.
    """
    began_s = time.monotonic()
    known = world.ask("seed", profile_file=str(profile_file))
    spec = {
        "name": "quick",
        "model": known["model"],
        "dataset": known["dataset"],
        "workload": WORKLOAD,
        "goal": {"device_budget_bytes": BUDGET},
    }
    crowd = Crowd(world.url, known["token"], spec=spec, seed=seed, num_people=num_people, pause_s=pause_s)
    crowd.start()
    kinds = faults.find(only)
    campaign = _Campaign(world, crowd, random.Random(seed), report_line, most_waiting=most_waiting, kinds=kinds)
    wait_for(lambda: len(crowd.accepted) > 3, what=f"the first jobs: {crowd.refusals} {world.logs()}", timeout_s=90)
    campaign.come_to_rest()
    campaign.before = leaks.look_at_all(world)
    crowd.rest(False)
    for number in range(1, rounds + 1):
        if time.monotonic() > began_s + limit_s or is_to_end():
            break
        campaign.do_round(number, most_at_once=most_at_once)
        if number % LOOK_EVERY == 0 and number < rounds:
            campaign.come_to_rest()
            campaign.look_for_leaks(f"after round {number}")
            crowd.rest(False)
    crowd.settle()
    campaign.come_to_rest()
    campaign.look_for_leaks("at the end")
    report = campaign.judge()
    report.seconds = time.monotonic() - began_s
    return report


class _Campaign:
    def __init__(
        self,
        world: World,
        crowd: Crowd,
        chance: random.Random,
        report_line: Callable[[str], None],
        *,
        most_waiting: int,
        kinds: Sequence[Fault],
    ) -> None:
        self._most_waiting = most_waiting
        self._world, self._crowd, self._chance, self._report_line = world, crowd, chance, report_line
        self._kinds = self._draw_forever([fault for fault in kinds if fault.is_possible_in(world)])
        self.before: dict[str, leaks.Holding] = {}
        self.report = Report()

    def do_round(self, number: int, *, most_at_once: int) -> None:
        """Strike, wait, heal; what died is started again."""
        self._let_queue_shrink()
        time.sleep(self._chance.random() * 0.6)
        struck: list[Fault] = []
        with ExitStack() as healing:
            for _ in range(self._chance.randint(1, most_at_once)):
                if (fault := self._strike(healing, beside=struck)) is not None:
                    struck.append(fault)
            time.sleep(max((self._chance.uniform(*fault.lasts_s) for fault in struck), default=0.0))
        for name in SERVICES:
            self._world.is_running(name)  # notes who is not, though nobody ended it
        names = " + ".join(fault.name for fault in struck)
        self.report.ended_alone += [f"{ended} in round {number}: {names}" for ended in self._world.ended_alone]
        self._world.ended_alone.clear()
        self._world.revive()
        self.report.rounds = number
        self._report_line(f"round {number}: {names or 'nothing hit'}; {len(self._crowd.accepted)} jobs accepted")

    def come_to_rest(self) -> None:
        """Nobody submits until every job has ended; those that were held back after many losses go on."""
        self._crowd.rest(True)
        began_s = time.monotonic()
        while (unfinished := self._world.ask("unfinished"))["num"] and time.monotonic() < began_s + DRAINED_WITHIN_S:
            for job in unfinished["paused"]:
                self._crowd.resume(job)
            time.sleep(0.5)
        self.report.drained_s.append(round(time.monotonic() - began_s, 1))

    def look_for_leaks(self, when: str) -> None:
        until_s = time.monotonic() + 30
        while (found := leaks.find_leaks(self._world, self.before)) and time.monotonic() < until_s:
            time.sleep(1)
        if found:
            self.report.broken.setdefault(promises.NOT_LEAKED, []).extend(f"{when}: {leak}" for leak in found)

    def judge(self) -> Report:
        file = self._world.home / "accepted.json"
        file.write_text(json.dumps(self._crowd.to_json()))
        checked = self._world.ask("check", accepted_file=str(file))
        report = self.report
        report.broken |= checked["broken"]
        if self._crowd.refusals:
            report.broken[promises.NOT_REFUSED] = self._crowd.refusals[:10]
        report.facts, report.num_accepted = checked["facts"], len(self._crowd.accepted)
        report.statuses = dict(self._crowd.statuses)
        return report

    def _strike(self, healing: ExitStack, *, beside: list[Fault]) -> Fault | None:
        """beside: faults that last, whose places are left alone."""
        places = {fault.place for fault in beside}
        for _ in range(_TRIES):
            fault = next(self._kinds)
            if fault.place in places:
                continue
            try:
                healing.enter_context(_Struck(fault, self._world, self._chance, self.report))
            except Missed:
                self.report.missed[fault.name] += 1
                continue
            return fault
        return None

    def _let_queue_shrink(self) -> None:
        """A queue of minutes would only make the end late."""
        is_long = self._world.ask("unfinished")["num"] > self._most_waiting
        self._crowd.rest(is_long)

    def _draw_forever(self, kinds: list[Fault]) -> Iterator[Fault]:
        """Each kind as often as any other, in an order of chance."""
        while True:
            yield from self._chance.sample(kinds, len(kinds))


class _Struck:
    """A fault that lasts; one that turns out at its end to have hit nothing is counted as missed."""

    def __init__(self, fault: Fault, world: World, chance: random.Random, report: Report) -> None:
        self._fault, self._report = fault, report
        self._context = fault.strike(world, chance)

    def __enter__(self) -> None:
        try:
            self._context.__enter__()
        except _NOTHING_TO_HIT as error:
            raise Missed(str(error)) from None

    def __exit__(self, *error: Any) -> None:
        try:
            self._context.__exit__(*error)
        except (Missed, *_NOTHING_TO_HIT):
            self._report.missed[self._fault.name] += 1
        else:
            self._report.struck[self._fault.name] += 1
