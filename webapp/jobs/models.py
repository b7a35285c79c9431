"""The record of jobs. Rows change only by ``moves.py``; every move of a job leaves one event.

States: ``queued -> starting -> running -> succeeded | failed | cancelled``, and back to ``queued`` when a lease is lost, a
worker drains or a retry is due. Cancel and pause are requests on the row, not states.
"""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from webapp.accounts.in_project import InProject
from webapp.catalog.models import Dataset, Machine, Model
from webapp.ids import new_artifact_id, new_job_id, new_plan_id


class State(models.TextChoices):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_STATES = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
LIVE_STATES = (State.STARTING, State.RUNNING)


class Reason(models.TextChoices):
    """Why a job ended, or why its last attempt did."""

    DONE = "done"
    CANCELLED_BY_USER = "cancelled_by_user"
    OUT_OF_DEVICE_MEMORY = "out_of_device_memory"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    DISK_FULL = "disk_full"
    LOSS_NOT_FINITE = "loss_not_finite"
    BAD_DATASET = "bad_dataset"
    BAD_MODEL = "bad_model"
    WORKER_LOST = "worker_lost"
    MACHINE_FAULT = "machine_fault"
    NO_PROGRESS = "no_progress"
    MAX_DURATION = "max_duration"
    PLAN_STALE = "plan_stale"
    MISSING_EXTRA = "missing_extra"
    DOES_NOT_FIT = "does_not_fit"
    NOT_PLANNED = "not_planned"
    REMOTE_STORE_FULL = "remote_store_full"
    REMOTE_STORE_LOST = "remote_store_lost"
    INTERNAL = "internal"


MEMORY_REASONS = (Reason.OUT_OF_DEVICE_MEMORY, Reason.OUT_OF_HOST_MEMORY)
"""After which a job may go on under another plan."""
PLAN_REASONS = (*MEMORY_REASONS, Reason.DISK_FULL)
"""The same, and a full disk, which is waited for where no other plan helps."""
PROBED = "probed"
"""Outcome of an attempt that ended because its first steps missed their prediction, and the reason in its ``result.json``."""


class Kind(models.TextChoices):
    TRAIN = "train"
    GENERATE = "generate"
    """Continues each prompt of a file."""
    SERVE = "serve"
    """Holds a model on a device and answers who asks."""
    EXPORT = "export"
    """Writes the weights of a checkpoint as others read them; needs no device."""
    PROFILE = "profile"
    """Traces a model for pricing; made by the program, not listed among people's jobs."""


DEVICE_JOB_KINDS = (Kind.TRAIN, Kind.GENERATE, Kind.SERVE)
USER_JOB_KINDS = (*DEVICE_JOB_KINDS, Kind.EXPORT)
TOKEN_KINDS = (Kind.GENERATE, Kind.SERVE)
"""Whose samples count generated tokens."""


class PlanOffer(models.Model):
    """One plan priced for one spec on one machine, kept so that a job can take exactly what was shown."""

    id = models.CharField(primary_key=True, max_length=48, default=new_plan_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    spec = models.JSONField()
    """The normalized job spec that was priced."""
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE)
    label = models.CharField(max_length=40)
    """``chosen`` or the baseline's name: keep_all, recompute_all, offload_optimizer, …"""
    plan = models.JSONField()
    prediction = models.JSONField()
    verdict = models.CharField(max_length=20)
    basis = models.CharField(max_length=64)
    """Hash of what the prices rest on (profile, machine, program version); a job refuses an offer whose basis has changed."""
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.label} ({self.id})"


class Job(InProject):
    """One piece of work, with its frozen spec and plan and its present state."""

    id = models.CharField(primary_key=True, max_length=48, default=new_job_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.CASCADE)
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=20, choices=Kind.choices, default=Kind.TRAIN)
    # an index of their own stands below, in the order in which their pages list them
    model = models.ForeignKey(Model, on_delete=models.PROTECT, db_index=False)
    dataset = models.ForeignKey(Dataset, null=True, on_delete=models.PROTECT, db_index=False)
    spec = models.JSONField()
    """The submitted spec, normalized: model, dataset, workload, goal."""
    plan = models.JSONField(null=True)
    prediction = models.JSONField(null=True)
    machine = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL)
    """The machine the prediction was made for; any machine that meets the plan's need may run it."""
    awaits_plan = models.BooleanField(default=False)
    """It may not start until a plan was found (``webapp/planning/waiting.py``): it was submitted before its model was profiled,
    or ran out of memory under its last plan."""

    state = models.CharField(max_length=12, choices=State.choices, default=State.QUEUED)
    phase = models.CharField(max_length=40, blank=True)
    """For people: profiling, tokenizing, loading, training, evaluating, saving."""
    reason = models.CharField(max_length=24, choices=Reason.choices, blank=True)
    message = models.TextField(blank=True)
    """One sentence for people about the last end or failure."""
    error = models.JSONField(null=True)
    """HeadroomError.to_json() of the last failure."""
    cancel_requested_at = models.DateTimeField(null=True)
    cancel_mode = models.CharField(
        max_length=8,
        blank=True,
        choices=[("save", "stop and export"), ("keep", "stop, keep a checkpoint"), ("discard", "stop now")],
    )
    pause_requested_at = models.DateTimeField(null=True)
    """Set: a running job stops at a checkpoint and goes back to queued; a queued one may not start."""
    priority = models.IntegerField(default=0)
    """Higher runs first."""
    turn = models.BigIntegerField(default=0)
    """Place among equal priorities, lower first: each person's jobs take turns with other people's (``turns.py``)."""
    not_before = models.DateTimeField(null=True)
    max_duration_s = models.IntegerField(null=True)
    need_device_kind = models.CharField(max_length=10, blank=True)
    """``cpu`` or ``cuda``: the kind of device the plan was priced for; empty when any will do."""
    need_device_bytes = models.BigIntegerField(default=0)
    """Memory that each of its devices must have free to run the plan: the highest of its stages, at most the budget, and on a
    card what its process takes beside tensors (``optimizer/estimate/sharing.py``)."""
    need_devices = models.PositiveSmallIntegerField(default=1)
    """Devices that the plan runs on, of one machine unless ``joined`` names several; a claim takes all of them or none."""
    need_ranks = models.TextField(blank=True, default="")
    """Needs by rank of a plan that names its devices (``devices/named.py``); ``need_device_kind`` is then ``named``, or
    ``joined`` where it names their machines too."""
    joined = models.ManyToManyField(Machine, related_name="joined_jobs")
    """The machines of a plan over several; none where any machine that has room may take the job."""
    retry_of = models.ForeignKey("self", null=True, on_delete=models.SET_NULL, related_name="retries")
    """The ended job that this one repeats; an ended job itself never moves again."""
    hinted_at = models.DateTimeField(null=True)
    """When this job was last announced to the broker; the reconciler announces it again while it waits."""

    attempt = models.IntegerField(default=0)
    failed_attempts = models.IntegerField(default=0)
    """Attempts that ended by infrastructure failure; drained and preempted ones do not count."""
    fence = models.BigIntegerField(null=True)
    """Number of the present claim, globally increasing; every write of the attempt carries it."""
    worker = models.CharField(max_length=200, blank=True)
    lease_until = models.DateTimeField(null=True)
    progress_at = models.DateTimeField(null=True)
    """When a new step was last seen."""

    step = models.IntegerField(default=0)
    num_steps = models.IntegerField(default=0)
    eta_s = models.FloatField(null=True)
    summary = models.JSONField(default=dict)
    """Latest and final numbers: loss, validation_loss_start, validation_loss, tokens_per_s, device_peak_bytes, step_ms, …"""
    event_seq = models.IntegerField(default=0)
    tags = models.JSONField(default=list)
    """Short words that people sort jobs by."""
    notes = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)
    """Set: out of sight, and gone with its files some days later."""
    share_key = models.CharField(max_length=32, blank=True)
    """Part of what signs the link under which anyone may read the run; empty while it is not shared."""

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            # claim, pages of the queue and counts by state, without reading documents; in turns.QUEUE_ORDER
            models.Index(
                fields=[
                    *("state", "-priority", "turn", "created_at", "id"),
                    *("kind", "need_device_kind", "need_devices", "need_device_bytes", "project"),
                ],
                name="job_claims",
            ),
            # lists: which jobs stand on a page, from the index alone; the rows are then read by their ids
            models.Index(fields=["-id", "state", "kind", "project", "deleted_at", "name"], name="job_lists"),
            models.Index(fields=["owner", "state", "-turn"], name="job_turns"),  # submission: a person's last turn that waits
            models.Index(fields=["owner", "-created_at"]),  # a person's list of jobs
            models.Index(fields=["project", "-id"]),  # a project's list of jobs
            models.Index(fields=["model", "-id"], name="job_of_model"),  # the latest jobs on a model's page
            models.Index(fields=["dataset", "-id"], name="job_of_dataset"),  # the same of a dataset
        ]
        constraints = [
            models.CheckConstraint(
                name="job_finished_at_iff_terminal",
                condition=Q(state__in=TERMINAL_STATES, finished_at__isnull=False)
                | (~Q(state__in=TERMINAL_STATES) & Q(finished_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="job_lease_iff_live",
                condition=Q(state__in=LIVE_STATES, lease_until__isnull=False, fence__isnull=False)
                | (~Q(state__in=LIVE_STATES) & Q(lease_until__isnull=True)),
            ),
            models.CheckConstraint(name="job_state_is_known", condition=Q(state__in=State.values)),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def makes_tokens(self) -> bool:
        """Generates or serves; else it trains, or traces."""
        return self.kind in TOKEN_KINDS


class FenceSequence(models.Model):
    """One row whose counter gives each claim its fence, inside the claim's own transaction."""

    value = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return str(self.value)


class Lead(models.Model):
    """One row: which reconciler acts, by the database's clock. A row, so that it outlives connections and others can see it."""

    holder = models.CharField(max_length=200, blank=True)
    held_until = models.DateTimeField(null=True)
    """Renewed with each pass; another reconciler may take the lead from then on."""
    unbroken_since = models.DateTimeField(null=True)
    """Since then the lead was renewed, by whomever, without a gap in which live workers may have lost their leases."""
    acted_at = models.DateTimeField(null=True)
    """End of the latest pass of which nothing failed; alarms go by it."""

    def __str__(self) -> str:
        return self.holder


class SavedFilter(models.Model):
    """A view of the list of jobs that a person keeps under a name."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=1000)
    """The list's address after the question mark."""

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="saved_filter_name_once")]

    def __str__(self) -> str:
        return self.name


class Attempt(models.Model):
    """One try at a job by one worker."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.IntegerField()
    fence = models.BigIntegerField(unique=True)
    worker = models.CharField(max_length=200)
    machine = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL)
    """The machine it ran on; its calibration learns from what was measured."""
    devices = models.JSONField(default=list)
    """Places of the machine's devices that it uses, counted from 0; empty for what needs none. Those on other machines are its
    members'."""
    pid = models.IntegerField(null=True)
    resumed_from_step = models.IntegerField(default=0)
    plan = models.JSONField(null=True)
    prediction = models.JSONField(null=True)
    measured = models.JSONField(null=True)
    """device_peak_bytes, step_ms (median of steady steps), host_peak_bytes, num_steps: what the prediction is checked against."""
    outcome = models.CharField(max_length=24, blank=True)
    """A reason, or drained, paused, probed; empty while it runs."""
    exit_code = models.IntegerField(null=True)
    made_progress = models.BooleanField(default=False)
    """True once a new step was done; three quick deaths without one are a poisoned job."""
    is_shared = models.BooleanField(default=False)
    """Another job ran on one of its devices at some time of the attempt: its times are not those of the prediction."""
    error = models.JSONField(null=True)
    started_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["job", "number"]
        constraints = [models.UniqueConstraint(fields=["job", "number"], name="attempt_number_once_per_job")]

    def __str__(self) -> str:
        return f"{self.job_id} attempt {self.number}"


class Member(models.Model):
    """The part of an attempt on one machine of several, but for the machine that leads, which has the attempt itself.

    Made with the attempt, in its claim; then a worker of its machine takes it, and renews a lease of its own. Its fence is the
    attempt's.
    """

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="members")
    machine = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL, db_index=False)
    machine_name = models.CharField(max_length=200)
    """Kept for messages when the machine's row is gone."""
    ranks = models.JSONField()
    """Numbers of its ranks among all of the attempt."""
    devices = models.JSONField()
    """Places of its machine's devices, counted from 0, in the order of ``ranks``."""
    device_bytes = models.JSONField()
    """Bytes that are kept for it on each of them."""
    worker = models.CharField(max_length=200, blank=True)
    """The worker that took it; empty until one has."""
    lease_until = models.DateTimeField(null=True)
    """Runs from the claim on: one that no worker takes is lost as well."""
    is_draining = models.BooleanField(default=False)
    """Its worker was asked to stop: the attempt ends at a checkpoint."""
    is_lost = models.BooleanField(default=False)
    """The attempt ended because this part of it was lost."""
    trouble = models.TextField(blank=True)
    """Why its worker could not begin or go on."""
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["attempt", "id"]
        # claims: what a machine's devices hold
        indexes = [models.Index(fields=["machine", "ended_at"], name="member_of_machine")]
        constraints = [models.UniqueConstraint(fields=["attempt", "machine_name"], name="member_once_per_machine")]

    def __str__(self) -> str:
        return f"{self.attempt} on {self.machine_name}"


class Event(models.Model):
    """One move of a job, in order: who, from, to, why."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    seq = models.IntegerField()
    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=200)
    """``user:NAME``, ``worker:NAME``, ``reconciler``."""
    kind = models.CharField(max_length=40)
    """created, claimed, started, phase, shared, checkpointed, requeued, cancel_requested, paused, resumed; and the three ends."""
    from_state = models.CharField(max_length=12, blank=True)
    to_state = models.CharField(max_length=12, blank=True)
    reason = models.CharField(max_length=24, blank=True)
    message = models.TextField(blank=True)

    class Meta:
        ordering = ["job", "seq"]
        constraints = [models.UniqueConstraint(fields=["job", "seq"], name="event_seq_once_per_job")]

    def __str__(self) -> str:
        return f"{self.job_id} #{self.seq} {self.kind}"


class Sample(models.Model):
    """One measurement of one attempt, as the runner wrote it."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="samples")
    attempt = models.IntegerField()
    kind = models.CharField(max_length=10)
    """``step``, ``eval`` or ``timeline``; ``generate`` of a generate job, where ``step`` counts generated tokens."""
    step = models.IntegerField()
    data = models.JSONField()
    peak_bytes = models.BigIntegerField(null=True)
    """This and the next two again from ``data``: what decides which points of a long run are drawn, read without parsing it."""
    loss = models.FloatField(null=True)
    tokens_per_s = models.FloatField(null=True)

    class Meta:
        ordering = ["job", "step", "attempt"]
        indexes = [
            # charts: which points of a run to draw, from the index alone; a table of long records is not read for it
            models.Index(
                fields=["job", "kind", "attempt", "step", "peak_bytes", "loss", "tokens_per_s", "id"], name="sample_points"
            )
        ]
        constraints = [
            # a copy that is sent twice is written once
            models.UniqueConstraint(fields=["job", "attempt", "kind", "step"], name="sample_once")
        ]

    def __str__(self) -> str:
        return f"{self.job_id} {self.kind} {self.step}"

    @classmethod
    def of_record(cls, record: dict[str, Any], *, job_id: str, attempt: int) -> "Sample":
        """A row, not saved, of a telemetry record; one that names its attempt is kept under that."""
        return cls(
            job_id=job_id,
            attempt=record.get("attempt", attempt),
            kind=record["kind"],
            step=record["step"],
            data=record,
            peak_bytes=record.get("device_peak_bytes"),
            loss=record.get("loss"),
            tokens_per_s=record.get("tokens_per_s"),
        )


class Checkpoint(models.Model):
    """A resumable checkpoint, recorded under the fence that wrote it."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="checkpoints")
    step = models.IntegerField()
    fence = models.BigIntegerField()
    folder = models.CharField(max_length=500)
    manifest_sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["job", "-step"]
        constraints = [models.UniqueConstraint(fields=["job", "folder"], name="checkpoint_folder_once")]

    def __str__(self) -> str:
        return f"{self.job_id} at step {self.step}"


class Artifact(models.Model):
    """A file that a finished job leaves behind."""

    id = models.CharField(primary_key=True, max_length=48, default=new_artifact_id)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="artifacts")
    kind = models.CharField(max_length=20)
    """model, adapter, gguf, sample, metrics, log, plan, record, tensorboard; results and errors of a generate job."""
    name = models.CharField(max_length=200)
    """Inside the folder of its kind, where that has one."""
    file = models.CharField(max_length=500)
    """Relative to HEADROOM_HOME."""
    num_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["job", "kind", "name"]
        constraints = [models.UniqueConstraint(fields=["job", "kind", "name"], name="artifact_once_per_job")]

    def __str__(self) -> str:
        return self.name


class IdempotencyKey(models.Model):
    """The answer to a POST that carried an Idempotency-Key, replayed for a day."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    key = models.CharField(max_length=200)
    request_sha256 = models.CharField(max_length=64)
    status = models.IntegerField(null=True)
    """None while the first request still runs."""
    holder = models.CharField(max_length=64, blank=True)
    """The web process that answers it (``webapp/http/process_lock.py``): once it is dead, the key is free."""
    location = models.CharField(max_length=500, blank=True)
    body = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once_per_user")]

    def __str__(self) -> str:
        return self.key
