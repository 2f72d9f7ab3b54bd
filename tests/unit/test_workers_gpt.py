"""The reference model: size, causality, where it starts, and that one seed gives one model and one text."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))
from gpt import GPT, GPTConfig

SMALL = GPTConfig(context=16, layers=2, width=32, heads=2)


def awake(config: GPTConfig = SMALL) -> GPT:
    """A model whose zero-initialised layers are not zero."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def test_default_size_is_about_0_8_million():
    assert sum(weight.numel() for weight in GPT(GPTConfig()).parameters()) == 851_968


def test_all_state_is_in_the_parameters():
    model = GPT(SMALL)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_seed_decides_the_weights_and_the_global_generator_does_not():
    first = GPT(SMALL, seed=3).state_dict()
    torch.rand(5)
    second, other = GPT(SMALL, seed=3).state_dict(), GPT(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_model_starts_at_8_bits_per_byte():
    loss = GPT(SMALL).loss(torch.arange(32).reshape(2, 16))
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=1e-6)


def test_later_bytes_do_not_change_earlier_scores():
    model, tokens = awake(), torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_order_matters():
    model = awake()
    scores = model(torch.tensor([[1, 2, 3, 4]]))[0, -1], model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(*scores)


def test_loss_is_the_mean_negative_log_probability_of_the_next_byte():
    model, tokens = awake(), torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    log_p = model(tokens[:, :-1]).log_softmax(-1)
    expected = -sum(float(log_p[i, j, tokens[i, j + 1]].detach()) for i in range(3) for j in range(8)) / 24
    assert float(model.loss(tokens).detach()) == pytest.approx(expected, rel=1e-5)


def test_text_is_drawn_by_seed_and_goes_beyond_the_context():
    model = awake()
    text = model.generate(b"a", 40, seed=1)
    assert len(text) == 40
    assert text == model.generate(b"a", 40, seed=1)
    assert text != model.generate(b"a", 40, seed=2)


@pytest.mark.parametrize(
    "wrong", [{"width": 30, "heads": 4}, {"width": 36, "heads": 12}, {"layers": 0}, {"context": 0}]
)
def test_impossible_shape_is_refused(wrong):
    with pytest.raises(ValueError, match="width"):
        GPTConfig(**wrong)
