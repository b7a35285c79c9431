"""``headroom generate``: upload prompts, take the best plan within the budgets, follow the job, fetch its results."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from headroom.client import HeadroomClient, Row
from headroom.commands.job_options import add_mirror_option, largest_device_bytes, size
from headroom.commands.submit import (
    UsageError,
    add_prompts,
    connect,
    download_artifacts,
    follow_to_end,
    submit_job,
    verdict_of,
)


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="id or name of a model with weights, or a folder to upload")
    parser.add_argument("--prompts", required=True, help="a .jsonl file to upload, or id or name of prompts the service knows")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="after each prompt, at most (default: 128)")
    parser.add_argument("--temperature", type=float, help="0 (default) takes the likeliest token each time")
    parser.add_argument("--top-k", type=int, help="draw from so many of the likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together are so probable (default: 1)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end an answer here; up to four times")
    parser.add_argument("--seed", type=int, help="of what is drawn (default: 0)")
    parser.add_argument("--budget", type=size, metavar="SIZE", help="of device memory (default: all of the largest machine's)")
    parser.add_argument("--host-budget", type=size, metavar="SIZE", help="of host memory")
    parser.add_argument("--disk-budget", type=size, metavar="SIZE", help="of the disk")
    parser.add_argument("--devices", type=int, metavar="N", help="of one machine, at most (default: 1); each has the budget")
    parser.add_argument("--allow-lossy", action="store_true", help="16-bit and packed weights may be taken")
    parser.add_argument("--plan", metavar="LABEL", default="chosen", help="chosen (default) or a baseline, such as resident")
    parser.add_argument("--name", help="of the job")
    add_mirror_option(parser)
    parser.add_argument("--detach", action="store_true", help="do not wait for the end")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="for results.jsonl and errors.jsonl (default: here)")


def generate_from_options(options: argparse.Namespace) -> None:
    """Raises UsageError, ApiProblem, and JobFailed with the job's own sentence."""
    console = Console()
    with connect(url=options.url, token=options.token, project=options.work_in) as client:
        spec = make_spec(client, options)
        job = submit_job(client, spec, label=options.plan, override=False, say=console.print)
        console.print(f"{job['id']}  {client.url}/jobs/{job['id']}/", highlight=False, soft_wrap=True)
        if options.detach:
            return
        ended = follow_to_end(client, job, console=console)
        verdict_of(ended)
        download_artifacts(client, job["id"], folder=options.output or Path(), say=console.print)


def make_spec(client: HeadroomClient, options: argparse.Namespace) -> Row:
    """The job spec, with what had to be uploaded by its id."""
    prompts, model = options.prompts, options.model
    if Path(model).is_dir():
        model = client.add_model(Path(model), name=Path(model).resolve().name)[0]["id"]
    if Path(prompts).is_file():
        prompts = add_prompts(client, Path(prompts))["id"]
    elif prompts.endswith(".jsonl"):
        raise UsageError(f"{prompts} is not a file")
    given = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed")
    workload = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    return {
        "kind": "generate",
        **({"name": options.name} if options.name else {}),
        "model": model,
        "prompts": prompts,
        "workload": workload,
        "goal": _goal(client, options),
        **({"mirrors": options.mirrors} if options.mirrors else {}),
    }


def _goal(client: HeadroomClient, options: argparse.Namespace) -> Row:
    budgets: dict[str, Any] = {
        "device_budget_bytes": options.budget or largest_device_bytes(client),
        "host_budget_bytes": options.host_budget,
        "disk_budget_bytes": options.disk_budget,
        "num_devices": options.devices,
    }
    return {**{name: size for name, size in budgets.items() if size is not None}, "allow_lossy": options.allow_lossy}
