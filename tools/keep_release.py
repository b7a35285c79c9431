"""Keeps what this release leaves behind, for the tests of later ones: ``python -m tools.keep_release``.

Writes ``tests/end_to_end/releases/VERSION.tar.xz``: a backup of a small service that was made while a job trained, with what is
known of it. Run it once for each release, and never write one again. Secrets are left out.
"""

import json
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.end_to_end import test_survival
from tests.end_to_end.site.stack import running_stack
from worker.stack.backup.contents import LIST_FILE
from worker.stack.backup.make import make_backup

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "end_to_end" / "releases"
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
SECRETS = ("home/secret_key", "home/cli.json")


def main() -> int:
    packed = FOLDER / f"{version('headroom')}.tar.xz"
    if packed.exists():
        print(f"{packed.name} is kept already", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with running_stack() as stack:
            test_survival.CONFIG.update(SMALL)
            jobs = test_survival.TrainJobs(stack)
            ended = jobs.start()
            row = jobs.wait_for_end(ended)
            running = jobs.start()
            jobs.wait_until_trained(running, step=10)
            make_backup(stack.home, folder / "backup")
        drop(folder / "backup", ended=ended, running=running)
        known = {name: row["summary"][name] for name in ("weights_sha256", "validation_loss")}
        (folder / "expected.json").write_text(json.dumps({"ended": {"id": ended, **known}, "running": running}, indent=1))
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(packed, "w:xz", preset=9) as archive:
            for name in ("expected.json", "backup"):
                archive.add(folder / name, name)
    print(f"{packed.name}: {packed.stat().st_size:,} bytes")
    return 0


def drop(backup: Path, *, ended: str, running: str) -> None:
    """Take away secrets, the files of the job that ended, and all but the newest checkpoint of the other."""
    document = json.loads((backup / LIST_FILE).read_text())
    own = f"home/jobs/{running}/checkpoints/"
    newest = max(entry["path"] for entry in document["entries"] if entry["path"].startswith(own)).rpartition("/")[0]

    def is_kept(path: str) -> bool:
        is_old = path.startswith(own) and not path.startswith(f"{newest}/")
        return path not in SECRETS and not path.startswith(f"home/jobs/{ended}/") and not is_old

    for entry in document["entries"]:
        if not is_kept(entry["path"]):
            (backup / entry["path"]).unlink()
    document["entries"] = [entry for entry in document["entries"] if is_kept(entry["path"])]
    (backup / LIST_FILE).write_text(json.dumps(document))


if __name__ == "__main__":
    sys.exit(main())
