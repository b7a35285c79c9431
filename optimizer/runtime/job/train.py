"""A training job from its plan to its weights: load, step, evaluate, save, resume, export.

Knows nothing of processes, signals or databases: what happens is passed to ``report``, whether to stop is asked of
``should_stop``. Two runs of the same ``TrainingRun`` on the same machine end with the same bits, also when one was stopped at
any step and resumed from its checkpoint: the data order is a function of the step, and the rest is in the checkpoint.

Of several ranks (``runtime/ranks/``) each runs this with a ``RankPlace`` of its own. Rank 0 reports, says when to stop and which
steps are counted, and writes checkpoints and artifacts; the others take part in all of it and report nothing. Where they take
steps alone (``layout.sync_every``) each counts as it sees fit, and all that concerns them together comes when they have the same
weights: stopping, evaluations and checkpoints that were due since, and the last weights. The loss and the norm of a step are then
rank 0's own.

Reported messages are those of the pipe in docs/attempt.md: ``started``, ``phase``, ``checkpoint``, and ``sample`` with
the telemetry record's fields beside ``type``.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from optimizer.base.serialize import to_json
from optimizer.base.units import format_bytes
from optimizer.data.samples.rows import open_batches
from optimizer.data.token_file import TokenFile
from optimizer.runtime.job.base_place import find_base
from optimizer.runtime.job.checkpoint import (
    Checkpoint,
    TensorGroups,
    WrittenCheckpoint,
    find_resumable,
    read_checkpoint,
    write_checkpoint,
)
from optimizer.runtime.job.export.artifacts import leave_artifacts
from optimizer.runtime.job.measured_steps import MeasuredSteps
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.job.resume import export_together, export_trainer, import_trainer, seed_random
from optimizer.runtime.job.stage_watch import StageWatch
from optimizer.runtime.job.telemetry import StepWatch
from optimizer.runtime.job.training_run import PROBED, Measured, Probe, Report, TrainingResult, TrainingRun
from optimizer.runtime.layers.quantized_linear import hash_frozen
from optimizer.runtime.meter.counting import CountingPolicy
from optimizer.runtime.meter.device import check_dtype, prepared_device, set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.meter.stage_names import name_stage
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.step.allocator import apply_allocator, release_unused
from optimizer.runtime.step.batch import BatchReader, read_validation_batches
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.optimizer_state import learning_rate_at
from optimizer.runtime.step.step import StepResult, Trainer


def train(
    run: TrainingRun, *, report: Report, should_stop: Callable[[], bool], probe: Probe | None = None
) -> TrainingResult:
    """Carry the job out, or as much of it as there is time for.

    probe: asked once, after the first steady steps; where it finds a reason the run ends there with a checkpoint.
    Raises OutOfDeviceMemory, LossNotFinite, DiskFull, CheckpointInvalid and the errors of bad input, on one of several ranks also
    RankLost and RanksDiffer; the checkpoints written until then stay.
    """
    device = torch.device(run.device)
    set_num_threads()
    apply_allocator(run.plan.allocator, device)
    with prepared_device(device), _join(run, device) as ranks:
        job = _Job(run, report if ranks is None or ranks.is_first else _stay_silent, probe=probe, ranks=ranks)
        try:
            return job.carry_out(should_stop)
        finally:
            job.close()


def _join(run: TrainingRun, device: torch.device) -> AbstractContextManager[Ranks | None]:
    if run.ranks is None or run.ranks.num_ranks == 1:
        return nullcontext()
    return Ranks(run.ranks, device=device, plan=run.plan.fingerprint)


def _stay_silent(message: dict[str, Any]) -> None:
    """Takes the place of ``report`` on all ranks but the first."""


class _Job:
    def __init__(self, run: TrainingRun, report: Report, *, probe: Probe | None, ranks: Ranks | None = None) -> None:
        self.run = run
        self.ranks = ranks
        self._leads = ranks is None or ranks.is_first
        self._probe = probe
        self.report = report
        self.workload = run.workload
        self.step = 0
        """Optimizer steps done."""
        self._phase("loading", "building the model")
        self.device = torch.device(run.device)
        check_dtype(run.plan.weights, self.device)
        self.meter = Meter(
            device=self.device,
            cap_bytes=run.goal.device_budget_bytes,
            host_cap_bytes=run.goal.host_budget_bytes,
        )
        token_file = TokenFile.open(run.token_file)
        self.batches = open_batches(token_file, run.workload)
        # Files are rank 0's, which alone writes them.
        self.stages = StageWatch(self.meter, job_folder=run.job_folder if self._leads else None)
        with self.stages.during("load"):
            self.trainer = self._build()
        self.watch = StepWatch(self.trainer, meter=self.meter, workload=run.workload)
        self.reader = BatchReader(
            self.batches,
            plan=self.trainer.plan.batch,
            num_steps=run.workload.num_steps,
            device=self.device,
            first=self._first_sequence,
            num_in_all=run.workload.global_batch_size,
        )
        self.last: StepResult | None = None
        self.validation_loss_start: float | None = None
        self.validation_loss: float | None = None
        self.steps = MeasuredSteps(sync_every=run.plan.layout.sync_every)
        self._has_evaluated = False
        self._evaluated_step = 0
        self._saved_step = -1
        self._common_step = 0
        """The last step but this one after which all ranks had the same weights."""
        self._counting = CountingPolicy(every_s=run.timeline_every_s)
        if ranks is not None:
            # Loading may take long, and longer on one than on another.
            ranks.barrier()
        self._is_probed = self._first_says(is_true=probe is not None)

    def _first_says(self, *, is_true: bool) -> bool:
        """Report on each rank what rank 0 holds for true."""
        return is_true if self.ranks is None else bool(self.ranks.from_first([is_true])[0])

    def carry_out(self, should_stop: Callable[[], bool]) -> TrainingResult:
        seed_random(self.workload.seed, rank=self.trainer.rank)
        self._resume()
        if self.ranks is not None:
            self.ranks.barrier()
        if self.validation_loss_start is None:
            self.validation_loss_start = self._evaluate()
        release_unused(self.device)
        self._phase("training")
        while self.step < self.workload.num_steps:
            if self.trainer.is_in_step and self._first_says(is_true=should_stop()):
                self._save()
                return self._drained()
            self._one_step()
            if self.trainer.is_in_step and (missed := self._probed()):
                self._save()
                return self._drained(reason=PROBED, message=missed)
        self.validation_loss = self._evaluate()
        return self._succeeded()

    def close(self) -> None:
        self.reader.close()
        # What was trained is in the checkpoints and the artifacts by now.
        self.trainer.close(keep_weights=False)

    def _build(self) -> Trainer:
        run = self.run
        with self.meter.translating():
            model = build_prepared(
                run.spec,
                weights=run.plan.weights,
                workload=self.workload,
                device=self.device,
                weights_folder=run.weights_folder,
                meter=self.meter,
                layout=run.plan.layout,
                rank=0 if self.ranks is None else self.ranks.rank,
            )
            trainer = Trainer(
                model,
                plan=run.plan,
                workload=self.workload,
                device=self.device,
                meter=self.meter,
                scratch=run.job_folder,
                ranks=self.ranks,
                base=find_base(run),
            )
            if trainer.base_homes is not None and trainer.base_homes.is_found:
                text = "The base model's streamed weights were on the host already, for another job: both use them."
                self.report({"type": "log", "message": text})
            self.stages.scratch_bytes = lambda: trainer.tiers.disk_peak_bytes
            # Empty where every weight is trained.
            self.frozen_sha256 = hash_frozen(model, read=trainer.read_whole)
            return trainer

    @property
    def _first_sequence(self) -> int:
        """The first of a step's sequences that this rank takes."""
        return self.run.plan.stretch_of(self.trainer.rank).start

    def _one_step(self) -> None:
        batches = self.reader.read(self.step)
        self.steps.data_wait_ms.append(self.reader.waited_ms)
        learning_rate = learning_rate_at(self.step, self.workload)
        is_due = self._counting.is_due(self.steps.num_done)
        is_counted = is_due if self._steps_alone else self._first_says(is_true=is_due)
        with_timeline = is_counted and not self.steps.is_first and self._leads
        self.watch.begin(with_timeline=with_timeline)
        with name_stage("first_step" if self.step == 0 else "steady_step", **self._lengths(batches)):
            result = self.last = self.trainer.step(batches, learning_rate=learning_rate, is_counted=is_counted)
        del batches  # what follows is not to find them in memory
        self.watch.end()
        self._counting.note(result.step_ms / 1000, is_counted=is_counted)
        self.step += 1
        if self.step == self.workload.num_steps:
            self.trainer.synchronize()
        if self.ranks is not None and (self.trainer.is_in_step if self._steps_alone else is_counted):
            peaks = self.ranks.exchange([self.meter.peak().device_bytes])
            self.steps.rank_peak_bytes = [int(peak_bytes) for (peak_bytes,) in peaks]
        if with_timeline:
            self._sample("timeline", **self.watch.timeline(result))
        self._record(result, learning_rate, is_counted=is_counted)
        self.steps.num_done += 1
        if not self.trainer.is_in_step:
            return
        if self._is_due(self.workload.eval_every_steps) and self.step < self.workload.num_steps:
            self._evaluate()
            release_unused(self.device)
            self._phase("training")
        if self._is_due(self.workload.checkpoint_every_steps):
            self._save()
        self._common_step = self.step

    @property
    def _steps_alone(self) -> bool:
        return self.run.plan.layout.steps_alone

    def _probed(self) -> str:
        """The probe's answer, once there are steps enough to ask it; else empty."""
        if not self._is_probed or not self.steps.can_be_probed:
            return ""
        self._is_probed = False
        answer = "" if self._probe is None else self._probe(self.steps.measured, self.workload.num_steps - self.step)
        return answer if self.ranks is None else str(self.ranks.exchange_json(answer)[0])

    def _lengths(self, batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Tokens of the longest micro-batch, and of one as it was planned."""
        rows = self.trainer.plan.batch.micro_batch_size * (2 if self.workload.has_pairs else 1)
        longest = max((batch[0].numel() for batch in batches), default=0)
        return {"batch_tokens": longest, "planned_tokens": rows * self.workload.sequence_length}

    def _is_due(self, every_steps: int) -> bool:
        """Report whether something falls due in this step, or has since ranks last had the same weights."""
        return every_steps > 0 and self.step // every_steps > self._common_step // every_steps

    def _record(self, result: StepResult, learning_rate: float, *, is_counted: bool) -> None:
        fields = self.watch.fields(
            result, learning_rate=learning_rate, data_wait_ms=self.steps.data_wait_ms[-1], is_counted=is_counted
        )
        if self.ranks is not None:
            fields["rank_peak_bytes"] = self.steps.rank_peak_bytes
        self._sample("step", **fields)
        if is_counted:
            self.stages.note("first_step" if self.steps.is_first else "steady_step")
        if self.steps.is_first and self.workload.num_steps > 1:
            return
        self.steps.add(
            result.step_ms,
            is_counted=is_counted,
            peak=self.meter.peak(),
            disk_peak_bytes=self.trainer.tiers.disk_peak_bytes,
            is_together=self.trainer.is_in_step,
        )

    def _evaluate(self) -> float:
        self._phase("evaluating", f"validation loss at step {self.step}")
        batches = read_validation_batches(
            self.batches, num_batches=self.workload.eval_batches, plan=self.trainer.plan.batch, first=self._first_sequence
        )
        is_counted = not self._has_evaluated or (self.step > 0 and self._evaluated_step == 0)
        with name_stage("evaluation"), self.meter.peak_of_its_own(is_counted=is_counted):
            loss = self.trainer.evaluate(batches, is_counted=is_counted)
            if is_counted:
                self.stages.note("evaluation")
            else:
                self.stages.note_disk("evaluation")
        self._has_evaluated, self._evaluated_step = True, self.step
        self._sample("eval", validation_loss=loss)
        return loss

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one from this attempt."""
        if self._saved_step == self.step:
            return
        before_bytes = self.stages.file_bytes()
        with self.stages.during("save", on_host=True):
            groups, facts = export_trainer(self.trainer, frozen_sha256=self.frozen_sha256)
            written = export_together(self.trainer, groups, facts, write=self._write)
        self._saved_step = self.step
        if written is None:
            return
        # An older one goes when the new one is there.
        gone_bytes = before_bytes + written.num_bytes - self.stages.file_bytes()
        self.stages.note_disk("save", more_bytes=max(0, gone_bytes))
        self.report({"type": "checkpoint", **to_json(written)})

    def _write(self, groups: TensorGroups, facts: dict[str, Any]) -> WrittenCheckpoint:
        return write_checkpoint(
            self.run.job_folder,
            step=self.step,
            fence=self.run.fence,
            plan_fingerprint=self.run.plan.fingerprint,
            tensors=groups,
            facts={
                **facts,
                "validation_loss_start": self.validation_loss_start,
                "loss": self.last.loss if self.last else None,
                "measured": to_json(self.steps.measured),
            },
        )

    def _resume(self) -> None:
        checkpoint = self._find_checkpoint()
        if checkpoint is None:
            self.report({"type": "started", "resumed_from_step": 0})
            return
        with self.stages.during("resume"):
            import_trainer(self.trainer, checkpoint, frozen_sha256=self.frozen_sha256)
        self.step = self._saved_step = self._common_step = checkpoint.manifest.step
        self.validation_loss_start = checkpoint.facts["validation_loss_start"]
        if checkpoint.manifest.plan_fingerprint == self.run.plan.fingerprint:
            self.steps.measured = Measured(**checkpoint.facts["measured"])
        self.report({"type": "started", "resumed_from_step": self.step})

    def _find_checkpoint(self) -> Checkpoint | None:
        """The same one on all ranks."""
        found = self._look_for_checkpoint() if self._leads else None
        if self.ranks is None:
            return found
        # Hashing a large one takes longer than a step may.
        self.ranks.barrier()
        folder = self.ranks.exchange_json(None if found is None else str(found.folder.resolve()))[0]
        return found if self._leads or folder is None else read_checkpoint(Path(folder))

    def _look_for_checkpoint(self) -> Checkpoint | None:
        if self.run.resume_from is None:
            return None
        if self.run.resume_from == "newest":
            folders = (self.run.job_folder, *self.run.earlier_job_folders)
            return next((found for folder in folders if (found := find_resumable(folder))), None)
        return read_checkpoint(Path(self.run.resume_from))

    def _drained(self, *, reason: str = "", message: str = "") -> TrainingResult:
        return TrainingResult(
            outcome="drained",
            reason=reason,
            message=message or f"Stopped as asked after step {self.step}; a checkpoint was saved.",
            step=self.step,
            measured=replace(self.steps.measured, stages=self.stages.found),
        )

    def _succeeded(self) -> TrainingResult:
        artifacts, weights_sha256 = leave_artifacts(
            self.trainer, self.run.exported(), batches=self.batches, stages=self.stages, enter_phase=self._phase
        )
        measured = replace(self.steps.measured, stages=self.stages.found)
        peak_bytes = measured.device_peak_bytes
        if not self.run.plan.layout.ranks:  # on devices that are alike the fullest has what is of interest
            peak_bytes = max(peak_bytes, *measured.rank_peak_bytes, 0)
        return TrainingResult(
            outcome="succeeded",
            reason="done",
            message=(
                f"Trained {self.step} steps; validation loss {self.validation_loss_start:.3f} to "
                f"{self.validation_loss:.3f}; peak {format_bytes(peak_bytes)} of a budget of "
                f"{format_bytes(self.run.goal.device_budget_bytes)}."
            ),
            step=self.step,
            measured=measured,
            summary={
                "loss": self.last.loss if self.last else None,
                "validation_loss_start": self.validation_loss_start,
                "validation_loss": self.validation_loss,
                "tokens_per_s": self.workload.tokens_per_step / (measured.step_ms / 1000) if measured.step_ms else None,
                "data_wait_ms": self.steps.median_data_wait_ms,
                "weights_sha256": weights_sha256,
            },
            artifacts=tuple(artifacts),
        )

    def _phase(self, phase: str, message: str = "") -> None:
        self.report({"type": "phase", "phase": phase, "message": message})

    def _sample(self, kind: str, **fields: Any) -> None:
        # A step counts from 1 once done: the record of the first step says step 1, the loss before any says step 0.
        common = {"kind": kind, "attempt": self.run.attempt, "step": self.step, "time_s": time.time()}
        self.report({"type": "sample", **common, **{key: _json_number(value) for key, value in fields.items()}})


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
