"""Laws of the history: nothing is lost, counted twice or believed unread, whoever writes and however they die."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import filelock
import pyarrow.parquet as pq
import pytest

from regression import store as store_module
from regression.records import StoreError, canonical, identity_of
from regression.store import Store, main, read_file

ROOT = Path(__file__).parent.parent


def record(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "measurement", "series": "s", "time": f"2026-01-01T00:{number // 60:02}:{number % 60:02}+00:00", "name": "w",
        "tokens_per_second": 100.0 + number, "tokens_per_second_per_device": 50.0, "invalid": ["busy"], "problems": [],
        "result": {"steps": [0.1, 1 / 3, number]}, **changes,
    }  # fmt: skip


def files(store: Store) -> list[Path]:
    return sorted((store.directory / "records").iterdir())


def test_what_was_added_is_read_back_by_time_and_series(tmp_path: Path) -> None:
    store = Store(tmp_path)
    numbers = list(range(6))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        store.add(record(number, series="even" if number % 2 == 0 else "odd"))
    records, problems = store.read()
    assert (records, problems) == ([record(n, series="even" if n % 2 == 0 else "odd") for n in range(6)], [])
    assert [one["tokens_per_second"] for one in store.read("odd")[0]] == [101.0, 103.0, 105.0]


def test_columns_answer_queries_without_the_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(record(1))
    store.accept("s", "new kernel")
    frame, _ = store.frame()
    assert list(frame["kind"]) == ["measurement", "acceptance"]
    assert frame["tokens_per_second"][0] == 101.0
    assert list(frame["invalid"][0]) == ["busy"]
    assert frame["reason"][1] == "new kernel"


def test_equal_records_are_one_file_named_by_their_content(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ids = {store.add(record(1)), store.add(dict(reversed(record(1).items())))}
    assert ids == {identity_of(canonical(record(1)))}
    assert [path.stem for path in files(store)] == list(ids)
    assert store.add(record(2)) not in ids


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "note"},
        {"series": ""},
        {"time": "yesterday"},
        {"time": "2026-01-01T00:00:00"},
        {"time": "2026-01-01T00:00:00+01:00"},
        {"tokens_per_second": float("nan")},
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        Store(tmp_path).add(record(**change))
    assert not (tmp_path / "records").exists()


def test_an_acceptance_needs_a_reason(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="needs a reason"):
        Store(tmp_path).accept("s", " ")


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_regression_store import record
from regression.store import Store
first = int(sys.argv[2])
for number in range(first, first + 20):
    Store(Path(sys.argv[1])).add(record(number))
"""


def test_several_writers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen((sys.executable, "-c", WRITER, str(tmp_path), str(first)), cwd=ROOT) for first in (0, 10, 10)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert Store(tmp_path).read() == ([record(number) for number in range(30)], [])
    assert len(files(Store(tmp_path))) == 30


# Stands still in the middle of writing a record, after half of its bytes or just before the rename.
DYING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from test_regression_store import record
from regression import records
from regression.store import Store

def park(*_):
    print("parked", flush=True)
    time.sleep(600)

if sys.argv[2] == "torn":
    whole = records.pq.write_table
    def half(table, file, **options):
        whole(table, file, **options)
        file.flush()
        os.truncate(file.name, os.stat(file.name).st_size // 2)
        park()
    records.pq.write_table = half
else:
    records.os.fsync = park
Store(Path(sys.argv[1])).add(record(1))
"""


@pytest.mark.parametrize("where", ["torn", "before the rename"])
def test_a_writer_killed_in_the_middle_leaves_a_leftover_that_is_told_and_pruned(tmp_path: Path, where: str) -> None:
    store = Store(tmp_path)
    store.add(record(0))
    with subprocess.Popen((sys.executable, "-c", DYING, str(tmp_path), where), cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"parked\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    records, (problem,) = store.read()
    assert records == [record(0)]
    assert "half written" in problem
    store.add(record(1))  # the lock of the dead is free
    assert [what.partition(" ")[0] for what in store.prune()] == ["leftover"]
    assert store.read() == ([record(0), record(1)], [])


def damaged(store: Store, how: str) -> None:
    path = files(store)[0]
    whole = path.read_bytes()
    if how == "torn":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "another record":
        path.write_bytes(files(store)[1].read_bytes())
    elif how == "foreign parquet":
        pq.write_table(pq.read_table(path).select(["kind"]), path)
    elif how == "columns changed":
        table = pq.read_table(path, partitioning=None)
        place = table.column_names.index("tokens_per_second")
        pq.write_table(table.set_column(place, table.schema.field(place), [[1.0]]), path)
    else:
        path.with_name("notes.txt").write_text("mine")


@pytest.mark.parametrize("how", ["torn", "empty", "another record", "foreign parquet", "columns changed", "foreign file"])
def test_a_file_that_cannot_be_believed_is_skipped_and_told(tmp_path: Path, how: str) -> None:
    store = Store(tmp_path)
    for number in range(3):
        store.add(record(number))
    damaged(store, how)
    records, (problem,) = store.read()
    assert len(records) == (3 if how == "foreign file" else 2)
    assert str(tmp_path) in problem
    assert main(["verify", str(tmp_path)]) == 1


def test_a_damaged_record_is_found_also_when_the_index_knows_it_and_can_be_added_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(3):
        store.add(record(number))
    store.frame()
    damaged(store, "torn")
    assert store.verify()[0] == 2
    assert len(store.read()[0]) == 2
    for number in range(3):
        store.add(record(number))
    assert store.verify() == (3, [])


@pytest.mark.parametrize("index", [None, b"", b"torn", "of another version"])
def test_the_index_is_only_a_cache(tmp_path: Path, index: bytes | str | None) -> None:
    store = Store(tmp_path)
    store.add(record(0))
    store.frame()
    path = tmp_path / "index.parquet"
    if index is None:
        path.unlink()
    elif isinstance(index, bytes):
        path.write_bytes(index)
    else:
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([f"old_{name}" for name in table.column_names]), path)
    store.add(record(1))
    assert list(store.frame()[0]["tokens_per_second"]) == [100.0, 101.0]


def test_reading_again_opens_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.add(record(0))
    first, _ = store.frame()
    monkeypatch.setattr(store_module, "read_rows", lambda *_, **__: pytest.fail("opened a record"))
    second, _ = Store(tmp_path).frame()
    assert first.to_dict("list").keys() == second.to_dict("list").keys()
    assert list(first["id"]) == list(second["id"])


def test_reading_waits_for_no_writer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(record(0))
    with filelock.FileLock(tmp_path / "lock"):
        assert len(Store(tmp_path).frame()[0]) == 1
        assert not (tmp_path / "index.parquet").exists()
    assert len(store.frame()[0]) == 1
    assert (tmp_path / "index.parquet").exists()


def test_a_removed_record_leaves_the_index(tmp_path: Path) -> None:
    store = Store(tmp_path)
    ids = [store.add(record(number)) for number in range(2)]
    store.frame()
    (tmp_path / "records" / f"{ids[0]}.parquet").unlink()
    assert list(store.frame()[0]["id"]) == ids[1:]


def test_pruning_by_age_keeps_acceptances(tmp_path: Path) -> None:
    store = Store(tmp_path)
    now = datetime.now(UTC)
    times = [(now - timedelta(days=days)).isoformat(timespec="seconds") for days in (10, 1)]
    for moment in times:
        store.add(record(time=moment))
        store.accept("s", "because", time=moment)
    assert main(["prune", str(tmp_path), "--older-than-days", "5"]) == 0
    assert [(one["kind"], one["time"]) for one in store.read()[0]] in (
        [("acceptance", times[0]), ("acceptance", times[1]), ("measurement", times[1])],
        [("acceptance", times[0]), ("measurement", times[1]), ("acceptance", times[1])],
    )


OLD_LINE = (
    '{"name": "tiny-cpu on CPU, 20 steps", "series": "tiny-cpu on CPU, 20 steps [0123456789ab]",'
    ' "time": "2026-11-01T01:00:00+00:00", "seconds": 60.1, "returncode": 0,'
    ' "result": {"tokens_per_second": 434.4, "tokens_per_second_per_device": 144.8}, "fingerprint": {"git": null}, "invalid": []}'
)


def test_the_earlier_jsonl_history_is_imported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "history.jsonl"
    old.write_text(f'{OLD_LINE}\n{{"torn\n[]\n{{"series": "x"}}\n')
    codes = [main(["import", str(tmp_path / "store"), str(old)]) for _ in range(2)]
    told = capsys.readouterr()
    assert codes == [1, 1]  # three lines are no records
    assert told.out.splitlines() == ["1 new records of 1", "0 new records of 1"]
    assert told.err.count("torn or not ours") == 6
    frame, _ = Store(tmp_path / "store").frame()
    assert list(frame["tokens_per_second_per_device"]) == [144.8]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_export_imported_elsewhere_is_the_same_history(tmp_path: Path, suffix: str) -> None:
    first, second, file = Store(tmp_path / "a"), Store(tmp_path / "b"), tmp_path / f"out{suffix}"
    for number in range(3):
        first.add(record(number))
    assert main(["export", str(first.directory), "--output", str(file)]) == 0
    assert main(["import", str(second.directory), str(file), str(first.directory)]) == 0
    assert second.read() == first.read()


def test_an_export_holds_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    for number in range(4):
        store.add(record(number))
    file = tmp_path / "out.jsonl"
    assert main(["export", str(store.directory), "--output", str(file), "--where", "tokens_per_second > 101"]) == 0
    assert [one["tokens_per_second"] for one in read_file(file)[0]] == [102.0, 103.0]
    csv = tmp_path / "out.csv"
    assert main(["export", str(store.directory), "--output", str(csv)]) == 0
    assert len(csv.read_text().splitlines()) == 5
    assert main(["export", str(store.directory), "--output", str(csv), "--where", "no such column"]) == 2


@pytest.mark.parametrize("command", [["verify"], ["export", "--output", "x.txt"], ["export", "--output", "x.csv"], []])
def test_bad_usage_is_told(tmp_path: Path, command: list[str]) -> None:
    arguments = [*command[:1], *([str(tmp_path / "none")] if command else []), *command[1:]]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_reading_a_store_that_is_not_there_is_an_empty_history(tmp_path: Path) -> None:
    assert Store(tmp_path / "none").read() == ([], [])
    assert not (tmp_path / "none").exists()


def test_the_command_line_runs(tmp_path: Path) -> None:
    started = time.monotonic()
    Store(tmp_path).add(json.loads(json.dumps(record())))
    done = subprocess.run(
        (sys.executable, "-m", "regression.store", "verify", str(tmp_path)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 records are whole\n"), time.monotonic() - started
