"""The base of every row that belongs to a project."""

from typing import Any

from django.db import models

from webapp.accounts.access import project_for_new
from webapp.accounts.models import Project


class InProject(models.Model):
    """A row with an ``owner``, who made it, and a ``project``, whose people see it."""

    project = models.ForeignKey(Project, null=True, on_delete=models.PROTECT)
    """None only for what belongs to nobody because it ships with the program."""

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        """A new row that names no project goes where its owner works, else to the owner's own."""
        owner = getattr(self, "owner", None)
        if self._state.adding and self.project_id is None and owner is not None:
            self.project = project_for_new(owner)
        super().save(*args, **kwargs)
