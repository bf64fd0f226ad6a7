from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import ConfigError
from dflash.decoding.comparing import check_comparable, compare, prompt_digests, read_evaluation

TAUS = st.lists(st.floats(1, 8), min_size=2, max_size=20)
WAY = {
    "target": "t",
    "target_digest": "d1",
    "dtype": "float32",
    "temperature": 0.0,
    "max_new_tokens": 32,
    "seed": 0,
    "eos_token_ids": [2],
}
DIGESTS = prompt_digests([("a", [1, 2]), ("b", [3]), ("c", [4])])
OURS = WAY | {"prompt_digests": DIGESTS}


def evaluation(taus: dict[str, float], **trees: dict[str, float]) -> dict[str, Any]:
    return {"tau_by_prompt": taus, "trees": [{"budget": int(name[1:]), "tau_by_prompt": tree} for name, tree in trees.items()]}


def test_the_difference_is_taken_prompt_by_prompt_and_over_those_of_both_only() -> None:
    ours = evaluation({"a": 2.0, "b": 5.0, "mine": 9.0}, b16={"a": 3.0, "b": 6.0}, b64={"a": 4.0, "b": 7.0})
    theirs = evaluation({"b": 4.5, "a": 1.5, "theirs": 1.0}, b64={"a": 4.5, "b": 6.5})
    found = compare(ours, theirs, seed=0)
    assert found["prompts"] == 2
    assert found["tau_difference"] == pytest.approx(0.5)
    assert found["tau_difference_ci95"] == pytest.approx([0.5, 0.5])  # however much the prompts differ
    assert (found["better_on"], found["worse_on"]) == (2, 0)
    (tree,) = found["trees"]
    assert (tree["budget"], tree["tau_difference"], tree["better_on"], tree["worse_on"]) == (64, 0.0, 1, 1)
    assert tree["tau_difference_ci95"] == pytest.approx([-0.5, 0.5])


@given(first=TAUS, second=TAUS)
def test_to_swap_the_two_turns_the_sign_and_the_order_of_prompts_is_nothing(first: list[float], second: list[float]) -> None:
    ours, theirs = ({f"p{i:02}": tau for i, tau in enumerate(taus)} for taus in (first, second))
    found, swapped = compare(evaluation(ours), evaluation(theirs), seed=1), compare(evaluation(theirs), evaluation(ours), seed=1)
    assert found["tau_difference"] == pytest.approx(-swapped["tau_difference"])
    assert (found["better_on"], found["worse_on"]) == (swapped["worse_on"], swapped["better_on"])
    backwards = compare(evaluation(dict(reversed(ours.items()))), evaluation(theirs), seed=1)
    assert backwards == found
    low, high = found["tau_difference_ci95"]
    assert low - 1e-9 <= found["tau_difference"] <= high + 1e-9


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[]",
        "\udcff",
        '{"tau_by_prompt": {"a": 2.0}, "prompt_digests": {"a": "0"}}',
        '{"tau_by_prompt": {"a": 2.0}, "trees": []}',
        '{"tau_by_prompt": ["a"], "prompt_digests": {}, "trees": []}',
        '{"tau_by_prompt": {"a": null}, "prompt_digests": {}, "trees": []}',
        '{"tau_by_prompt": {"a": 2.0}, "prompt_digests": {}, "trees": [{"budget": 16}]}',
    ],
)
def test_what_is_no_evaluation_is_refused_by_its_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_evaluation(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, r"temperature 1\.0, here 0\.0"),
        ({"max_new_tokens": 64, "dtype": "bfloat16"}, "dtype bfloat16, here float32; max_new_tokens 64, here 32"),
        ({"eos_token_ids": [3]}, r"eos_token_ids \[3\], here \[2\]"),
        ({"prompt_digests": {"a": DIGESTS["a"], "x": "0"}}, "1 of the 3 prompts, 1 of them with rounds"),
        ({"tau_by_prompt": {"b": 2.0}}, "3 of the 3 prompts, 1 of them with rounds"),
        ({"prompt_digests": DIGESTS | {"b": DIGESTS["a"]}}, "1 prompts have other tokens there, 'b' first"),
    ],
)
def test_an_evaluation_in_another_way_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(OURS | evaluation({"a": 2.0, "b": 3.0}) | changes))
    with pytest.raises(ConfigError, match=message):
        check_comparable(read_evaluation(path), OURS, path)


def test_targets_are_the_same_where_their_weights_are_wherever_they_lie() -> None:
    other = OURS | evaluation({"a": 2.0, "b": 3.0})
    assert check_comparable(other | {"target": "elsewhere"}, OURS, Path("x")) is None
    with pytest.raises(ConfigError, match=r"target t \(digest d2\), here t \(digest d1\)"):
        check_comparable(other | {"target_digest": "d2"}, OURS, Path("x"))


def test_an_older_evaluation_is_compared_by_the_path_of_its_target_and_says_so() -> None:
    other = OURS | evaluation({"a": 2.0, "b": 3.0})
    del other["target_digest"]
    caution = check_comparable(other, OURS, Path("x"))
    assert caution is not None
    assert "only the paths are known to be equal" in caution
    with pytest.raises(ConfigError, match=r"target elsewhere \(digest not written: evaluate that run again.*here t \(digest d1"):
        check_comparable(other | {"target": "elsewhere"}, OURS, Path("x"))


def test_the_seed_matters_only_where_tokens_are_drawn() -> None:
    other = OURS | {"seed": 7} | evaluation({"a": 2.0, "b": 3.0})
    check_comparable(other, OURS, Path("x"))
    drawn = {"temperature": 1.0}
    with pytest.raises(ConfigError, match="seed 7, here 0"):
        check_comparable(other | drawn, OURS | drawn, Path("x"))
