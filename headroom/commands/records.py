"""``headroom logs``, ``events``, ``checkpoints``, ``metrics`` and ``files``: what a job has reported so far."""

import argparse
import csv
import json
import sys
from collections.abc import Callable

from headroom.client import HeadroomClient
from headroom.commands.catalog import Connect, Subparsers
from headroom.commands.naming import JOB_HELP
from headroom.commands.tables import moment, print_table
from optimizer.base.categories import CATEGORIES
from optimizer.base.units import format_bytes

FIELDS = ("loss", "learning_rate", "grad_norm", "step_ms", "tokens_per_s", "device_peak_bytes", "host_bytes")
"""Columns of a step in the table of ``metrics``; the categories' bytes follow."""


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    def add(name: str, print_: Callable[[HeadroomClient, argparse.Namespace], None], help_text: str) -> argparse.ArgumentParser:
        def run(options: argparse.Namespace) -> None:
            with connect(options) as client:
                print_(client, options)

        command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, parents=[connection])
        command.set_defaults(run=run)
        command.add_argument("job", help=JOB_HELP)
        return command

    add("logs", _print_logs, "what the job's process printed").add_argument("--find", metavar="TEXT", help="lines that hold it")
    add("events", _print_events, "every move of the job: who, from, to, why")
    add("checkpoints", _print_checkpoints, "from where it can go on")
    add("files", _print_files, "what it left; fetch with: headroom download")
    metrics = add("metrics", _print_metrics, "its steps as CSV")
    metrics.add_argument("--max-points", type=int, metavar="N", help="of a long run; peaks are kept")
    metrics.add_argument("--json", action="store_true", help="everything the API says")


def _print_logs(client: HeadroomClient, options: argparse.Namespace) -> None:
    for line in client.logs(options.job).splitlines():
        if options.find is None or options.find.lower() in line.lower():
            print(line)


def _print_events(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (str(row["seq"]), moment(row["at"]), row["actor"], row["kind"], row["to_state"], row["message"] or row["reason"])
        for row in client.events(options.job)
    ]
    print_table(("", "at", "by", "what", "state", ""), rows, empty="no events")


def _print_checkpoints(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (row["name"], str(row["step"]), format_bytes(row["num_bytes"]), moment(row["created_at"]))
        for row in client.checkpoints(options.job)
    ]
    print_table(("name", "step", "size", "at"), rows, empty="no checkpoint yet")


def _print_files(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = [
        (row["name"], row["kind"], format_bytes(row["num_bytes"]), row["sha256"][:12]) for row in client.artifacts(options.job)
    ]
    print_table(("name", "kind", "size", "sha256"), rows, empty="the job has left no files")


def _print_metrics(client: HeadroomClient, options: argparse.Namespace) -> None:
    metrics = client.metrics(options.job, max_points=options.max_points)
    if options.json:
        print(json.dumps(metrics, indent=2))
        return
    evals = {record["step"]: record.get("validation_loss") for record in metrics["evals"]}
    writer = csv.writer(sys.stdout)
    writer.writerow(("step", *FIELDS, "validation_loss", *(f"{category}_bytes" for category in CATEGORIES)))
    for record in metrics["steps"] or metrics["generated"]:
        held = record.get("device_bytes") or {}
        writer.writerow(
            (
                record["step"],
                *(record.get(name) for name in FIELDS),
                evals.get(record["step"]),
                *(held.get(category, 0) for category in CATEGORIES),
            )
        )
