"""Masks are made by several drafter threads at once."""

from __future__ import annotations

import threading

import pytest
import torch
from modeling_batches import packed_batch

from dflash.modeling import attention
from dflash.modeling.masks import BlockLayout


def test_flex_masks_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch deletes an annotation of the process at the end of each: a second thread must not be inside meanwhile."""
    layout = BlockLayout.of(packed_batch([[100]], length=128, anchors=[[10]], num_anchors=1), 4)
    inside, go, overlaps = threading.Event(), threading.Event(), list[bool]()
    made, counting = attention.flex_mask, [0]

    def slow(layout: BlockLayout) -> object:
        counting[0] += 1
        overlaps.append(counting[0] > 1)
        inside.set()
        go.wait(60)
        mask = made(layout)
        counting[0] -= 1
        return mask

    def build() -> None:
        with torch.no_grad():
            attention.build_mask(layout, "flex", "cpu")

    monkeypatch.setattr(attention, "flex_mask", slow)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    threads[1].join(0.2)  # a second one would come in by now
    go.set()
    for thread in threads:
        thread.join()
    assert overlaps == [False, False]
