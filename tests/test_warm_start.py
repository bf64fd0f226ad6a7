import pytest
import torch

from dflash.config import ConfigError, DrafterConfig, TargetConfig
from dflash.modeling.drafter import Drafter, DrafterShape
from dflash.modeling.target import load_target, text_config
from dflash.modeling.warm_start import OTHER_FEATURES, start_from_target


def make(name: str, **changes: int) -> tuple[Drafter, torch.nn.Module]:
    model, _ = load_target(TargetConfig(path=f"random:{name}", dtype="float32", mask_token_id=5), device="cpu")
    config = DrafterConfig(block_size=4, num_layers=2, num_features=2, **changes)  # type: ignore[arg-type]  # sizes only
    return Drafter(DrafterShape.from_target(text_config(model), config, 5)), model


def test_layers_norms_and_fusion_start_as_the_targets() -> None:
    drafter, model = make("qwen3")
    random_fusion = drafter.fc.weight.detach().clone()
    start_from_target(drafter, model)
    for number, layer in enumerate(drafter.layers):
        source = dict(model.model.layers[number].named_parameters())  # type: ignore[index, union-attr]  # any model
        assert all(torch.equal(parameter, source[name]) for name, parameter in layer.named_parameters())
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)  # type: ignore[union-attr, arg-type]  # any model
    size = drafter.shape.hidden_size
    expected = OTHER_FEATURES * random_fusion
    expected[:, :size] += torch.eye(size)
    torch.testing.assert_close(drafter.fc.weight.detach(), expected)


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("qwen3", {"intermediate_size": 48})])
def test_a_target_of_other_layers_is_refused_and_nothing_changes(name: str, changes: dict[str, int]) -> None:
    drafter, model = make(name, **changes)
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    with pytest.raises(ConfigError, match=r"use --drafter\.init random"):
        start_from_target(drafter, model)
    assert all(torch.equal(value, before[key]) for key, value in drafter.state_dict().items())
