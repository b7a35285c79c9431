"""The only writer of models, datasets, machines and profiles.

An upload is staged under ``spool/``, checked in a limited process, renamed into place, then recorded; whatever fails in between
leaves neither a folder nor a row. A folder whose row could not be written is removed again.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.db.models import ProtectedError
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import DiskFull, InvalidDataset, InvalidModel
from optimizer.data.samples.columns import read_columns
from optimizer.models.files.linked_files import linked_bytes
from optimizer.models.spec import read_model_spec
from optimizer.models.unread import describe_unread
from webapp.accounts.models import Project
from webapp.catalog.errors import CatalogConflict
from webapp.catalog.files.limited import MEMORY_BYTES, run_limited
from webapp.catalog.files.model_parts import (
    CHAT_FILE,
    check_tokenizer,
    check_weights_in,
    generation_document,
    keep_sidecars,
    make_tokenizer_of_gguf,
    named_weights,
    read_config,
    require_gguf,
    write_chat,
    write_config,
)
from webapp.catalog.files.stored import require_stored_room, require_stored_room_again
from webapp.catalog.models import Dataset, Machine, Model, Profile, PromptTokens
from webapp.ids import new_dataset_id, new_model_id
from webapp.names import check_name

MAX_NAME_CHARACTERS = 200
MAX_PREVIEW_CHARACTERS = 2_000
DatasetPurpose = Literal["text", "prompts"]
R = TypeVar("R", Model, Dataset)

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_DATASET_TIMEOUT_S = 600
_BYTES_PER_SENT_BYTE = 10
"""Address space for each byte of a file that is read whole: JSON parsed, a Parquet dictionary unpacked and copied."""


def create_model(
    *,
    owner: User | None,
    name: str,
    config: "UploadedFile[Any] | None",
    tokenizer: "UploadedFile[Any] | None" = None,
    weights: "Sequence[UploadedFile[Any]]" = (),
    tokenizer_config: "UploadedFile[Any] | None" = None,
    sidecars: "Mapping[str, UploadedFile[Any]] | None" = None,
    links: Mapping[str, Path] | None = None,
    linked_from: str = "",
    chat_file: Path | None = None,
    project: Project | None = None,
    from_job_id: str = "",
    check_last: Callable[[], None] | None = None,
) -> Model:
    """Check and keep a Hugging Face model. Raises InvalidModel that names the file, what it holds and what is allowed.

    config: None for a GGUF file, which holds its own.
    sidecars: further files by their places in the folder, as ``models/files/sidecars.py`` lists them.
    links: weights that stay where they are, by the names they get; linked_from is the folder they were found in.
    chat_file: the chat.json of the model that it was trained from, where its own files say nothing.
    project: whose it is; the one its owner works in unless given.
    check_last: called in the transaction that writes the row, just before; where it raises, nothing is kept.
    """
    name = checked_name(name)
    num_bytes = 0 if from_job_id else sum(file.size or 0 for file in weights)  # a run's files are there already
    if not from_job_id:
        require_stored_room(owner, num_bytes, project=project)
    if config is None:
        require_gguf([file.name or "" for file in weights], links or {})
    document: Any = None if config is None else read_config(config)
    spec = None if config is None else read_model_spec(document)
    model_id, owner_id = new_model_id(), owner.pk if owner else None
    given = {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config, **(sidecars or {})}
    with _staged(model_id, kind="models") as folder:
        keep_sidecars({name: file for name, file in given.items() if file is not None}, folder, keep=_keep)
        for name_there, file in named_weights(weights).items():
            _keep(file, folder / name_there)
        for link, target in (links or {}).items():
            (folder / link).symlink_to(target)
        has_weights = bool(weights or links)
        if spec is not None and document is not None:
            write_config(folder, spec, document, has_weights=has_weights)
        found = check_weights_in(folder, owner_id=owner_id) if has_weights else {}
        if spec is None or document is None:
            document = found["config"]
            spec = read_model_spec(document)
            write_config(folder, spec, {}, has_weights=False)
            if not (folder / "tokenizer.json").exists():
                make_tokenizer_of_gguf(folder, owner_id=owner_id)
        has_tokenizer = (folder / "tokenizer.json").exists()
        if has_tokenizer:
            check_tokenizer(folder, spec, owner_id=owner_id)
        return _publish(
            folder,
            kind="models",
            num_bytes=num_bytes,
            check_last=check_last,
            row=Model(
                id=model_id,
                owner=owner,
                project=project,
                from_job_id=from_job_id,
                name=name,
                model_type=spec.model_type,
                config=spec.to_config(),
                unread=describe_unread(document, spec),
                fingerprint=spec.fingerprint,
                folder=f"models/{model_id}",
                linked_from=linked_from,
                linked_files=found.get("linked_files", []),
                generation=generation_document(folder),
                has_weights=has_weights,
                has_tokenizer=has_tokenizer,
                has_chat=write_chat(folder, otherwise=chat_file),
                num_parameters=spec.num_parameters,
            ),
        )


def create_dataset(
    *, owner: User | None, name: str, file: "UploadedFile[Any]", purpose: DatasetPurpose = "text", columns: Any = None
) -> Dataset:
    """Check and keep a text file, or a file of prompts. Raises InvalidDataset that names the line or column.

    columns: which column holds what (``read_columns``), where that is not to be found.

    A line of prompts that cannot be used does not make the file invalid; it is named in ``facts``.
    """
    require_stored_room(owner, file.size or 0)
    suffix = Path(file.name or "").suffix.lower()
    said = _said_columns(columns, format="prompts" if purpose == "prompts" else FORMATS.get(suffix, ""))
    if purpose == "prompts":
        return _create_prompts(owner=owner, name=name, file=file)
    name = checked_name(name)
    if suffix not in FORMATS:
        raise InvalidDataset(
            f"file is named {(file.name or '')[:80]!r}; allowed: {', '.join(FORMATS)}",
            field="file",
            value=(file.name or "")[:80],
            allowed=list(FORMATS),
        )
    dataset_id = new_dataset_id()
    with _staged(dataset_id, kind="datasets") as folder:
        kept = folder / f"data{suffix}"
        _keep(file, kept)
        facts = _inspect(kept, FORMATS[suffix], columns=said, owner=owner)
        return _publish_dataset(
            kept,
            id=dataset_id,
            owner=owner,
            name=name,
            format=FORMATS[suffix],
            columns=said,
            num_documents=facts.get("num_documents"),
            facts=facts,
        )


def read_again(dataset: Dataset) -> None:
    """Inspect the file as a new upload is inspected. Raises InvalidDataset."""
    path = Path(settings.HEADROOM_HOME) / dataset.file
    is_prompts = dataset.format == "prompts"
    dataset.facts = (
        _inspect_prompts(path, owner=dataset.owner)
        if is_prompts
        else _inspect(path, dataset.format, columns=dataset.columns, owner=dataset.owner)
    )
    dataset.preview = str(dataset.facts.pop("preview", ""))[:MAX_PREVIEW_CHARACTERS]
    dataset.num_documents = dataset.facts.get("num_documents", dataset.num_documents)
    dataset.save(update_fields=["columns", "facts", "num_documents", "preview"])


def correct_columns(dataset: Dataset, columns: Any) -> None:
    """Read the file anew, with its columns as a person says; what later jobs then train on. None or nothing: as found.

    Raises InvalidDataset where a row cannot be read so, and nothing has changed then.
    """
    if dataset.owner_id is None:
        raise CatalogConflict(f"dataset {dataset.name!r} ships with the program", hint="Add a dataset of your own.")
    dataset.columns = _said_columns(columns, format=dataset.format)
    read_again(dataset)


def _said_columns(columns: Any, *, format: str) -> dict[str, str] | None:
    said = read_columns(columns)
    if said is not None and format in ("txt", "prompts"):
        found = "a text has none" if format == "txt" else "prompts have fixed ones"
        raise InvalidDataset(
            f"columns is given; {found}; allowed: JSONL, JSON, CSV or Parquet to train on",
            field="columns",
            value=found,
            allowed="JSONL, JSON, CSV or Parquet",
        )
    return None if said is None else said.by_part


def files_bytes(model: Model) -> int:
    """Bytes of a model on the disk, those of linked files as they were when they were linked."""
    folder = Path(settings.HEADROOM_HOME) / model.folder
    own = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in own) + linked_bytes(model.linked_files)


def _create_prompts(*, owner: User | None, name: str, file: "UploadedFile[Any]") -> Dataset:
    name = checked_name(name)
    dataset_id = new_dataset_id()
    with _staged(dataset_id, kind="datasets") as folder:
        kept = folder / "prompts.jsonl"
        _keep(file, kept)
        if not kept.stat().st_size:
            raise InvalidDataset("the file is empty", field="file", value=0, allowed="one JSON object a line")
        facts = _inspect_prompts(kept, owner=owner)
        return _publish_dataset(
            kept,
            id=dataset_id,
            owner=owner,
            name=name,
            format="prompts",
            num_documents=facts["num_prompts"],
            facts=facts,
        )


def _publish_dataset(kept: Path, *, id: str, facts: dict[str, Any], **fields: Any) -> Dataset:
    """kept: the file in its staging folder. facts: with what its inspection found, ``preview`` among it."""
    row = Dataset(
        id=id,
        file=f"datasets/{id}/{kept.name}",
        sha256=_sha256(kept),
        num_bytes=kept.stat().st_size,
        preview=str(facts.pop("preview", ""))[:MAX_PREVIEW_CHARACTERS],
        facts=facts,
        **fields,
    )
    return _publish(kept.parent, kind="datasets", row=row, num_bytes=row.num_bytes)


def count_prompt_tokens(dataset: Dataset, model: Model) -> list[list[int | None]]:
    """``[[prompt tokens, new tokens or null, lines], ...]``, counted in a limited process the first time.

    Raises InvalidModel where the model's tokenizer or chat template cannot be used.
    """
    rows = PromptTokens.objects.filter(dataset=dataset, model=model)
    known = rows.first()
    if known is None:
        # each edit of a form asks again, and a large file takes minutes: whoever asks meanwhile waits for the first
        with _one_at_a_time(f"{dataset.pk} {model.pk}"):
            known = rows.first()
            if known is None:
                counts = _count_in_limits(dataset, model)
                known, _ = rows.get_or_create(dataset=dataset, model=model, defaults={"counts": counts})
    found: list[list[int | None]] = known.counts
    return found


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    """In this process. The lock is forgotten with the last who waits for it."""
    with _counting_guard:
        lock = _counting.setdefault(key, threading.Lock())
    with lock:
        yield


_counting_guard = threading.Lock()
_counting: "WeakValueDictionary[str, Any]" = WeakValueDictionary()
"""By dataset and model."""


def _count_in_limits(dataset: Dataset, model: Model) -> list[list[int | None]]:
    home = Path(settings.HEADROOM_HOME)
    spec = read_model_spec(model.config)
    arguments = [str(home / dataset.file), "--count", "--vocab-size", str(spec.vocab_size)]
    if model.has_tokenizer:
        arguments += ["--tokenizer", str(home / model.folder / "tokenizer.json")]
    if model.has_chat:
        arguments += ["--chat", str(home / model.folder / CHAT_FILE)]
    if spec.end_of_text_id is not None:
        arguments += ["--end-of-text-id", str(spec.end_of_text_id)]
    answer = run_limited(
        "optimizer.data.inspect_prompts",
        arguments,
        field="model",
        error=InvalidModel,
        owner_id=dataset.owner_id,
        timeout_s=_DATASET_TIMEOUT_S,
    )
    counts: list[list[int | None]] = answer["counts"]
    return counts


def remove_dataset(dataset: Dataset) -> bool:
    """With its file. False, and nothing changed, while a job still names it."""
    folder = Path(settings.HEADROOM_HOME) / "datasets" / dataset.pk
    try:
        dataset.delete()
    except ProtectedError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def keep_profile(fingerprint: str, document: dict[str, Any]) -> None:
    """Keep the profile that an attempt made; every model of this architecture can be priced from here on."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    Profile.objects.update_or_create(
        fingerprint=fingerprint,
        defaults={
            "document": document,
            "document_sha256": digest,
            "version": document["version"],
            "error": None,
        },
    )


def keep_profile_error(fingerprint: str, error: dict[str, Any]) -> None:
    """Why there is no profile; one that is there stays."""
    rows = Profile.objects.filter(fingerprint=fingerprint, document__isnull=True)
    rows.update(error=error, updated_at=Now())


def register_machine(*, name: str, document: dict[str, Any]) -> Machine:
    """Record what a worker measured of its machine. The calibration stays."""
    machine, _ = Machine.objects.update_or_create(
        name=name,
        defaults={"document": document, "last_seen_at": timezone.now(), "draining": False},
    )
    Machine.objects.filter(pk=machine.pk).update(last_seen_at=Now())
    return machine


def heartbeat_machine(machine: Machine, *, draining: bool = False, used_bytes: Sequence[int] = ()) -> bool:
    """By the database's clock. False when the row is gone, and the machine must register again.

    used_bytes: memory in use on each device, from the driver.
    """
    changes = {"last_seen_at": Now(), "draining": draining, "used_bytes": list(used_bytes)}
    return bool(Machine.objects.filter(pk=machine.pk).update(**changes))


def checked_name(name: str) -> str:
    """Raises InvalidInput for a name that a model or dataset cannot have."""
    return check_name(name, max_characters=MAX_NAME_CHARACTERS)


def _inspect(path: Path, data_format: str, *, owner: User | None, columns: dict[str, str] | None = None) -> dict[str, Any]:
    answer = run_limited(
        "optimizer.data.inspect",
        [str(path), "--format", data_format, *(["--columns", json.dumps(columns)] if columns else [])],
        field="file",
        error=InvalidDataset,
        owner_id=owner.pk if owner else None,
        timeout_s=_DATASET_TIMEOUT_S,
        memory_bytes=_inspection_bytes(path, data_format),
    )
    facts: dict[str, Any] = answer["facts"]
    return facts


def _inspection_bytes(path: Path, data_format: str) -> int:
    """More for what is read whole, a JSON array or the parts of a Parquet file, but only by the bytes that were really sent."""
    whole_bytes = _BYTES_PER_SENT_BYTE * path.stat().st_size if data_format in ("json", "parquet") else 0
    return min(MEMORY_BYTES + whole_bytes, 4 * MEMORY_BYTES)


def _inspect_prompts(path: Path, *, owner: User | None) -> dict[str, Any]:
    answer = run_limited(
        "optimizer.data.inspect_prompts",
        [str(path)],
        field="file",
        error=InvalidDataset,
        owner_id=owner.pk if owner else None,
        timeout_s=_DATASET_TIMEOUT_S,
    )
    facts: dict[str, Any] = answer["facts"]
    return facts


@contextmanager
def _staged(name: str, *, kind: str) -> Iterator[Path]:
    """A folder under spool that is gone afterwards, unless it was published."""
    home = Path(settings.HEADROOM_HOME)
    (home / kind).mkdir(mode=0o700, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=settings.FILE_UPLOAD_TEMP_DIR))
    try:
        yield folder
    except OSError as error:
        raise _no_room(error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _no_room(error: OSError) -> Exception:
    """Only a full disk is the user's to mend; every other failure of the file system is ours."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return DiskFull("the upload could not be kept: the disk is full", hint="Free some disk space and send it again.")


def _keep(file: "UploadedFile[Any]", path: Path) -> None:
    """Into place without a copy where the upload is already a file on this disk."""
    spooled = getattr(file, "temporary_file_path", None)
    if spooled is not None:
        try:
            os.link(spooled(), path)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
    with path.open("xb") as out:
        for chunk in file.chunks():
            out.write(chunk)


def _publish(folder: Path, *, kind: str, row: R, num_bytes: int, check_last: Callable[[], None] | None = None) -> R:
    """Rename the staged folder to its place and write the row; without the row the folder goes too. num_bytes: 0 for what takes
    no room of its own."""
    place = Path(settings.HEADROOM_HOME) / kind / str(row.pk)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():  # what is linked is not ours
            path.chmod(0o600)
    folder.rename(place)
    try:
        with transaction.atomic():
            if check_last is not None:
                check_last()
            if num_bytes:
                require_stored_room_again(row.owner, num_bytes, project=row.project)
            row.save(force_insert=True)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return row


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
