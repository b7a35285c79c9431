"""Checks where a webhook may be sent: to public addresses by https, and into networks that the settings name.

The host is resolved once and the connection goes to that very address, so that a name cannot point elsewhere between the check
and the call (DNS rebinding). Redirects are not followed: where they lead would not have been checked.
"""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.conf import settings

from optimizer.base.errors import InvalidInput

MAX_URL_CHARACTERS = 500
Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to network addresses."""
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IPv6 has handed out for the public (RFC 4291, 2.4)."""
_INSIDE = (".internal", ".local", ".localdomain", ".home.arpa", ".lan", ".intranet", ".corp", ".home")
"""No public name ends so (RFC 6761, RFC 6762, RFC 8375; ICANN has set internal, corp and home aside); clouds name their metadata
servers by the first."""
_ALLOWED = "https://host/path, a public address, port 443"


@dataclass(frozen=True, kw_only=True)
class Target:
    """An address that may be called."""

    connect_url: str
    """With the checked network address in place of the name."""
    host: str
    """The name, for the Host header and the certificate."""
    host_header: str


def check_url(url: str) -> None:
    """Raises InvalidInput for what cannot be a target, without asking any name server."""
    parts = _split(url)
    address = _written_out(parts.host)
    if address:
        find_target(url, resolve=lambda host, port: [address])
    elif not settings.HEADROOM_WEBHOOK_NETWORKS:
        if parts.scheme == "http":
            raise _refused(url, "http is for networks that HEADROOM_WEBHOOK_NETWORKS names")
        name = parts.host.rstrip(".")
        if "." not in name or name.endswith(_INSIDE):
            raise _refused(url, f"{name} is a name of private networks")


def find_target(url: str, *, resolve: Resolve | None = None) -> Target:
    """The address to connect to now. Raises InvalidInput where the name is not there, or one of its addresses is not allowed."""
    parts = _split(url)
    found = (resolve or resolve_host)(parts.host, parts.port)
    if not found:
        raise _refused(url, f"the host {parts.host} has no address")
    for text in found:
        _check_address(url, parts, text)
    shown = f"[{found[0]}]" if ":" in found[0] else found[0]
    named = f"[{parts.host}]" if ":" in parts.host else parts.host
    usual = {"https": 443, "http": 80}[parts.scheme]
    return Target(
        connect_url=f"{parts.scheme}://{shown}:{parts.port}{parts.rest}",
        host=parts.host,
        host_header=named if parts.port == usual else f"{named}:{parts.port}",
    )


def resolve_host(host: str, port: int) -> Sequence[str]:
    """All network addresses of a name; none where there is no such name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


@dataclass(frozen=True, kw_only=True)
class _Parts:
    scheme: str
    host: str
    port: int
    rest: str


def _split(url: str) -> _Parts:
    if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable() or any(letter in url for letter in ' \\"<>'):
        raise _refused(url, f"it is longer than {MAX_URL_CHARACTERS} characters, or holds what an address does not")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused(url, str(error)) from error
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise _refused(url, "it is not an https address")
    if parts.username is not None or parts.password is not None:
        raise _refused(url, "it holds a name or password; they would be in every log")
    rest = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Parts(scheme=parts.scheme, host=parts.hostname, port=port or (443 if parts.scheme == "https" else 80), rest=rest)


def _check_address(url: str, parts: _Parts, text: str) -> None:
    address = _literal(text)
    if address is None:
        raise _refused(url, f"{text} is no network address")
    if any(address in ipaddress.ip_network(network) for network in settings.HEADROOM_WEBHOOK_NETWORKS):
        return
    if not _is_public(address):
        named = str(address) if parts.host.strip("[]") == str(address) else f"{parts.host} leads to {address}, which"
        raise _refused(url, f"{named} is a private address")
    if parts.scheme != "https" or parts.port != 443:
        raise _refused(url, "public addresses are called by https on port 443")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Nor may an IPv6 address carry a private IPv4 one: NAT64, mapped and compatible ones lie outside global unicast."""
    carried: tuple[ipaddress.IPv4Address | None, ...] = ()
    if isinstance(address, ipaddress.IPv6Address):
        if address not in _GLOBAL_UNICAST:
            return False
        carried = (address.sixtofour, *(address.teredo or ()))
    return all(one.is_global and not one.is_multicast for one in (address, *carried) if one is not None)


def _written_out(host: str) -> str:
    """The address that a host means wherever it is looked up: 127.1 and 0x7f000001 too, and localhost; empty for other names."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return "127.0.0.1"
    if _literal(name) is not None:
        return name
    try:
        return socket.inet_ntoa(socket.inet_aton(name))
    except OSError:
        return ""


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read an address in its usual form."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _refused(url: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"url {url[:120]!r} cannot be called: {why}",
        field="url",
        value=url[:120],
        allowed=_ALLOWED,
        hint="An administrator of the service can allow a private network by HEADROOM_WEBHOOK_NETWORKS.",
    )
