"""Reads ``machines`` and ``link`` of a training spec: registered machines that share the job, and the network between them.

Their workers share HEADROOM_HOME, and reach each other by the interface that HEADROOM_RANK_INTERFACE names on each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from optimizer.base.errors import InvalidInput
from optimizer.base.shown import shown_value
from optimizer.hardware.joined import join_machines
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.hardware.peers import read_network
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to
from webapp.clock import iso
from webapp.jobs.links.known import Network, age_of, compare_links, network_between

MACHINES = "machines"
LINK = "link"
MEASURED_AT = "link_measured_at"
JOINING_FIELDS = (MACHINES, LINK, MEASURED_AT)
_NEED = "the names of 2 or more machines"
_LINK_NEED = "the network's rate and delay, such as 1Gbit,1ms"


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The machines that share a job."""

    rows: tuple[Machine, ...]
    """In the order in which they were named."""
    link: str
    """Rate and delay of the network between any two of them, as it was stated or measured."""
    measured_at: str = ""
    """When the link was measured, where it was; empty where a person stated it."""
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """Sentences on which link was taken, and where a stated one differs much from what was measured."""

    @property
    def machine(self) -> MachineSpec:
        """One machine with the devices of all, for the planner."""
        named = [replace(MachineSpec.from_json(row.document), name=row.name) for row in self.rows]
        return join_machines(named, link=read_network(self.link))

    def to_json(self) -> dict[str, Any]:
        """The part of a normalized spec."""
        measured = {MEASURED_AT: self.measured_at} if self.measured_at else {}
        return {MACHINES: [row.name for row in self.rows], LINK: self.link, **measured}

    @property
    def num_devices(self) -> int:
        return self.machine.total_devices


def read_joining(user: Any, sent: Mapping[str, Any]) -> Joining | None:
    """sent: those of JOINING_FIELDS that a spec has. None without ``machines`` and ``link``.

    A link that is left out is the measured one. Raises InvalidInput for names that are not there, the same name twice, a link
    that is none or that nobody knows, machines that were found not to reach each other, machines with other versions of torch,
    and what ``join_machines`` refuses.
    """
    names, link = sent.get(MACHINES), sent.get(LINK)
    if names is None and link is None:
        return None
    if not isinstance(names, list | tuple) or len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise _refused(MACHINES, names, f"{MACHINES} is {names!r:.80}; allowed: {_NEED}", allowed=_NEED)
    joining = _with_link(_find_machines(user, names), link, measured_at=sent.get(MEASURED_AT))
    _check_versions(joining.rows)
    _ = joining.machine  # refuses what cannot be joined
    return joining


def joining_of(spec: dict[str, Any]) -> Joining | None:
    """The machines of a normalized spec; None where it names none. Raises InvalidInput where one is gone."""
    names = spec.get(MACHINES) or []
    return Joining(rows=_known(Machine.objects.all(), names), link=spec[LINK]) if names else None


def link_words(spec: dict[str, Any]) -> str:
    """The network with which a normalized spec is priced: ``1Gbit,1ms as stated``; empty where no machines share the job."""
    if not spec.get(LINK):
        return ""
    measured = parse_datetime(spec.get(MEASURED_AT, ""))
    how = "as stated" if measured is None else f"as their workers measured it on {measured:%Y-%m-%d at %H:%M} UTC"
    return f"{spec[LINK]} {how}"


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


def _with_link(rows: tuple[Machine, ...], link: Any, *, measured_at: Any) -> Joining:
    """measured_at: of a spec that was read before, whose link was measured then."""
    network = network_between(rows)
    if network.unreached:
        raise _refused(
            MACHINES,
            [row.name for row in rows],
            f"{'; '.join(network.unreached)}. A machine's page measures its links again",
            allowed="machines that reach each other",
        )
    if link is None and network.measured_at is not None:
        found = f"{network.link}, as their workers measured it {age_of(network.measured_at, now=timezone.now())}"
        remark = f"the network between the machines is taken as {found}"
        return Joining(rows=rows, link=network.link, measured_at=iso(network.measured_at) or "", remarks=(remark,))
    stated = _read_link(link, network)
    return Joining(rows=rows, link=stated, measured_at=_read_moment(measured_at), remarks=_differences(stated, network))


def _differences(stated: str, network: Network) -> tuple[str, ...]:
    if network.measured_at is None or not (differs := compare_links(stated, network.link)):
        return ()
    measured = f"the {network.link} that was measured {age_of(network.measured_at, now=timezone.now())}"
    return (f"the stated link {stated} differs much from {measured}: {differs}; leave it out to use what was measured",)


def _read_moment(text: Any) -> str:
    try:
        found = parse_datetime(text) if isinstance(text, str) else None
    except ValueError:
        return ""
    return iso(found) or "" if found is not None and found.tzinfo is not None else ""


def _read_link(link: Any, network: Network) -> str:
    if not isinstance(link, str):
        given = "no link is given" if link is None else f"{LINK} is {link!r:.80}"
        pairs = ", ".join(network.unknown)
        unknown = f"nothing has measured yet how {pairs} reach each other, which their workers do once both are idle"
        known = f"leave it out to take what was measured, {network.link}" if network.link else unknown
        message = f"{given}, and {known}; or give {_LINK_NEED}"
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
