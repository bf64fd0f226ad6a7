"""Write target features once, to train from them without targets: `python -m dflash capture --preset P --output DIR [any field]`.

Fields are those of `train`; target, data, drafter layers and loss kind decide what is written (`dflash.features` has the format).
One target, on the first device, makes the micro-batches of the first epoch and of the held-out data. What the disk must hold is
printed and compared with what is free before the first one is made. Each shard is written aside, synced, renamed, and only then
described in its JSON: a capture that was killed goes on with the same command, after the shards that are whole.

Known limit: one process; a large data set is captured in parts by giving each part a data set and a directory of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash.assembly import streams_of
from dflash.config import ConfigError, RunConfig
from dflash.data.meta import DataError, Split
from dflash.data.packing import PackedStream
from dflash.device import intra_op_threads, parse_device, require_gpus
from dflash.features import (
    FORMAT,
    META_FILE,
    Belongs,
    digest,
    documents_of,
    read_meta,
    read_shard,
    shard_files,
    verify_shard,
)
from dflash.files import as_others_are, sync, write_whole
from dflash.modeling.target import TargetRunner, drafter_shape, load_target, resolve_mask_token_id, text_config
from dflash.worker import check_packing, target_states

SHARD_BYTES = 2**28
_FOR_HEADERS = 1.01  # part of the tensors' bytes that names and JSON may add
Item = tuple[Split, int]  # a micro-batch
Streams = dict[Split, PackedStream | None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a capture will write."""

    belongs: Belongs
    shards: tuple[tuple[Item, ...], ...]
    tokens: int
    documents: int

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self.tokens * self.belongs.bytes_per_token

    def document(self) -> bytes:
        """Content of `meta.json`."""
        values = {
            "format": FORMAT,
            "belongs": dataclasses.asdict(self.belongs),
            "shards": len(self.shards),
            "bytes": self.num_bytes,
        }
        return json.dumps(values, indent=1).encode()


def capture(config: RunConfig, *, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Make or complete the directory `config.output`; returns the JSON-ready result.

    Raises ConfigError or DataError where target and data do not fit, the disk is too small or refuses, or the directory holds
    something else.
    """
    device = _device(config)
    if (config.output / "config.json").exists() or (config.output / "checkpoints").exists():
        raise ConfigError(f"{config.output} holds a training run: name another --output for the features")
    if config.compile.target:
        _say("capture compiles nothing: --compile.target is not used")
    with intra_op_threads(config.devices, config.cpu_threads):
        model, tokenizer = load_target(config.target, device=device)
        settings = text_config(model)
        mask_token_id = resolve_mask_token_id(config.target, tokenizer, settings.vocab_size)
        shape = drafter_shape(model, config.drafter, mask_token_id)
        check_packing(config, model)
        stream, heldout, meta = streams_of(config, settings, mask_token_id)
        streams: Streams = {"train": stream, "heldout": heldout}
        plan = _plan(Belongs.of(config, model, shape, meta, device), streams, shard_bytes)
        missing = _missing(config.output, plan)
        _check_disk(config.output, plan, missing)
        write_whole(config.output / META_FILE, plan.document())
        runner = TargetRunner(model, shape.target_layer_ids, keep_final_hidden=plan.belongs.final_hidden)
        started = time.perf_counter()
        for done, shard in enumerate(missing, 1):
            _write_shard(config.output, shard, _made(plan.shards[shard], streams, runner, device))
            _say(f"shard {shard + 1} of {len(plan.shards)}, {done / len(missing):.0%} of what was missing")
    return {
        "output": str(config.output),
        "documents": plan.documents,
        "skipped_examples": sum(len(one.skipped) for one in streams.values() if one),
        "tokens": plan.tokens,
        "bytes_per_token": plan.belongs.bytes_per_token,
        "bytes": plan.num_bytes,
        "shards": len(plan.shards),
        "shards_written_now": len(missing),
        "seconds": time.perf_counter() - started,
    }


def _device(config: RunConfig) -> torch.device:
    if config.data.features is not None:
        raise ConfigError("capture writes features, it reads none: leave --data.features out, --output names the directory")
    name = config.devices.split(",")[0].strip()
    if name == "cuda":
        require_gpus(1, "capture")
        name = "cuda:0"
    return parse_device(name)


def _plan(belongs: Belongs, streams: Streams, shard_bytes: int) -> Plan:
    items: list[Item] = [(split, n) for split, one in streams.items() if one for n in range(one.batches_per_epoch())]
    used = [one for one in streams.values() if one]
    tokens = sum(len(example.ids) for one in used for example in one.examples)
    slots = max(one.config.rows_per_batch * one.config.sequence_length for one in used)
    each = max(1, shard_bytes // (slots * belongs.bytes_per_token))
    shards = tuple(tuple(items[first : first + each]) for first in range(0, len(items), each))
    return Plan(belongs=belongs, shards=shards, tokens=tokens, documents=sum(one.num_examples for one in used))


def _missing(directory: Path, plan: Plan) -> list[int]:
    """Shards that are not there whole. Raises DataError where the directory belongs to another capture."""
    if not (directory / META_FILE).exists():
        return list(range(len(plan.shards)))
    found, shards = read_meta(directory)
    different = found.differences(plan.belongs)
    if found.final_hidden != plan.belongs.final_hidden:
        different.append("features for another --loss.kind")
    if shards != len(plan.shards):
        different.append(f"{shards} shards, this run has {len(plan.shards)}")
    if different:
        raise DataError(f"{directory} holds other features: {'; '.join(different)}: use another --output, or remove it")
    return [shard for shard in range(shards) if not _is_whole(directory, shard)]


def _is_whole(directory: Path, shard: int) -> bool:
    if not shard_files(directory, shard)[1].exists():
        return False
    try:
        verify_shard(directory, shard, read_shard(directory, shard)["sha256"])
    except DataError as error:
        _say(f"made again: {error}")
        return False
    return True


def _check_disk(directory: Path, plan: Plan, missing: Sequence[int]) -> None:
    """Say what is needed; raise ConfigError where the disk has less."""
    directory.mkdir(parents=True, exist_ok=True)
    needed = int(plan.num_bytes * _FOR_HEADERS * len(missing) / len(plan.shards))
    free = shutil.disk_usage(directory).free
    _say(
        f"{plan.documents} documents of {plan.tokens} tokens, {plan.belongs.bytes_per_token} bytes a token: "
        f"{_gib(plan.num_bytes)} in {len(plan.shards)} shards; {len(missing)} of them are missing and need {_gib(needed)}, "
        f"{directory} has {_gib(free)} free"
    )
    if needed > free:
        raise ConfigError(
            f"the features need {_gib(needed)}, the disk of {directory} has {_gib(free)} free: use another --output, fewer "
            f"examples, a smaller --drafter.num-features, or a target in bfloat16 on a GPU"
        )


def _made(
    items: Sequence[Item], streams: Streams, runner: TargetRunner, device: torch.device
) -> Iterator[tuple[list[Any], dict[str, Tensor]]]:
    """Each document's line of the shard's JSON, and its tensors by the ending of their names."""
    for split, number in items:
        stream = streams[split]
        assert stream is not None
        batch = stream.batch(number)
        states = target_states(runner, batch, device).to(torch.device("cpu"))
        for sample_id, row, place in documents_of(batch):
            ids = batch.input_ids[row, place].numpy()
            tensors = {"": states.features[row, place].clone()}
            if states.final_hidden is not None:
                tensors[".final"] = states.final_hidden[row, place].clone()
            yield [split, sample_id, len(ids), digest(ids)], tensors


def _write_shard(directory: Path, shard: int, made: Iterator[tuple[list[Any], dict[str, Tensor]]]) -> None:
    path, about = shard_files(directory, shard)
    documents: list[list[Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, (line, own) in enumerate(made):
        documents.append(line)
        tensors |= {f"{number}{ending}": tensor for ending, tensor in own.items()}
    aside = path.with_name(f".{path.name}.partial")
    try:
        about.unlink(missing_ok=True)
        save_file(tensors, aside)
        as_others_are(aside)
        sync(aside)
        aside.replace(path)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        written = {"bytes": path.stat().st_size, "sha256": sha256, "documents": documents}
        write_whole(about, json.dumps(written).encode())
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise DataError(
            f"cannot write {path}: {error}. The shards before it are whole: free disk space, the same command goes on"
        ) from error


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
