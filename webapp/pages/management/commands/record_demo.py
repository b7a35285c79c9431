"""Writes ``demo/recorded.json`` from the newest finished run of the demo: ``python manage.py record_demo``."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webapp.jobs.models import Job, State
from webapp.pages.shown.demo_run import RECORDED_FILE, TUNED, demo_document


class Command(BaseCommand):
    """Records the demo's run for services that have not run it."""

    help = "Write demo/recorded.json from the newest finished run of the demo."

    def handle(self, *args: Any, **options: Any) -> None:
        job = Job.objects.filter(name=TUNED, state=State.SUCCEEDED).order_by("-pk").first()
        document = demo_document(job) if job else None
        if document is None:
            raise CommandError("no finished run of the demo is here; run `make demo` first")
        RECORDED_FILE.write_text(json.dumps(document, indent=1) + "\n")
        self.stdout.write(f"wrote {RECORDED_FILE.name}\n")
