"""``headroom backup`` and ``headroom restore``: what people type, and what they read."""

import argparse
import os
import time
from pathlib import Path

from optimizer.base.units import format_bytes, format_duration
from worker.stack.backup.contents import Contents
from worker.stack.backup.make import make_backup
from worker.stack.backup.restore import restore_backup


def run_backup_command(options: argparse.Namespace, *, home: Path) -> int:
    started_s = time.monotonic()
    os.umask(0o077)  # a backup holds secrets
    if options.command == "backup":
        contents = make_backup(home, options.folder, say=print)
        print(f"{options.folder} is whole: {_size_of(contents)}, in {format_duration(time.monotonic() - started_s)}")
        print("it holds the service's secrets: keep it as private as the service itself")
        num_links = sum(bool(entry.link_to) for entry in contents.entries)
        if num_links:
            print(f"{num_links} linked files of models are not in it: they stay where they are")
        return 0
    into = (options.into or home).absolute()
    contents = restore_backup(options.folder, into)
    took = format_duration(time.monotonic() - started_s)
    print(f"{into} is restored: {_size_of(contents)}, as of {contents.made_at}, in {took}")
    print(f"start it with: HEADROOM_HOME={into} headroom up; jobs that ran then go on from their newest checkpoint")
    return 0


def _size_of(contents: Contents) -> str:
    return f"{len(contents.entries):,} files, {format_bytes(contents.num_bytes)}"
