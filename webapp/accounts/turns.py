"""Gives turns at what takes seconds of the processor, such as a search for a plan: few at once in a process, one to a person.

Each request has a thread of its own, and goes on when its reader has left. So without turns one person's questions, asked side by
side, would take the interpreter from everybody and memory without bound. People take turns; a person's further questions wait for
their own. A thread that works on no request, as those of the reconciler, takes no turn.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from webapp.accounts.errors import SearchesBusy

MAX_AT_ONCE: Final = 2
"""Searches in one process: they share one interpreter, so that more would only each take longer."""
MAX_OF_PERSON: Final = 8
"""Under way or waiting: an edit of a form asks again while the question before is still being answered."""
WAIT_S: Final = 10.0
"""A question waits so long for its turn."""
SUBMISSION_WAIT_S: Final = 0.5
"""A submission waits so long for other questions of the same person: meanwhile it holds one of the few places for submissions."""


@dataclass(kw_only=True)
class _Asking:
    """A request, for as long as its thread works on it."""

    name_person: Callable[[], int | None]
    own_wait_s: float = WAIT_S
    has_turn: bool = False


_asking: ContextVar[_Asking | None] = ContextVar("asking", default=None)


@dataclass(frozen=True, kw_only=True)
class _Ticket:
    number: int
    person: int | None


class Turns:
    """Use one for all of a process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[_Ticket] = []
        self._at_work: list[_Ticket] = []
        self._last_turn: dict[int | None, int] = {}
        """By person who has questions, the number of the ticket that was given the latest turn."""

    @contextmanager
    def take(self, person: int | None, *, own_wait_s: float = WAIT_S) -> Iterator[None]:
        """Wait for a turn and hold it. own_wait_s: for other questions of the same person. Raises SearchesBusy."""
        with self._changed:
            ticket = _Ticket(number=next(self._numbers), person=person)
            if self._num_of(person) >= MAX_OF_PERSON:
                raise SearchesBusy(f"{MAX_OF_PERSON} questions of yours are being answered or wait for it")
            self._waiting.append(ticket)
            try:
                self._wait(ticket, own_wait_s=own_wait_s)
            finally:
                self._waiting.remove(ticket)
                self._forget_if_gone(person)
            self._at_work.append(ticket)
            self._last_turn[person] = ticket.number
        try:
            yield
        finally:
            with self._changed:
                self._at_work.remove(ticket)
                self._forget_if_gone(person)
                self._changed.notify_all()

    def _wait(self, ticket: _Ticket, *, own_wait_s: float) -> None:
        began_s = time.monotonic()
        while self._next() is not ticket:
            is_for_own = any(other.person == ticket.person for other in self._at_work)
            left_s = began_s + (own_wait_s if is_for_own else WAIT_S) - time.monotonic()
            if left_s <= 0:
                own = "another question of yours is being answered"
                raise SearchesBusy(own if is_for_own else f"{MAX_AT_ONCE} questions are being answered, as many as go at once")
            self._changed.wait(left_s)

    def _next(self) -> _Ticket | None:
        """The oldest question of who has waited longest for a turn; None while none can be had."""
        if len(self._at_work) >= MAX_AT_ONCE:
            return None
        busy = {ticket.person for ticket in self._at_work}
        free = [ticket for ticket in self._waiting if ticket.person not in busy]
        return min(free, key=lambda ticket: (self._last_turn.get(ticket.person, -1), ticket.number), default=None)

    def _num_of(self, person: int | None) -> int:
        return sum(ticket.person == person for ticket in (*self._waiting, *self._at_work))

    def _forget_if_gone(self, person: int | None) -> None:
        if not self._num_of(person):
            self._last_turn.pop(person, None)


_turns = Turns()


@contextmanager
def asked_by(name_person: Callable[[], int | None]) -> Iterator[None]:
    """Mark what this thread does within as done for a request.

    name_person: the person's id, None for a stranger; called when a turn is taken, since who asks is known only then.
    """
    token = _asking.set(_Asking(name_person=name_person))
    try:
        yield
    finally:
        _asking.reset(token)


def present_person() -> int | None:
    """Id of who asks by the request that this thread works on; None for a stranger, and where it works on none."""
    asking = _asking.get()
    return None if asking is None else asking.name_person()


def hurry() -> None:
    """Let the present request wait for its person's other questions no longer than a submission may."""
    if (asking := _asking.get()) is not None:
        asking.own_wait_s = SUBMISSION_WAIT_S


@contextmanager
def take_turn() -> Iterator[None]:
    """A turn for the present request, the same one where it has one already. Raises SearchesBusy."""
    asking = _asking.get()
    if asking is None or asking.has_turn:
        yield
        return
    with _turns.take(asking.name_person(), own_wait_s=asking.own_wait_s):
        asking.has_turn = True
        try:
            yield
        finally:
            asking.has_turn = False
