import pytest
import torch
from torch import nn

from dflash import compile_policy
from dflash.compile_policy import CompilePolicy, RecompileError
from dflash.config import CompileConfig, ConfigError


def make(**changes: object) -> CompilePolicy:
    return CompilePolicy(CompileConfig(**({"policy": "prewarm", "backend": "eager"} | changes)), num_drafters=3)  # type: ignore[arg-type]


def test_warnings_from_before_the_run_do_not_count_and_new_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = ["flex ran unfused"]
    monkeypatch.setattr(compile_policy.seams, "fallback_warnings", lambda: tuple(warnings))
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


def test_the_recompile_limit_has_room_for_all_drafters_and_is_restored() -> None:
    before = torch._dynamo.config.recompile_limit
    with make().watching():
        assert torch._dynamo.config.recompile_limit >= 3 * compile_policy.ENTRIES_PER_DRAFTER
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
