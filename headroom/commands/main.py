"""The ``headroom`` command: start the service, submit and follow jobs, fetch results.

Exit code 0 when it worked, 1 when it failed, 2 for a command that cannot be understood. An error is one line and a hint.
``submit --follow`` and ``follow`` end with the job's verdict.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from headroom.client import HeadroomClient
from headroom.client.types import Cancelled, Job
from headroom.commands import access as cli_access
from headroom.commands import catalog as cli_catalog
from headroom.commands import chat as cli_chat
from headroom.commands import datasets as cli_datasets
from headroom.commands import plans as cli_plans
from headroom.commands import records as cli_records
from headroom.commands.compare import print_comparison
from headroom.commands.generate import add_generate_options, generate_from_options
from headroom.commands.job_options import add_submit_options, complete_job, job_from_options, summary_of
from headroom.commands.naming import JOB_HELP, resolve_jobs
from headroom.commands.submit import (
    UsageError,
    connect,
    download_artifacts,
    follow_to_end,
    submit_job,
    upload_named_files,
    verdict_of,
)
from headroom.commands.tables import add_json, moment, print_json, print_table, short_id
from headroom.shell.completion import add_completion
from optimizer.base.errors import HeadroomError
from optimizer.base.units import format_bytes, format_duration
from worker.stack import stack

OPTIMIZER_COMMANDS = ("plan", "estimate", "probe", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    needs_all = (*OPTIMIZER_COMMANDS, "completion", "-h", "--help")
    parser = make_parser(with_optimizer=any(word in needs_all for word in given))
    options = parser.parse_args(given)
    try:
        run: Callable[[argparse.Namespace], int | None] = options.run
        return run(options) or 0
    except UsageError as error:
        return _complain(error, exit_code=2)
    except HeadroomError as error:
        return _complain(error, exit_code=1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # ``headroom list | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file that cannot be read or written
        print(f"headroom: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1


def make_parser(*, with_optimizer: bool) -> argparse.ArgumentParser:
    """with_optimizer: also the commands that need no service; their import is slow, so it is left out where not asked for."""
    parser = argparse.ArgumentParser(prog="headroom", description="Train large models on the GPU you have.")
    parser.add_argument("--version", action="version", version=f"headroom {version('headroom')}")
    connection = argparse.ArgumentParser(add_help=False)
    connection.add_argument("--url", help="of the service (else HEADROOM_URL, else the local one)")
    connection.add_argument("--token", help="an API token (else HEADROOM_TOKEN, else the local one)")
    connection.add_argument("--work-in", metavar="PROJECT", help="a project's id or name (else HEADROOM_PROJECT, else your own)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    stack.add_commands(commands)
    for name in ("up", "down", "status", "backup", "restore"):
        commands.choices[name].set_defaults(run=stack.run_command)
    jobs = commands.add_parser("jobs", help="jobs: list, show, submit, follow, stop, export, and more")
    verbs = jobs.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_job_commands(verbs, connection)
    _add_record_commands(verbs, connection)
    # the same without the noun, as scripts of before have them; the help leaves them out
    _add_job_commands(commands, connection, is_hidden=True)
    for more in (cli_plans, cli_records, cli_chat, cli_catalog, cli_datasets, cli_access):
        more.add_commands(commands, connection, connect=_connect)
    add_completion(commands, parser)
    if with_optimizer:
        from optimizer.cli.main import add_subcommands

        add_subcommands(commands)
    return parser


def _add_job_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    connection: argparse.ArgumentParser,
    *,
    is_hidden: bool = False,
) -> None:
    def add(name: str, run: Callable[..., int | None], help_text: str) -> argparse.ArgumentParser:
        shown: dict[str, Any] = {} if is_hidden else {"help": help_text}
        command = commands.add_parser(name, description=f"{help_text}.".capitalize(), parents=[connection], **shown)
        command.set_defaults(run=run)
        return command

    submit = add("submit", _submit, "start a training job, from a YAML file or from options")
    add_submit_options(submit)
    submit.add_argument("--follow", action="store_true", help="watch it to its end; exit with its verdict")
    submit.add_argument("--plan", metavar="LABEL", help="chosen (default) or a baseline, such as keep_all or offload_optimizer")
    submit.add_argument("--override", action="store_true", help="start it although the plan does not fit")
    generate = add("generate", generate_from_options, "continue each prompt of a file")
    add_generate_options(generate)
    add("follow", _follow, "watch a job to its end; exit with its verdict").add_argument("job", help=JOB_HELP)
    listing = add("list", _list, "jobs, newest first")
    listing.add_argument("--state", help="queued, starting, running, succeeded, failed or cancelled")
    listing.add_argument("--text", metavar="TEXT", help="part of the name")
    listing.add_argument("--limit", type=_positive, default=20, help="so many at most (default: 20)")
    add_json(listing)
    show = add("show", _show, "one job: state, plan, prediction against measurement")
    show.add_argument("job", help=JOB_HELP)
    show.add_argument("--json", action="store_true", help="everything the API says")
    compare = add("compare", _compare, "jobs side by side: only what differs, and what it cost")
    compare.add_argument("jobs", nargs="+", metavar="JOB", help=JOB_HELP)
    compare.add_argument("--json", action="store_true", help="everything the API says")
    add("queue", _queue, "what waits, in which order and why")
    priority = add("priority", _priority, "move a waiting job: higher starts first")
    priority.add_argument("job", help=JOB_HELP)
    priority.add_argument("priority", type=int, help="-100 to 0, for administrators to 100")
    cancel = add("cancel" if is_hidden else "stop", _cancel, "stop jobs at a checkpoint and export their weights")
    cancel.add_argument("jobs", nargs="*", metavar="JOB", help=JOB_HELP)
    cancel.add_argument("--tag", default="", help="every job of yours with this tag that has not ended")
    cancel.add_argument("--queued", action="store_true", help="every job of yours that waits; with --tag those of them")
    how = cancel.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="keep the checkpoint, export nothing")
    how.add_argument("--discard", action="store_true", help="stop at once, save nothing")
    add("pause", _pause, "stop a job at a checkpoint until it is resumed").add_argument("job", help=JOB_HELP)
    add("resume", _resume, "let a paused job go on").add_argument("job", help=JOB_HELP)
    retry = add("retry", _retry, "start a failed or cancelled job again, from its newest checkpoint")
    retry.add_argument("job", help=JOB_HELP)
    retry.add_argument("--follow", action="store_true", help="watch it to its end; exit with its verdict")
    export = add("export", _export, "write the weights of a checkpoint: model, adapters, GGUF; needs no device")
    export.add_argument("job", help=JOB_HELP)
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint's step (default: the newest)")
    export.add_argument("--adapter", choices=("alone", "merged", "both"), help="of a run with adapters (default: as it asked)")
    export.add_argument("--dtype", choices=("same", "fp32", "bf16", "fp16"), help="numbers of the file (default: as trained)")
    export.add_argument("--gguf", choices=("none", "f16", "q8_0"), help="a GGUF file beside them")
    export.add_argument("--follow", action="store_true", help="wait for its end; exit with its verdict")
    branch = add("branch", _branch, "start a new run from a checkpoint of another")
    branch.add_argument("job", help=JOB_HELP)
    branch.add_argument("--step", type=int, metavar="N", help="the checkpoint's step (default: the newest)")
    branch.add_argument("--steps", type=_positive, metavar="N", help="steps in all, those before the checkpoint included")
    branch.add_argument("--learning-rate", type=float, metavar="X", help="default: that of the first run")
    branch.add_argument("--dataset", help="id or name of another dataset")
    branch.add_argument("--name", help="a name for the new job")
    branch.add_argument("--follow", action="store_true", help="watch it to its end; exit with its verdict")
    download = add("download", _download, "fetch what a job left: weights, sample, results, log")
    download.add_argument("job", help=JOB_HELP)
    download.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: a new folder named as the job")


def _add_record_commands(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", connection: argparse.ArgumentParser
) -> None:
    rename = verbs.add_parser("rename", help="give a job another name", parents=[connection])
    rename.add_argument("job", help=JOB_HELP)
    rename.add_argument("name", help="the new name")
    tag = verbs.add_parser("tag", help="replace a job's tags; none takes them all away", parents=[connection])
    tag.add_argument("job", help=JOB_HELP)
    tag.add_argument("tags", nargs="*", metavar="TAG", help="short words")
    delete = verbs.add_parser("delete", help="delete a job that has ended; it can be restored for a week", parents=[connection])
    delete.add_argument("job", help=JOB_HELP)
    restore = verbs.add_parser("restore", help="have a deleted job back", parents=[connection])
    restore.add_argument("deleted_job", metavar="JOB", help="the whole id, as delete printed it")
    share = verbs.add_parser("share", help="print a link under which anyone may read a run", parents=[connection])
    share.add_argument("job", help=JOB_HELP)
    share.add_argument("--stop", action="store_true", help="take the link back")
    for command, run in ((rename, _rename), (tag, _tag), (delete, _delete), (restore, _restore), (share, _share)):
        command.set_defaults(run=run)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.20} is not a number from 1")
    return int(text)


def _connect(options: argparse.Namespace) -> HeadroomClient:
    client = connect(url=options.url, token=options.token, project=options.work_in)
    resolve_jobs(client, options)
    return client


def _submit(options: argparse.Namespace) -> None:
    console = Console()
    spec = job_from_options(options)
    with _connect(options) as client:
        spec = upload_named_files(client, spec, folder=options.file.parent if options.file else Path())
        if options.file is None:
            spec = complete_job(client, spec)
            console.print(summary_of(spec), highlight=False)
        label = options.plan or str(spec.pop("plan", "chosen"))
        job = submit_job(client, spec, label=label, override=options.override, say=console.print)
        console.print(f"{job['id']}  {client.url}/jobs/{job['id']}/", highlight=False, soft_wrap=True)
        if options.follow:
            verdict_of(follow_to_end(client, job, console=console))


def _follow(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        verdict_of(follow_to_end(client, client.job(options.job), console=Console()))


def _list(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        jobs = client.jobs(state=options.state, text=options.text, limit=options.limit)
    if options.json:
        print_json(jobs)
        return
    rows = [
        (job["name"], job["state"], _steps_of(job), _loss(job), moment(job["created_at"]), short_id(job["id"]))
        for job in jobs
    ]
    heads = ("name", "state", "step", "loss", "created", "id")
    print_table(heads, rows, empty="no jobs yet; start one: headroom submit JOB.yaml")


def _show(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.job(options.job)
    if options.json:
        print(json.dumps(job, indent=2))
        return
    for line in describe_job(job):
        print(line)


def describe_job(job: Job) -> list[str]:
    """Print what a person asks first: how far, why so, and whether the prediction held."""
    prediction, summary = job.get("prediction") or {}, job.get("summary") or {}
    counted = {"generate": "prompt ", "serve": ""}.get(job.get("kind", ""), "step ")
    lines = [f"{job['name']}  {job['state']} · {counted}{_steps_of(job)}  ({job['id']})"]
    if job.get("message"):
        lines.append(f"  {job['message']}")
    if (eta_s := job.get("eta_s")) and not job["is_terminal"]:
        lines.append(f"  {format_duration(eta_s)} left")
    measures: list[tuple[str, str, Callable[[float], str]]] = [
        ("device peak", "device_peak_bytes", lambda value: format_bytes(int(value))),
        ("step time", "step_ms", lambda value: f"{value:,.0f} ms"),
        ("first token", "prefill_ms", lambda value: f"{value:,.0f} ms"),
        ("each token", "decode_ms", lambda value: f"{value:,.1f} ms"),
    ]
    for name, key, write in measures:
        predicted, measured = prediction.get(key), summary.get(key)
        if predicted and measured:
            off = f"{predicted / measured - 1:+.1%}".replace("%", " %")
            lines.append(f"  {name:<12} measured {write(measured)}, predicted {write(predicted)} ({off})")
        elif predicted:
            lines.append(f"  {name:<12} predicted {write(predicted)}")
    for key, name in (("loss", "loss"), ("validation_loss_start", "validation before"), ("validation_loss", "validation")):
        if summary.get(key) is not None:
            lines.append(f"  {name:<18} {summary[key]:.4f}")
    return lines


def _compare(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        found = client.compare_jobs(options.jobs)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print_comparison(found)


def _queue(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        queue = client.queue()
    rows = [
        (str(row["position"]), row["name"], str(row["priority"]), row["sentence"], short_id(row["id"]))
        for row in queue["waiting"]
    ]
    others = queue["num_waiting"] - queue["num_own"]
    print_table(("place", "name", "priority", "why it waits", "id"), rows, empty="no jobs waiting")
    if more := queue["num_own"] - len(rows):
        print(f"{more} more of yours")
    if others:
        print(f"{others} of other people")


def _priority(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.set_priority(options.job, options.priority)
    print(f"{job['id']}  priority {job['priority']}")


def _cancel(options: argparse.Namespace) -> None:
    filters = options.tag or options.queued
    if bool(options.jobs) == bool(filters):
        raise UsageError("stop needs jobs, or --tag or --queued, not both", hint="headroom jobs stop JOB JOB ...")
    mode: Literal["save", "keep", "discard"] = "discard" if options.discard else "keep" if options.keep else "save"
    with _connect(options) as client:
        if len(options.jobs) != 1:
            states = ("queued",) if options.queued else ()
            _print_cancelled(client.cancel_jobs(options.jobs, states=states, tag=options.tag, mode=mode))
            return
        client.cancel_job(options.jobs[0], mode=mode)
    left = "a checkpoint is kept" if options.keep else "its weights are exported"
    print("stopping now" if options.discard else f"stopping after this step; {left}")


def _print_cancelled(results: Sequence[Cancelled]) -> None:
    for result in results:
        print(f"{result['id']}  {result['outcome'].replace('_', ' ')}")
    if not results:
        print("no job of yours is meant")


def _rename(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.change_job(options.job, name=options.name)
    print(f"{job['id']}  {job['name']}")


def _tag(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.change_job(options.job, tags=options.tags)
    print(f"{job['id']}  {', '.join(job['tags']) or 'no tags'}")


def _delete(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.delete_job(options.job)
    print(f"deleted {job['name']}; to have it back: headroom jobs restore {job['id']}")


def _restore(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.restore_job(options.deleted_job)
    print(f"{job['id']}  {job['name']} is back")


def _share(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        if options.stop:
            client.unshare_job(options.job)
            print("the link leads nowhere any more")
        else:
            print(client.share_job(options.job))


def _pause(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        client.pause_job(options.job)
    print(f"pausing at a checkpoint; go on with: headroom resume {options.job}")


def _resume(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        client.resume_job(options.job)
    print("queued again")


def _retry(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        job = client.retry_job(options.job)
        print(f"{job['id']}  {client.url}/jobs/{job['id']}/")
        if options.follow:
            verdict_of(follow_to_end(client, job, console=Console()))


def _export(options: argparse.Namespace) -> None:
    fields = {name: getattr(options, name) for name in ("adapter", "dtype", "gguf") if getattr(options, name) is not None}
    with _connect(options) as client:
        job = client.export_job(options.job, step=options.step, export=fields or None)
        print(f"{job['id']}  {client.url}/jobs/{job['id']}/")
        if options.follow:
            verdict_of(follow_to_end(client, job, console=Console()))


def _branch(options: argparse.Namespace) -> None:
    changes = {"num_steps": options.steps, "learning_rate": options.learning_rate}
    with _connect(options) as client:
        source = client.job(options.job)["spec"]
        spec = {
            **source,
            "name": options.name or f"{source['name']}, branched",
            "dataset": options.dataset or source["dataset"],
            "workload": {**source["workload"], **{key: value for key, value in changes.items() if value is not None}},
            "resume_from": {"job": options.job, **({} if options.step is None else {"step": options.step})},
        }
        job = submit_job(client, spec, label=spec.pop("plan", "chosen"), override=False, say=print)
        print(f"{job['id']}  {client.url}/jobs/{job['id']}/")
        if options.follow:
            verdict_of(follow_to_end(client, job, console=Console()))


def _download(options: argparse.Namespace) -> None:
    with _connect(options) as client:
        folder: Path = options.output or Path(_file_name(client.job(options.job)["name"]))
        download_artifacts(client, options.job, folder=folder, say=print)


def _steps_of(job: Job) -> str:
    """A held model has no end to count to."""
    if job.get("kind") == "serve":
        return f"{job['step']} answers"
    return f"{job['step']} of {job['num_steps']}"


def _loss(job: Job) -> str:
    loss = (job.get("summary") or {}).get("loss")
    return "" if loss is None else f"{loss:.3f}"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "job"


def _complain(error: HeadroomError, *, exit_code: int) -> int:
    print(f"headroom: {error.message}", file=sys.stderr)
    for row in getattr(error, "problem_fields", []):
        message = str(row.get("message") or row.get("value"))
        if message == error.message:
            continue
        allowed = f"; allowed: {row['allowed']}" if row.get("allowed") and "allowed" not in message else ""
        print(f"  {row.get('field')}: {message}{allowed}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
