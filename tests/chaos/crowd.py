"""The people of a campaign: they submit, cancel, pause, resume and watch over the API, and try again what was not answered.

Each submission carries an Idempotency-Key and is sent again under it until the service says yes or no. What it said yes to is
kept, to be held against the rows at the end.
"""

import contextlib
import random
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import httpx

_TIMEOUT_S = 10.0
_SHORT_TIMEOUT_S = 0.05
"""Timeout of impatient people, who hang up before the answer and ask again."""
_PAUSE_S = 0.2
_MAY_BE_SENT_AGAIN = frozenset({409, 429, 502, 503, 504, 507})
"""507: there is no room on the disk."""
_SHARES = {"cancel": 0.15, "cancel twice": 0.05, "pause": 0.04, "watch": 0.05, "hang up": 0.05}
"""Share of all submissions that are followed by another request."""
_SLOW_SHARE, _REAL_SHARE = 0.06, 0.01


@dataclass(kw_only=True)
class Accepted:
    """A job that the service took."""

    id: str
    may_be_cancelled: bool = False
    """Somebody asked for it, answered or not."""
    is_to_be_resumed: bool = False


class Crowd:
    """Starts with ``start``; ``settle`` ends it when everything sent has been answered."""

    def __init__(
        self, url: str, token: str, *, spec: dict[str, Any], seed: int, num_people: int = 2, pause_s: float = 0.1
    ) -> None:
        """spec: of every job; only the name differs. pause_s: between two submissions of one person."""
        self.accepted: dict[str, Accepted] = {}
        self.statuses: Counter[int] = Counter()
        """The status of every answer; 0 for a connection that ended without one."""
        self.refusals: list[str] = []
        """Answers that nobody should get: a fault of the service, or a no to what is right."""
        self._url, self._headers, self._spec = url, {"Authorization": f"Bearer {token}"}, spec
        self._seed, self._pause_s = seed, pause_s
        self._ending = threading.Event()
        self._resting = threading.Event()
        self._lock = threading.Lock()
        self._plan_id = ""
        self._threads = [threading.Thread(target=self._live, args=(number,), daemon=True) for number in range(num_people)]

    def start(self) -> None:
        self.ask_for_offer()
        for thread in self._threads:
            thread.start()

    def rest(self, rests: bool) -> None:
        """Submit nothing for a while, so that the queue can empty."""
        (self._resting.set if rests else self._resting.clear)()

    def settle(self) -> None:
        """Nothing new; what is under way is asked for until it is answered, and what is paused goes on."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        with self._client() as client:
            for known in self.accepted.values():
                if known.is_to_be_resumed:
                    self._ask(client, "POST", f"/jobs/{known.id}/resume", {}, must_answer=True, may_be_late=True)

    def resume(self, job: str) -> None:
        """Let a job go on that is held back."""
        with self._client() as client:
            self._ask(client, "POST", f"/jobs/{job}/resume", {}, may_be_late=True)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return {name: asdict(known) for name, known in self.accepted.items()}

    def ask_for_offer(self) -> None:
        """Take the search's choice as the plan of all that follows."""
        with self._client() as client:
            client.timeout = httpx.Timeout(120)
            answer = client.post("/plans", json={**self._spec, "name": "quick-offer"}).raise_for_status().json()
        self._plan_id = next(offer["id"] for offer in answer["offers"] if offer["chosen"])

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self._url}/api/v1", headers=self._headers, timeout=_TIMEOUT_S, trust_env=False)

    def _live(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        with self._client() as client:
            count = 0
            while not self._ending.wait(self._pause_s):
                if self._resting.is_set():
                    continue
                drawn = chance.random()
                kind = "real" if drawn < _REAL_SHARE else "slow" if drawn < _REAL_SHARE + _SLOW_SHARE else "quick"
                name = f"{kind}-{number}-{count}"
                count += 1
                if (job := self._submit(client, name, hangs_up=chance.random() < _SHARES["hang up"])) is not None:
                    self._follow(client, name, job, chance)

    def _submit(self, client: httpx.Client, name: str, *, hangs_up: bool) -> str | None:
        body = {"spec": {**self._spec, "name": name}, "plan_id": self._plan_id}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if hangs_up:
            with contextlib.suppress(httpx.HTTPError):
                client.post("/jobs", json=body, headers=headers, timeout=_SHORT_TIMEOUT_S)
        answer = self._ask(client, "POST", "/jobs", body, headers=headers, must_answer=True)
        if answer is None or answer.status_code != httpx.codes.CREATED:
            return None
        job: str = answer.json()["id"]
        with self._lock:
            self.accepted[name] = Accepted(id=job)
        return job

    def _follow(self, client: httpx.Client, name: str, job: str, chance: random.Random) -> None:
        known = self.accepted[name]
        if (do := chance.random()) < _SHARES["cancel"]:
            time.sleep(chance.random() * 0.5)
            known.may_be_cancelled = True
            mode = chance.choice(["keep", "discard"])
            for _ in range(2 if do < _SHARES["cancel twice"] else 1):
                self._ask(client, "POST", f"/jobs/{job}/cancel", {"mode": mode}, may_be_late=True)
        elif do < _SHARES["cancel"] + _SHARES["pause"]:
            known.is_to_be_resumed = True
            self._ask(client, "POST", f"/jobs/{job}/pause", {}, may_be_late=True)
            time.sleep(chance.random())
            self._ask(client, "POST", f"/jobs/{job}/resume", {}, may_be_late=True)
        elif do > 1 - _SHARES["watch"]:
            with contextlib.suppress(httpx.HTTPError), client.stream("GET", f"/jobs/{job}/events", timeout=1.0) as stream:
                for number, _ in enumerate(stream.iter_raw()):
                    if number > 2:
                        break  # and the connection is closed in the middle

    def _ask(
        self,
        client: httpx.Client,
        method: str,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        must_answer: bool = False,
        may_be_late: bool = False,
    ) -> httpx.Response | None:
        """Send it until it is answered. None where the connection was lost; with must_answer it is asked again then too.

        may_be_late: the job may have ended meanwhile, which is answered with a conflict.
        """
        until_s = time.monotonic() + (600 if must_answer else 20)
        while time.monotonic() < until_s:
            try:
                answer = client.request(method, path, json=body, headers=headers)
            except httpx.HTTPError:
                with self._lock:
                    self.statuses[0] += 1
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self.statuses[answer.status_code] += 1
            if answer.is_success or (may_be_late and answer.status_code == httpx.codes.CONFLICT):
                return answer
            if answer.status_code not in _MAY_BE_SENT_AGAIN:
                with self._lock:
                    self.refusals.append(f"{method} {path}: {answer.status_code}: {answer.text[:300]}")
                return answer
            if answer.status_code == httpx.codes.CONFLICT and "plan" in answer.text:
                self.ask_for_offer()
                body["plan_id"] = self._plan_id
                headers = {**(headers or {}), "Idempotency-Key": uuid.uuid4().hex}
            time.sleep(min(float(answer.headers.get("Retry-After", _PAUSE_S)), 1.0))
        if must_answer:
            with self._lock:
                self.refusals.append(f"{method} {path}: no answer in 600 s")
        return None
