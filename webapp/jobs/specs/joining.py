"""Reads ``machines`` and ``link`` of a training spec: registered machines that share the job, and the network between them.

Their workers share HEADROOM_HOME, and reach each other by the interface that HEADROOM_RANK_INTERFACE names on each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import QuerySet

from optimizer.base.errors import InvalidInput
from optimizer.base.shown import shown_value
from optimizer.hardware.joined import join_machines
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.hardware.peers import read_network
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to

MACHINES = "machines"
LINK = "link"
_NEED = "the names of 2 or more machines"
_LINK_NEED = "the network's rate and delay, such as 1Gbit,1ms"


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The machines that share a job."""

    rows: tuple[Machine, ...]
    """In the order in which they were named."""
    link: str
    """Rate and delay of the network between any two of them, as it was written."""

    @property
    def machine(self) -> MachineSpec:
        """One machine with the devices of all, for the planner."""
        named = [replace(MachineSpec.from_json(row.document), name=row.name) for row in self.rows]
        return join_machines(named, link=read_network(self.link))

    def to_json(self) -> dict[str, Any]:
        """The part of a normalized spec."""
        return {MACHINES: [row.name for row in self.rows], LINK: self.link}

    @property
    def num_devices(self) -> int:
        return self.machine.total_devices


def read_joining(user: Any, *, names: Any, link: Any) -> Joining | None:
    """names, link: a spec's ``machines`` and ``link``, as they were sent. None where both are missing.

    Raises InvalidInput for names that are not there, the same name twice, a link that is none, machines with other versions of
    torch, and what ``join_machines`` refuses.
    """
    if names is None and link is None:
        return None
    if not isinstance(names, list | tuple) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise _refused(MACHINES, names, f"{MACHINES} is {names!r:.80}; allowed: {_NEED}", allowed=_NEED)
    joining = Joining(rows=_find_machines(user, names), link=_read_link(link, names))
    _check_versions(joining.rows)
    _ = joining.machine  # refuses what cannot be joined
    return joining


def joining_of(spec: dict[str, Any]) -> Joining | None:
    """The machines of a normalized spec; None where it names none. Raises InvalidInput where one is gone."""
    names = spec.get(MACHINES) or []
    return Joining(rows=_known(Machine.objects.all(), names), link=spec[LINK]) if names else None


def _find_machines(user: Any, names: Sequence[str]) -> tuple[Machine, ...]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _refused(MACHINES, twice, f"{MACHINES} names {twice[:80]!r} twice; allowed: each machine once", allowed=_NEED)
    return _known(machines_visible_to(user), names)


def _known(visible: "QuerySet[Machine]", names: Sequence[str]) -> tuple[Machine, ...]:
    # isprintable: a text may hold a NUL, on which PostgreSQL fails
    known = {row.name: row for row in visible.filter(name__in=[name for name in names if name.isprintable()])}
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        there = sorted(visible.values_list("name", flat=True)[:20])
        message = f"machine {missing[:80]!r} is not there; those that are: {', '.join(there) or 'none yet'}"
        raise _refused(MACHINES, missing[:80], message, allowed=there)
    return tuple(known[name] for name in names)


def _read_link(link: Any, names: Sequence[str]) -> str:
    if not isinstance(link, str):
        given = "no link is given" if link is None else f"{LINK} is {link!r:.80}"
        message = f"{given}, and nothing says how {' and '.join(names)} reach each other; give {_LINK_NEED}"
        raise _refused(LINK, link, message, allowed=_LINK_NEED)
    try:
        read_network(link)
    except InvalidInput as error:
        raise _refused(LINK, link[:80], error.message, allowed=_LINK_NEED) from error
    return link.strip()


def _check_versions(rows: Sequence[Machine]) -> None:
    """Ranks of one run must compute alike, and exchange what they have in one form."""
    versions = {row.name: str((row.document.get("facts") or {}).get("torch", "")) for row in rows}
    if len(set(versions.values())) > 1:
        shown = ", ".join(f"{name} has {version or 'an unknown one'}" for name, version in versions.items())
        raise _refused(
            MACHINES,
            list(versions),
            f"the machines run different versions of torch ({shown}); ranks of one job need the same",
            allowed="machines with one version of torch",
        )


def _refused(field: str, value: Any, message: str, *, allowed: Any) -> InvalidInput:
    return InvalidInput(message, field=field, value=shown_value(value), allowed=allowed)
