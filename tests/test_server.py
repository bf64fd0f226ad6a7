"""Laws of answers from a server: the same data as in process, whatever goes wrong on the way, and nothing lost or paid twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers_data import THINKING, byte_tokenizer, saved_target
from helpers_server import TargetServer, serving

from dflash import __main__ as main
from dflash.config import ConfigError, TargetConfig
from dflash.data import asking, chat, prepare
from dflash.data.examples import DataError, load_examples, load_meta
from dflash.data.meta import PrepareFailed

ROWS = [{"id": f"p{number}", "prompt": "x" * (number + 1)} for number in range(16)]
TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def tokens(path: Path) -> list[tuple[str, list[int], list[bool]]]:
    return [(e.sample_id, e.ids.tolist(), e.loss_mask.tolist()) for e in load_examples(path, "train")]


def key(row: dict[str, Any]) -> str:
    return json.dumps(chat.render_prompt(TOKENIZER, [{"role": "user", "content": row["prompt"]}]))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, target: Path) -> list[tuple[str, list[int], list[bool]]]:
    """What the same target gives in this process."""
    from helpers_data import prepare_config  # noqa: PLC0415 - as in conftest

    directory = tmp_path_factory.mktemp("here")
    prepare.prepare(prepare_config(directory, target, ROWS))
    return tokens(directory / "data")


@pytest.fixture
def there(configure: Any) -> Any:
    """A function that makes the configuration for a server."""

    def configured(serving_it: TargetServer, rows: list[Any] | str = ROWS, /, **changes: Any) -> Any:
        return configure(rows, **{"server": serving_it.url, "server_backoff_seconds": 0.001, **changes})

    return configured


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_server_gives_the_tokens_that_the_target_gives_in_process(
    there: Any, model: Any, tmp_path: Path, here: Any, api: str
) -> None:
    with serving(model) as server:
        summary = prepare.prepare(there(server, server_api=api))
    assert tokens(tmp_path / "data") == here
    assert (summary["server_requests"], summary["unanswered"], summary["retokenized_answers"]) == (len(ROWS), 0, 0)
    meta = load_meta(tmp_path / "data")
    assert meta.server == f"tiny through {api}"
    assert sum(meta.finish_reasons.values()) == len(ROWS)
    assert meta.finish_reasons.get("length", 0) == meta.truncated_answers


FAULTS = ("500", "503", "429", "cut", "slow", "say {", "say []", 'say {"choices": []}', 'say {"choices": [{"token_ids": ["a"]}]}')


def test_errors_cuts_slow_answers_and_malformed_replies_change_nothing(there: Any, model: Any, tmp_path: Path, here: Any) -> None:
    def fault(prompt: str, times: int) -> str | None:
        chance = random.Random(f"{prompt}{times}")
        return chance.choice(FAULTS) if times < 3 and chance.random() < 0.5 else None

    with serving(model, fault=fault) as server:
        for row in ROWS:  # the target has answered before anybody waits for it
            server.reply({"prompt": json.loads(key(row)), "max_tokens": 12})
        summary = prepare.prepare(there(server, server_timeout_seconds=5.0))
    assert tokens(tmp_path / "data") == here
    retries = summary["server_retries"]
    assert set(retries) >= {"HTTP 500", "HTTP 429", "malformed reply", "no reply in time"}
    assert sum(retries.values()) + len(ROWS) == summary["server_requests"] == sum(server.asked.values())
    assert set(server.answered.values()) == {1}


def test_text_is_tokenized_where_no_ids_come_and_counted(there: Any, model: Any, tmp_path: Path) -> None:
    with serving(model, gives_ids=False) as server:
        summary = prepare.prepare(there(server))
    assert summary["retokenized_answers"] == load_meta(tmp_path / "data").retokenized_answers == len(ROWS)
    for _, ids, mask in tokens(tmp_path / "data"):
        prompt = ids[: mask.index(True)]
        reply = server.reply({"prompt": prompt, "max_tokens": 12, "temperature": 0.0})["choices"][0]
        written = TOKENIZER(reply["text"], add_special_tokens=False)["input_ids"]
        assert ids[len(prompt) :] == written + [TOKENIZER.eos_token_id] * (reply["finish_reason"] == "stop")


@pytest.mark.parametrize(
    ("stop", "given", "kept"),
    [("stop", [5, 6], [5, 6, END]), ("stop", [5, END, 9], [5, END]), ("length", [5, 6], [5, 6]), ("tool_calls", [7], [7, END])],
)
def test_an_answer_ends_with_its_end_token_exactly_when_the_target_stopped(
    there: Any, model: Any, tmp_path: Path, stop: str, given: list[int], kept: list[int]
) -> None:
    def change(reply: dict[str, Any]) -> None:
        reply["choices"][0] |= {"token_ids": given, "finish_reason": stop}

    with serving(model, change=change) as server:
        prepare.prepare(there(server, ROWS[:1]))
    ((_, ids, mask),) = tokens(tmp_path / "data")
    assert ids[mask.index(True) :] == kept


def test_questions_that_fail_are_listed_and_counted_and_the_others_are_published(there: Any, model: Any, tmp_path: Path) -> None:
    planted = {key(ROWS[3]): "500", key(ROWS[5]): "400", key(ROWS[7]): 'say {"choices": [{"text": "", "finish_reason": "stop"}]}'}
    planted[key(ROWS[9])] = 'say {"choices": [{"text": "a", "finish_reason": "content_filter"}]}'
    with serving(model, fault=lambda prompt, _: planted.get(prompt)) as server:
        summary = prepare.prepare(there(server, server_retries=2, server_max_unanswered=0.5))
    reasons = {"p3": "HTTP 500", "p5": "HTTP 400", "p7": "empty answer", "p9": "finish reason content_filter"}
    listed = [json.loads(line) for line in (tmp_path / "data" / "unanswered.jsonl").read_text().splitlines()]
    assert {one["sample_id"]: (one["reason"], one["tries"]) for one in listed} == {
        name: (reason, 3 if name == "p3" else 1) for name, reason in reasons.items()
    }
    assert "planted" in next(one["detail"] for one in listed if one["sample_id"] == "p3")
    assert summary["skipped"] == {f"not answered: {reason}": 1 for reason in reasons.values()}
    assert summary["unanswered"] == 4
    assert {name for name, _, _ in tokens(tmp_path / "data")} == {row["id"] for row in ROWS} - set(reasons)


def test_too_many_failures_publish_nothing_and_the_next_go_asks_only_them(
    there: Any, model: Any, tmp_path: Path, here: Any
) -> None:
    failing = {key(row) for row in ROWS[:3]}
    with serving(model, fault=lambda prompt, _: "500" if prompt in failing else None) as server:
        with pytest.raises(PrepareFailed, match=r"3 of 16 questions were not answered \(HTTP 500: 3\), listed in .*unanswered"):
            prepare.prepare(there(server, server_retries=1))
        assert not (tmp_path / "data").exists()
        server.fault = lambda _prompt, _times: None
        assert prepare.prepare(there(server))["resumed_answers"] == 13
    assert tokens(tmp_path / "data") == here
    assert set(server.answered.values()) == {1}


def test_a_server_that_dies_for_good_ends_with_1_and_the_command_that_goes_on(
    target: Path, model: Any, tmp_path: Path, here: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(_prompt: str, _times: int) -> str | None:
        if sum(server.answered.values()) >= 9:
            server.die()
            return "dead"
        return None

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["prepare", "--prompts", str(prompts), "--output", str(tmp_path / "data"), "--heldout-fraction", "0"]
    arguments += ["--target.path", str(target), "--max-new-tokens", "12", "--server-concurrency", "4", "--server-retries", "2"]
    arguments += ["--server-backoff-seconds", "0.001", "--target.dtype", "float32"]
    with serving(model, fault=dies) as server:
        assert main.main([*arguments, "--server", server.url]) == 1
        said = capsys.readouterr().err
    assert f"nothing answers at {server.url} any more" in said
    assert f"go on with: python -m dflash prepare --prompts {prompts}" in said
    assert not (tmp_path / "data").exists()
    with serving(model) as other:
        assert main.main([*arguments, "--server", other.url]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    sent = sum(server.answered.values())
    assert sent >= 9
    under_way = 3  # of four requests at a time, those that end because another one found the server gone
    assert sent - under_way <= summary["resumed_answers"] <= sent
    assert sum(other.asked.values()) == len(ROWS) - summary["resumed_answers"]
    assert tokens(tmp_path / "data") == here


def test_a_server_that_fails_on_everything_is_given_up_before_all_are_asked(
    there: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FAILURES_IN_A_ROW", 5)
    with (
        serving(model, fault=lambda _prompt, _times: "422") as server,
        pytest.raises(PrepareFailed, match=r"5 questions in a row .*HTTP 422.*planted.*--no-server-extras"),
    ):
        prepare.prepare(there(server, server_concurrency=1))
    assert sum(server.asked.values()) == 5


def test_a_prepare_that_is_killed_asks_nothing_again_that_it_kept(there: Any, model: Any, tmp_path: Path, here: Any) -> None:
    def kills(_prompt: str, _times: int) -> str | None:
        if sum(server.answered.values()) >= 8:
            os.kill(child.pid, signal.SIGKILL)
        return None

    with serving(model, fault=kills) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of a process with threads, from Python 3.12 on
        config = there(server, server_concurrency=3)
        child = multiprocessing.get_context("fork").Process(target=prepare.prepare, args=(config,))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        journal = tmp_path / ".data.answers" / "answers.jsonl"
        kept = {json.loads(line)["sample_id"] for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")}
        assert 0 < len(kept) < len(ROWS)
        server.fault = lambda _prompt, _times: None
        server.asked.clear()
        summary = prepare.prepare(config)
    assert summary["resumed_answers"] == len(kept)
    assert set(server.asked) == {key(row) for row in ROWS if row["id"] not in kept}
    assert tokens(tmp_path / "data") == here


def test_answers_that_came_are_kept_when_another_question_ends_everything(there: Any, model: Any, tmp_path: Path) -> None:
    with (
        serving(model, fault=lambda prompt, _: "401" if prompt == key(ROWS[-1]) else None) as server,
        pytest.raises(ConfigError, match=r"HTTP 401 .*--server-key-variable"),
    ):
        prepare.prepare(there(server, server_concurrency=1))
    lines = (tmp_path / ".data.answers" / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["sample_id"] for line in lines} == {row["id"] for row in ROWS[:-1]}


def test_a_request_asks_for_token_ids_and_the_raw_distribution(there: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(model) as server:
        prepare.prepare(there(server, ROWS[:1], temperature=0.5, server_key_variable="MY_KEY"))
    (body,) = server.bodies
    assert body["prompt"] == json.loads(key(ROWS[0]))
    assert (body["return_token_ids"], body["stop_token_ids"]) == (True, [TOKENIZER.eos_token_id])
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert (body["model"], body["max_tokens"], body["temperature"], type(body["seed"])) == ("tiny", 12, 0.5, int)
    assert server.headers_seen[0]["Authorization"] == "Bearer secret"


def test_without_extras_only_words_of_openai_are_said(there: Any, model: Any) -> None:
    with serving(model) as server:
        prepare.prepare(there(server, ROWS[:1], server_api="chat", server_extras=False))
    assert set(server.bodies[0]) == {"model", "messages", "max_tokens", "temperature", "top_p", "stream"}


def test_as_many_requests_are_under_way_as_allowed_and_no_more(there: Any, model: Any) -> None:
    together = threading.Barrier(3)

    def fault(_prompt: str, _times: int) -> None:
        if sum(server.asked.values()) <= 3:
            together.wait(60)
            time.sleep(0.2)  # one request too many would come now; none does however long this is

    with serving(model, fault=fault) as server:
        prepare.prepare(there(server, server_concurrency=3))
    assert server.most_at_one_time == 3


def test_retry_after_holds_back_every_request(there: Any, model: Any, tmp_path: Path) -> None:
    with serving(model, fault=lambda prompt, times: "later" if prompt == key(ROWS[0]) and times == 0 else None) as server:
        prepare.prepare(there(server, ROWS[:3], server_concurrency=1))
    assert len(tokens(tmp_path / "data")) == 3
    assert server.arrivals[1] - server.arrivals[0] >= 1.0  # a lower bound: slow machines only add to it


def test_a_server_with_another_template_is_refused(there: Any, model: Any, tmp_path: Path) -> None:
    path = saved_target(tmp_path / "thinking", THINKING)
    with (
        serving(model) as server,
        pytest.raises(DataError, match=r"they differ from token \d+ on .*'<think.*another chat template"),
    ):
        prepare.prepare(there(server, target=TargetConfig(path=str(path)), server_api="chat"))


def test_a_server_with_another_vocabulary_is_refused(there: Any, model: Any) -> None:
    def change(reply: dict[str, Any]) -> None:
        reply["choices"][0]["token_ids"] = [3, 272]

    with (
        serving(model, change=change) as server,
        pytest.raises(DataError, match=r"answers with token id 272, .*a vocabulary of 272"),
    ):
        prepare.prepare(there(server))


def test_reasoning_that_was_taken_out_of_the_text_is_not_made_up(there: Any, model: Any) -> None:
    def change(reply: dict[str, Any]) -> None:
        reply["choices"][0]["message"]["reasoning_content"] = "hm"

    with (
        serving(model, gives_ids=False, change=change) as server,
        pytest.raises(PrepareFailed, match="took reasoning_content out of the text"),
    ):
        prepare.prepare(there(server, ROWS[:1], server_api="chat"))


def test_answers_of_one_model_are_not_gone_on_with_by_another(there: Any, model: Any) -> None:
    with serving(model, fault=lambda prompt, _: "500" if prompt == key(ROWS[0]) else None) as server:
        with pytest.raises(PrepareFailed, match="1 of 16 questions were not answered"):
            prepare.prepare(there(server, server_retries=0))
        server.models = ["another"]
        with pytest.raises(DataError, match="answers that were made with another server: use the same settings"):
            prepare.prepare(there(server))


@pytest.mark.parametrize(
    ("models", "asked", "message"),
    [
        (["a", "b"], None, r"names 2 models \(a, b\): name one with --server-model"),
        ([], None, r"names 0 models"),
        (["a"], "b", "has no model 'b', found a: name one with --server-model"),
    ],
)
def test_a_model_that_is_not_there_is_refused(there: Any, model: Any, models: list[str], asked: str | None, message: str) -> None:
    with serving(model, models=models) as server, pytest.raises(ConfigError, match=message):
        prepare.prepare(there(server, server_model=asked))


def test_settings_of_a_server_that_cannot_work_say_what_to_change(there: Any, configure: Any, model: Any) -> None:
    with serving(model) as server:
        wrong_root = there(server, server=server.url.removesuffix("/v1") + "/v2")
        for changes, message in (
            ({"server": "localhost:8000"}, "use the root of its API"),
            ({"server_concurrency": 0}, "server-concurrency is 0: use at least 1"),
            ({"server_requests_per_second": 0.0}, "server-requests-per-second is 0.0: use a positive number"),
            ({"server_max_unanswered": 2.0}, "server-max-unanswered is 2.0"),
        ):
            with pytest.raises(ConfigError, match=message):
                there(server, **changes)
        with pytest.raises(ConfigError, match="variable NO_SUCH_KEY is empty or not set"):
            prepare.prepare(there(server, server_key_variable="NO_SUCH_KEY"))
        with pytest.raises(ConfigError, match="a server needs a target with tokenizer"):
            prepare.prepare(there(server, target=TargetConfig(path="random:qwen3")))
    assert wrong_root.server
    with pytest.raises(ConfigError, match="server-model has no meaning without --server: add it"):
        configure(ROWS, server_model="a")
    with pytest.raises(PrepareFailed, match=r"does not answer .*: start the server"):
        prepare.prepare(there(server))
