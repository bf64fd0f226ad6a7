"""Laws of training from captured features: the bits of training with targets, and nothing but the right features."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_processes import Outcome, losses, same_bits
from helpers_training import make_config, write_synthetic

from dflash import capture as capturing
from dflash.__main__ import main
from dflash.capture import capture
from dflash.config import ConfigError, RunConfig
from dflash.data.meta import DataError
from dflash.features import FeatureStore, read_shard, shard_files
from dflash.trainer import train

LENGTHS = [32, 20, 12, 9, 9, 32, 30, 5, 17, 17, 8, 24, 6]  # rows of one to four documents
STEPS = 2  # of two micro-batches: the first epoch

pytestmark = pytest.mark.timeout(2700)  # whoever comes first waits for all runs in processes


def configure(output: Path, base: Path, **changes: Any) -> RunConfig:
    changes = {"optim": {"steps": STEPS, "batches_per_step": 2}, **changes}
    changes["data"] = {"path": base / "data", **changes.get("data", {})}
    return make_config(output, **changes)


def offline(output: Path, base: Path, features: Path, **changes: Any) -> RunConfig:
    data = {"features": features, **changes.pop("data", {})}
    return configure(output, base, **{"topology": "0t+2d", **changes, "data": data})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, its features for the KL loss in small shards, and the run with targets."""
    base = tmp_path_factory.mktemp("capture")
    write_synthetic(configure(base / "run", base), base / "data", LENGTHS, chat_template_sha256="t1")
    capture(configure(base / "features", base, loss={"kind": "kl"}), shard_bytes=1)
    train(configure(base / "run", base))
    return base


@pytest.fixture
def features(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(base / "features", tmp_path / "features"))


@pytest.mark.parametrize("topology", ["0t+1d", "0t+3d"])
def test_training_from_features_has_the_bits_of_training_with_targets(base: Path, tmp_path: Path, topology: str) -> None:
    result = train(offline(tmp_path / "run", base, base / "features", topology=topology))
    assert result is not None
    assert same_bits(tmp_path / "run", base / "run")
    assert losses(tmp_path / "run") == losses(base / "run")
    assert {worker["worker"].partition("-")[0] for worker in result["workers"]} == {"reader", "drafter"}
    assert result["tokens_per_second_per_target"] is None
    metrics = [json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())["metrics"] for run in
               (tmp_path / "run", base / "run")]  # fmt: skip
    assert "validation_loss" in metrics[0]
    assert metrics[0] == metrics[1]


def test_the_kl_loss_reads_what_the_head_got(base: Path, tmp_path: Path) -> None:
    train(configure(tmp_path / "online", base, loss={"kind": "kl"}))
    train(offline(tmp_path / "offline", base, base / "features", loss={"kind": "kl"}))
    assert losses(tmp_path / "offline") == losses(tmp_path / "online")


def test_later_epochs_have_the_losses_of_training_with_targets_within_rounding(base: Path, tmp_path: Path) -> None:
    steps = {"optim": {"steps": 4 * STEPS, "batches_per_step": 2}}
    train(configure(tmp_path / "online", base, **steps))
    train(offline(tmp_path / "offline", base, base / "features", **steps))
    assert losses(tmp_path / "offline") == pytest.approx(losses(tmp_path / "online"), rel=1e-5)


def test_processes_without_a_target_have_the_bits_of_a_run_with_one(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    offline = outcomes["offline"]
    assert offline.codes == {}, offline.said()
    train(make_config(tmp_path / "online"))
    assert losses(offline.run) == losses(tmp_path / "online")
    assert same_bits(offline.run, tmp_path / "online")


def test_a_capture_that_was_cut_short_goes_on_and_ends_with_the_same_bytes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when the tensors of its third shard are on disk: nothing may depend on what runs after that."""
    config, original, calls = configure(tmp_path / "features", base, loss={"kind": "kl"}), capturing.sync, []

    def dying(path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(path)

    monkeypatch.setattr(capturing, "sync", dying)
    with pytest.raises(KeyboardInterrupt):
        capture(config, shard_bytes=1)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"shard-00002\.json is not readable .* run dflash capture"):
        FeatureStore(config.output)
    result = capture(config, shard_bytes=1)
    assert (result["shards"], result["shards_written_now"]) == (5, 3)
    assert {p.name: p.read_bytes() for p in config.output.iterdir()} == {
        p.name: p.read_bytes() for p in (base / "features").iterdir()
    }
    assert capture(config, shard_bytes=1)["shards_written_now"] == 0


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])


def test_a_damaged_shard_is_never_learned_from_and_is_made_again(
    base: Path, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = shard_files(features, 4)[0]  # the held-out documents are in the last one
    flip(held)
    with pytest.raises(DataError, match=r"shard-00004\.safetensors does not match the SHA-256 .* run dflash capture again"):
        train(offline(tmp_path / "run", base, features))
    result = capture(configure(features, base, loss={"kind": "kl"}), shard_bytes=1)
    assert result["shards_written_now"] == 1
    assert f"made again: {held} does not match" in capsys.readouterr().err
    assert held.read_bytes() == shard_files(base / "features", 4)[0].read_bytes()


def test_a_shard_of_another_size_is_told_at_the_start(features: Path) -> None:
    path = shard_files(features, 1)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard-00001\.safetensors has \d+ bytes, \d+ were written"):
        FeatureStore(features)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": {"seed": 9}}, r"weights '\w+', this run has '\w+'"),
        ({"drafter": {"target_layer_ids": (0, 2)}}, r"target_layer_ids \(\d, \d\), this run has \(0, 2\)"),
        ({"target": {"dtype": "bfloat16"}}, "target_dtype 'float32', this run has 'bfloat16'"),
        ({"data": {"sequence_length": 24}}, "has 24 tokens, the features in .* are of 32 tokens"),
        ({"data": {"path": Path("synthetic:5")}}, "chat_template_sha256 't1', this run has ''"),
    ],
)
def test_features_of_another_run_are_refused_with_what_differs(
    base: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        train(offline(tmp_path / "run", base, base / "features", **changes))


def test_features_for_another_dtype_loss_or_text_are_refused(base: Path) -> None:
    store = FeatureStore(base / "features")
    for field, value in (("dtype", "bfloat16"), ("enable_thinking", True), ("hidden_size", 8)):
        with pytest.raises(DataError, match=f"{field} .*, this run has {value!r}"):
            store.check(dataclasses.replace(store.belongs, **{field: value}), {})
    store.belongs = dataclasses.replace(store.belongs, final_hidden=False)
    with pytest.raises(DataError, match=r"--loss\.kind kl"):
        store.check(dataclasses.replace(store.belongs, final_hidden=True), {})
    ids = torch.zeros(32, dtype=torch.int32).numpy()
    example: Any = SimpleNamespace(sample_id="synthetic-0", ids=ids)
    with pytest.raises(DataError, match="are of 32 tokens that are others"):
        store.check(store.belongs, {"train": SimpleNamespace(examples=[example])})  # type: ignore[dict-item]  # of its kind
    example.sample_id = "unknown"
    with pytest.raises(DataError, match="no features of the train example 'unknown'"):
        store.check(store.belongs, {"train": SimpleNamespace(examples=[example])})  # type: ignore[dict-item]  # of its kind


def test_another_capture_in_the_same_directory_is_refused(base: Path, features: Path) -> None:
    with pytest.raises(DataError, match=r"holds other features: weights .* features for another --loss.kind"):
        capture(configure(features, base, target={"seed": 9}), shard_bytes=1)


def test_what_the_disk_must_hold_is_told_and_checked_before_the_start(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capturing.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"the features need 0\.\d MiB, the disk of .* has 0\.0 MiB free"):
        capture(configure(tmp_path / "features", base))
    tokens = sum(LENGTHS) + sum(LENGTHS[:2])
    assert f"{len(LENGTHS) + 2} documents of {tokens} tokens, 512 bytes a token: " in capsys.readouterr().err
    assert list((tmp_path / "features").iterdir()) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel lets no file grow beyond 16 KiB: a disk that is full when it is written to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_fills_up_is_told_and_leaves_whole_shards(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*shard-00000\.safetensors: .*File too large.* the same command goes on"):
        capture(configure(tmp_path / "features", base))
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["meta.json"]


def test_bytes_on_disk_are_those_that_were_foretold(base: Path) -> None:
    meta = json.loads((base / "features" / "meta.json").read_text())
    store = FeatureStore(base / "features")
    assert store.belongs.bytes_per_token == (2 + 1) * 64 * 4
    assert meta["bytes"] == (sum(LENGTHS) + sum(LENGTHS[:2])) * store.belongs.bytes_per_token
    on_disk = sum(read_shard(base / "features", shard)["bytes"] for shard in range(meta["shards"]))
    assert meta["bytes"] < on_disk < 1.1 * meta["bytes"]  # a header a shard: small shards have much of it


def test_targets_beside_features_and_neither_of_them_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for topology, features, said in (
        ("1t+2d", ["--data.features", str(tmp_path)], "use 0t+Md"),
        ("0t+2d", [], "--data.features"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["train", "--preset", "tiny-cpu", "--topology", topology, *features])
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_features_are_not_written_into_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a training run: name another --output"):
        capture(make_config(tmp_path / "run"))
