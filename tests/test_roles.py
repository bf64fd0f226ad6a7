from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import ConfigError, Topology
from dflash.engine.roles import Roles


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_every_rank_is_one_worker_and_rank_0_leads(targets: int, drafters: int, data: st.DataObject) -> None:
    nodes = tuple(sorted(data.draw(st.lists(st.integers(0, 3), min_size=targets + drafters, max_size=targets + drafters))))
    roles = Roles.assign(Topology(targets, drafters), nodes)
    assert sorted(roles.drafters + roles.targets) == list(range(targets + drafters))
    assert (len(roles.targets), len(roles.drafters)) == (targets, drafters)
    assert roles.worker(0) == "drafter-0"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 50))
def test_drafters_take_turns_and_no_number_is_lost(targets: int, drafters: int, first: int) -> None:
    roles = Roles.assign(Topology(targets, drafters), (0,) * (targets + drafters))
    end = first + 7 * targets * drafters
    assert all(roles.target_of(n) == roles.target_of(n + roles.period) for n in range(first, end))
    theirs = {rank: roles.numbers_of_drafter(rank, first, end) for rank in roles.drafters}
    assert sorted(n for numbers in theirs.values() for n in numbers) == list(range(first, end))
    assert all(roles.drafter_of(n) == rank for rank, numbers in theirs.items() for n in numbers)
    assert set(Counter(roles.target_of(n) for n in range(first, end)).values()) == {7 * drafters}  # all targets work alike


def test_states_stay_on_their_node_where_every_node_has_both_kinds() -> None:
    roles = Roles.assign(Topology(10, 6), (0,) * 8 + (1,) * 8)
    assert roles.drafters == (0, 1, 2, 8, 9, 10)
    assert all(roles.nodes[roles.target_of(n)] == roles.nodes[roles.drafter_of(n)] for n in range(200))
    assert len({roles.target_of(n) for n in range(200)}) == 10


def test_a_node_without_drafters_still_works_for_the_others() -> None:
    roles = Roles.assign(Topology(5, 1), (0, 0, 0, 1, 1, 1))
    assert roles.drafters == (0,)
    assert {roles.target_of(n) for n in range(20)} == {1, 2, 3, 4, 5}


def test_a_world_that_does_not_match_the_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology 1t\+2d has 3 workers, torchrun started 4 processes.*--nproc-per-node 3"):
        Roles.assign(Topology(1, 2), (0,) * 4)


def test_a_target_of_several_ranks_is_one_target_on_one_node() -> None:
    roles = Roles.assign(Topology(2, 2), (0, 0, 0, 1, 1, 1), tensor_parallel=2)
    assert (roles.drafters, roles.targets) == ((0, 3), (1, 4))
    assert [roles.team(rank) for rank in (1, 2, 4, 5)] == [(1, 2), (1, 2), (4, 5), (4, 5)]
    assert [roles.worker(rank) for rank in (1, 2, 4, 5)] == ["target-0", "target-0.1", "target-1", "target-1.1"]
    assert {roles.target_of(n) for n in range(12)} == {1, 4}  # only the first of a team is known to others
    assert {target for target, _ in roles.pairs} == {1, 4}


def test_teams_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"topology 1t\+1d, targets of 2 ranks each, has 3 workers, torchrun started 2 processes"
    ):
        Roles.assign(Topology(1, 1), (0, 0), tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"ranks \[2, 3\] of one target lie on several nodes"):
        Roles.assign(Topology(1, 2), (0, 0, 0, 1), tensor_parallel=2)
