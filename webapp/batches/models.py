"""Files and batches as OpenAI's API knows them; the work itself is a generate job. Rows change only through ``actions.py``."""

from django.conf import settings
from django.db import models

from webapp.accounts.in_project import InProject
from webapp.catalog.models import Dataset, Model
from webapp.ids import new_batch_id, new_file_id
from webapp.jobs.models import Artifact, Job


class Status(models.TextChoices):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN_STATUSES = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)


class BatchFile(InProject):
    """An uploaded file of requests, or the file of a batch's results or errors."""

    id = models.CharField(primary_key=True, max_length=48, default=new_file_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=20, choices=[("batch", "batch"), ("batch_output", "batch_output")])
    dataset = models.ForeignKey(Dataset, null=True, on_delete=models.PROTECT)
    """Set for an upload."""
    artifact = models.ForeignKey(Artifact, null=True, on_delete=models.CASCADE)
    """Set for a result."""
    num_bytes = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["owner", "-id"])]  # a person's list of files

    def __str__(self) -> str:
        return self.filename


class Batch(InProject):
    """Requests of one file, all to one model."""

    id = models.CharField(primary_key=True, max_length=48, default=new_batch_id)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT)
    """The input's lines; they stay when the file is deleted."""
    input_file = models.CharField(max_length=48)
    """Ids of files, this and the next two; a file may be deleted, and its id is still shown."""
    output_file = models.CharField(max_length=48, blank=True)
    error_file = models.CharField(max_length=48, blank=True)
    endpoint = models.CharField(max_length=40)
    completion_window = models.CharField(max_length=10)
    metadata = models.JSONField(null=True)
    model = models.ForeignKey(Model, null=True, on_delete=models.PROTECT)
    """Known once it was validated."""
    job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT)
    status = models.CharField(max_length=12, choices=Status.choices, default=Status.VALIDATING)
    errors = models.JSONField(null=True)
    """``[{"code", "message", "param", "line"}]`` of a batch that failed."""
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    expired_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["owner", "-id"]),  # a person's list of batches
            models.Index(fields=["status"]),  # the open ones, to be moved on
        ]

    def __str__(self) -> str:
        return self.id
