"""The ASGI application: Django behind a guard that bounds bodies.

The guard stands outside Django because Django spools the whole body to disk before a view or its authentication runs.
"""

import os
from typing import cast

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
_django = get_asgi_application()

from webapp.body_guard import Application, BodyGuard  # noqa: E402  (needs the apps that Django has just loaded)

application = BodyGuard(cast(Application, _django))
