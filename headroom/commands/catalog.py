"""``headroom models``, ``uploads`` and ``machines``: what jobs are made of, and what they run on."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headroom.client import HeadroomClient
from headroom.client.types import Device, Machine, MachineDetails, Model, ModelDetails, Within
from headroom.commands.submit import UsageError
from headroom.commands.tables import LENGTH_OF_SHORT_ID, add_json, print_json, print_table, short_id
from optimizer.base.errors import HeadroomError
from optimizer.base.units import format_bytes

HUB = "hub:"
POLL_S = 1.0
Connect = Callable[[argparse.Namespace], HeadroomClient]
Run = Callable[[HeadroomClient, argparse.Namespace], None]
Subparsers = Any
"""argparse's own type of them is private."""
MODEL_HELP = "id or name of a model"
VERDICTS = {"fits": "fits", "fits_saving": "saving memory", "does_not_fit": "no", None: "?"}


def add_commands(commands: Subparsers, connection: argparse.ArgumentParser, *, connect: Connect) -> None:
    def add(group: Subparsers, name: str, run: Run, help_text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = group.add_parser(name, help=help_text, parents=[connection])
        command.set_defaults(run=lambda options: with_client(connect, run, options))
        return command

    _add_models(commands, add)
    uploads = add_group(commands, "uploads", "uploads that were begun and not finished")
    add(uploads, "list", _list_uploads, "what is there of them; the same add goes on with one")
    add(uploads, "drop", _drop_upload, "give one up").add_argument("upload", help="id, as headroom uploads list shows it")
    machines = add_group(commands, "machines", "what plans are made for, and who holds their memory")
    add_json(add(machines, "list", _list_machines, "all machines"))
    show = add(machines, "show", _show_machine, "one machine: what it measured, and who holds its memory")
    show.add_argument("machine", help="id or name of a machine")
    add_json(show)
    links = add(machines, "links", _show_links, "the network from one machine to the others, as it was measured")
    links.add_argument("machine", help="id or name of a machine")
    links.add_argument("--measure", action="store_true", help="have it measured again, once no job is on either machine")
    add_json(links)


def _add_models(commands: Subparsers, add: Callable[..., argparse.ArgumentParser]) -> None:
    models = add_group(commands, "models", "the models the service knows")
    adding = add(models, "add", _add_model, "link or upload a model, after a cut the same again; or make one of a finished run")
    adding.add_argument("path", metavar="FOLDER", nargs="?", help="or a GGUF file, or hub:OWNER/NAME[@REVISION]")
    adding.add_argument("--from-job", metavar="JOB", help="of the weights that this run left; nothing is uploaded")
    adding.add_argument("--name", help="default: the name of the folder, or of the job")
    add_json(add(models, "list", _list_models, "all models"))
    show = add(models, "show", _show_model, "one model: its parts and their parameters")
    show.add_argument("model", help=MODEL_HELP)
    show.add_argument("--json", action="store_true", help="everything the API says")
    cards = add(models, "cards", _show_cards, "on which cards it can be trained or run")
    cards.add_argument("model", help=MODEL_HELP)
    cards.add_argument("--ask", action="store_true", help="have a worker find out what is not known yet")
    add(models, "delete", _delete_model, "out of sight; for seven days it can be had back").add_argument("model", help=MODEL_HELP)
    add(models, "restore", _restore_model, "have a deleted one back").add_argument("model", help=MODEL_HELP)


def add_group(commands: Subparsers, name: str, help_text: str) -> Subparsers:
    return commands.add_parser(name, help=help_text).add_subparsers(required=True, metavar="ACTION")


def with_client(connect: Connect, run: Run, options: argparse.Namespace) -> None:
    with connect(options) as client:
        run(client, options)


# Models.


def _add_model(client: HeadroomClient, options: argparse.Namespace) -> None:
    if (options.path is None) == (options.from_job is None):
        raise UsageError("a model is made of a folder or of a job, one of the two", hint="Give FOLDER, or --from-job JOB.")
    if options.from_job is not None:
        model = client.create_model_from_job(options.from_job, name=options.name)
    else:
        model = _bring_model(client, options.path, name=options.name)
    print(f"{model['id']}  {model['name']}")
    _print_unread(model)


def _bring_model(client: HeadroomClient, place: str, *, name: str | None) -> Model:
    """Say in one line whether it was linked, uploaded or fetched."""
    if place.startswith(HUB):
        return _fetch_model(client, place.removeprefix(HUB), name=name or "")
    folder = Path(place)
    if not folder.exists():
        raise UsageError(f"{folder} is not there", hint="Give the folder of a Hugging Face model, or a GGUF file.")
    with progress_bar() as on_progress:
        try:
            model, why = client.add_model(folder, name=name or default_name(folder), on_progress=on_progress)
        except FileNotFoundError as error:
            raise UsageError(str(error), hint="Give the folder of a Hugging Face model, or a GGUF file.") from error
    print(f"uploaded, because {why}" if why else f"linked: its weights stay in {folder.resolve()}")
    return model


def _fetch_model(client: HeadroomClient, reference: str, *, name: str) -> Model:
    upload = client.fetch_model(reference, name=name)
    source = upload["source"] or {}
    print(f"fetching {source['hub']} at commit {source['commit'][:12]}; it goes on when this command is stopped ({upload['id']})")
    with progress_bar() as on_progress:
        while source["state"] == "downloading":
            time.sleep(POLL_S)
            upload = client.upload(upload["id"])
            source = upload["source"] or {}
            if on_progress is not None:
                received, total = (sum(int(file[key]) for file in upload["files"]) for key in ("received_bytes", "num_bytes"))
                on_progress(received, total)
    if source["state"] == "failed":
        raise HubDownloadFailed(source["message"])
    return client.model(source["model"])


class HubDownloadFailed(HeadroomError):
    """The service gave a download up."""

    code = "hub_failed"


def default_name(path: Path) -> str:
    """Name of a folder, or of a file without its ending."""
    real = path.resolve()
    return real.name if real.is_dir() else real.stem


def _print_unread(model: Model) -> None:
    if model["unread"]:
        print("not read of its config.json, and in no price:")
        for sentence in model["unread"]:
            print(f"  {sentence}")


def _list_models(client: HeadroomClient, options: argparse.Namespace) -> None:
    models = client.models()
    if options.json:
        print_json(models)
        return
    rows = [
        (
            row["name"],
            row["model_type"],
            count(row["num_parameters"]),
            "yes" if row["has_weights"] else "no",
            short_id(row["id"]),
        )
        for row in models
    ]
    print_table(("name", "type", "parameters", "weights", "id"), rows, empty="no models; add one: headroom models add FOLDER")


def _show_model(client: HeadroomClient, options: argparse.Namespace) -> None:
    model = client.model(find_id(client.models(), options.model))
    if options.json:
        print(json.dumps(model, indent=2))
        return
    print(f"{model['name']}  {model['model_type']}, {count(model['num_parameters'])} parameters  ({model['id']})")
    if model["from_job"]:
        print(f"trained by {model['from_job']}")
    print_table(("part", "number", "parameters each", "in all"), list(_structure_rows(model)), empty="")
    _print_unread(model)


def _structure_rows(model: ModelDetails) -> Iterator[Sequence[str]]:
    structure = model["structure"]
    yield "word embedding", "", "", count(structure["embedding_parameters"])
    for stack in structure["stacks"]:
        for fold in stack["folds"]:
            for run in fold["runs"]:
                each = run["block"]["num_parameters"]
                number = fold["times"] * (run["last"] - run["first"] + 1)
                name = f"{run['block']['kind']} {stack['name']}".strip().replace("_", " ")
                yield name, count(number), count(each), count(number * each)
    yield "output projection", "", "", count(structure["head_parameters"])
    yield "positions, norms, the rest", "", "", count(structure["other_parameters"])


def _show_cards(client: HeadroomClient, options: argparse.Namespace) -> None:
    model_id = find_id(client.models(), options.model)
    found = client.ask_for_model_cards(model_id) if options.ask else client.model_cards(model_id)
    needs = [
        (need["title"], need["what"], size(need["plain_bytes"]), size(need["least_bytes"]), need["message"] or need["state"])
        for need in found["methods"]
    ]
    print_table(("method", "what", "plainly", "at least", ""), needs, empty="")
    print()
    names = [need["name"] for need in found["methods"]]
    rows = [
        (card["name"], format_bytes(card["memory_bytes"]), *(VERDICTS[card["verdicts"][name]] for name in names))
        for card in found["cards"]
    ]
    print_table(("card", "memory", *(need["title"] for need in found["methods"])), rows, empty="")


def _delete_model(client: HeadroomClient, options: argparse.Namespace) -> None:
    deleted = client.delete_model(find_id(client.models(), options.model))
    print(f"deleted; have it back with: headroom models restore {deleted['id']}")


def _restore_model(client: HeadroomClient, options: argparse.Namespace) -> None:
    print(f"{client.restore_model(options.model)['name']} is back")


# Uploads.


def _list_uploads(client: HeadroomClient, options: argparse.Namespace) -> None:
    rows = []
    for upload in client.uploads():
        here, total = (sum(int(file[key]) for file in upload["files"]) for key in ("received_bytes", "num_bytes"))
        rows.append((upload["id"], upload["kind"], upload["name"], f"{format_bytes(here)} of {format_bytes(total)}"))
    print_table(("id", "kind", "name", "here"), rows, empty="no upload is open")


def _drop_upload(client: HeadroomClient, options: argparse.Namespace) -> None:
    client.drop_upload(options.upload)
    print("given up")


# Machines.


def _list_machines(client: HeadroomClient, options: argparse.Namespace) -> None:
    machines = client.machines()
    if options.json:
        print_json(machines)
        return
    rows = [(row["name"], _devices(row), _presence(row), short_id(row["id"])) for row in machines]
    print_table(("name", "device", "state", "id"), rows, empty="no machine has run a worker yet; start one: headroom up")


def _show_links(client: HeadroomClient, options: argparse.Namespace) -> None:
    machine_id = find_id(client.machines(), options.machine)
    links = client.measure_links(machine_id) if options.measure else client.machine(machine_id)["links"]
    if options.json:
        print(json.dumps(links, indent=2))
        return
    rows = [
        (
            link["machine"],
            link["link"] or "not known yet",
            link["measured_at"] or "never",
            "due" if link["is_due"] else link["failure"] and "not reached",
        )
        for link in links
    ]
    print_table(("machine", "link", "measured", ""), rows, empty="no other machine has registered")
    for link in links:
        if link["failure"]:
            print(f"  {link['failure']}")


def _show_machine(client: HeadroomClient, options: argparse.Namespace) -> None:
    machine = client.machine(find_id(client.machines(), options.machine))
    if options.json:
        print(json.dumps(machine, indent=2))
        return
    for line in _machine_lines(machine):
        print(line)
    rows = [
        (
            holder["name"] or "someone else's job",
            holder["worker"],
            ", ".join(map(str, holder["devices"])),
            size(holder["needs_bytes"]),
            size(_held(holder)),
        )
        for holder in machine["memory"]["holders"]
    ]
    print_table(("job", "worker", "devices", "set aside", "holds"), rows, empty="  no job is running")


def _held(holder: Any) -> int | None:
    return sum(holder["bytes_by_category"].values()) or None


def _machine_lines(machine: MachineDetails) -> Iterator[str]:
    memory, accuracy = machine["memory"], machine["accuracy"]
    yield f"{machine['name']}  {_devices(machine)}, {_presence(machine)}  ({machine['id']})"
    yield f"  {format_bytes(max(0, memory['free_bytes']))} of {format_bytes(memory['memory_bytes'])} free"
    for name, within in (("peak memory", accuracy["peak"]), ("step time", accuracy["step"])):
        if within is not None:
            yield f"  {name} was predicted {_within_words(within)}"


def _within_words(within: Within) -> str:
    nine_of_ten, worst = (f"{within[name]:.1%}".replace("%", " %") for name in ("nine_of_ten", "worst"))
    runs = "1 run" if within["num_runs"] == 1 else f"{within['num_runs']} runs"
    return f"within {nine_of_ten} in 90 % of {runs} (worst {worst})"


def device_words(device: Device) -> str:
    name, size = device["name"], format_bytes(int(device["memory_bytes"]))
    return name if name.endswith(size) else f"{name} {size}"


def _devices(machine: Machine) -> str:
    """``2 x NVIDIA L4 22.0 GiB, linked by pcie``; ``NVIDIA L4 22.0 GiB and NVIDIA T4 14.6 GiB, linked by pcie``."""
    link = machine.get("peers")
    kinds = [(machine["device"], machine.get("num_devices", 1))]
    kinds += [(kind["device"], kind["num_devices"]) for kind in machine.get("others", [])]
    parts = [f"{number} x {device_words(device)}" if number > 1 else device_words(device) for device, number in kinds]
    if parts == [device_words(machine["device"])]:
        return parts[0]
    shares_memory = machine["device"]["kind"] == "cpu" and not machine["device"].get("is_capped")
    return " and ".join(parts) + " together" * shares_memory + (f", linked by {link['kind']}" if link else "")


def _presence(machine: Machine) -> str:
    if machine["draining"]:
        return "draining"
    return "online" if machine["online"] else f"last seen {machine['last_seen_at']}"


# Shared.


def find_id(rows: Sequence[Any], wanted: str) -> str:
    """The id of the row that is called so: by id, by name, or by its id's last characters; what is none is asked for as it is."""
    for key in ("id", "name"):
        for row in rows:
            if row[key] == wanted:
                return str(row["id"])
    if len(wanted) >= LENGTH_OF_SHORT_ID:
        ending = [str(row["id"]) for row in rows if row["id"].endswith(wanted)]
        if len(ending) == 1:
            return ending[0]
    return wanted


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar in place on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("sending", total=None)
        yield lambda sent, total: progress.update(task, completed=sent, total=total)


def count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)
