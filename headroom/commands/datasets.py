"""``headroom datasets``: what training and generation read."""

import argparse
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from headroom.client import HeadroomClient
from headroom.client.types import Dataset
from headroom.commands.catalog import (
    Connect,
    Run,
    Subparsers,
    add_group,
    count,
    default_name,
    find_id,
    progress_bar,
    with_client,
)
from headroom.commands.preview import print_preview
from headroom.commands.submit import DATASET_SUFFIXES, UsageError, name_unusable_lines
from headroom.commands.tables import add_json, print_json, print_table, short_id
from optimizer.base.units import format_bytes
from optimizer.data.samples.columns import FORM, read_columns
from optimizer.data.samples.gather import gather, list_data_files

DATASET_HELP = "id or name of a dataset"


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    def add(group: Subparsers, name: str, run: Run, help_text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = group.add_parser(name, help=help_text, parents=[connection])
        command.set_defaults(run=lambda options: with_client(connect, run, options))
        return command

    datasets = add_group(commands, "datasets", "the datasets the service knows")
    adding = add(datasets, "add", _add_dataset, "upload a dataset; run again after a cut, it goes on")
    adding.add_argument("path", type=Path, metavar="FILE", help="or a folder, whose dataset files become one")
    adding.add_argument("--name", help="default: the name of the file")
    adding.add_argument("--columns", default="", metavar="LIST", help=f"where they have unusual names: {FORM}")
    adding.add_argument("--on-server", action="store_true", help="the file or folder is the service's; it is copied there")
    adding.add_argument("--prompts", action="store_true", help="a .jsonl of prompts, for generate jobs")
    columns = add(datasets, "columns", _correct_dataset, "say which column holds what; without LIST they are found")
    columns.add_argument("dataset", help=DATASET_HELP)
    columns.add_argument("columns", nargs="?", default="", metavar="LIST", help=FORM)
    add_json(add(datasets, "list", _list_datasets, "all datasets"))
    shown = add(datasets, "show", _show_dataset, "one dataset: its first records, and how long they are")
    shown.add_argument("dataset", help=DATASET_HELP)
    preview = add(datasets, "preview", _preview_dataset, "what training on one would learn with a model")
    preview.add_argument("dataset", help=DATASET_HELP)
    preview.add_argument("--model", required=True, help="id or name")
    preview.add_argument("--sequence-length", type=int, default=512, metavar="N", help="tokens in a row (default: 512)")
    preview.add_argument("--loss-on", choices=("assistant", "all"), default="assistant", help="default: answers alone")
    deleted = add(datasets, "delete", _delete_dataset, "out of sight; for seven days it can be had back")
    deleted.add_argument("dataset", help=DATASET_HELP)
    add(datasets, "restore", _restore_dataset, "have a deleted one back").add_argument("dataset", help=DATASET_HELP)


def _add_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    if options.on_server:
        dataset = client.create_dataset_of_path(
            str(options.path), name=options.name or options.path.stem, columns=options.columns
        )
    else:
        dataset = _upload_dataset(client, options)
    what = "prompts" if options.prompts else "documents"
    print(f"{dataset['id']}  {dataset['name']}  {count(dataset['num_documents'])} {what}")
    name_unusable_lines(dataset)


def _upload_dataset(client: HeadroomClient, options: argparse.Namespace) -> Dataset:
    path: Path = options.path
    if not path.exists():
        raise UsageError(f"{path} is not there", hint=f"Give a file ending in {', '.join(DATASET_SUFFIXES)}, or a folder.")
    with ExitStack() as stack:
        file = path
        if path.is_dir():
            place = Path(stack.enter_context(TemporaryDirectory(prefix="headroom-dataset-")))
            file = gather(list_data_files(path), place / default_name(path))
        return client.create_dataset(
            file,
            name=options.name or default_name(path),
            purpose="prompts" if options.prompts else "text",
            columns=options.columns,
            on_progress=stack.enter_context(progress_bar()),
        )


def _correct_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    said = read_columns(options.columns)
    dataset = client.correct_dataset(find_id(client.datasets(), options.dataset), None if said is None else said.by_part)
    found = ", ".join(f"{part}={name}" for part, name in dataset["facts"]["columns"].items())
    print(f"{dataset['name']} is read as {found}  ({count(dataset['num_documents'])} documents)")


def _list_datasets(client: HeadroomClient, options: argparse.Namespace) -> None:
    datasets = client.datasets()
    if options.json:
        print_json(datasets)
        return
    rows = [
        (row["name"], row["format"], format_bytes(row["num_bytes"]), count(row["num_documents"]), short_id(row["id"]))
        for row in datasets
    ]
    heads = ("name", "format", "size", "documents", "id")
    print_table(heads, rows, empty="no datasets; add one: headroom datasets add FILE")


def _show_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    dataset = client.dataset(find_id(client.datasets(), options.dataset))
    print(f"{dataset['name']}  {dataset['format']}, {format_bytes(dataset['num_bytes'])}  ({dataset['id']})")
    columns = dataset["facts"].get("columns") or {}
    if columns:
        found = ", ".join(f"{part}={name}" for part, name in columns.items())
        print(f"columns {found}  ({'as said' if dataset['columns'] else 'found'})")
    lengths = dataset["facts"].get("lengths") or []
    rows = [(f"{end // 2:,} to {end - 1:,}" if end > 2 else str(end - 1), count(number)) for end, number in lengths]
    print_table(("characters", "texts"), rows, empty="lengths are not known")
    for record in dataset["facts"].get("records") or [dataset["preview"]]:
        print(f"---\n{record}")


def _preview_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    dataset_id = find_id(client.datasets(), options.dataset)
    length = options.sequence_length
    found = client.preview_dataset(dataset_id, model=options.model, sequence_length=length, loss_on=options.loss_on)
    print_preview(found, sequence_length=length, console=Console())


def _delete_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    deleted = client.delete_dataset(find_id(client.datasets(), options.dataset))
    print(f"deleted; have it back with: headroom datasets restore {deleted['id']}")


def _restore_dataset(client: HeadroomClient, options: argparse.Namespace) -> None:
    print(f"{client.restore_dataset(options.dataset)['name']} is back")
