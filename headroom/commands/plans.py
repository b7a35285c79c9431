"""``headroom price``, ``frontier``, ``cards`` and ``clone``: what the pages New job and Plans show, of a job's file."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headroom.client import ApiProblem, HeadroomClient, Row
from headroom.client.types import Offer
from headroom.commands.catalog import Connect, Subparsers, size
from headroom.commands.naming import JOB_HELP
from headroom.commands.submit import read_job_file, upload_named_files
from headroom.commands.tables import print_table
from optimizer.base.units import format_bytes, format_duration


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    def add(
        name: str, answer: Callable[[HeadroomClient, argparse.Namespace], None], help_text: str
    ) -> argparse.ArgumentParser:
        def run(options: argparse.Namespace) -> None:
            with connect(options) as client:
                answer(client, options)

        command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, parents=[connection])
        command.set_defaults(run=run)
        return command

    price = add("price", _price, "plans for a job's file on every machine, and whether they fit; starts nothing")
    frontier = add("frontier", _frontier, "every plan worth its time or its memory, on one machine")
    frontier.add_argument("--gpu", help="a card of the table instead of the first machine")
    cards = add("cards", _cards, "cards of the table for a job's file, best first")
    cards.add_argument("--card", action="append", metavar="NAME", help="only these; may be given several times")
    cards.add_argument("--by-money", action="store_true", help="by the rent of a million tokens")
    for command in (price, frontier, cards):
        command.add_argument("file", type=Path, metavar="JOB.yaml", help="what a job asks for")
        command.add_argument("--json", action="store_true", help="everything the API says")
    clone = add("clone", _clone, "a job's file, to edit and submit")
    clone.add_argument("job", help=JOB_HELP)
    clone.add_argument("-o", "--output", type=Path, metavar="JOB.yaml", help="default: to the screen")


def _price(client: HeadroomClient, options: argparse.Namespace) -> None:
    spec = upload_named_files(client, read_job_file(options.file), folder=options.file.parent)
    spec.pop("plan", None)
    try:
        offers, error = client.price_plans(spec), None
    except ApiProblem as problem:  # nothing fits: the baselines are printed all the same
        offers, error = problem.extra.get("offers") or [], problem
    if options.json:
        print(json.dumps(offers, indent=2))
    elif offers:
        print_table(("plan", "machine", "verdict", "peak", "a step", "in all"), list(map(_offer_row, offers)), empty="")
        for sentence in next((offer["explanation"] for offer in offers if offer["chosen"]), []):
            print(f"  {sentence}")
    if error is not None:
        raise error


def _offer_row(offer: Offer) -> tuple[str, ...]:
    prediction = offer["prediction"]
    step_ms = prediction.get("step_ms")
    return (
        offer["label"],
        offer["machine"]["name"],
        offer["verdict"].replace("_", " "),
        format_bytes(prediction["device_peak_bytes"]),
        "" if step_ms is None else f"{step_ms:,.0f} ms",
        format_duration(prediction["total_s"]),
    )


def _frontier(client: HeadroomClient, options: argparse.Namespace) -> None:
    question = _question(client, options)
    place = {"gpu": options.gpu} if options.gpu else {"machine": client.machines()[0]["id"]}
    found = client.find_best_plan({**question, **place})
    if options.json:
        print(json.dumps(found, indent=2))
        return
    generates = found["kind"] == "generation"
    rows = [
        (plan["label"], format_bytes(plan["prediction"]["device_peak_bytes"]), *_times(plan["prediction"], generates=generates))
        for plan in found["frontier"]
    ]
    times = ("all prompts", "tokens/s") if generates else ("a step",)
    print_table(("plan", "peak", *times), rows, empty="no plan")
    for sentence in found["explanation"]:
        print(f"  {sentence}")


def _times(prediction: Row, *, generates: bool) -> tuple[str, ...]:
    if generates:
        return format_duration(prediction["total_s"]), f"{prediction['tokens_per_s']:,.0f}"
    return (f"{prediction['step_ms']:,.0f} ms",)


def _cards(client: HeadroomClient, options: argparse.Namespace) -> None:
    order = "money" if options.by_money else "speed"
    question = {**_question(client, options), "order": order, "cards": options.card or ["all"]}
    found = client.rank_cards(question)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    rows = [(card["card"], size(card["memory_bytes"]), _speed(card), card["what"]) for card in found["cards"]]
    print_table(("card", "memory", "tokens/s", "how"), rows, empty="no card")


def _speed(card: dict[str, Any]) -> str:
    return "" if card["tokens_per_s"] is None else f"{card['tokens_per_s']:,.0f}"


def _question(client: HeadroomClient, options: argparse.Namespace) -> Row:
    spec = upload_named_files(client, read_job_file(options.file), folder=options.file.parent)
    return {name: spec[name] for name in ("model", "prompts", "workload", "goal") if name in spec}


def _clone(client: HeadroomClient, options: argparse.Namespace) -> None:
    spec = client.job(options.job)["spec"]
    text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
    if options.output is None:
        print(text, end="")
        return
    options.output.write_text(text)
    print(f"{options.output}; start it with: headroom submit {options.output}")
