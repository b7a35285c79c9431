"""Runs a ``train`` job in the attempt's process: ``attempt.json`` into values, tokens made once, then ``train``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.base.errors import OutOfMemory
from optimizer.base.heap import without_collections
from optimizer.base.serialize import from_json
from optimizer.data.chat_facts import ChatFacts
from optimizer.data.samples.columns import read_columns
from optimizer.data.tokens import tokenize_dataset
from optimizer.estimate.job.causes import name_cause
from optimizer.estimate.job.probing import find_miss
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.models.files.linked_files import checked_folder
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.plan import Plan
from optimizer.runtime.compiled.kernel_cache import keep_kernels_in
from optimizer.workload import TrainingWorkload
from worker.run.reporter import Reporter

if TYPE_CHECKING:
    from optimizer.runtime.job.training_run import Measured, Probe, TrainingRun
    from optimizer.runtime.ranks.group import RankPlace


def train_attempt(attempt: dict[str, Any], *, reporter: Reporter, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """The content of ``result.json``. Raises the errors of ``tokenize_dataset`` and ``train``."""
    spec = read_model_spec(attempt["config"])
    workload = from_json(TrainingWorkload, attempt["workload"], path="workload")
    token_folder = _tokenize(attempt, spec=spec, workload=workload, reporter=reporter)
    # torch takes seconds to import; what is wrong with the input has been said by now
    reporter.phase("loading", "starting torch")
    with without_collections():
        from optimizer.runtime.job.train import train

    run = _read_run(attempt, spec=spec, workload=workload, token_folder=token_folder)
    if run.plan.kernels.blocks == "compiled" and attempt.get("kernels_folder"):
        # for all attempts: each one's home is a folder of its own
        keep_kernels_in(Path(attempt["kernels_folder"]))
    probe = _make_probe(attempt)
    try:
        result = train(run, report=reporter, should_stop=should_stop, probe=probe).to_json()
        return _with_fullest_peak(result, attempt.get("prediction"))
    except OutOfMemory as error:
        _add_cause(error, run.goal, prediction=attempt.get("prediction"), place=attempt.get("ranks"))
        raise


def _make_probe(attempt: dict[str, Any]) -> "Probe | None":
    """Hold the first steps against the prediction, where the job may take another plan for it."""
    enough_left_s = attempt.get("probe_enough_left_s")
    if enough_left_s is None or not attempt.get("prediction"):
        return None
    prediction = Prediction.from_json(attempt["prediction"])

    def probe(measured: "Measured", num_steps_left: int) -> str:
        return find_miss(
            prediction,
            device_peak_bytes=max([measured.device_peak_bytes, *measured.rank_peak_bytes]),
            step_ms=measured.step_ms,
            num_steps_left=num_steps_left,
            enough_left_s=enough_left_s,
        )

    return probe


def _add_cause(
    error: OutOfMemory, goal: Goal, *, prediction: dict[str, Any] | None, place: dict[str, Any] | None
) -> None:
    """Name why memory ran out while what was predicted is at hand. place: of this rank, where there are several."""
    allowed = goal.device_budget_bytes if error.tier == "device" else goal.host_budget_bytes
    if allowed is not None:
        error.fields["allowed_bytes"] = allowed
    if place is not None:
        error.fields["rank"] = place["rank"]
    known = Prediction.from_json(prediction) if prediction else None
    error.fields["cause"] = name_cause(error.fields, prediction=known)


def _tokenize(attempt: dict[str, Any], *, spec: ModelSpec, workload: TrainingWorkload, reporter: Reporter) -> Path:
    reporter.phase("tokenizing")
    tokens = tokenize_dataset(
        file=attempt["dataset"]["file"],
        format=attempt["dataset"]["format"],
        columns=read_columns(attempt["dataset"].get("columns")),
        tokenizer_file=attempt["tokenizer_file"],
        folder=attempt["tokens_folder"],
        chat=ChatFacts.read(attempt.get("chat_file")),
        loss_on=workload.loss_on,
        pairs=workload.has_pairs,
        vocab_size=spec.vocab_size,
        end_of_text_id=spec.end_of_text_id,
    )
    return tokens.folder


def _read_run(
    attempt: dict[str, Any], *, spec: ModelSpec, workload: TrainingWorkload, token_folder: Path
) -> "TrainingRun":
    from optimizer.runtime.job.training_run import TrainingRun

    starts_from_weights = workload.mode == "finetune"
    return TrainingRun(
        spec=spec,
        plan=Plan.from_json(attempt["plan"]),
        workload=workload,
        goal=_goal_of_rank(from_json(Goal, attempt["goal"], path="goal"), attempt.get("ranks"), attempt.get("prediction")),
        device=attempt["device"],
        attempt=attempt["attempt"],
        fence=attempt["fence"],
        job_folder=Path(attempt["job_folder"]),
        weights_folder=checked_folder(attempt["weights_folder"], attempt["linked_files"]) if starts_from_weights else None,
        token_file=token_folder,
        tokenizer_file=Path(attempt["tokenizer_file"]) if attempt["tokenizer_file"] else None,
        resume_from=attempt["resume_from"],
        model_folder=Path(attempt["model_folder"]) if starts_from_weights else None,
        name=attempt.get("model_name", "model"),
        earlier_job_folders=tuple(Path(folder) for folder in attempt["earlier_job_folders"]),
        base_folder=Path(attempt["base_folder"]) if attempt.get("base_folder") else None,
        ranks=_read_place(attempt.get("ranks")),
    )


def _read_place(document: dict[str, Any] | None) -> "RankPlace | None":
    """The process's place among several ranks (``ranks/rank.py``)."""
    if document is None:
        return None
    from optimizer.runtime.ranks.group import RankPlace

    return RankPlace(**{**document, "folder": Path(document["folder"])})


def _goal_of_rank(goal: Goal, place: dict[str, Any] | None, prediction: dict[str, Any] | None) -> Goal:
    """The goal with the rank's part of what all ranks share: budgets of host and disk are given for all together. No rank has
    more of its device than there is, where devices differ.
    """
    if ranks := (prediction or {}).get("ranks"):
        own_bytes = int(ranks[0 if place is None else place["rank"]]["memory_bytes"])
        goal = replace(goal, device_budget_bytes=min(goal.device_budget_bytes, own_bytes))
    if place is None:
        return goal
    shared = {name: getattr(goal, name) for name in ("host_budget_bytes", "disk_budget_bytes")}
    parts = {name: size // place["num_ranks"] for name, size in shared.items() if size is not None}
    return replace(goal, **parts)


def _with_fullest_peak(result: dict[str, Any], prediction: dict[str, Any] | None) -> dict[str, Any]:
    """Put the fullest rank's peak in place of the first one's, which reports: predictions are of the fullest. Of devices that
    differ that is the one for which the least room was predicted.
    """
    measured = result["measured"]
    if peaks := measured.get("rank_peak_bytes"):
        fullest = Prediction.from_json(prediction).fullest_rank if (prediction or {}).get("ranks") else None
        result["measured"] = {**measured, "device_peak_bytes": max(peaks) if fullest is None else peaks[fullest]}
    return result
