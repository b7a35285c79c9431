"""Webhooks may not go to a private address: no spelling of one, and no name that points to one, gets through."""

from collections.abc import Callable

import pytest
from pytest_django import Settings

from optimizer.base.errors import InvalidInput
from webapp.webhooks.targets import check_url, find_target, resolve_host

PUBLIC = ("93.184.215.14",)
PRIVATE = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "198.18.0.1",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "2002:7f00:1::",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "::7f00:1",
    "::ffff:0:7f00:1",
    "2001:db8::1",
]
SPELLINGS = ["127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "127.0.0.1."]


def resolve_to(*addresses: str) -> Callable[[str, int], list[str]]:
    return lambda host, port: list(addresses)


def test_a_name_is_called_at_the_address_that_was_checked() -> None:
    target = find_target("https://hooks.example.org/in?a=1", resolve=resolve_to(*PUBLIC))
    assert target.connect_url == "https://93.184.215.14:443/in?a=1"
    assert (target.host, target.host_header) == ("hooks.example.org", "hooks.example.org")


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_that_points_into_a_private_network_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="is a private address"):
        find_target("https://hooks.example.org/", resolve=resolve_to(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_written_out_is_refused_when_it_is_entered(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidInput, match="is a private address"):
        check_url(f"https://{host}/")


@pytest.mark.parametrize("host", SPELLINGS)
def test_other_spellings_of_loopback_are_resolved_and_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="is a private address|has no address"):
        find_target(f"https://{host}/", resolve=resolve_host)


@pytest.mark.parametrize("host", [*SPELLINGS, "0x7f.1", "LOCALHOST", "localhost.", "hooks.localhost"])
def test_other_spellings_of_loopback_are_refused_when_they_are_entered(host: str) -> None:
    with pytest.raises(InvalidInput, match=r"leads to 127\.0\.0\.1, which is a private address"):
        check_url(f"https://{host}/")


def test_an_address_is_named_once_in_its_refusal() -> None:
    with pytest.raises(InvalidInput, match=r"cannot be called: 127\.0\.0\.1 is a private address$"):
        check_url("https://127.0.0.1/")


@pytest.mark.parametrize(
    "host", ["metadata", "metadata.google.internal", "METADATA.google.internal.", "instance-data", "router", "printer.local"]
)
def test_a_name_of_private_networks_is_refused_when_it_is_entered_unless_one_is_open(host: str, settings: Settings) -> None:
    named = host.lower().rstrip(".")
    with pytest.raises(InvalidInput, match=rf"{named} is a name of private networks"):
        check_url(f"https://{host}/")
    settings.HEADROOM_WEBHOOK_NETWORKS = ["10.1.0.0/16"]
    check_url(f"https://{host}/")


def test_a_spelling_of_an_address_in_an_open_network_is_accepted(settings: Settings) -> None:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    for host in ("localhost", "127.1"):
        check_url(f"http://{host}:9000/")


def test_all_of_several_addresses_must_be_public() -> None:
    with pytest.raises(InvalidInput, match="10.0.0.1, which is a private address"):
        find_target("https://hooks.example.org/", resolve=resolve_to(*PUBLIC, "10.0.0.1"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.org/", "not an https address"),
        ("file:///etc/passwd", "not an https address"),
        ("https:///nohost", "not an https address"),
        ("https://ada:secret@example.org/", "a name or password"),
        ("https://example.org:99999/", "out of range"),
        ("https://example.org/a b", "holds what an address does not"),
        ("https://exämple.org/", "holds what an address does not"),
        ("https://example.org/\r\nX: y", "holds what an address does not"),
        ("https://example.org/" + "a" * 500, "longer than 500"),
        ("http://example.org/", "HEADROOM_WEBHOOK_NETWORKS"),
    ],
)
def test_what_is_no_target_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        check_url(url)


def test_a_public_address_is_called_by_https_on_its_port_only() -> None:
    with pytest.raises(InvalidInput, match="by https on port 443"):
        find_target("https://hooks.example.org:8443/", resolve=resolve_to(*PUBLIC))


def test_an_administrator_can_open_a_private_network_and_nothing_beside_it(settings: Settings) -> None:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["10.1.0.0/16"]
    target = find_target("http://ci.internal:8080/in", resolve=resolve_to("10.1.2.3"))
    assert (target.connect_url, target.host_header) == ("http://10.1.2.3:8080/in", "ci.internal:8080")
    with pytest.raises(InvalidInput, match="is a private address"):
        find_target("http://ci.internal:8080/in", resolve=resolve_to("10.2.0.1"))
