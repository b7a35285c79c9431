"""Projects and who may do what in them, API tokens, the audit trail. Users are Django's own.

A superuser administers the service: every project, every account. Everyone else has a role in each project they belong to.
"""

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from webapp.ids import new_audit_id, new_project_id


class Role(models.TextChoices):
    """Roles of a person in one project; each includes the one before."""

    VIEWER = "viewer"
    """Looks at everything there, changes nothing."""
    MEMBER = "member"
    """Uploads, starts and stops jobs."""
    ADMIN = "admin"
    """Decides who belongs to it, and where its events are sent."""


class Scope(models.TextChoices):
    """Scopes of a token; each includes the one before. Its person's roles hold beside it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class Project(models.Model):
    """Owns models, datasets, jobs, batches and files."""

    id = models.CharField(primary_key=True, max_length=48, default=new_project_id)
    name = models.CharField(max_length=100)
    home_of = models.OneToOneField(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="home_project"
    )
    """Whose own project it is: everyone has one, where what they make goes while they name no other."""
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name", "id"]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """One person's role in one project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["project", "user"]
        constraints = [
            models.UniqueConstraint(fields=["project", "user"], name="membership_once"),
            models.CheckConstraint(name="membership_role_is_known", condition=Q(role__in=Role.values)),
        ]

    def __str__(self) -> str:
        return f"{self.user_id} is {self.role} of {self.project_id}"


class ApiToken(models.Model):
    """A bearer token ``hr_<id8>_<secret>_<crc>``; only a keyed hash of the secret is stored."""

    token_id = models.CharField(max_length=8, primary_key=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    name = models.CharField(max_length=100)
    scope = models.CharField(max_length=10, choices=Scope.choices, default=Scope.WRITE)
    project = models.ForeignKey(Project, null=True, on_delete=models.CASCADE, related_name="api_tokens")
    """The only project that it opens; None for all of its person's."""
    secret_hmac = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.name} ({self.token_id})"


class LoginCount(models.Model):
    """Tries at passwords by one name or address, or an address at which a name has logged in (``brake.py``)."""

    key = models.CharField(max_length=64, primary_key=True)
    level = models.FloatField()
    """Tries that time has not forgotten, at ``counted_at``."""
    counted_at = models.DateTimeField()
    wait_until = models.DateTimeField()
    forget_at = models.DateTimeField(db_index=True)
    """From then on the row says nothing and is deleted."""

    def __str__(self) -> str:
        return f"{self.level:.1f} tries of {self.key[:8]}"


class AuditRecord(models.Model):
    """An action that somebody did, or was refused. Written once and never changed (``triggers.py``).

    It names people, tokens and projects by what they were called then, not by foreign keys: it outlives them.
    """

    id = models.CharField(primary_key=True, max_length=48, default=new_audit_id)
    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=150)
    """The person's name; of a failed log-in the name that was tried."""
    token_id = models.CharField(max_length=8, blank=True)
    """Id of the token they came with; empty for a session."""
    address = models.CharField(max_length=45, blank=True)
    """Network address of the caller."""
    action = models.CharField(max_length=40)
    """The action's name in the permission table: ``job.cancel``."""
    outcome = models.CharField(max_length=8, choices=[("done", "done"), ("refused", "refused")])
    target = models.CharField(max_length=150, blank=True)
    """Id or name of what it was done to."""
    project_id = models.CharField(max_length=48, blank=True)
    detail = models.CharField(max_length=300, blank=True)
    """The reason of a refusal, or the roles of a change."""

    class Meta:
        indexes = [models.Index(fields=["project_id", "-id"])]  # one project's trail, newest first

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.target}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Inserts only."""
        kwargs["force_insert"] = True
        super().save(*args, **kwargs)
