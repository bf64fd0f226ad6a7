from __future__ import annotations

import torch
from modeling_batches import packed_batch

from dflash.compile_policy import CompilePolicy
from dflash.config import CompileConfig, TargetConfig
from dflash.modeling.target import TargetRunner, load_target

LAYERS = (1, 3, 5)
ROWS = ([64], [20, 30], [40], [10, 20, 34])  # documents: a full row, two, one with padding, three


def test_compiled_layers_give_the_same_features_and_compile_nothing_after_the_first_batch() -> None:
    config = TargetConfig(path="random:gemma3", dtype="float32")  # two kinds of layers, in turns
    batches = [packed_batch([documents], length=64, anchors=[[]], num_anchors=1) for documents in ROWS]
    policy = CompilePolicy(CompileConfig(backend="aot_eager"), num_drafters=1)
    plain = TargetRunner(load_target(config, device="cpu")[0], LAYERS, keep_final_hidden=True)
    with policy.watching(), policy.in_worker():
        model, _ = load_target(config, device="cpu")
        compiled = TargetRunner(model, LAYERS, keep_final_hidden=True, compiled=policy.compiled)
        compiled.run(batches[0])
        warm = policy.report()
        with policy.frozen():
            for batch in batches:
                for found, expected in zip(compiled.run(batch), plain.run(batch), strict=True):
                    assert found is not None
                    assert expected is not None
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            policy.check()
        report = policy.report()
    assert warm.compiles_in_warmup == report.compiles_in_warmup <= 4  # not one a layer
    assert report.calls == report.graph_runs == warm.calls + len(batches) * 8
