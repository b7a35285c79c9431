"""The ASGI application: Django behind a guard that bounds bodies and a line in which bursts of submissions wait.

A few threads serve all event streams, and every other request has one to itself.

The guard stands outside Django because Django spools the whole body to disk before a view or its authentication runs.
"""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
# Somebody waits for the answer: it is 503 after two seconds, where a worker would go on waiting for its turn to write.
os.environ.setdefault("HEADROOM_WRITE_WAIT_S", "2")
# and its thread is soon asked again
os.environ.setdefault("HEADROOM_SQLITE_KEPT_S", "60")
django.setup(set_prefix=False)

from webapp.body_guard import BodyGuard  # noqa: E402  (needs the apps that Django has just loaded)
from webapp.http.handler import Handler  # noqa: E402
from webapp.live.threads import ChosenThreads  # noqa: E402
from webapp.submissions import SubmissionLine  # noqa: E402

application = SubmissionLine(BodyGuard(ChosenThreads(Handler())))
