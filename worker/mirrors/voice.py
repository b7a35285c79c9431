"""The words of a mirror's process to its supervisor: a line of JSON for each change, without anything secret."""

import json
import os
import re
from collections.abc import Mapping

MAX_TROUBLE_CHARACTERS = 300
_SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|USERNAME", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


class Voice:
    """Says only what is new. Safe to use from two threads: a line is one write."""

    def __init__(self, fd: int, *, environment: Mapping[str, str]) -> None:
        self._fd = fd
        self._secrets = [value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) > 3]
        self._said: dict[str, str] = {}

    def say(self, *, url: str | None = None, trouble: str | None = None) -> None:
        """trouble: empty once it is over."""
        changes = {"url": url, "trouble": trouble}
        new = {name: self.clean(text) for name, text in changes.items() if text is not None}
        said = {"url": "", "trouble": "", **self._said, **new}
        if said != self._said:
            self._said = said
            os.write(self._fd, json.dumps(said).encode() + b"\n")

    def clean(self, text: str) -> str:
        """One line without the values of secret variables and without the name and password in an address."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = _CREDENTIALS.sub("//", " ".join(text.split()))
        return text if len(text) <= MAX_TROUBLE_CHARACTERS else f"{text[:MAX_TROUBLE_CHARACTERS]}…"
