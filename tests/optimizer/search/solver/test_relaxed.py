"""No plan is faster than the bound of its setting at the budget that it just keeps, nor where it says that nothing fits."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.profiles import TINY, with_depth
from benchmarks.search.small import draw_machine
from optimizer.estimate.bounds.lower_bounds import Relaxation
from optimizer.goal import Goal
from optimizer.models.spec import read_model_spec
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.grid import MAX_PREFETCH, chunk_counts
from optimizer.search.solver.relaxed import bound_relaxed, with_forms, with_host_limit
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

NUM_PLANS = 24
REPRESENTATIONS = {"llama": ("fp32+bf16",), "gpt2": ("bf16",), "gemma3_text": ("fp32",)}
"""One for each model: tracing takes most of the time."""


LENGTHS = {"llama": (32, 128, 512), "gpt2": (32, 128, 512), "gemma3_text": (512,)}
"""Lengths of sequences; blocks of the last model differ much only beyond its window."""


def traced(name: str) -> Profile:
    shapes = tuple((size, length) for size in (1, 2) for length in LENGTHS[name])
    return profile_model(read_model_spec(TINY[name]), extent=Extent(representations=REPRESENTATIONS[name], shapes=shapes))


def draw_problem(draw: random.Random, profile: Profile, lengths: tuple[int, ...]) -> SearchProblem:
    workload = TrainingWorkload(
        sequence_length=draw.choice(lengths),
        global_batch_size=draw.choice([1, 4, 6]),
        max_grad_norm=draw.choice([None, 1.0]),
        optimizer=draw.choice(["adamw", "sgd"]),
        adapter=None,
        eval_batches=1,
    )
    _, machine = draw_machine(draw)
    goal = Goal(device_budget_bytes=1, allow_lossy=True)
    return training_problem(with_depth(profile, draw.randint(2, 9)), workload=workload, goal=goal, machine=machine)


def draw_setting(draw: random.Random, problem: SearchProblem) -> OuterPlan:
    while True:
        setting = replace(
            draw.choice(problem.settings()),
            gradients=draw.choice(["keep", "consume", "host"]),
            state_place=draw.choice(["device", "host", "disk", "remote"]),
            state_fraction=draw.choice([1.0, 0.5, 3 / 64]),
            weights_place=draw.choice(["device", "host", "disk", "remote"]),
            prefetch=draw.randint(0, MAX_PREFETCH),
            compress=draw.choice(["none", "bf16", "int8"]),
        )
        if setting.state_place == "device" or setting.weights_place != "device":
            setting = replace(setting, state_fraction=1.0)
        if problem.permits_setting(setting):
            counts = chunk_counts(setting, tokens=problem.workload.sequence_length)
            return replace(setting, num_chunks=draw.choice(counts))


@pytest.mark.parametrize("name", list(REPRESENTATIONS))
def test_no_plan_is_faster_than_its_settings_bound(name: str) -> None:
    draw = random.Random(f"relaxed {name}")
    profile = traced(name)
    problem = draw_problem(draw, profile, LENGTHS[name])
    tightness, num_limited = [], 0
    for index in range(NUM_PLANS):
        if index % 8 == 0:
            problem = draw_problem(draw, profile, LENGTHS[name])
        setting = draw_setting(draw, problem)
        favourite = draw.choice(problem.choices)
        per_block = tuple(
            favourite if draw.random() < 0.6 else draw.choice(problem.choices) for _ in range(problem.num_blocks)
        )
        prediction = problem.price(setting.plan(per_block))
        counts = chunk_counts(setting, tokens=problem.workload.sequence_length)
        free = setting.state_place != "device" and setting.weights_place == "device" and draw.random() < 0.7
        found = problem.relax.setting(setting, forms=problem.forms, chunk_counts=counts, state_is_free=free)
        limited = with_host_limit(found, host_budget_bytes=prediction.host_peak_bytes)
        num_limited += len(limited.last_ms) - len(found.last_ms)
        limited_ms = bound_relaxed(limited, budget_bytes=prediction.device_peak_high_bytes)[counts.index(setting.num_chunks)]
        assert limited_ms <= prediction.step_ms, (setting, per_block)
        bounds = bound_relaxed(found, budget_bytes=prediction.device_peak_high_bytes)
        bound_ms = bounds[counts.index(setting.num_chunks)]
        assert bound_ms <= prediction.step_ms, (setting, per_block)
        assert problem.relax.base_ms(setting.base) <= prediction.step_ms
        tightness.append(bound_ms / prediction.step_ms)
    assert max(tightness) > 0.9
    assert num_limited


def _draw_relaxations() -> Iterator[tuple[Relaxation, int]]:
    """Drawn bytes and times, each with a budget between the least and the most that blocks hold."""
    draw = np.random.default_rng(26)
    for _ in range(NUM_PLANS):
        num_kinds, num_sums, num_counts = draw.integers(1, 4, size=3)
        num_forms = int(draw.integers(2, 7))
        found = Relaxation(
            num_of_kind=draw.integers(1, 9, size=num_kinds).astype(np.float64),
            kind_bytes=draw.uniform(1e6, 1e8, (num_kinds, num_forms)),
            kind_ms=draw.uniform(1, 20, (num_sums + 1, num_kinds, num_forms)),
            last_bytes=draw.uniform(1e6, 1e8, (num_counts, num_forms)),
            last_ms=draw.uniform(1, 20, (num_sums + 1, num_forms)),
            fixed_bytes=1e8,
            end_bytes=np.full(num_counts, 1e6),
            fixed_ms=draw.uniform(1, 50, (num_sums + 1, num_counts)),
            state_bytes=float(draw.choice([0, 5e7])),
            state_ms=draw.uniform(-1, 10, num_sums + 1),
            host_bytes=0,
            state_host_bytes=0,
            kind_host_bytes=np.zeros((num_kinds, num_forms)),
            last_host_bytes=np.zeros(num_forms),
            disk_bytes=0,
            remote_bytes=0,
            margin=0.0,
        )
        ends = (found.num_of_kind @ extreme(found.kind_bytes, axis=1) for extreme in (np.min, np.max))
        least, most = (end + found.last_bytes.max() + found.fixed_bytes for end in ends)
        yield found, int(draw.uniform(least, most))


def test_a_bound_that_is_high_enough_is_still_one_and_no_higher_than_the_best() -> None:
    num_left = 0
    for found, budget_bytes in _draw_relaxations():
        best = bound_relaxed(found, budget_bytes=budget_bytes)
        finite = np.isfinite(best)
        for enough_ms in (0.0, float(np.median(best[finite]))):
            quick = bound_relaxed(found, budget_bytes=budget_bytes, enough_ms=enough_ms)
            assert (np.isfinite(quick) == finite).all()
            assert (quick[finite] <= best[finite] * (1 + 1e-12)).all()
            num_left += int((quick[finite] < best[finite]).sum())
    assert num_left


def test_forms_that_another_one_is_never_worse_than_change_no_bound() -> None:
    for found, budget_bytes in _draw_relaxations():
        forms = list(range(found.last_bytes.shape[1]))
        doubled = with_forms(found, [*forms, *forms])
        worse = replace(
            doubled,
            kind_bytes=doubled.kind_bytes + np.repeat([0.0, 64.0], len(forms)),
            last_ms=doubled.last_ms + np.repeat([0.0, 0.5], len(forms)),
        )
        expected = bound_relaxed(found, budget_bytes=budget_bytes)
        assert bound_relaxed(worse, budget_bytes=budget_bytes) == pytest.approx(expected, rel=1e-12)
