"""One injected out-of-memory from end to end: a job under a tight budget meets it, is named, planned again, and goes on.

A seed and an index name one case: a tiny model, how much of it the budget holds, the cause and how much it takes. The attempts
are real runs on the CPU device, each going on from the checkpoint of the one before; plans come from the search, as a job's do.
"""

import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import Row
from benchmarks.oom.inject import LONGER, HostKilled, Injection
from optimizer.api.replan import Failure, replan_profiled
from optimizer.base.errors import DiskFull, NoFeasiblePlan, OutOfMemory
from optimizer.base.units import KIB
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.tokens import tokenize_dataset
from optimizer.estimate.job.causes import CAUSES, Cause, name_cause
from optimizer.estimate.job.shortfalls import EVERY_STAGE, Shortfall, ShortTier
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.profile.profile import Profile
from optimizer.runtime.job.export.place import artifacts_place
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.search.core import search
from optimizer.search.problem import PricedPlan
from optimizer.search.training import training_problem, with_shortfalls
from optimizer.workload import Adapter, TrainingWorkload

MACHINE = make_cpu_machine()
MAX_RETRIES = 3
_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 4096,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4, **_LLAMA},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 4096, "n_positions": 256},
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 3, **_LLAMA, "head_dim": 16, "sliding_window": 16},
}
_STAGES: dict[str, str] = {
    "load": "load",
    "resume": "resume",
    "evaluation": "evaluation",
    "save": "save",
    "export": "export",
    "reference_model": "evaluation",
}
"""The stage whose predicted peak an injection must go over; of other causes a steady step."""
_TIERS: dict[str, ShortTier] = {"save": "host", "pinned_memory": "host", "export": "host"}
_NUM_DRAWS = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """An injection, and the job that meets it under the plan that was found for it."""

    cause: Cause
    model: str
    workload: TrainingWorkload
    goal: Goal
    first: PricedPlan
    injection: Injection


def run_case(seed: int, index: int, *, causes: Sequence[Cause] = CAUSES) -> Row:
    """The row of one case; causes take turns."""
    draw, cause = random.Random(f"{seed} {index}"), causes[index % len(causes)]
    head = {"seed": seed, "index": index, "cause": cause}
    case = _draw_case(draw, cause)
    if case is None:
        return {**head, "what": "left out", "why": "no plan has room for what is injected"}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        row = _run_job(case, Path(folder))
    if not row["named"]:
        return {**head, "what": "left out", "why": "the first plan had room for what was injected"}
    held = {
        "model": case.model,
        "injected_bytes": case.injection.num_bytes,
        "budget_bytes": case.goal.device_budget_bytes,
    }
    return {**head, "what": "case", **held, **row, "took_s": round(time.monotonic() - started_s, 2)}


def _run_job(case: Case, folder: Path) -> Row:
    """Attempts until one ends, or no further plan is found."""
    priced, failures, named = case.first, list[Failure](), list[str]()
    plan_s: list[float] = []
    steps: list[tuple[int, int]] = []
    if case.cause == "resume":
        # a first attempt leaves a checkpoint, and stops as if its worker had drained
        _attempt(case, priced, folder, attempt=1, num_steps=2, steps=steps)
    for number in range(2, MAX_RETRIES + 3):
        with case.injection.applied():
            failure = _attempt(case, priced, folder, attempt=number, steps=steps)
        if failure is None:
            break
        named.append(failure.cause)
        if failure.cause == "disk" or number == MAX_RETRIES + 2:
            break
        failures.append(failure)
        started_s = time.monotonic()
        try:
            priced = replan_profiled(
                _profile(case.model, case.workload),
                machine=MACHINE,
                workload=case.workload,
                goal=case.goal,
                failures=failures,
                checkpoint_of=priced.plan,
            )
        except NoFeasiblePlan:
            return _outcome(case, failures, named, plan_s, steps, ended="no plan found")
        plan_s.append(round(time.monotonic() - started_s, 2))
    ended = "named" if named == ["disk"] else "ran out" if len(failures) > MAX_RETRIES else "done"
    return _outcome(case, failures, named, plan_s, steps, ended=ended)


def _outcome(
    case: Case,
    failures: list[Failure],
    named: list[str],
    plan_s: list[float],
    steps: list[tuple[int, int]],
    *,
    ended: str,
) -> Row:
    lost = [done - begun for (_, done), (begun, _) in itertools.pairwise(steps)]
    plans = [failure.plan for failure in failures]
    return {
        "ended": ended,
        "named": named[0] if named else "",
        "is_named_right": bool(named) and set(named) == {case.cause},
        "num_retries": len(plan_s),
        "has_repeated": any(plan in plans[:index] for index, plan in enumerate(plans)),
        "most_steps_lost": max([0, *lost[:-1], *(lost[-1:] if ended == "done" else [])]),
        "longest_plan_s": max(plan_s, default=0.0),
    }


def _attempt(
    case: Case,
    priced: PricedPlan,
    folder: Path,
    *,
    attempt: int,
    steps: list[tuple[int, int]],
    num_steps: int | None = None,
) -> Failure | None:
    """None where it ended well. steps: the step from which this one went on and the last that it did are added."""
    run = TrainingRun(
        spec=_spec(case.model),
        plan=priced.plan,
        workload=case.workload,
        goal=case.goal,
        device="cpu",
        attempt=attempt,
        fence=attempt,
        job_folder=folder / "job",
        weights_folder=_weights(case.model) if case.workload.mode == "finetune" else None,
        token_file=_tokens(has_pairs=case.workload.has_pairs),
        tokenizer_file=TOKENIZER_FILE,
        resume_from="newest",
    )
    # one that ends before it has begun has lost nothing
    begun = done = steps[-1][1] if steps else 0

    def report(message: dict[str, Any]) -> None:
        nonlocal begun, done
        if message["type"] == "started":
            begun = done = message["resumed_from_step"]
        done = max(done, message.get("step", 0))

    try:
        train(run, report=report, should_stop=lambda: num_steps is not None and done >= num_steps)
    except (OutOfMemory, HostKilled, DiskFull, OSError) as error:
        return _failure(error, case, priced)
    finally:
        steps.append((begun, done))
    return None


def _failure(error: BaseException, case: Case, priced: PricedPlan) -> Failure:
    """The part of an attempt that a job keeps, as it comes back from the database."""
    prediction = Prediction.from_json(json.loads(json.dumps(priced.prediction.to_json())))
    if isinstance(error, HostKilled):
        return Failure(plan=priced.plan, cause="host_killed", fields={"tier": "host"})
    if not isinstance(error, OutOfMemory):
        return Failure(plan=priced.plan, cause="disk", fields={})
    on_device = error.tier == "device"
    allowed = case.goal.device_budget_bytes if on_device else case.goal.host_budget_bytes
    fields = json.loads(json.dumps({**error.fields, "allowed_bytes": allowed}))
    return Failure(plan=priced.plan, cause=name_cause(fields, prediction=prediction), fields=fields)


# Drawing a case.


def _draw_case(draw: random.Random, cause: Cause) -> Case | None:
    for _ in range(_NUM_DRAWS):
        case = _try_case(draw, cause)
        if case is not None:
            return case
    return None


def _try_case(draw: random.Random, cause: Cause) -> Case | None:
    """None where no plan at all has room for what is injected, or the first one has."""
    has_pairs = cause == "reference_model"
    model = "llama" if has_pairs else draw.choice(list(_CONFIGS))
    workload = _draw_workload(draw, has_pairs=has_pairs)
    if cause == "load":
        # drawn weights are whole on the device for a moment whatever the plan; read ones are not
        workload = replace(workload, mode="finetune")
    profile = _profile(model, workload)
    plain = _search(profile, workload, Goal(device_budget_bytes=2**40))
    floor_bytes = _find_floor(profile, workload)
    top_bytes = plain.prediction.device_peak_high_bytes
    share = draw.uniform(0.5, 1.0)
    wide = Goal(device_budget_bytes=int(floor_bytes + share * (top_bytes - floor_bytes)))
    first = _search(profile, workload, wide)
    goal = _tighten(wide, first, cause)
    num_bytes = _draw_bytes(draw, cause, first, goal=goal, floor_bytes=floor_bytes)
    if num_bytes is None or not _has_room(profile, workload, goal, first, cause, num_bytes):
        return None
    return Case(
        cause=cause,
        model=model,
        workload=workload,
        goal=goal,
        first=first,
        injection=Injection(cause=cause, num_bytes=num_bytes),
    )


def _find_floor(profile: Profile, workload: TrainingWorkload) -> int:
    """The smallest peak of any plan."""
    try:
        return _search(profile, workload, Goal(device_budget_bytes=1)).prediction.device_peak_bytes
    except NoFeasiblePlan as error:
        return int(error.fields["smallest_feasible_bytes"])


def _tighten(goal: Goal, first: PricedPlan, cause: Cause) -> Goal:
    """The budget that the first plan fills; of the host as well where that is to run out."""
    if _TIERS.get(cause) != "host":
        return replace(goal, device_budget_bytes=first.prediction.device_peak_high_bytes)
    host_bytes = max([first.prediction.host_peak_bytes, *(peak.host_peak_bytes for peak in first.prediction.stages)])
    # another plan may then take more of the device in turn
    return replace(goal, device_budget_bytes=int(goal.device_budget_bytes * 1.1), host_budget_bytes=host_bytes)


def _draw_bytes(draw: random.Random, cause: Cause, first: PricedPlan, *, goal: Goal, floor_bytes: int) -> int | None:
    """Bytes to inject: over what the stage leaves free, by a part of what other plans could save."""
    prediction, part = first.prediction, draw.uniform(0.05, 0.5)
    peaks = {str(peak.stage): peak for peak in prediction.stages}
    if cause == "host_killed":
        return int((prediction.device_peak_bytes + prediction.host_peak_bytes) * (1 - 0.2 * part))
    if _TIERS.get(cause) == "host":
        host = goal.host_budget_bytes or 0
        used = peaks[cause].host_peak_bytes if cause in peaks else prediction.host_peak_bytes
        return host - used + int(part * prediction.host_peak_bytes) if prediction.host_peak_bytes else None
    stage = _STAGES.get(cause)
    used = peaks[stage].device_peak_bytes if stage else prediction.device_peak_bytes
    more = int(part * max(16 * KIB, used - floor_bytes if not stage else used // 2))
    return goal.device_budget_bytes - used + more


def _has_room(
    profile: Profile, workload: TrainingWorkload, goal: Goal, first: PricedPlan, cause: Cause, num_bytes: int
) -> bool:
    """Report whether a plan other than the first has room, by a search that knows what is injected."""
    stage, tier = _STAGES.get(cause, "steady_step"), _TIERS.get(cause, "device")
    further: tuple[Shortfall, ...] = ()
    if cause == "disk":
        return True
    if cause == "host_killed":
        host_bytes = first.prediction.host_peak_bytes
        if num_bytes - host_bytes >= goal.device_budget_bytes:
            return False
        left_bytes = goal.device_budget_bytes - (num_bytes - host_bytes)
        further = (Shortfall(stage=EVERY_STAGE, tier="host", num_bytes=MACHINE.host_memory_bytes - host_bytes),)
        shortfall = Shortfall(stage=EVERY_STAGE, tier="device", num_bytes=left_bytes)
    elif cause == "longest_batch":
        resident = sum(first.prediction.timeline[0].bytes_by_category.values())
        longer_bytes = int((first.prediction.device_peak_bytes - resident) * (LONGER - 1) * 1.25)
        shortfall = Shortfall(stage=stage, tier=tier, num_bytes=longer_bytes)
    elif cause in ("another_process", "fragmentation"):
        shortfall = Shortfall(stage=EVERY_STAGE, tier=tier, num_bytes=num_bytes)
    else:
        shortfall = Shortfall(stage=stage, tier=tier, num_bytes=num_bytes)
    try:
        return _search(profile, workload, goal, shortfall, *further).plan != first.plan
    except NoFeasiblePlan:
        return False


def _search(profile: Profile, workload: TrainingWorkload, goal: Goal, *shortfalls: Shortfall) -> PricedPlan:
    problem = training_problem(profile, workload=workload, goal=goal, machine=MACHINE)
    return search(with_shortfalls(problem, profile, shortfalls, machine=MACHINE)).chosen


def _draw_workload(draw: random.Random, *, has_pairs: bool) -> TrainingWorkload:
    pairs: dict[str, Any] = {"objective": "dpo", "packing": "off", "loss_on": "assistant", "adapter": Adapter(rank=4)}
    return TrainingWorkload(
        sequence_length=draw.choice((32, 48, 64)),
        global_batch_size=draw.choice((2, 4)),
        num_steps=4,
        learning_rate=1e-3,
        eval_every_steps=2,
        eval_batches=1,
        checkpoint_every_steps=1,
        sample_tokens=0,
        **(pairs if has_pairs else {}),
    )


def _spec(model: str) -> ModelSpec:
    return read_model_spec(_CONFIGS[model])


@cache
def _weights(model: str) -> Path:
    """The weights that a run of one step leaves."""
    workload = replace(_draw_workload(random.Random(0), has_pairs=False), num_steps=1)
    first = _search(_profile(model, workload), workload, Goal(device_budget_bytes=2**40))
    folder = Path(tempfile.mkdtemp(prefix="headroom-oom-"))
    run = TrainingRun(
        spec=_spec(model),
        plan=first.plan,
        workload=workload,
        goal=Goal(device_budget_bytes=2**40),
        device="cpu",
        attempt=1,
        fence=1,
        job_folder=folder,
        weights_folder=None,
        token_file=_tokens(has_pairs=False),
        tokenizer_file=TOKENIZER_FILE,
    )
    train(run, report=lambda message: None, should_stop=lambda: False)
    return folder / artifacts_place(run.fence) / "model"


def _profile(model: str, workload: TrainingWorkload) -> Profile:
    return _trace(model, workload.adapter, workload.objective)


@cache
def _trace(model: str, adapter: Adapter | None, objective: Any) -> Profile:
    from optimizer.profile.trace.trace import profile_model

    return profile_model(_spec(model), adapter=adapter, objective=objective)


@cache
def _tokens(*, has_pairs: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headroom-oom-"))
    words = ("bread", "water", "light", "stone", "river", "tree", "salt", "fire")
    file = folder / ("pairs.jsonl" if has_pairs else "text.txt")
    if has_pairs:
        rows = [
            {"prompt": f"Say {word}.", "chosen": f"Blessed {word}.", "rejected": f"No {word} now."} for word in words
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write_text("\n".join(f"the {one} and the {other}" for one in words for other in words) * 20)
    return tokenize_dataset(
        file=file,
        format="jsonl" if has_pairs else "txt",
        tokenizer_file=TOKENIZER_FILE,
        folder=folder / "tokens",
        loss_on="assistant" if has_pairs else "all",
        pairs=has_pairs,
    ).folder
