"""Many questions to a server at a time: paced, asked again after faults, kept as their answers come.

Every answer is handed to `keep` before the next question of the same worker is asked, many together when many came together;
so a run that is killed has lost only what was under way. A question that failed for good is listed, with what the server said.
When a question fails after all its tries and nothing answers at the server's address, or so many questions fail in a row
that the fault is not theirs, asking ends with `PrepareFailed`.

All of it runs in one thread, in asyncio's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dflash.command_config import PrepareConfig
from dflash.data.answers import Answer, Unanswered
from dflash.data.generate import Question
from dflash.data.meta import PrepareFailed
from dflash.data.retrying import RequestSchedule, backoff_seconds
from dflash.data.server import Refused, Served, Server, Unavailable
from dflash.data.shelf import Prompt, PromptShelf

FAILURES_IN_A_ROW = 20  # without an answer between them: the server is at fault

Keep = Callable[[Sequence[tuple[Question, Answer]]], None]


@dataclass
class Tally:
    """What asking took; filled while it goes on, and whole when it ended early."""

    requests: int = 0
    retries: Counter[str] = field(default_factory=Counter)  # by reason
    unanswered: list[Unanswered] = field(default_factory=list)


def model_name(config: PrepareConfig, served: Served) -> str:
    """The name of the target at the server: as configured, else that of its only model.

    Raises PrepareFailed when nothing answers there, ConfigError when it has no such model.
    """

    async def chosen() -> str:
        async with Server(config, served) as server:
            await server.choose_model()
            return server.model

    return asyncio.run(chosen())


def ask_all(
    config: PrepareConfig, served: Served, questions: Iterable[Question], prompts: PromptShelf, keep: Keep, tally: Tally
) -> None:
    """Ask all `questions`; answers go to `keep`, the rest to `tally`.

    Raises PrepareFailed when the server is gone or fails on everything, ConfigError or DataError when it cannot be the target's,
    and whatever `keep` raises; answers that have come are kept before.
    """
    asyncio.run(_ask_all(config, served, questions, prompts, keep, tally))


async def _ask_all(
    config: PrepareConfig, served: Served, questions: Iterable[Question], prompts: PromptShelf, keep: Keep, tally: Tally
) -> None:
    async with Server(config, served) as server:
        await server.choose_model()
        asker = _Asker(config, server, prompts, keep, tally)
        pending = iter(questions)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(config.server_concurrency):
                    group.create_task(asker.work(pending))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            asker.flush()


class _Asker:
    """The workers' shared state; only the thread of the loop touches it."""

    def __init__(self, config: PrepareConfig, server: Server, prompts: PromptShelf, keep: Keep, tally: Tally) -> None:
        self._config = config
        self._server = server
        self._prompts = prompts
        self._keep = keep
        self._tally = tally
        self._schedule = RequestSchedule(config.server_requests_per_second)
        self._arrived: list[tuple[Question, Answer]] = []
        self._failed_in_a_row = 0

    async def work(self, pending: Iterator[Question]) -> None:
        """Take questions until there are none."""
        for question in pending:
            outcome = await self._outcome(question)
            if isinstance(outcome, Unanswered):
                self._failed(outcome)
            else:
                self._failed_in_a_row = 0
                self._arrived.append((question, outcome))
                await asyncio.sleep(0)  # answers that came at the same time are kept by one write
                self.flush()

    def flush(self) -> None:
        """Keep what has arrived."""
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._keep(arrived)

    async def _outcome(self, question: Question) -> Answer | Unanswered:
        for attempt in range(self._config.server_retries + 1):
            await self._turn()
            self._tally.requests += 1
            try:
                return await self._server.ask(question, self._prompt(question))
            except Refused as refused:
                return self._unanswered(question, refused, attempt + 1)
            except Unavailable as unavailable:
                failure = unavailable
            if attempt < self._config.server_retries:
                self._tally.retries[failure.reason] += 1
                await self._wait(failure, attempt, question)
        if not await self._server.answers_at_all():
            self._tally.unanswered.append(self._unanswered(question, failure, attempt + 1))
            raise PrepareFailed(f"nothing answers at {self._server.root} any more (at last: {failure.detail})")
        return self._unanswered(question, failure, attempt + 1)

    def _prompt(self, question: Question) -> Prompt:
        found = self._prompts.get(question.sample_id)
        assert found is not None  # every question is on the shelf with its prompt
        return found

    async def _turn(self) -> None:
        """Wait for a start that the schedule gives; a pause that begins meanwhile is waited for, too."""
        now = asyncio.get_running_loop().time
        start = self._schedule.reserve(now())
        while (seconds := max(start, self._schedule.paused_until) - now()) > 0:
            await asyncio.sleep(seconds)

    async def _wait(self, failure: Unavailable, attempt: int, question: Question) -> None:
        if failure.wait_seconds > 0:
            self._schedule.pause(asyncio.get_running_loop().time() + failure.wait_seconds)
        base, seed = self._config.server_backoff_seconds, self._config.seed
        await asyncio.sleep(backoff_seconds(base, attempt, seed=seed, sample_id=question.sample_id))

    def _unanswered(self, question: Question, failure: Refused | Unavailable, tries: int) -> Unanswered:
        return Unanswered(sample_id=question.sample_id, reason=failure.reason, detail=failure.detail, tries=tries)

    def _failed(self, unanswered: Unanswered) -> None:
        self._tally.unanswered.append(unanswered)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILURES_IN_A_ROW:
            raise PrepareFailed(
                f"{self._failed_in_a_row} questions in a row were not answered by {self._server.root} "
                f"(at last: {unanswered.reason}: {unanswered.detail}); where it does not know a field, use --no-server-extras"
            )
