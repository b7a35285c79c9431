"""Writes what a finished job leaves: the model's folder, its adapters' own, a sample of its text, and a hash of everything."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimizer.data.batches import Batches
from optimizer.data.bundled import TOKENIZER_FILE
from optimizer.data.samples.rows import SampleRows
from optimizer.data.tokenizer import load_tokenizer
from optimizer.models.files.export import ExportedFile, export_adapters, export_dtype, export_model
from optimizer.models.spec import ModelSpec
from optimizer.runtime.job.checkpoint import hash_file
from optimizer.runtime.job.export_weights import FinalWeights
from optimizer.runtime.job.sample_text import generate_tokens
from optimizer.runtime.step.step import Trainer

ARTIFACTS_FOLDER = "artifacts"
PROMPT_TOKENS = 16
"""Tokens of the first validation sequence; the model goes on from there."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One file that is left."""

    kind: str
    """model, adapter or sample."""
    name: str
    file: str
    """Relative to the job's folder."""
    num_bytes: int
    sha256: str


def leave_artifacts(
    trainer: Trainer,
    *,
    spec: ModelSpec,
    batches: Batches | SampleRows,
    tokenizer_file: Path | None,
    job_folder: Path,
    enter_phase: Callable[[str, str], None],
) -> tuple[list[Artifact], str]:
    """Write the artifacts that ``workload.export`` asks for; returns them and the sha256 of the weights.

    The weights' hash is that of the safetensors file, or of the files' hashes in order when there are several.
    """
    folder = job_folder / ARTIFACTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = _export(trainer, spec=spec, tokenizer_file=tokenizer_file, folder=folder, enter_phase=enter_phase)
    if trainer.workload.sample_tokens:
        enter_phase("sampling", "writing a sample")
        path = folder / "sample.txt"
        path.write_text(_sample_text(trainer, spec=spec, batches=batches, tokenizer_file=tokenizer_file))
        artifacts.append(
            Artifact(
                kind="sample",
                name=path.name,
                file=f"{ARTIFACTS_FOLDER}/{path.name}",
                num_bytes=path.stat().st_size,
                sha256=hash_file(path),
            )
        )
    hashes = [artifact.sha256 for artifact in artifacts if artifact.name.endswith(".safetensors")]
    weights_sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return artifacts, weights_sha256


def _export(
    trainer: Trainer,
    *,
    spec: ModelSpec,
    tokenizer_file: Path | None,
    folder: Path,
    enter_phase: Callable[[str, str], None],
) -> list[Artifact]:
    export, has_adapters = trainer.workload.export, trainer.workload.adapter is not None
    dtype = trainer.plan.weights.dtype if export.dtype == "same" else export.dtype
    final = FinalWeights(trainer)
    artifacts: list[Artifact] = []
    if not has_adapters or export.adapter in ("merged", "both"):
        enter_phase("saving", "exporting the model" if not has_adapters else "exporting the model with its adapters added")
        files = export_model(
            trainer.model,
            spec,
            folder=_fresh(folder / "model"),
            dtype=dtype,
            tensors=final.model_tensors(dtype=export_dtype(dtype)),
            max_shard_bytes=export.max_shard_bytes,
            tokenizer_file=tokenizer_file or TOKENIZER_FILE,
        )
        artifacts += [_artifact("model", file) for file in files]
    if has_adapters and export.adapter in ("alone", "both"):
        enter_phase("saving", "exporting the adapters")
        files = export_adapters(
            trainer.model,
            folder=_fresh(folder / "adapter"),
            tensors=final.adapter_tensors(dtype=export_dtype(dtype)),
        )
        artifacts += [_artifact("adapter", file) for file in files]
    return artifacts


def _fresh(folder: Path) -> Path:
    """An attempt that was killed after its export leaves the folder; the same weights are written again."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _artifact(kind: str, file: ExportedFile) -> Artifact:
    return Artifact(
        kind=kind,
        name=file.name,
        file=f"{ARTIFACTS_FOLDER}/{kind}/{file.name}",
        num_bytes=file.num_bytes,
        sha256=file.sha256,
    )


def _sample_text(trainer: Trainer, *, spec: ModelSpec, batches: Batches | SampleRows, tokenizer_file: Path | None) -> str:
    loaded = load_tokenizer(tokenizer_file, end_of_text_id=spec.end_of_text_id)
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
    text: str = loaded.tokenizer.decode(prompt_ids + new_ids)
    return text + "\n"
