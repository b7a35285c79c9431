"""Writes what a finished job leaves, each in a folder of its own: the model, its adapters, a GGUF file; a sample of its text.

All of them lie in a folder of the attempt (``place.py``), and each is read again and compared (``verify_export.py``). The disk is
asked first.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.errors import DiskFull
from optimizer.base.units import MIB, format_bytes
from optimizer.data.batches import Batches
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.chat_facts import read_chat_folder
from optimizer.data.samples.rows import SampleRows
from optimizer.data.tokenizer import load_tokenizer
from optimizer.models.adapters import has_adapters
from optimizer.models.files.export import (
    ExportDtype,
    ExportedFile,
    describe_all,
    export_adapters,
    export_dtype,
    export_model,
    staged_folder,
)
from optimizer.models.files.gguf_export.check import check_gguf_file
from optimizer.models.files.gguf_export.kinds import GgufPacking, check_gguf
from optimizer.models.files.gguf_export.tensors import list_entries
from optimizer.models.files.gguf_export.vocabulary import read_vocabulary
from optimizer.models.files.gguf_export.write import write_gguf
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import ModelSpec
from optimizer.runtime.job.checkpoint import hash_file
from optimizer.runtime.job.export.export_weights import FinalWeights
from optimizer.runtime.job.export.place import artifacts_place
from optimizer.runtime.job.export.sample_text import generate_tokens
from optimizer.runtime.job.export.verify_export import verify_adapter, verify_buildable, verify_model
from optimizer.runtime.job.stage_watch import StageWatch
from optimizer.runtime.meter.meter import check_peak
from optimizer.runtime.meter.stage_names import JobStage
from optimizer.runtime.ranks.gathering import AnyTensor, gather_to_first, load_tensor
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.tensor.blocks import SharedBlocks
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Export

PROMPT_TOKENS = 16
"""Tokens of the first validation sequence; the model goes on from there."""
_SPARE_BYTES = 64 * MIB
"""Left free for tokenizers, logs and the database."""

EnterPhase = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One file that is left."""

    kind: str
    """model, adapter, gguf or sample."""
    name: str
    """Inside the kind's folder."""
    file: str
    """Relative to the job's folder."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The form of the written weights, and the files beside them."""

    spec: ModelSpec
    export: Export
    trained_dtype: ExportDtype
    tokenizer_file: Path | None
    """None: the bundled one."""
    model_folder: Path | None
    """Folder of the model that was trained, whose templates and settings go along; None for one that was only a config."""
    job_folder: Path
    fence: int
    """Fence of the attempt that writes them."""
    name: str = "model"

    @property
    def dtype(self) -> ExportDtype:
        return self.trained_dtype if self.export.dtype == "same" else self.export.dtype

    @property
    def folder(self) -> Path:
        return self.job_folder / artifacts_place(self.fence)


def leave_artifacts(
    trainer: Trainer,
    exported: Exported,
    *,
    batches: Batches | SampleRows,
    enter_phase: EnterPhase,
    stages: StageWatch | None = None,
) -> tuple[list[Artifact], str]:
    """Write the artifacts that the workload asks for; returns them and the sha256 of the weights (``hash_weights``).

    Of several ranks the first writes, and reads masters from their owners; the others wait meanwhile, and have none.
    """
    if trainer.ranks is None:
        return _leave_all(trainer, exported, batches=batches, enter_phase=enter_phase, stages=stages)
    if trainer.parts is not None:
        return _leave_joined(trainer, trainer.parts, trainer.ranks, exported, batches, enter_phase=enter_phase, stages=stages)
    trainer.join()
    state, _ = trainer.optimizer.export_state()
    left = gather_to_first(
        trainer.ranks,
        groups={
            "optimizer": state if trainer.ranks.is_first or (trainer.shares_state and trainer.is_in_first_replica) else {},
            "weights": trainer.dealt_weights() if trainer.is_in_first_replica else {},
        },
        facts={},
        use=lambda groups, _: _leave_all(
            trainer,
            exported,
            batches=batches,
            enter_phase=enter_phase,
            stages=stages,
            state=groups["optimizer"],
            dealt=groups["weights"],
        ),
    )
    return left or ([], "")


def _leave_joined(
    trainer: Trainer,
    parts: SharedBlocks,
    ranks: Ranks,
    exported: Exported,
    batches: Batches | SampleRows,
    *,
    enter_phase: EnterPhase,
    stages: StageWatch | None,
) -> tuple[list[Artifact], str]:
    """The same of ranks that share each block: the first writes whole tensors; all of them write the sample together."""
    held = trainer.list_held()
    state, _ = trainer.optimizer.export_state()

    def leave(gathered: dict[str, dict[str, AnyTensor]], _: Any) -> list[Artifact]:
        groups = parts.slices.join(gathered)
        final = FinalWeights.of_parts(trainer, exported.spec, weights=groups["weights"], state=groups["optimizer"])
        return leave_weights(final, exported, enter_phase=enter_phase, stages=stages)

    left = gather_to_first(ranks, groups=parts.slices.give({"weights": held, "optimizer": state}), facts={}, use=leave)
    artifacts = left or []
    if trainer.workload.sample_tokens:
        enter_phase("sampling", "writing a sample")
        text = _sample_text(trainer, exported, batches=batches)
        artifacts += [_leave_sample(text, exported)] if ranks.is_first else []
    return artifacts, hash_weights(artifacts) if ranks.is_first else ""


def _leave_all(
    trainer: Trainer,
    exported: Exported,
    *,
    batches: Batches | SampleRows,
    enter_phase: EnterPhase,
    stages: StageWatch | None,
    state: Mapping[str, AnyTensor] | None = None,
    dealt: Mapping[str, AnyTensor] | None = None,
) -> tuple[list[Artifact], str]:
    """state: the optimizer's of all ranks, where there are several; dealt: weights that one rank alone has."""
    final = FinalWeights.of_trainer(trainer, state=state, dealt=dealt)
    artifacts = leave_weights(final, exported, enter_phase=enter_phase, stages=stages)
    if trainer.workload.sample_tokens:
        enter_phase("sampling", "writing a sample")
        with trainer.running_alone(lambda name: load_tensor((dealt or {})[name])):
            text = _sample_text(trainer, exported, batches=batches)
        artifacts.append(_leave_sample(text, exported))
    return artifacts, hash_weights(artifacts)


def _leave_sample(text: str, exported: Exported) -> Artifact:
    path = exported.folder / "sample.txt"
    path.write_text(text)
    return Artifact(
        kind="sample",
        name=path.name,
        file=f"{artifacts_place(exported.fence)}/{path.name}",
        num_bytes=path.stat().st_size,
        sha256=hash_file(path),
    )


def leave_weights(
    final: FinalWeights, exported: Exported, *, enter_phase: EnterPhase, stages: StageWatch | None = None
) -> list[Artifact]:
    """Write and check each folder that is asked for. Raises DiskFull before anything is written, ExportInvalid."""
    export, adapts = exported.export, has_adapters(final.model)
    merges = not adapts or export.adapter in ("merged", "both")
    # a service that was restored may give a fence again, under which an attempt that it knows nothing of has written
    shutil.rmtree(exported.folder, ignore_errors=True)
    exported.folder.mkdir(parents=True)
    if export.gguf != "none":
        check_gguf(exported.spec)
    whole = final.model_tensors(dtype=export_dtype(exported.dtype))
    alone = final.adapter_tensors(dtype=export_dtype(exported.dtype)) if adapts and export.adapter != "merged" else []
    _require_room(exported, [*(whole if merges else []), *alone], whole if export.gguf != "none" else [])
    artifacts: list[Artifact] = []

    def during(stage: JobStage) -> AbstractContextManager[None]:
        return nullcontext() if stages is None else stages.during(stage, on_host=True)

    if merges:
        enter_phase("saving", "exporting the model" if not adapts else "exporting the model with its adapters added")
        with during("merge" if adapts else "export"):
            artifacts += _leave_model(whole, final, exported, enter_phase=enter_phase)
        verify_buildable(exported.folder / "model", exported.spec)
    if alone:
        enter_phase("saving", "exporting the adapters")
        with during("export"):
            artifacts += _leave_adapter(alone, final, exported, has_model=merges, enter_phase=enter_phase)
    if export.gguf != "none":
        enter_phase("saving", f"writing a GGUF file in {export.gguf.upper()}")
        with during("merge" if adapts else "export"):
            artifacts += _leave_gguf(final, exported, packing=export.gguf, enter_phase=enter_phase)
    return artifacts


def hash_weights(artifacts: list[Artifact]) -> str:
    """The hash of the one safetensors file, or of the files' hashes in order when there are several."""
    hashes = [artifact.sha256 for artifact in artifacts if artifact.name.endswith(".safetensors")]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _leave_model(
    entries: list[TensorEntry], final: FinalWeights, exported: Exported, *, enter_phase: EnterPhase
) -> list[Artifact]:
    files = export_model(
        final.model,
        exported.spec,
        folder=exported.folder / "model",
        dtype=exported.dtype,
        tensors=entries,
        max_shard_bytes=exported.export.max_shard_bytes,
        tokenizer_file=exported.tokenizer_file or TOKENIZER_FILE,
        sidecar_folder=exported.model_folder,
    )
    enter_phase("verifying", "reading the model again")
    verify_model(exported.folder / "model", entries, exported.spec)
    return [_artifact("model", file, exported) for file in files]


def _leave_adapter(
    entries: list[TensorEntry], final: FinalWeights, exported: Exported, *, has_model: bool, enter_phase: EnterPhase
) -> list[Artifact]:
    files = export_adapters(
        final.model, folder=exported.folder / "adapter", tensors=entries, sidecar_folder=exported.model_folder
    )
    enter_phase("verifying", "reading the adapters again")
    merged = exported.folder / "model" if has_model else None
    verify_adapter(exported.folder / "adapter", entries, final, merged=merged)
    return [_artifact("adapter", file, exported) for file in files]


def _leave_gguf(
    final: FinalWeights, exported: Exported, *, packing: GgufPacking, enter_phase: EnterPhase
) -> list[Artifact]:
    spec, model_folder = exported.spec, exported.model_folder
    entries = list_entries(final.model_tensors(dtype=export_dtype("fp32")), spec, packing=packing)
    vocabulary = read_vocabulary(
        exported.tokenizer_file or TOKENIZER_FILE,
        vocab_size=spec.vocab_size,
        special_ids=_special_ids(exported),
        chat=None if model_folder is None else read_chat_folder(model_folder),
    )
    with staged_folder(exported.folder / "gguf") as stage:
        file = stage / f"model-{packing}.gguf"
        write_gguf(file, entries, spec, vocabulary=vocabulary, packing=packing, name=exported.name)
        enter_phase("verifying", "reading the GGUF file again")
        check_gguf_file(file, entries)
    return [_artifact("gguf", file, exported) for file in describe_all(exported.folder / "gguf")]


def _special_ids(exported: Exported) -> dict[str, int]:
    """By the config; where documents were parted by the bundled tokenizer's end of text, that."""
    config = exported.spec.config
    found = {name: config.get(f"{name}_token_id") for name in ("bos", "pad")}
    loaded = load_tokenizer(exported.tokenizer_file, end_of_text_id=exported.spec.end_of_text_id)
    found["eos"] = loaded.end_of_text_id
    return {name: token_id for name, token_id in found.items() if isinstance(token_id, int)}


def _require_room(exported: Exported, tensors: list[TensorEntry], packed: list[TensorEntry]) -> None:
    num_elements = sum(entry.num_bytes // entry.dtype.itemsize for entry in packed)
    gguf_bytes = num_elements * 2 if exported.export.gguf == "f16" else num_elements * 34 // 32
    needed_bytes = sum(entry.num_bytes for entry in tensors) + gguf_bytes + _SPARE_BYTES
    free_bytes = shutil.disk_usage(exported.folder).free
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"the exported weights need {format_bytes(needed_bytes)} of disk; {format_bytes(free_bytes)} are free",
            hint="Free disk space and export the newest checkpoint, or ask for the adapters alone.",
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
        )


def _artifact(kind: str, file: ExportedFile, exported: Exported) -> Artifact:
    return Artifact(
        kind=kind,
        name=file.name,
        file=f"{artifacts_place(exported.fence)}/{kind}/{file.name}",
        num_bytes=file.num_bytes,
        sha256=file.sha256,
    )


def _sample_text(trainer: Trainer, exported: Exported, *, batches: Batches | SampleRows) -> str:
    loaded = load_tokenizer(exported.tokenizer_file, end_of_text_id=exported.spec.end_of_text_id)
    ids, *_ = batches.validation_batch(0, 1)
    prompt_ids = [int(token) for token in ids[0][:PROMPT_TOKENS]]
    with trainer.metered():
        new_ids = generate_tokens(
            trainer.model,
            prompt_ids,
            num_tokens=trainer.workload.sample_tokens,
            window_length=trainer.workload.sequence_length,
            seed=trainer.workload.seed,
            vocab_size=loaded.vocab_size,
        )
    check_peak(trainer.meter)
    text: str = loaded.tokenizer.decode(prompt_ids + new_ids)
    return text + "\n"
