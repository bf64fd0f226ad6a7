import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config as functorch
import torch.fx
from torch import nn
from torch._dynamo import config as dynamo

from dflash import compile_counts, compile_policy
from dflash.compile_policy import CompilePolicy, RecompileError
from dflash.config import CompileConfig, ConfigError, DataConfig, RunConfig
from dflash.fx.isolation import is_isolated

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def make(**changes: object) -> CompilePolicy:
    return CompilePolicy(CompileConfig(**({"policy": "prewarm", "backend": "eager"} | changes)), num_drafters=3)  # type: ignore[arg-type]


def test_warnings_from_before_the_run_do_not_count_and_new_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = ["flex ran unfused"]
    monkeypatch.setattr(compile_counts.seams, "fallback_warnings", lambda: tuple(warnings))
    policy = make()
    with policy.watching():
        policy.check()
        warnings.append("something else ran uncompiled")
        with pytest.raises(RecompileError, match="something else ran uncompiled"):
            policy.check()
        assert policy.report().fallbacks == ("something else ran uncompiled",)


def test_a_new_shape_after_the_freeze_names_the_guard() -> None:
    policy = make()
    call = policy.compiled(nn.Linear(4, 2))
    with policy.watching():
        call(torch.ones(3, 4))
        with policy.frozen():
            call(torch.zeros(3, 4))
            with pytest.raises(RuntimeError, match=r"fail_on_recompile(.|\n)*size mismatch"):
                call(torch.ones(5, 4))


def test_a_refused_compile_in_a_worker_says_what_it_is_and_what_to_do() -> None:
    policy = make()
    call = policy.compiled(nn.Linear(4, 2))
    cpu = torch.device("cpu")
    with policy.watching():
        with policy.turn("drafter-0", "training", cpu):
            call(torch.ones(3, 4))
        with policy.frozen(), policy.turn("drafter-0", "training", cpu):
            pass
        refused = pytest.raises(RecompileError, match=r"^compiled after warm-up(.|\n)*size mismatch(.|\n)*allow-recompiles")
        with policy.frozen(), refused, policy.turn("drafter-0", "training", cpu):
            call(torch.ones(5, 4))
        with policy.frozen(), pytest.raises(RuntimeError, match=r"^another$"), policy.turn("drafter-0", "training", cpu):
            raise RuntimeError("another")


def test_runs_and_calls_are_counted_apart() -> None:
    policy = make()
    call = policy.compiled(nn.Linear(4, 2))
    with policy.watching():
        call(torch.ones(3, 4))
        call(torch.ones(3, 4))
        with torch.compiler.set_stance("force_eager"):
            call(torch.ones(3, 4))
        report = policy.report()
    assert (report.calls, report.graph_runs) == (3, 2)
    assert report.fallbacks == ("1 of 3 calls of compiled functions ran no compiled graph",)


def test_a_call_that_still_runs_in_another_thread_is_no_fallback_and_hides_none() -> None:
    policy = make()
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    compiled = policy.compiled(Slow())
    with policy.watching():
        compiled(torch.ones(3))
        waits = policy._counts.counting_calls(lambda: (inside.set(), go_on.wait(20)))
        thread = threading.Thread(target=waits)
        thread.start()
        assert inside.wait(20)
        assert policy.report().fallbacks == ()
        with torch.compiler.set_stance("force_eager"):
            compiled(torch.ones(3))
        assert policy.report().fallbacks == ("1 of 2 calls of compiled functions ran no compiled graph",)
        go_on.set()
        thread.join()
        assert policy.report().fallbacks == ("2 of 3 calls of compiled functions ran no compiled graph",)


def test_the_recompile_limit_has_room_for_all_drafters_and_is_restored() -> None:
    before = torch._dynamo.config.recompile_limit
    with make().watching():
        assert torch._dynamo.config.recompile_limit >= 3 * compile_policy.KINDS * compile_policy.COMPILES_PER_KIND
    assert torch._dynamo.config.recompile_limit == before


def test_eager_compiles_nothing_and_an_unknown_backend_is_refused() -> None:
    module = nn.Linear(4, 2)
    assert make(policy="eager").compiled(module) is module
    with pytest.raises(ConfigError, match="'magic' is not known"):
        make(backend="magic").compiled(module)


def test_cache_entries_stay_in_place_while_frozen_and_move_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_set_lru_cache", switched.append)
    with make().frozen():
        assert switched == [False]
    assert switched == [False, True]


def in_a_thread(function: Callable[[], object]) -> object:
    """What `function` returns, or the exception that it raises, in a new thread."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(function())
        except (ConfigError, RuntimeError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    return found[0]


@pytest.mark.parametrize("policy", ["prewarm", "isolate", "lock", "force", "none", "eager"])
def test_only_the_isolated_policies_isolate_and_all_of_them_leave_the_process_as_it_was(policy: str) -> None:
    before = {name: getattr(dynamo, name) for name in ("recompile_limit", "force_compile_during_fx_trace")}
    with make(policy=policy).watching():
        assert is_isolated() == (policy in {"prewarm", "isolate"})
        assert dynamo.force_compile_during_fx_trace == (policy == "force")
    assert not is_isolated()
    assert before == {name: getattr(dynamo, name) for name in before}


@pytest.mark.parametrize("policy", ["prewarm", "isolate", "lock", "force"])
def test_settings_hold_in_every_worker_thread_and_are_gone_with_it(policy: str) -> None:
    made = make(policy=policy)

    def seen() -> tuple[int, bool]:
        with made.in_worker():
            return dynamo.recompile_limit, dynamo.force_compile_during_fx_trace

    default = dynamo.recompile_limit
    with made.watching():
        assert in_a_thread(seen) == (12, policy == "force")
        assert in_a_thread(seen) == (12, policy == "force")
    assert in_a_thread(lambda: dynamo.recompile_limit) == default


def test_a_setting_that_does_not_hold_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    with made.watching():
        made._settings["recompile_limit"] = 99
        lost = SimpleNamespace(recompile_limit=8, patch=lambda **_: contextlib.nullcontext())  # somebody else's value wins
        monkeypatch.setattr(compile_policy, "dynamo", lost)
        error = in_a_thread(lambda: made.in_worker().__enter__())
    assert isinstance(error, ConfigError)
    assert "recompile_limit" in str(error)
    assert "99" in str(error)


@pytest.mark.parametrize(("policy", "device_threads"), [("prewarm", False), ("isolate", False), ("lock", True), ("none", True)])
def test_isolated_policies_run_backward_in_the_calling_thread(policy: str, device_threads: bool) -> None:
    made = make(policy=policy)

    def seen() -> bool:
        with made.in_worker():
            return bool(torch._C._is_multithreading_enabled())

    with made.watching():
        assert in_a_thread(seen) == device_threads
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("policy", ["isolate", "lock", "force", "none"])
def test_without_a_warm_up_the_first_micro_batch_of_a_kind_may_compile_and_later_ones_may_not(policy: str) -> None:
    made = make(policy=policy)
    call = made.compiled(nn.Linear(4, 2))
    with made.watching(), made.frozen():
        with made.turn("drafter-0", "training", CPU):
            call(torch.ones(3, 4))
        with made.turn("drafter-0", "validation", CPU), torch.no_grad():
            call(torch.ones(3, 4))
        with made.turn("drafter-0", "training", CPU):
            call(torch.ones(3, 4))
        made.check()
        assert made.report().compiles_in_warmup == 2
        with made.turn("drafter-0", "training", CPU):
            call(torch.ones(5, 4))
        with pytest.raises(RecompileError, match=r"in thread MainThread(.|\n)*size mismatch at index 0. expected 3, actual 5"):
            made.check()


def test_under_lock_a_first_micro_batch_waits_for_all_others_and_later_ones_do_not() -> None:
    made = make(policy="lock")
    for worker in ("a", "b"):
        with made.turn(worker, "training", CPU):
            pass
    both = threading.Barrier(2, timeout=60)

    def again() -> int:
        with made.turn("a", "training", CPU):
            return both.wait()

    inside, go = threading.Event(), threading.Event()

    def first() -> bool:
        with made.turn("c", "training", CPU):
            inside.set()
            return go.wait(60)

    with made.turn("b", "training", CPU):
        assert in_a_thread_beside(again, both.wait) in (0, 1)
    thread = threading.Thread(target=first)
    with made.turn("b", "training", CPU):
        thread.start()
        assert not inside.wait(0.2)  # a limit, not a race: it must stay out for as long as this turn lasts
    assert inside.wait(60)
    go.set()
    thread.join(60)


def test_under_isolate_the_first_of_a_device_compiles_alone_there_and_the_others_go_on_together() -> None:
    made = make(policy="isolate")
    entered: list[str] = []
    both = threading.Barrier(2, timeout=60)

    def follow(worker: str) -> None:
        with made.turn(worker, "training", CPU):
            entered.append(worker)
            both.wait()  # nobody would pass alone

    followers = [threading.Thread(target=follow, args=(worker,)) for worker in ("b", "c")]
    with made.turn("a", "training", CPU):
        for thread in followers:
            thread.start()
        with made.turn("d", "training", OTHER), made.turn("e", "validation", CPU):  # neither waits
            entered.append("others")
        followers[0].join(0.2)  # a limit, not a race: it must stay out for as long as this turn lasts
        assert entered == ["others"]
    for thread in followers:
        thread.join(60)
    assert sorted(entered) == ["b", "c", "others"]
    assert not both.broken


def test_under_isolate_a_failed_first_micro_batch_leaves_the_turn_to_the_next() -> None:
    made = make(policy="isolate")
    with pytest.raises(ZeroDivisionError), made.turn("a", "training", CPU):
        raise ZeroDivisionError
    with made.turn("b", "training", CPU):
        assert in_a_thread(made._firsts[CPU, "training"].locked)  # it compiles alone, as the first


def in_a_thread_beside(function: Callable[[], object], beside: Callable[[], object]) -> object:
    """Both at once; what `function` returns."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    beside()
    thread.join(60)
    return found[0]


def test_isolation_that_cannot_be_had_is_refused_with_the_way_out() -> None:
    parked, go = threading.Event(), threading.Event()

    class Parking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parked.set()
            go.wait(60)
            return x

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(Parking()))
    thread.start()
    assert parked.wait(60)
    try:
        with pytest.raises(ConfigError, match=r"traces(.|\n)*--compile.policy lock"), make().watching():
            pass
    finally:
        go.set()
        thread.join(60)


def test_force_is_refused_where_torch_has_no_such_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_policy, "_FORCE", "force_nothing")
    with pytest.raises(ConfigError, match="has no force_nothing; use prewarm or isolate"):
        make(policy="force")


def test_backward_keeps_less_and_gives_the_same_where_memory_is_asked_for() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(nn.functional.silu(self.up(x)).square().sin())
            return out

    mlp, kept, gradients = Mlp(), [], []
    for share in (1.0, 0.0):
        torch._dynamo.reset()
        policy = make(policy="prewarm", backend="aot_eager_decomp_partition", activation_memory=share)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        call = policy.compiled(mlp)
        with policy.watching(), policy.in_worker(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = call(torch.linspace(-1, 1, 256 * 64).view(256, 64)).square().sum()
        gradients.append(torch.autograd.grad(loss, list(mlp.parameters())))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_memory_budget_holds_in_every_worker_and_nowhere_else() -> None:
    before, seen = functorch.activation_memory_budget, []
    policy = make(activation_memory=0.5)

    def work() -> None:
        with policy.in_worker():
            seen.append(functorch.activation_memory_budget)

    with policy.watching():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (seen, functorch.activation_memory_budget) == ([0.5], before)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        CompileConfig(activation_memory=1.5)
    with pytest.raises(ConfigError, match="policy is eager"):
        CompileConfig(activation_memory=0.5, policy="eager")


def test_what_asks_to_compile_is_refused_where_nothing_compiles_or_no_target_runs() -> None:
    for lever in ("target", "loss"):
        with pytest.raises(ConfigError, match=f"nothing is compiled: use --compile.no-{lever}"):
            CompileConfig(policy="eager", **{lever: True})
        CompileConfig(policy="lock", **{lever: True})
    with pytest.raises(ConfigError, match=r"use --compile\.no-target --compile\.no-loss, or another policy"):
        CompileConfig(policy="eager", target=True, loss=True)
    with pytest.raises(ConfigError, match="no target runs"):
        RunConfig(topology="0t+1d", data=DataConfig(features=Path("features")), compile=CompileConfig(target=True))
