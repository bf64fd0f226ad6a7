"""`python -m dflash.decoding.tree_cost`: how long a draft tree takes to build, beside a plain Python heap in the same run.

Marginals are made up, by key: logits are normal numbers times a sharpness, so that trees go from flat (many first tokens) to
deep (long chains). Timed is what stands between the copy of the top-k from the device and the ids and the mask of the
verification: the nodes, and who descends from whom. The heap pops one node after the other, as published code does, and
gives the same nodes in the same order, which is checked. Times are of one thread; on a shared machine read the ratio.

Exit codes: 0 built as the heap builds; 1 the two differ; 2 bad usage.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash.config import MAX_BUDGET
from dflash.decoding.tree import Floats, Ints, build_tree
from dflash.standard_output import outlive_reader

_Result = TypeVar("_Result")
Node = tuple[int, int, int, float]  # depth, place of the parent, token, log-probability


def heap_tree(logs: Floats, tokens: Ints, budget: int) -> list[Node]:
    """The nodes of `build_tree` without the root, by a heap with one entry a node."""
    levels, count = logs.shape
    weights, nodes = [0.0], list[Node]()
    heap = [(-float(logs[0, 0]), 1, 0, 0)]  # -log-probability, depth, parent, rank
    while heap and len(nodes) < budget:
        negative, depth, parent, rank = heapq.heappop(heap)
        nodes.append((depth, parent, int(tokens[depth - 1, rank]), -negative))
        weights.append(-negative)
        if rank + 1 < count and logs[depth - 1, rank + 1] > -np.inf:
            heapq.heappush(heap, (-(weights[parent] + float(logs[depth - 1, rank + 1])), depth, parent, rank + 1))
        if depth < levels:
            heapq.heappush(heap, (-(weights[-1] + float(logs[depth, 0])), depth + 1, len(nodes), 0))
    return nodes


def main(arguments: Sequence[str] | None = None) -> int:
    """Time trees of several sharpnesses; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash.decoding.tree_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=256, help="nodes (default 256)")
    parser.add_argument("--block-size", type=int, default=16, help="anchor and drafts (default 16)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens (default 151936, Qwen3)")
    parser.add_argument("--rounds", type=int, default=200, help="builds a figure (default 200)")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.block_size < 2 or options.vocabulary < 1 or not 1 <= options.budget <= MAX_BUDGET:
        parser.error(f"expected at least 2 rounds, a block of at least 2, a vocabulary, and a budget from 1 to {MAX_BUDGET}")
    table = Table("sharpness", "depth", "nodes", "ancestors", "both [quartiles]", "heap", "heap / nodes", title="milliseconds")
    same, figures = True, []
    for sharpness in (1.0, 4.0, 8.0, 16.0):
        logs, tokens = _marginals(sharpness, options.block_size - 1, options.vocabulary, options.budget)
        tree = build_tree(logs, tokens, options.budget)
        nodes = zip(tree.depths[1:], tree.parents[1:], tree.tokens[1:], tree.log_probabilities[1:], strict=True)
        same &= list(nodes) == heap_tree(logs, tokens, options.budget)
        build, ancestors, both, heap = _times(logs, tokens, options.budget, options.rounds)
        low, middle, high = statistics.quantiles(both, n=4)
        build_ms, ancestors_ms, heap_ms = map(statistics.median, (build, ancestors, heap))
        ratio, depth = heap_ms / build_ms, int(tree.depths.max())
        spread = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        table.add_row(
            f"{sharpness}", f"{depth}", f"{build_ms:.2f}", f"{ancestors_ms:.2f}", spread, f"{heap_ms:.2f}", f"{ratio:.1f}"
        )
        figures.append({"sharpness": sharpness, "depth": depth, "tree_ms": middle, "heap_ms": heap_ms, "heap_over_nodes": ratio})
    Console(stderr=True).print(table)
    print(json.dumps({"budget": options.budget, "same_nodes": same, "figures": figures}))  # noqa: T201 - the command's result
    return 0 if same else 1


def _times(logs: Floats, tokens: Ints, budget: int, rounds: int) -> tuple[list[float], ...]:
    """Milliseconds of nodes, ancestors, both together, and the heap; the two ways take turns."""
    build, ancestors, both, heap = (list[float]() for _ in range(4))
    for _ in range(rounds):
        first, tree = _timed(lambda: build_tree(logs, tokens, budget))
        second, _ = _timed(lambda tree=tree: tree.ancestors)  # type: ignore[misc]  # mypy cannot type a default of a lambda
        third, _ = _timed(lambda: heap_tree(logs, tokens, budget))
        for values, value in zip((build, ancestors, both, heap), (first, second, first + second, third), strict=True):
            values.append(value)
    return build, ancestors, both, heap


def _timed(call: Callable[[], _Result]) -> tuple[float, _Result]:
    started = time.perf_counter()
    result = call()
    return (time.perf_counter() - started) * 1e3, result


def _marginals(sharpness: float, levels: int, vocabulary: int, count: int) -> tuple[Floats, Ints]:
    """What the copy brings: log-probabilities [L, k] float64, descending, and tokens [L, k]."""
    logits = np.random.Generator(np.random.Philox(7)).normal(size=(levels, vocabulary)) * sharpness
    tokens = np.argsort(-logits, axis=1)[:, :count]
    top = np.take_along_axis(logits, tokens, axis=1)
    return top - top[:, :1] - np.log(np.exp(logits - top[:, :1]).sum(axis=1, keepdims=True)), tokens


if __name__ == "__main__":
    outlive_reader()
    sys.exit(main())
