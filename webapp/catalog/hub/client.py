"""Asks the Hugging Face hub's API and reads its files: no library of the hub, so that nothing reaches a host that is not allowed.

Redirects are followed by hand, to hosts of the list alone; the token goes to the hub's own host and nowhere else, and is in no
message. Settings of a proxy and of ``.netrc`` are not read.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx
from django.conf import settings

from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.models.files.sidecars import is_sidecar

TOKEN_VARIABLE = "HEADROOM_HUB_TOKEN"
LINKED_SIZE = "x-linked-size"
"""The hub's own word on a large file's size, beside the redirect to where it lies."""
OWN_SUFFIXES = (".huggingface.co", ".hf.co")
"""Hosts that the hub's own address sends its large files from."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_FILES = 5_000
_MAX_REDIRECTS = 5
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_REFERENCE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.\-]{0,95}(?:/[\w.\-]{1,96})?)(?:@(?P<revision>[\w.\-/]{1,200}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HubFailed(HeadroomError):
    """The hub does not answer, or not as it should; asking again may help."""

    code = "hub_failed"


class HubRefused(InvalidInput):
    """The model cannot be had from the hub; asking again changes nothing."""

    code = "hub_refused"

    def __init__(self, found: str, *, allowed: str, hint: str = "") -> None:
        super().__init__(f"hub: {found}; allowed: {allowed}", field="hub", value=found, allowed=allowed, hint=hint)


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a model at a commit."""

    name: str
    num_bytes: int
    sha256: str
    """Hash of its content; empty for a small file, which git names by ``git_sha1``."""
    git_sha1: str


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model pinned to a commit, with the files that are taken."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


def read_reference(text: str) -> tuple[str, str]:
    """Repository and revision of ``owner/name[@revision]``, perhaps after ``hub:``. Raises HubRefused."""
    match = _REFERENCE.fullmatch(text.removeprefix("hub:"))
    if match is None or ".." in text:
        raise HubRefused(f"{text[:80]!r} names no model", allowed="owner/name, or owner/name@revision")
    return match["repo"], match["revision"] or "main"


def find_model(repo: str, revision: str) -> HubModel:
    """The files to take at the commit that the revision is now. Raises HubRefused, HubFailed."""
    path = f"/api/models/{quote(repo)}/revision/{quote(revision, safe='')}?blobs=true"
    with _opened(path) as response:
        document = _read_json(response)
    commit, siblings = document.get("sha"), document.get("siblings")
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None or not isinstance(siblings, list):
        raise HubFailed("the hub's answer names no commit and no files")
    if len(siblings) > MAX_FILES:
        raise HubRefused(f"{repo} has {len(siblings):,} files", allowed=f"at most {MAX_FILES:,}")
    files = {file.name: file for file in (_read_file(entry) for entry in siblings) if file is not None}
    return HubModel(repo=repo, commit=commit, files=tuple(files[name] for name in _choose(repo, list(files))))


@contextmanager
def open_file(repo: str, commit: str, name: str, *, offset_bytes: int) -> Iterator[httpx.Response]:
    """The answer to a request for a file from ``offset_bytes`` on: 206, or 200 where the server sends all of it.

    Its header LINKED_SIZE is that of the last redirect which had one.
    """
    path = f"/{quote(repo)}/resolve/{quote(commit)}/{quote(name)}"
    with _opened(path, headers={"Range": f"bytes={offset_bytes}-"} if offset_bytes else {}) as response:
        yield response


def _choose(repo: str, names: list[str]) -> list[str]:
    """Config, sidecars and one set of safetensors. Raises HubRefused."""
    top = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    shards = [name for name in top if _SHARD.fullmatch(name)]
    alone = [_SINGLE] if _SINGLE in top else top if len(top) == 1 else []
    weights = [*shards, _INDEX] if _INDEX in names and shards else alone
    if "config.json" not in names or not weights:
        raise HubRefused(
            f"{repo} holds no config.json with safetensors",
            allowed="a model with config.json and safetensors; formats that can run code when read are not fetched",
        )
    return ["config.json", *(name for name in names if is_sidecar(name)), *weights]


def _read_file(entry: Any) -> HubFile | None:
    name, num_bytes = (entry.get("rfilename"), entry.get("size")) if isinstance(entry, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(num_bytes, int) or num_bytes < 0:
        return None
    lfs = entry.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else ""
    git_sha1 = entry.get("blobId")
    is_named = isinstance(sha256, str) and (re.fullmatch(r"[0-9a-f]{64}", sha256) or not lfs)
    if not is_named or (not lfs and not (isinstance(git_sha1, str) and _COMMIT.fullmatch(git_sha1))):
        raise HubFailed(f"the hub names no hash of {name[:80]!r}")
    return HubFile(name=name, num_bytes=num_bytes, sha256=str(sha256), git_sha1="" if lfs else str(git_sha1))


@contextmanager
def _opened(path: str, *, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
    """A streamed answer of status 200 or 206, redirects followed. Raises HubRefused, HubFailed."""
    linked = ""
    address = f"{settings.HEADROOM_HUB_URL.rstrip('/')}{path}"
    try:
        with httpx.Client(timeout=_TIMEOUT, follow_redirects=False, trust_env=False) as client:
            for _ in range(_MAX_REDIRECTS):
                _require_allowed(address)
                sent = {"Accept-Encoding": "identity", "User-Agent": "headroom", **(headers or {}), **_authorization(address)}
                with client.stream("GET", address, headers=sent) as response:
                    if response.is_redirect:
                        linked = response.headers.get(LINKED_SIZE, linked)
                        address = urljoin(address, response.headers["location"])
                        continue
                    _require_answer(response)
                    response.headers[LINKED_SIZE] = response.headers.get(LINKED_SIZE, linked)
                    yield response
                    return
    except httpx.HTTPError as error:
        raise HubFailed(f"the hub's line failed: {type(error).__name__}") from error
    except (ValueError, httpx.InvalidURL) as error:
        raise HubFailed("the hub redirects to something that is no address") from error
    raise HubFailed(f"the hub redirects more than {_MAX_REDIRECTS} times")


def _require_allowed(address: str) -> None:
    """Raises HubRefused for another scheme than the hub's own, or a host that is not on the list."""
    hub, wanted = urlsplit(settings.HEADROOM_HUB_URL), urlsplit(address)
    is_hub = (wanted.hostname, wanted.port) == (hub.hostname, hub.port)
    host = wanted.hostname or ""
    is_own = f".{hub.hostname}".endswith(OWN_SUFFIXES) and host.endswith(OWN_SUFFIXES)
    if wanted.scheme != hub.scheme or not (is_hub or is_own or wanted.netloc in settings.HEADROOM_HUB_HOSTS):
        raise HubRefused(
            f"it sends to {wanted.scheme}://{wanted.netloc[:200]}",
            allowed="its own hosts, and those that HEADROOM_HUB_HOSTS lists",
        )


def _authorization(address: str) -> dict[str, str]:
    """The token, for the hub itself alone: what it redirects to has its right in its address."""
    hub, wanted = urlsplit(settings.HEADROOM_HUB_URL), urlsplit(address)
    token = os.environ.get(TOKEN_VARIABLE, "")
    is_hub = (wanted.scheme, wanted.hostname, wanted.port) == (hub.scheme, hub.hostname, hub.port)
    return {"Authorization": f"Bearer {token}"} if token and is_hub else {}


def _require_answer(response: httpx.Response) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        hint = f"An administrator sets {TOKEN_VARIABLE} to a token that may read it, and accepts the model's terms on the hub."
        raise HubRefused(f"it does not let this service read the model ({status})", allowed="a model that it may read", hint=hint)
    if status == 404:
        raise HubRefused("there is no such model, revision or file", allowed="owner/name[@revision] as the hub has it")
    raise HubFailed(f"the hub answered {status}")


def _read_json(response: httpx.Response) -> dict[str, Any]:
    data = b""
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            raise HubFailed("the hub's answer is too long")
    document = httpx.Response(200, content=data).json()
    if not isinstance(document, dict):
        raise HubFailed("the hub's answer is no object")
    return document
