"""The stores of a run behind the host: the disk's scratch file and the remote store, each opened when it is first needed."""

import tempfile
from pathlib import Path
from typing import Literal

from optimizer.base.errors import RemoteStoreLost
from optimizer.runtime.tiers.disk import DiskStore
from optimizer.runtime.tiers.remote import URL_VARIABLE, RemoteStore, remote_url
from optimizer.runtime.tiers.stores import Store

StorePlace = Literal["disk", "remote"]


class OpenStores:
    """``close`` it: what it opened is removed with all that is in it."""

    def __init__(self, *, scratch: Path | None, url: str | None) -> None:
        """scratch: folder for the disk's file, made when first needed; the system's temporary folder unless given.
        url: of the remote store; ``HEADROOM_REMOTE_URL`` unless given.
        """
        self._scratch = scratch
        self._url = url
        self._opened: dict[StorePlace, Store] = {}

    def get(self, place: StorePlace) -> Store:
        """Raises DiskFull and RemoteStoreLost."""
        if place not in self._opened:
            self._opened[place] = self._open(place)
        return self._opened[place]

    def used_bytes(self, place: StorePlace) -> int:
        return self._opened[place].room.used_bytes if place in self._opened else 0

    def peak_bytes(self, place: StorePlace) -> int:
        """Most in use since the last ``reset_peak``."""
        return self._opened[place].room.peak_bytes if place in self._opened else 0

    def reset_peak(self) -> None:
        for store in self._opened.values():
            store.room.reset_peak()

    def close(self) -> None:
        for store in self._opened.values():
            store.close()
        self._opened.clear()

    def _open(self, place: StorePlace) -> Store:
        if place == "disk":
            return DiskStore(self._scratch or Path(tempfile.gettempdir()))
        url = self._url or remote_url()
        if url is None:
            raise RemoteStoreLost(
                f"the plan uses the remote tier; {URL_VARIABLE} is not set",
                hint=f"Set {URL_VARIABLE} (redis://host:6379/0), or choose a plan without the remote tier.",
            )
        return RemoteStore(url)
