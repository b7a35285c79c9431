"""A job's spec as something to keep and send again: YAML for a file, a command line, a request.

Pure text from a spec and an address. What names the sender is not in it: the token is read from ``HEADROOM_TOKEN``.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from optimizer.base.units import format_bytes, parse_bytes

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


def copies_of(spec: Mapping[str, Any], *, url: str, names: Mapping[str, str]) -> tuple[Copyable, ...]:
    """Three ways to send one spec to the service at ``url``; all ask for the same job.

    names: of ``model``, ``dataset`` and ``prompts``, where a name means the row that the spec has by id; YAML says these.
    """
    readable = {**spec, **names}
    return (
        Copyable(key="yaml", label="YAML", use="For a file; headroom submit FILE starts it.", text=as_yaml(readable)),
        Copyable(key="cli", label="CLI", use="In a shell, with HEADROOM_TOKEN set.", text=as_cli(readable, url=url)),
        Copyable(key="curl", label="curl", use="In a shell, with HEADROOM_TOKEN set.", text=as_curl(spec, url=url)),
    )


def as_yaml(spec: Mapping[str, Any]) -> str:
    """The spec as YAML that ``headroom submit`` reads."""
    text: str = yaml.safe_dump(_for_people(spec), sort_keys=False, allow_unicode=True, width=120)
    return text


def _for_people(value: Any, name: str = "") -> Any:
    """Without what is not set, and with budgets in the units that people write."""
    if isinstance(value, Mapping):
        given = {key: _for_people(each, key) for key, each in value.items()}
        return {key: each for key, each in given.items() if each not in (None, [], {})}
    if name.endswith("_budget_bytes") and isinstance(value, int):
        rounded = format_bytes(value)
        return rounded if parse_bytes(rounded) == value else value
    return value


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
