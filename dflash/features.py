"""Target features on disk: `python -m dflash capture` writes them, `train --data.features DIR` reads them and runs no target.

A directory holds
    meta.json                 what the features were made with (`Belongs`), and how many shards there are
    shard-00000.safetensors   of document n of the shard: "n" [tokens, K*H], and for the KL loss "n.final" [tokens, H]
    shard-00000.json          written after its shard: its bytes and SHA-256; split, sample id, tokens, digest of each document
A directory in which a shard's JSON is missing is not complete; `capture` goes on with it, `train` refuses it.

Features belong to documents, not to micro-batches, so that any number of drafters reads them, in any epoch. They were made in the
micro-batches of the first epoch, whose losses therefore have the bits of a run with targets (CPU, fp32). In later epochs a
document has other neighbours in its row: with a target beside it, kernels may then round its features differently.
Padding, which nobody sees, is zero.

Known limits: sizes are compared at the start, a shard's SHA-256 when a process first reads it. The target's weights are compared
by a sample of each parameter. Reading is one thread for each process.

Legend: R rows, S tokens, K features, H hidden size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash.batch import PackedBatch, TargetStates
from dflash.config import RunConfig
from dflash.data.meta import DataError, Meta, Split
from dflash.data.packing import PackedStream
from dflash.modeling.shape import DrafterShape
from dflash.modeling.tiles import tile_lists

META_FILE = "meta.json"
FORMAT = "dflash-harness features 1"
_OPEN_SHARDS = 64
_SAMPLED = 256  # elements of each parameter that tell targets apart


@dataclass(frozen=True, kw_only=True)
class Belongs:
    """What features are made with; filled by `of`. Two runs with the same give the same features to the same document."""

    target: str  # its path: told, not compared
    weights: str  # digest of a sample of each of its parameters
    target_dtype: str
    dtype: str  # of the features: float32 on CPUs, else the target's
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    final_hidden: bool  # also the input of the target's head, for the KL loss
    chat_template_sha256: str
    enable_thinking: bool

    @classmethod
    def of(cls, config: RunConfig, model: Any, shape: DrafterShape, meta: Meta | None, device: torch.device) -> Self:
        """Of a run whose features are used on `device`; `meta` is that of its data, None for synthetic data."""
        return cls(
            target=config.target.path,
            weights=_sample_digest(model),
            target_dtype=config.target.dtype,
            dtype="float32" if device.type == "cpu" else config.target.dtype,
            target_layer_ids=tuple(shape.target_layer_ids),
            hidden_size=shape.hidden_size,
            final_hidden=config.loss.kind == "kl",
            chat_template_sha256=meta.chat_template_sha256 if meta else "",
            enable_thinking=meta.enable_thinking if meta else False,
        )

    @property
    def bytes_per_token(self) -> int:
        """On disk."""
        width = len(self.target_layer_ids) + self.final_hidden
        size: int = getattr(torch, self.dtype).itemsize
        return width * self.hidden_size * size

    def differences(self, run: Belongs) -> list[str]:
        """In what these features are not those that `run` needs."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("target", "final_hidden")]
        pairs = [(name, getattr(self, name), getattr(run, name)) for name in names]
        if run.final_hidden and not self.final_hidden:
            pairs.append(("final_hidden (--loss.kind kl)", False, True))
        return [f"{name} {found!r}, this run has {wanted!r}" for name, found, wanted in pairs if found != wanted]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Where the features of one document are."""

    shard: int
    number: int  # in the shard
    tokens: int
    digest: str  # of its token ids


def shard_files(directory: Path, shard: int) -> tuple[Path, Path]:
    """The tensors of a shard, and its JSON."""
    path = directory / f"shard-{shard:05d}.safetensors"
    return path, path.with_suffix(".json")


def read_meta(directory: Path) -> tuple[Belongs, int]:
    """What features belong to, and the number of their shards. Raises DataError where there are none."""
    document = _read_json(directory / META_FILE)
    if document.get("format") != FORMAT:
        raise DataError(f"{directory} has format {document.get('format')!r}, expected {FORMAT!r}: write it with dflash capture")
    values = document["belongs"]
    return Belongs(**values | {"target_layer_ids": tuple(values["target_layer_ids"])}), document["shards"]


def read_shard(directory: Path, shard: int) -> dict[str, Any]:
    """The JSON of a shard. Raises DataError where it is missing, or where the shard has another size."""
    path, about = shard_files(directory, shard)
    written = _read_json(about)
    found = path.stat().st_size if path.is_file() else None
    if found != written["bytes"]:
        raise DataError(f"{path} has {found} bytes, {written['bytes']} were written: {_REPAIR}")
    return written


def verify_shard(directory: Path, shard: int, sha256: str) -> None:
    """Raise DataError unless the shard has these bytes."""
    path = shard_files(directory, shard)[0]
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise DataError(f"{path} does not match the SHA-256 in its JSON: it was changed; {_REPAIR}")


def digest(ids: npt.NDArray[np.int32]) -> str:
    """Of the token ids of a document."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()


def documents_of(batch: PackedBatch) -> Iterator[tuple[str, int, slice]]:
    """Sample id, row and place in the row of every document of a micro-batch."""
    for row, samples in enumerate(batch.sample_ids):
        lengths = torch.bincount(batch.document_ids[row] + 1, minlength=len(samples) + 1)[1:].tolist()
        start = 0
        for sample_id, length in zip(samples, lengths, strict=True):
            yield sample_id, row, slice(start, start + length)
            start += length


class FeatureStore:
    """A complete directory of features. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Raises DataError where something is missing or has another size."""
        self._directory = directory
        self.belongs, shards = read_meta(directory)
        self._sha256: list[str] = []
        self._documents: dict[tuple[str, str], Document] = {}
        for shard in range(shards):
            written = read_shard(directory, shard)
            self._sha256.append(written["sha256"])
            for number, (split, sample_id, tokens, its_digest) in enumerate(written["documents"]):
                document = Document(shard=shard, number=number, tokens=tokens, digest=its_digest)
                self._documents[split, sample_id] = document
        self._verified: set[int] = set()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, run: Belongs, streams: dict[Split, PackedStream | None]) -> None:
        """Raise DataError unless the features are those of this run, and of all its documents."""
        different = self.belongs.differences(run)
        if different:
            raise DataError(
                f"the features in {self._directory} are not those of this run ({self.belongs.target}; this run: {run.target}): "
                f"{'; '.join(different)}: capture them again, or train with what they were made with"
            )
        for split, stream in streams.items():
            for example in stream.examples if stream else ():
                self._check_document(split, example.sample_id, example.ids)

    def states(self, split: Split, batch: PackedBatch, *, final_hidden: bool) -> TargetStates:
        """The target states of a micro-batch, on the CPU. Raises DataError on a damaged shard."""
        shape, dtype = batch.input_ids.shape, getattr(torch, self.belongs.dtype)
        width = self.belongs.hidden_size
        features = torch.zeros(*shape, len(self.belongs.target_layer_ids) * width, dtype=dtype)
        final = torch.zeros(*shape, width, dtype=dtype) if final_hidden else None
        for sample_id, row, place in documents_of(batch):
            document = self._documents[split, sample_id]
            features[row, place] = self._read(document, f"{document.number}")
            if final is not None:
                final[row, place] = self._read(document, f"{document.number}.final")
        return TargetStates(batch=batch, features=features, final_hidden=final)

    def _check_document(self, split: Split, sample_id: str, ids: npt.NDArray[np.int32]) -> None:
        document = self._documents.get((split, sample_id))
        if document is None:
            raise DataError(f"{self._directory} has no features of the {split} example {sample_id!r}: capture this run's data")
        if document.tokens != len(ids) or document.digest != digest(ids):
            raise DataError(
                f"the {split} example {sample_id!r} has {len(ids)} tokens, the features in {self._directory} are of "
                f"{document.tokens} tokens{' that are others' if document.tokens == len(ids) else ''}: capture them again with "
                f"this data and --data.sequence-length"
            )

    def _read(self, document: Document, name: str) -> Tensor:
        try:
            tensor: Tensor = self._opened(document.shard).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{shard_files(self._directory, document.shard)[0]} is not readable ({error}): {_REPAIR}") from error
        return tensor

    def _opened(self, shard: int) -> Any:
        with self._lock:
            if shard not in self._verified:
                verify_shard(self._directory, shard, self._sha256[shard])
                self._verified.add(shard)
            if shard not in self._open:
                self._open[shard] = safe_open(shard_files(self._directory, shard)[0], framework="pt")
                while len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard)
            return self._open[shard]


class FeatureReader:
    """Reads the target states of numbered micro-batches; stands where a target worker would."""

    def __init__(self, name: str, store: FeatureStore, stream: PackedStream, *, final_hidden: bool, tiles_of: int | None) -> None:
        """With `tiles_of`, the drafter's block size, the tiles of its flex mask are made ahead."""
        self.name, self.device = name, torch.device("cpu")
        self._store, self._stream, self._final_hidden, self._tiles_of = store, stream, final_hidden, tiles_of

    def produce(self, number: int) -> TargetStates:
        """The states of training micro-batch `number`, on the CPU."""
        return self._states("train", self._stream.batch(number))

    def run(self, batch: PackedBatch) -> TargetStates:
        """The states of a held-out micro-batch, on the CPU."""
        return self._states("heldout", batch)

    def _states(self, split: Split, batch: PackedBatch) -> TargetStates:
        if self._tiles_of is not None:
            batch = dataclasses.replace(batch, tiles=tile_lists(batch, self._tiles_of))
        return self._store.states(split, batch, final_hidden=self._final_hidden)


_REPAIR = "run dflash capture again, it makes what is missing or damaged"


def _sample_digest(model: Any) -> str:
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        sample = parameter.detach().reshape(-1)[:_SAMPLED].contiguous().cpu()
        hasher.update(sample.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not readable ({type(error).__name__}): {path.parent} holds no features, or not all of them; "
            f"run dflash capture with it as --output, it goes on where it was"
        ) from error
    return document
