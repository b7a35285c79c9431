"""Runs a ``generate`` job in the attempt's process: prompts into tokens, passes over the model, answers line by line.

A line that is done is on the disk before it is reported to anyone, and no later attempt does it again. A line that cannot be used
becomes an entry of the error file; it does not end the job. Stop texts are looked for after each token (``data/stop_texts.py``)
and end their sequence; what is written of it ends before them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from optimizer.base.errors import OutOfMemory
from optimizer.base.heap import without_collections
from optimizer.base.serialize import from_json, to_json
from optimizer.data.prompt_tokens import LineTokens, PromptTokenizer, length_problem
from optimizer.data.prompts import read_prompts
from optimizer.data.stop_texts import StopWatch, cut_at_stop
from optimizer.estimate.job.causes import name_generation_cause
from optimizer.formats.sampling import Sampling
from optimizer.goal import GenerationGoal
from optimizer.models.files.linked_files import checked_folder
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.workload import GenerationRequest
from worker.run.answers import answer, refusal
from worker.run.ranks.generating import GeneratingRank, measured_together
from worker.run.reporter import Reporter
from worker.run.results import OtherParts, Result, ResultWriter, read_finished, write_finished

if TYPE_CHECKING:
    from optimizer.runtime.generation.run_requests import Finished, GenerationResult, Request


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One attempt at a job, read from ``attempt.json``."""

    attempt: dict[str, Any]
    spec: ModelSpec
    workload: GenerationRequest
    goal: GenerationGoal
    plan: GenerationPlan
    tokenizer: PromptTokenizer
    job_folder: Path
    rank: GeneratingRank

    @property
    def job_id(self) -> str:
        return str(self.attempt["job_id"])


@dataclass
class _Progress:
    """Counts of finished work, by this attempt and those before it."""

    finished: dict[int, Result]
    num_lines: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    waiting: dict[int, LineTokens] = field(default_factory=dict)
    """Lines to generate for, by index."""

    def add(self, result: Result) -> None:
        self.finished[result.index] = result
        self.num_errors += result.is_error
        self.num_tokens += result.completion_tokens


def generate_attempt(
    attempt: dict[str, Any], *, reporter: Reporter, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """The content of ``result.json``. Raises InvalidModel, InvalidDataset, and the errors of ``run_requests``."""
    reporter.phase("tokenizing")
    work = _read_work(attempt)
    folders = [work.job_folder, *(Path(folder) for folder in attempt["earlier_job_folders"])]
    progress = _Progress(finished={})
    for result in read_finished(folders).values():
        progress.add(result)
    reporter({"type": "started", "resumed_from_step": len(progress.finished)})
    rank = work.rank
    with ResultWriter(work.job_folder, attempt=attempt["attempt"], fence=attempt["fence"], rank=rank.rank) as writer:
        _read_lines(work, progress, writer)
        try:
            measured = _generate(work, progress, writer, reporter=reporter, should_stop=should_stop)
        except OutOfMemory as error:
            _add_cause(error, work)
            raise
    if not rank.is_first:
        return _result(progress, measured, files=[])
    if rank.shares_lines:
        _take_others(progress, read_finished(folders))
    reporter.phase("saving", "writing the results in the order of the prompts")
    files = write_finished(progress.finished, job_folder=work.job_folder, fence=attempt["fence"])
    return _result(progress, measured, files=[asdict(file) for file in files])


def _add_cause(error: OutOfMemory, work: _Work) -> None:
    """Name why memory ran out, against what this rank may take."""
    goal = work.goal
    allowed = goal.device_budget_bytes if error.tier == "device" else work.rank.own_part(goal.host_budget_bytes)
    if allowed is not None:
        error.fields["allowed_bytes"] = allowed
    error.fields["cause"] = name_generation_cause(error.fields)


def _take_others(progress: _Progress, finished: Mapping[int, Result]) -> None:
    """The answers of other ranks, all of which have ended."""
    for index in [index for index in progress.waiting if index in finished]:
        del progress.waiting[index]
        progress.add(finished[index])


def _read_work(attempt: dict[str, Any]) -> _Work:
    spec = read_model_spec(attempt["config"])
    plan = GenerationPlan.from_json(attempt["plan"])
    return _Work(
        attempt=attempt,
        spec=spec,
        workload=from_json(GenerationRequest, attempt["workload"], path="workload"),
        goal=from_json(GenerationGoal, attempt["goal"], path="goal"),
        plan=plan,
        tokenizer=PromptTokenizer(
            attempt["tokenizer_file"],
            chat_file=attempt["chat_file"],
            vocab_size=spec.vocab_size,
            end_of_text_id=spec.end_of_text_id,
            end_ids=attempt["end_ids"],
        ),
        job_folder=Path(attempt["job_folder"]),
        rank=GeneratingRank.read(attempt, plan.layout),
    )


def _read_lines(work: _Work, progress: _Progress, writer: ResultWriter) -> None:
    """Sort the lines into those that are done, that cannot be done, and that wait."""
    refused = []
    for each in work.tokenizer.encode(read_prompts(work.attempt["prompts"]["file"])):
        progress.num_lines += 1
        line = each.line
        if line.index in progress.finished:
            continue
        problem = each.problem or length_problem(
            len(each.ids),
            line.workload(work.workload).max_new_tokens,
            max_sequence_length=work.spec.max_sequence_length,
        )
        if problem is None:
            progress.waiting[line.index] = each
        else:
            refused.append(refusal(line, problem, job_id=work.job_id))
    if refused and work.rank.is_first:
        writer.add(refused)
    for result in refused:
        progress.add(result)


def _generate(
    work: _Work,
    progress: _Progress,
    writer: ResultWriter,
    *,
    reporter: Reporter,
    should_stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Until all that waits is done, or it is time to stop. What was measured; None where there was nothing to do."""
    rank = work.rank
    # Ranks go on together, to stop together.
    if not progress.waiting or (rank.is_alone and should_stop()):
        return None
    # torch takes seconds to import; what is wrong with the input has been said by now
    reporter.phase("loading", "starting torch")
    with without_collections():
        from optimizer.runtime.generation.run_requests import open_generator, run_requests
        from optimizer.runtime.meter.device import set_num_threads

    def keep(finished: "Finished") -> None:
        each = progress.waiting.pop(int(finished.id))
        result = _answer(work, each, finished)
        if rank.writes:
            reporter.require_lease()
            writer.add([result])
        progress.add(result)

    set_num_threads()
    with rank.joined(work.attempt["device"]) as ranks:
        lines = _own_lines(work, progress.waiting)
        with open_generator(
            work.spec,
            plan=work.plan,
            device=work.attempt["device"],
            weights_folder=checked_folder(work.attempt["weights_folder"], work.attempt["linked_files"]),
            cap_bytes=work.goal.device_budget_bytes,
            host_cap_bytes=rank.own_part(work.goal.host_budget_bytes),
            scratch=work.job_folder,
            ranks=ranks,
        ) as generator:
            reporter.phase("generating")
            result = run_requests(
                generator,
                _Requests(work, lines),
                on_finished=keep,
                report=_Sampler(work, progress, reporter),
                should_stop=rank.stopping(should_stop),
            )
        measured = _measured(result)
        if ranks is not None:
            # Also so that the first ends when all have.
            ranks.barrier()
            measured = measured_together(ranks.exchange_json(measured), work.plan.layout)
    return measured


def _own_lines(work: _Work, waiting: Mapping[int, LineTokens]) -> list[LineTokens]:
    """Lines that this rank generates for."""
    lines = list(waiting.values())
    lengths = [(len(each.ids), each.line.workload(work.workload).max_new_tokens) for each in lines]
    return work.rank.own_lines(lines, lengths)


class _Requests(Sequence["Request"]):
    """Made as they are looked at; all of them at once would take many times the memory of their tokens."""

    def __init__(self, work: _Work, lines: Sequence[LineTokens]) -> None:
        self._work = work
        self._lines = tuple(lines)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> "Request": ...
    @overload
    def __getitem__(self, index: slice) -> Sequence["Request"]: ...
    def __getitem__(self, index: int | slice) -> "Request | Sequence[Request]":
        if isinstance(index, slice):
            return [_request(self._work, line) for line in self._lines[index]]
        return _request(self._work, self._lines[index])


def _request(work: _Work, each: LineTokens) -> "Request":
    from optimizer.runtime.generation.run_requests import Request

    workload = each.line.workload(work.workload)
    sampling = Sampling(
        max_new_tokens=workload.max_new_tokens,
        temperature=workload.temperature,
        top_k=workload.top_k,
        top_p=workload.top_p,
        seed=workload.seed,
        stop_token_ids=work.tokenizer.end_ids,
    )
    watch = partial(StopWatch, workload.stop, decode=work.tokenizer.decode) if workload.stop else None
    return Request(id=str(each.line.index), token_ids=tuple(each.ids), sampling=sampling, make_watch=watch)


def _answer(work: _Work, each: LineTokens, finished: "Finished") -> Result:
    ids = finished.token_ids
    written = ids[:-1] if ids and ids[-1] in work.tokenizer.end_ids else ids
    text, is_cut = cut_at_stop(work.tokenizer.decode(written), each.line.workload(work.workload).stop)
    return answer(
        each.line,
        text=text,
        finish_reason="stop" if is_cut else finished.finish_reason,
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=len(ids),
        job_id=work.job_id,
    )


class _Sampler:
    """Makes the runtime's samples into telemetry: ``step`` counts the tokens of all attempts, so it never goes back. Of copies of
    the model the others' answers count as they are written.
    """

    def __init__(self, work: _Work, progress: _Progress, reporter: Reporter) -> None:
        self._progress = progress
        self._reporter = reporter
        self._before = progress.num_tokens
        num_ranks = work.rank.num_ranks if work.rank.is_first and work.rank.shares_lines else 1
        attempt = work.attempt
        self._others = OtherParts(
            work.job_folder, attempt=attempt["attempt"], fence=attempt["fence"], num_ranks=num_ranks
        )

    def __call__(self, sample: Mapping[str, Any]) -> None:
        progress, others = self._progress, self._others
        others.look()
        self._reporter(
            {
                **sample,
                "type": "sample",
                "kind": "generate",
                "step": self._before + int(sample["num_new_tokens"]) + others.num_tokens,
                "time_s": time.time(),
                "prompts_done": len(progress.finished) + others.num_done,
                "num_prompts": progress.num_lines,
                "num_errors": progress.num_errors + others.num_errors,
            }
        )


def _measured(result: "GenerationResult") -> dict[str, Any]:
    return {
        "device_peak_bytes": result.device_peak_bytes,
        "device_bytes_by_category": result.device_bytes_by_category,
        "host_peak_bytes": result.host_peak_bytes,
        "disk_peak_bytes": result.disk_peak_bytes,
        "remote_peak_bytes": result.remote_peak_bytes,
        "copied_bytes": result.copied_bytes,
        "tokens_per_s": result.tokens_per_s,
        "total_s": result.total_s,
        "prefill_ms": result.prefill_ms,
        "decode_ms": result.decode_ms,
        "num_new_tokens": result.num_new_tokens,
        "passes": [to_json(each) for each in result.timed_passes],
        "draws": result.draws,
    }


def _result(progress: _Progress, measured: dict[str, Any] | None, *, files: list[dict[str, Any]]) -> dict[str, Any]:
    num_done, is_whole = len(progress.finished), not progress.waiting
    failed = f", {progress.num_errors:,} of them with an error" if progress.num_errors else ""
    message = f"{num_done:,} of {progress.num_lines:,} prompts are done{failed}"
    return {
        "outcome": "succeeded" if is_whole else "drained",
        "reason": "done" if is_whole else "",
        "message": message,
        "error": None,
        "step": num_done,
        "measured": measured,
        "summary": {
            "prompts_done": num_done,
            "num_prompts": progress.num_lines,
            "num_errors": progress.num_errors,
            "num_tokens": progress.num_tokens,
        },
        "artifacts": files,
    }
