"""A job's spec as something to keep and send again: YAML for a file, a command line, a request.

Pure text from a spec and an address. What names the sender is not in it: the token is read from ``HEADROOM_TOKEN``.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_HERE = "HEADROOM"
"""The word that ends the text a shell hands over; no YAML or JSON made here has it alone on a line."""


@dataclass(frozen=True, kw_only=True)
class Copyable:
    """One way to send a job again."""

    key: str
    """``yaml``, ``cli`` or ``curl``."""
    label: str
    use: str
    """Instruction on using the text."""
    text: str


def copies_of(spec: Mapping[str, Any], *, url: str) -> tuple[Copyable, ...]:
    """Three ways to send one spec to the service at ``url``; all ask for the same job."""
    return (
        Copyable(key="yaml", label="YAML", use="For a file; headroom submit FILE starts it.", text=as_yaml(spec)),
        Copyable(key="cli", label="CLI", use="In a shell, with HEADROOM_TOKEN set.", text=as_cli(spec, url=url)),
        Copyable(key="curl", label="curl", use="In a shell, with HEADROOM_TOKEN set.", text=as_curl(spec, url=url)),
    )


def as_yaml(spec: Mapping[str, Any]) -> str:
    """The spec as YAML that ``headroom submit`` reads."""
    text: str = yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True, width=120)
    return text


def as_cli(spec: Mapping[str, Any], *, url: str) -> str:
    return f"headroom submit /dev/stdin --url {shlex.quote(url)} --follow <<'{_HERE}'\n{as_yaml(spec)}{_HERE}\n"


def as_curl(spec: Mapping[str, Any], *, url: str) -> str:
    body = json.dumps({"spec": spec}, indent=1, ensure_ascii=False)
    head = [
        f"curl --fail-with-body -X POST {shlex.quote(f'{url}/api/v1/jobs')}",
        '-H "Authorization: Bearer $HEADROOM_TOKEN"',
        "-H 'Content-Type: application/json'",
        f"--data-binary @- <<'{_HERE}'",
    ]
    return " \\\n  ".join(head) + f"\n{body}\n{_HERE}\n"
