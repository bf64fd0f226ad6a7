"""The only file that changes torch in order to observe it.

A point is one function. While anyone listens to it, it leads to a list of subscribers around the original; subscribers
come and go in any order, and when the last one goes everything is the same object as before. (Saving and restoring in
nested order is what breaks when lifetimes overlap: the failure F5 that these probes look for.) A point is checked when it
is attached, not when it fires: a function that is missing or has other parameters raises `NotObservable`, and the caller
reports the run as not observed.

A function of torch gets other code, not another object in its place: `torch.compile` keeps references to the check of the
tracing flag, and wraps `Tracer.trace` at its first use, so that a replacement would be missed, or wrapped for ever, and
Dynamo would look at it where it is off while it calls the original.

Observation must not change what is observed: a subscriber that raises is reported, never the program's problem. What
remains visible: the observed function stands twice in a stack trace, once at its `def` line, and a few microseconds a call.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from diagnostics.code_like import code_like
from diagnostics.imports import exists, when_imported

Finish = Callable[[Any, BaseException | None], None]  # called with the result, or None and the exception
Subscriber = Callable[[tuple[Any, ...], dict[str, Any]], Finish | None]  # called before the original, with its arguments
Report = Callable[[str], None]
_Entry = tuple[Subscriber, Report]
_Finishes = list[tuple[Finish, Report]]
_ABSENT = object()
CALLS_BETWEEN_SAMPLES = 10_000  # what a sample looks at takes 0.2 ms


class NotObservable(RuntimeError):
    """This torch does not have what a probe attaches to."""


class Point(abc.ABC):
    """A function that calls subscribers while there are any."""

    def __init__(self, module: str, name: str) -> None:
        """`name` may be dotted."""
        self.module, self.name = module, name
        self._lock = threading.Lock()
        self._subscribers: tuple[_Entry, ...] = ()
        self._original: Callable[..., Any] | None = None
        self._installed = False
        self._forget: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @contextlib.contextmanager
    def subscribed(self, subscriber: Subscriber, report: Report) -> Iterator[None]:
        """Call `subscriber` around every call inside the block; `report` gets sentences about what went unobserved.

        Raises NotObservable when the function is missing or has other parameters. A module that nobody has imported yet is
        left so: the function is checked when it comes, and `report` hears if it is not as expected.
        """
        entry = (subscriber, report)
        with self._lock:
            if not self._subscribers:
                self._install_in_time()
            self._subscribers = (*self._subscribers, entry)
        try:
            yield
        finally:
            with self._lock:
                self._subscribers = tuple(kept for kept in self._subscribers if kept is not entry)
                if not self._installed:
                    if not self._subscribers:
                        self._forget()
                elif not self._in_place():
                    report(f"the program replaced {self} while it was observed: later calls were not observed")
                elif not self._subscribers:
                    self._remove()
                    self._installed = False

    def _install_in_time(self) -> None:
        self._installed = False
        if self.module in sys.modules or not exists(self.module):
            self._install()  # also says that there is no such module
            self._installed = True
        else:
            self._forget = when_imported(self.module, self._install_late)

    def _install_late(self) -> None:
        with self._lock:
            if not self._subscribers:
                return
            try:
                self._install()
                self._installed = True
            except NotObservable as reason:
                for _, report in self._subscribers:
                    report(str(reason))

    def begin(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Finishes:
        """Tell the subscribers that a call begins."""
        return _begin(self._subscribers, arguments, keywords)

    @abc.abstractmethod
    def _install(self) -> None:
        """Lead calls to the subscribers and `_original`, which stays: somebody may have kept what is installed."""

    @abc.abstractmethod
    def _in_place(self) -> bool:
        """What was installed is still there."""

    @abc.abstractmethod
    def _remove(self) -> None:
        """Undo `_install`."""

    def _owner(self) -> tuple[Any, str]:
        try:
            owner: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise NotObservable(f"this torch has no module {self.module}: what it does is not observed") from error
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if not callable(getattr(owner, attribute, None)):
            raise NotObservable(f"this torch has no {self}: what it does is not observed")
        return owner, attribute


class Function(Point):
    """A function written in Python, whoever holds it and whatever wraps it."""

    def __init__(self, module: str, name: str, parameters: tuple[str, ...], *, only: bool = False) -> None:
        """`parameters` are the first ones that the function must have; with `only` it has no others."""
        super().__init__(module, name)
        self._parameters, self._only = parameters, only
        self._function: types.FunctionType | None = None
        self._copy: types.FunctionType | None = None  # has the original code, and gets the code that isolation gives functions
        self._code: types.CodeType | None = None

    def _install(self) -> None:
        owner, attribute = self._owner()
        function = inspect.unwrap(getattr(owner, attribute))
        if not isinstance(function, types.FunctionType):
            raise NotObservable(f"{self} is not a plain function on this torch: it is not observed")
        found = tuple(inspect.signature(function).parameters)
        if found[: len(self._parameters)] != self._parameters or (self._only and len(found) != len(self._parameters)):
            expected = ", ".join(self._parameters)
            raise NotObservable(f"{self} takes ({', '.join(found)}) on this torch, expected ({expected}): it is not observed")
        code, closure = function.__code__, function.__closure__
        original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        original.__kwdefaults__ = function.__kwdefaults__
        self._original = self._copy = original
        self._function = function
        self._code = self._observing()
        function.__code__ = self._code

    def _observing(self) -> types.CodeType:
        """The code that torch's function gets."""
        assert self._copy is not None
        code = self._copy.__code__
        return _observing(code, code.co_freevars, begin=self.begin, original=self._original)

    def _in_place(self) -> bool:
        return self._function is not None and self._function.__code__ is self._code

    def _remove(self) -> None:
        assert self._function is not None
        assert self._copy is not None
        self._function.__code__ = self._copy.__code__


class Check(Function):
    """A function without arguments that is asked all the time and answers False: whoever hears of true answers only is cheap.

    Where nobody hears of every call and `listen(on=False)` said that none can answer true, torch's own code runs: free of cost.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(module, name, (), only=True)
        self._every: list[None] = []  # one for each subscriber that hears of every call

    @contextlib.contextmanager
    def subscribed(self, subscriber: Subscriber, report: Report) -> Iterator[None]:
        """As for every point: `subscriber` hears of every call."""
        self._every.append(None)
        try:
            with super().subscribed(subscriber, report):
                self.listen(on=True)
                yield
        finally:
            self._every.pop()

    @contextlib.contextmanager
    def subscribed_to_answers(self, subscriber: Subscriber, report: Report) -> Iterator[None]:
        """`subscriber` hears of each call that answers true, and of one in CALLS_BETWEEN_SAMPLES of the others."""
        with super().subscribed(subscriber, report):
            self.listen(on=True)
            yield

    def listen(self, *, on: bool) -> None:
        """Hear of calls from now on, or not; takes no lock, and is not for two threads at a time."""
        if self._installed and self._in_place():
            assert self._function is not None
            assert self._copy is not None
            assert self._code is not None
            self._function.__code__ = self._code if on or self._every else self._copy.__code__

    def _in_place(self) -> bool:
        if self._function is None or self._copy is None:
            return False
        return self._function.__code__ is self._code or self._function.__code__ is self._copy.__code__

    def _observed(self) -> Any:
        assert self._original is not None
        return call_observed(self._original, self._subscribers, (), {})

    def _answered(self, answer: Any) -> None:
        _end(self.begin((), {}), answer, None)

    def _observing(self) -> types.CodeType:
        assert self._copy is not None
        sample = itertools.cycle([False] * (CALLS_BETWEEN_SAMPLES - 1) + [True]).__next__
        return code_like(
            _CHECKING,
            self._copy.__code__,
            cells=self._copy.__code__.co_freevars,
            original=self._original,
            every=self._every,
            observed=self._observed,
            sample=sample,
            answered=self._answered,
        )


class Hook(Point):
    """A function that Python looks up by name each time it needs it."""

    _hook: Any = None

    def _install(self) -> None:
        owner, attribute = self._owner()
        self._original = getattr(owner, attribute)
        original = self._original

        def hook(*arguments: Any, **keywords: Any) -> Any:
            # A program that replaces the hook may keep this one and call it after the probes came off.
            return call_observed(original, self._subscribers, arguments, keywords)

        self._hook = hook
        setattr(owner, attribute, hook)

    def _in_place(self) -> bool:
        owner, attribute = self._owner()
        return getattr(owner, attribute) is self._hook

    def _remove(self) -> None:
        owner, attribute = self._owner()
        setattr(owner, attribute, self._original)


class Lock(Hook):
    """A lock that torch looks up by name whenever it needs it. Subscribers hear `("acquire",)` and `("release",)`."""

    def _install(self) -> None:
        owner, attribute = self._owner()
        original = getattr(owner, attribute)
        if not all(hasattr(original, method) for method in ("acquire", "release", "__enter__", "__exit__")):
            raise NotObservable(f"{self} is no lock on this torch: who waits for it is not observed")
        self._original = original
        self._hook = _WatchedLock(original, lambda: self._subscribers)
        setattr(owner, attribute, self._hook)

    def _owner(self) -> tuple[Any, str]:
        module = importlib.import_module(self.module) if exists(self.module) else None
        if not hasattr(module, self.name):
            raise NotObservable(f"this torch has no {self}: who waits for it is not observed")
        return module, self.name


class _WatchedLock:
    """A lock with subscribers around its `acquire` and `release`; everything else is the lock's own."""

    def __init__(self, lock: Any, subscribers: Callable[[], tuple[_Entry, ...]]) -> None:
        self._lock, self._subscribers = lock, subscribers

    def acquire(self, *arguments: Any, **keywords: Any) -> Any:
        return call_observed(lambda _what: self._lock.acquire(*arguments, **keywords), self._subscribers(), ("acquire",), {})

    def release(self) -> None:
        call_observed(lambda _what: self._lock.release(), self._subscribers(), ("release",), {})

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@contextlib.contextmanager
def instance_observed(instance: Any, method: str, subscriber: Subscriber, report: Report) -> Iterator[None]:
    """Call `subscriber` around every call of one object's method inside the block; the class stays as it is."""
    original = getattr(instance, method)
    like = getattr(original, "__code__", _end.__code__)  # of a bound method, too
    entries = ((subscriber, report),)
    code = _observing(like, (), begin=functools.partial(_begin, entries), original=original)
    observed = types.FunctionType(code, {}, method)
    previous = vars(instance).get(method, _ABSENT)
    setattr(instance, method, observed)
    try:
        yield
    finally:
        if vars(instance).get(method) is not observed:
            report(f"{type(instance).__name__}.{method} of one object was replaced while it was observed")
        elif previous is _ABSENT:
            delattr(instance, method)
        else:
            setattr(instance, method, previous)


def call_observed(
    original: Callable[..., Any], subscribers: tuple[_Entry, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call `original` with `subscribers` around it."""
    finishes = _begin(subscribers, arguments, keywords)
    result, raised = None, None
    try:
        result = original(*arguments, **keywords)
    except BaseException as error:
        raised = error
        raise
    finally:
        _end(finishes, result, raised)
        raised = None  # no cycle of the exception and this frame
    return result


def _begin(subscribers: tuple[_Entry, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Finishes:
    finishes: _Finishes = []
    for subscriber, report in subscribers:
        try:
            finish = subscriber(arguments, keywords)
        except Exception as error:  # noqa: BLE001 - a probe's defect must not become the program's
            report(f"a probe failed at the start of a call: {type(error).__name__}: {error}")
        else:
            if finish is not None:
                finishes.append((finish, report))
    return finishes


def _end(finishes: _Finishes, result: Any, error: BaseException | None) -> None:
    for finish, report in reversed(finishes):
        try:
            finish(result, error)
        except Exception as defect:  # noqa: BLE001 - a probe's defect must not become the program's
            report(f"a probe failed at the end of a call: {type(defect).__name__}: {defect}")


# The code that an observed function gets. In it, and nowhere else, the original is called: a stack trace shows no frame of ours.
_OBSERVING = """
finishes = begin(arguments, keywords)
try:
    result = original(*arguments, **keywords)
except everything as error:
    end(finishes, None, error)
    raise
end(finishes, result, None)
return result
"""
_CHECKING = """
if every:
    return observed()
answer = original()
if answer or sample():
    answered(answer)
return answer
"""


def _observing(like: types.CodeType, cells: tuple[str, ...], **objects: Any) -> types.CodeType:
    return code_like(_OBSERVING, like, cells=cells, end=_end, everything=BaseException, **objects)


TRACE = Function("torch.fx._symbolic_trace", "Tracer.trace", ("self", "root"))
COMPILE = Function("torch._dynamo.convert_frame", "_compile", ("code",))
FRAME = Function(
    "torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__", ("self", "frame", "cache_entry", "frame_state"), only=True
)
FLAG_CHECK = Check("torch.fx._symbolic_trace", "is_fx_symbolic_tracing")
GRAPH = Function("torch._functorch._aot_autograd.logging_utils", "track_graph_compiling", ("aot_config", "graph_name"))
SETTING = Function("torch.utils._config_module", "ConfigModule.__setattr__", ("self", "name", "value"), only=True)
STANCE = Function("torch._dynamo.decorators", "set_stance.__init__", ("self", "stance"))
STANCE_CALLBACK = Function("torch._dynamo.eval_frame", "_callback_from_stance", ("callback",), only=True)
RANDOM_STATE = Function("torch.random", "set_rng_state", ("new_state",), only=True)
DEFAULT_DTYPE = Function("torch", "set_default_dtype", ("d",), only=True)
IS_COMPILING = Check("torch.compiler", "is_compiling")
COMPILE_LOCK = Lock("torch._dynamo.convert_frame", "compile_lock")
THREAD_EXCEPTION = Hook("threading", "excepthook")
