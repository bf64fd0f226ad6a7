import copy
import itertools
import math

import pytest
import torch
from modeling_batches import lively_drafter, random_tensor, tiny_shape
from torch import nn

from dflash.config import OptimConfig
from dflash.flat import ALIGNMENT, FlatAdamW, FlatParameters, learning_rate
from dflash.modeling.drafter import Drafter


def small_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))


def test_parameters_and_gradients_are_views_of_two_flat_tensors() -> None:
    module = small_module()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    flat = FlatParameters(module)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert flat.layout.offsets[name] % ALIGNMENT == 0
    module(torch.randn(4, 7)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(flat.named(flat.gradients)[name], parameter.grad)
    flat.weights.zero_()
    assert all(not parameter.any() for parameter in module.parameters())


def test_flat_adamw_equals_adamw_on_separate_parameters_with_decay_on_matrices_only() -> None:
    config = OptimConfig(steps=6, learning_rate=0.05, weight_decay=0.1, clip=0.5)
    reference = small_module()
    module = copy.deepcopy(reference)
    flat = FlatParameters(module)
    ours = FlatAdamW(flat, config)
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2))
    for step in range(6):
        inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        (reference(inputs).square().sum() / 3).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in theirs.param_groups:
            group["lr"] = learning_rate(config, step)
        theirs.step()
        flat.gradients.zero_()
        module(inputs).square().sum().backward()
        found = ours.norm()
        ours.step(step, total_weight=torch.tensor(3.0), norm=found)
        assert float(found) / 3 == pytest.approx(float(norm), rel=1e-5)
    for expected, parameter in zip(reference.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def bf16_step(module: Drafter, seed: int) -> None:
    """Backward of a forward pass that multiplies in bf16, with other inputs for every seed."""
    embeds, features = random_tensor(1, 8, 32, seed=seed).bfloat16(), random_tensor(1, 10, 96, seed=seed + 1).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = module(embeds, torch.arange(8)[None], features, torch.arange(10)[None], None)
    hidden.float().square().sum().backward()


def test_bf16_copies_of_matrices_compute_and_add_up_what_autocast_does_bit_for_bit() -> None:
    reference, module = lively_drafter(tiny_shape()), lively_drafter(tiny_shape())
    theirs, ours = FlatParameters(reference), FlatParameters(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters() if p.dim() >= 2} == {torch.bfloat16}
    assert {p.dtype for p in module.parameters() if p.dim() < 2} == {torch.float32}
    optimizers = [FlatAdamW(flat, OptimConfig(steps=4, learning_rate=0.01)) for flat in (theirs, ours)]
    for step in range(2):
        for micro_batch in range(3):
            for flat, drafter in ((theirs, reference), (ours, module)):
                bf16_step(drafter, seed=10 * step + 2 * micro_batch)
                flat.collect_gradients()
        assert theirs.gradients.any()
        assert torch.equal(theirs.gradients, ours.gradients)
        for flat, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.step(step, total_weight=torch.tensor(2.0), norm=optimizer.norm())
            flat.clear_gradients()
        assert torch.equal(theirs.weights, ours.weights)


def test_a_step_from_which_one_matrix_got_no_gradient_counts_it_as_zero() -> None:
    module = small_module()
    flat = FlatParameters(module, torch.bfloat16)
    flat.gradients.fill_(9.0)
    flat.clear_gradients()
    module[2].weight.grad = torch.ones_like(module[2].weight)
    flat.collect_gradients()
    found = flat.named(flat.gradients)
    assert (found["2.weight"] == 1).all()
    assert not any(found[name].any() for name in found if name != "2.weight")


def test_moments_survive_a_round_trip_bit_for_bit() -> None:
    config = OptimConfig(steps=10)
    first, second = small_module(), small_module()
    flats = [FlatParameters(first), FlatParameters(second)]
    optimizers = [FlatAdamW(flat, config) for flat in flats]
    flats[0].gradients.fill_(0.3)
    optimizers[0].step(0, total_weight=torch.tensor(1.0), norm=optimizers[0].norm())
    flats[1].weights.copy_(flats[0].weights)
    optimizers[1].load_moments(optimizers[0].moments())
    for flat, optimizer in zip(flats, optimizers, strict=True):
        flat.gradients.fill_(0.7)
        optimizer.step(1, total_weight=torch.tensor(1.0), norm=optimizer.norm())
    assert torch.equal(flats[0].weights, flats[1].weights)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_learning_rate_rises_peaks_and_ends_where_it_is_told(schedule: str) -> None:
    config = OptimConfig(steps=100, learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.1, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[:10] == pytest.approx([(k + 1) / 10 for k in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    config = OptimConfig(steps=102, learning_rate=2.0, warmup_fraction=2 / 102)
    assert learning_rate(config, 52) == pytest.approx(2.0 * 0.5 * (1 + math.cos(math.pi * 0.5)))


def test_the_first_non_finite_parameter_is_named() -> None:
    module = small_module()
    flat = FlatParameters(module)
    assert flat.first_non_finite(flat.weights) is None
    flat.named(flat.weights)["1.weight"][2] = math.nan
    assert flat.first_non_finite(flat.weights) == "1.weight"


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 0.0), (2.0, math.nan), (2.0, math.inf)])
def test_an_update_without_weight_or_with_gradients_that_are_not_finite_changes_nothing(weight: float, gradient: float) -> None:
    module = small_module()
    flat = FlatParameters(module)
    optimizer = FlatAdamW(flat, OptimConfig(steps=4, weight_decay=0.1))
    flat.gradients.fill_(0.5)
    optimizer.step(0, total_weight=torch.tensor(1.0), norm=optimizer.norm())
    weights, moments = flat.weights.clone(), {name: value.clone() for name, value in optimizer.moments().items()}
    flat.gradients.fill_(gradient)
    optimizer.step(1, total_weight=torch.tensor(weight), norm=optimizer.norm())
    assert torch.equal(flat.weights, weights)
    assert all(torch.equal(value, moments[name]) for name, value in optimizer.moments().items())
