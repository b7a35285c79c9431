"""A person at the record: creates jobs, asks things of them, reads how they are.

``python -m tests.end_to_end.site.control``: one JSON line ``[command, arguments]`` in, one JSON line out. A process of
its own, so that it uses the stack's own database and never the one that pytest-django made for other tests.
"""

import json
import os
import sys

import django


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    django.setup()
    from tests.end_to_end.site import commands

    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
