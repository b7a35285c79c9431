"""``estimate_model``: from a model's configuration and a card's name to a plan's bytes and milliseconds. Torch-free.

What ``headroom estimate`` prints and a notebook asks for. A model that was never seen is traced by a child process, as far as the
question needs it, and its profile is kept (``profile/keep/obtain.py``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from optimizer.base.errors import InvalidInput, InvalidModel, NoFeasiblePlan
from optimizer.base.serialize import to_json
from optimizer.base.shown import shown_value
from optimizer.estimate.explanation import Explanation, explain_prediction
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import SUPPORTED_MODEL_TYPES, ModelSpec, read_model_spec
from optimizer.models.targets import check_targets
from optimizer.models.unread import describe_unread
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import EVERYTHING, Extent, traced_representation
from optimizer.profile.keep.obtain import ProfileSource
from optimizer.profile.plan_extent import extent_of_plans
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.answer.knobs import Knob, list_knobs
from optimizer.search.core import search
from optimizer.search.problem import PricedPlan, SearchProblem, divisors
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

BEST = "best"
"""Asks for the fastest plan that fits, beside any baseline's label (``BASELINES``)."""
MAX_CONFIG_BYTES = 1_000_000
"""Largest config.json that is read."""
_COMPUTED = ("fp32", "bf16", "fp32+bf16")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One plan or two, priced on one machine for one workload, and the last of them explained."""

    model_type: str
    num_blocks: int
    num_parameters: int
    """Trained ones."""
    machine: Machine
    workload: TrainingWorkload
    goal: Goal
    host_budget_bytes: int
    """The goal's, or what the machine has."""
    plans: tuple[PricedPlan, ...]
    """The plan asked for; without one plain training, and after it the fastest plan that fits where there is one."""
    nothing_fits: str | None
    """Where the fastest plan that fits was asked for and there is none: why, with the smallest peak found."""
    explanation: Explanation
    """Of the last of ``plans``."""
    knobs: tuple[Knob, ...]
    """What one change of that plan would buy and cost; empty unless asked for."""
    unread: tuple[str, ...] = ()
    """What the config asks for that is not in this estimate (``models/unread.py``)."""

    @property
    def priced(self) -> PricedPlan:
        """The last of ``plans``."""
        return self.plans[-1]

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def estimate_model(
    model: str | Path | Mapping[str, Any] | ModelSpec,
    *,
    machine: str | Machine,
    workload: TrainingWorkload | None = None,
    plan: str | Plan | None = None,
    goal: Goal | None = None,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
    profiles_folder: Path | None = None,
) -> Estimate:
    """model: a config.json, its folder or content, a preset's name, a ModelSpec. machine: a card's name, or a measured one.

    plan: a plan, a baseline's label, ``best``; None for plain training and the best beside it. goal: what the verdict and the
    search honour; the card's whole memory and nothing lossy unless given. weights: the dtype of a baseline, and of plain
    training, instead of fp32. with_knobs: price one-change neighbours too. profiles_folder: where profiles are kept.

    Raises InvalidInput and what is below it for anything that was asked wrongly, NoFeasiblePlan for ``best`` where nothing fits.
    """
    config = None if isinstance(model, ModelSpec) else read_config(model)
    spec = model if isinstance(model, ModelSpec) else read_model(model if config is None else config)
    workload = workload or TrainingWorkload()
    if not isinstance(workload, TrainingWorkload):
        raise InvalidInput(
            f"workload is of type {type(workload).__name__}; allowed: a TrainingWorkload",
            field="workload",
            allowed="a TrainingWorkload",
        )
    target = machine if isinstance(machine, Machine) else table_machine(machine)
    goal = goal or Goal(device_budget_bytes=target.device.memory_bytes)
    _check_label(plan)
    if workload.adapter is not None:
        check_targets(workload.adapter, spec.model_type)
    with ProfileSource(spec, adapter=workload.adapter, folder=profiles_folder) as source:
        extent = needed_extent(
            spec.num_blocks, plan, workload=workload, goal=goal, weights=weights, with_knobs=with_knobs
        )
        profile = source.read(extent)
    estimate = estimate_profiled(
        profile, machine=target, workload=workload, plan=plan, goal=goal, weights=weights, with_knobs=with_knobs
    )
    return estimate if config is None else replace(estimate, unread=describe_unread(config, spec))


def estimate_profiled(
    profile: Profile,
    *,
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    plan: str | Plan | None = None,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
    calibration: Mapping[str, Any] | None = None,
) -> Estimate:
    """``estimate_model`` with a profile at hand: milliseconds, but for the search that ``best`` means."""
    _check_label(plan)
    problem = training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    plans, nothing_fits = _price(problem, plan, weights)
    priced = plans[-1]
    explanation = explain_prediction(profile, plan=priced.plan, workload=workload, prediction=priced.prediction)
    knobs = list_knobs(problem, priced.plan, prediction=priced.prediction) if with_knobs else ()
    return Estimate(
        model_type=profile.model_type,
        num_blocks=profile.num_blocks,
        num_parameters=profile.num_parameters,
        host_budget_bytes=problem.host_budget_bytes,
        machine=machine,
        workload=workload,
        goal=goal,
        plans=plans,
        nothing_fits=nothing_fits,
        explanation=explanation,
        knobs=knobs,
    )


def read_model(model: str | Path | Mapping[str, Any]) -> ModelSpec:
    """A preset's name, a config.json or the folder with one, or its content. Raises InvalidInput, InvalidModel."""
    config = read_config(model)
    return PRESETS[str(model)].spec if config is None else _read_spec(config)


def read_config(model: str | Path | Mapping[str, Any]) -> dict[str, Any] | None:
    """The config that ``read_model`` reads; None for a preset. Raises InvalidInput, InvalidModel."""
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, str | Path):
        raise InvalidInput(
            f"model is {type(model).__name__}; allowed: a file's or a preset's name, or the content of a config.json",
            field="model",
            allowed="a name or an object",
        )
    if str(model) in PRESETS:
        return None
    path = Path(model)
    if not is_there(path):
        raise InvalidInput(
            f"model {str(model)!r} is neither a file nor a preset; presets: {', '.join(PRESETS)}",
            field="model",
            value=str(model),
            allowed=list(PRESETS),
        )
    document = read_json(path / "config.json" if path.is_dir() else path, field="model", max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(document, dict):
        raise InvalidModel(f"{path} must hold one JSON object", field="model", value=str(path), allowed="a JSON object")
    return document


def _read_spec(document: dict[str, Any]) -> ModelSpec:
    """Of a type on the allow-list without torch; of any other that transformers knows with it."""
    if document.get("model_type") in (None, *SUPPORTED_MODEL_TYPES):
        return read_model_spec(document)
    # By name: what the service imports must not lead to transformers, and the service never comes here.
    spec: ModelSpec = import_module("optimizer.models.any_spec").read_any_spec(document)
    return spec


def is_there(path: Path) -> bool:
    """Whether anything lies there; no also of what can be no path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, not permitted, with a NUL in it
        return False


def read_json(path: Path, *, field: str, max_bytes: int = 256_000_000) -> Any:
    """Raises InvalidInput that names the file where it cannot be read, is too large, or is no JSON."""
    try:
        return json.loads(read_text(path, field=field, max_bytes=max_bytes))
    except ValueError as error:
        raise _refuse(path, field, f" is not JSON: {error}") from error
    except RecursionError as error:
        raise _refuse(path, field, " is not JSON that can be read: it is nested too deeply") from error


def read_text(path: Path, *, field: str, max_bytes: int) -> str:
    """Raises InvalidInput that names the file where it cannot be read, is too large, or is no text."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise _refuse(path, field, " is no file")
        if path.stat().st_size > max_bytes:
            raise _refuse(path, field, f" has {path.stat().st_size:,} bytes; allowed: up to {max_bytes:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _refuse(path, field, f": {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refuse(path, field, " cannot be read: it is no UTF-8 text") from error
    except ValueError as error:
        raise _refuse(path, field, f" cannot be read: {error}") from error


def _refuse(path: Path, field: str, why: str) -> InvalidInput:
    return InvalidInput(f"--{field} {path}{why}", field=field, value=str(path))


def needed_extent(
    num_blocks: int,
    plan: str | Plan | None,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    weights: WeightsPlan | None = None,
    with_knobs: bool = False,
) -> Extent:
    """How much of a profile the question needs."""
    asked = "fp32" if weights is None else traced_representation(weights.representation)
    if with_knobs or (plan in (None, BEST) and goal.allow_lossy):
        if workload.adapter is not None:
            return EVERYTHING
        return _extent_of_search(_COMPUTED, workload)
    if isinstance(plan, Plan):
        return extent_of_plans([plan], workload=workload)
    if plan in (None, BEST):
        return _extent_of_search(tuple({"fp32": None, asked: None}), workload)
    try:
        baseline = baseline_plan(str(plan), _unpriced(num_blocks, workload, goal), weights)
        return extent_of_plans([baseline], workload=workload)
    except _Unpriced:
        return _extent_of_search(tuple({"fp32": None, asked: None}), workload)


def _extent_of_search(representations: tuple[str, ...], workload: TrainingWorkload) -> Extent:
    sizes = {1, *divisors(workload.global_batch_size)}
    return Extent(
        representations=representations,
        choices=BLOCK_CHOICES,
        shapes=tuple((size, workload.sequence_length) for size in sorted(sizes)),
    )


class _Unpriced(Exception):
    """A baseline asked for a price before there was a profile."""


def _unpriced(num_blocks: int, workload: TrainingWorkload, goal: Goal) -> SearchProblem:
    def price(plan: Plan) -> NoReturn:
        raise _Unpriced

    return SearchProblem(num_blocks=num_blocks, workload=workload, goal=goal, host_budget_bytes=0, price=price)


def _check_label(plan: str | Plan | None) -> None:
    allowed = [BEST, *BASELINES]
    if isinstance(plan, Plan) or plan is None or plan in allowed:
        return
    named = repr(plan) if isinstance(plan, str) else f"of type {type(plan).__name__}"
    raise InvalidInput(
        f"plan {named} is not one of {', '.join(allowed)}, nor a Plan", field="plan", value=shown_value(plan), allowed=allowed
    )


def _price(
    problem: SearchProblem, plan: str | Plan | None, weights: WeightsPlan | None
) -> tuple[tuple[PricedPlan, ...], str | None]:
    if isinstance(plan, Plan):
        plan.check(
            num_blocks=problem.num_blocks, workload=problem.workload, has_sparse_gradients=problem.has_sparse_gradients
        )
        return (_priced(problem, "given", plan),), None
    if plan is not None and plan != BEST:
        return (_priced(problem, plan, baseline_plan(plan, problem, weights)),), None
    plain = _priced(problem, "keep_all", baseline_plan("keep_all", problem, weights))
    try:
        chosen = search(problem).chosen
    except NoFeasiblePlan as error:
        if plan == BEST:
            raise
        return (plain,), error.message
    return ((chosen,) if plan == BEST else (plain, chosen)), None


def baseline_plan(label: str, problem: SearchProblem, weights: WeightsPlan | None) -> Plan:
    setting, per_block = BASELINES[label](problem)
    if weights is not None:
        setting = replace(setting, dtype=weights.dtype, autocast=weights.autocast, frozen=weights.frozen)
    plan = setting.plan(per_block)
    conflict = problem.find_conflict(plan)
    if conflict is not None:
        raise conflict
    return plan


def _priced(problem: SearchProblem, label: str, plan: Plan) -> PricedPlan:
    prediction: Prediction = problem.price(plan)
    return problem.priced(label, plan, prediction)
