"""``headroom chat``: talk to a model, or to what a run made of it, in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from headroom.client import HeadroomClient
from headroom.client.chat import ChatEvent
from headroom.client.connection import Row
from headroom.commands.catalog import Connect, Subparsers
from headroom.commands.submit import UsageError
from optimizer.base.errors import HeadroomError
from optimizer.base.units import parse_bytes

HELP = "/new begins anew, /quit or Ctrl-D ends"


class NoAnswer(HeadroomError):
    """The model did not answer to the end."""

    code = "no_answer"


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    help_text = "talk to a model, or to what a training run left"
    command = commands.add_parser("chat", help=help_text, parents=[connection])
    command.set_defaults(run=lambda options: _chat(connect, options))
    command.add_argument("model", help="a model's name or id, a run's, or NAME:RUN for a model with a run's adapters")
    command.add_argument("--once", metavar="TEXT", help="ask this, print the answer and end; - reads it from standard input")
    command.add_argument("--system", metavar="TEXT", help="a system message that goes before")
    command.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    command.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: 1)")
    command.add_argument("--seed", type=int, help="for the same answer again")
    command.add_argument("--budget", metavar="SIZE", help="device memory for holding the model, where it is not held yet")


def _chat(connect: Connect, options: argparse.Namespace) -> int:
    settings = _read_settings(options)
    begun = [{"role": "system", "content": options.system}] if options.system else []
    with connect(options) as client:
        if options.once is not None:
            question = sys.stdin.read() if options.once == "-" else options.once
            _answer(client, options.model, [*begun, {"role": "user", "content": question}], settings)
            return 0
        _talk(client, options.model, begun, settings)
    return 0


def _read_settings(options: argparse.Namespace) -> Row:
    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.budget is not None:
        try:
            settings["device_budget_bytes"] = parse_bytes(options.budget)
        except ValueError as error:
            raise UsageError(f"--budget: {error}", hint="Such as 12 GiB.") from error
    return settings


def _talk(client: HeadroomClient, model: str, begun: list[Row], settings: Row) -> None:
    """Question after question; one that got no answer is not kept."""
    print(f"{model}: {HELP}", file=sys.stderr)
    messages = [*begun]
    for question in _questions():
        if question == "/new":
            messages = [*begun]
            continue
        asked = [*messages, {"role": "user", "content": question}]
        try:
            answer = _answer(client, model, asked, settings)
        except HeadroomError as error:
            print(f"headroom: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
            continue
        except KeyboardInterrupt:  # cuts the answer off, not the conversation
            print(file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _questions() -> Iterator[str]:
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return
        if question == "/quit":
            return
        if question:
            yield question


def _answer(client: HeadroomClient, model: str, messages: list[Row], settings: Row) -> str:
    """Print the answer as it comes; the whole of it. Raises NoAnswer."""
    pieces: list[str] = []
    waited_for = ""
    for event in client.chat(model, messages, **settings):
        if event.kind == "error":
            raise NoAnswer(event.text)
        waited_for = _show(event, waited_for)
        if event.kind == "text":
            pieces.append(event.text)
    print(flush=True)
    return "".join(pieces)


def _show(event: ChatEvent, waited_for: str) -> str:
    """Write text to standard output, and to standard error what is waited for, once."""
    if event.kind == "waiting" and event.text not in ("", "waiting", waited_for):
        print(f"({event.text})", file=sys.stderr, flush=True)
        return event.text
    if event.kind == "text":
        sys.stdout.write(event.text)
        sys.stdout.flush()
    elif event.kind == "end" and event.finish_reason == "length":
        sys.stdout.write(" …")
    return waited_for
