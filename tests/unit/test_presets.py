"""The preset files: they parse, and hold the values of the papers that they are named after."""

from importlib import resources

import pytest

from diloco_blob.core.settings import PRESETS, Settings, differences, preset


def test_there_is_one_file_for_each_name():
    folder = resources.files("diloco_blob.core").joinpath("presets")
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.toml" for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_parses_and_names_its_paper(name):
    preset(name).resolved(islands=3)
    text = resources.files("diloco_blob.core").joinpath("presets", f"{name}.toml").read_text()
    assert "arXiv" in text.splitlines()[0] + text.splitlines()[1]


def test_defaults_are_diloco():
    changed = differences(Settings(), preset("diloco"))
    assert [line for line in changed if line.startswith(("sync.", "up.", "down.", "outer."))] == []


def test_diloco():
    settings = preset("diloco")
    assert (settings.sync.sync_every, settings.sync.num_fragments, settings.sync.overlap) == (500, 1, 0)
    assert (settings.outer.optimizer, settings.outer.lr, settings.outer.momentum) == ("nesterov", 0.7, 0.9)
    assert (settings.merge.rule, settings.merge.weights) == ("mean", "uniform")


@pytest.mark.parametrize(("name", "weights"), [("local-sgd", "uniform"), ("fedavg", "tokens")])
def test_plain_averages_adopt_the_mean_of_the_weights(name, weights):
    settings = preset(name)
    assert (settings.outer.optimizer, settings.outer.lr, settings.outer.momentum) == ("sgd", 1.0, 0.0)
    assert (settings.merge.rule, settings.merge.weights, settings.merge.staleness) == (
        "mean",
        weights,
        "constant",
    )
    assert (settings.up.name, settings.down.name, settings.sync.overlap) == ("fp32", "fp32", 0)


def test_streaming_diloco():
    settings = preset("streaming-diloco")
    assert (settings.sync.sync_every, settings.sync.num_fragments, settings.sync.overlap) == (100, 8, 1)
    assert (settings.sync.adopt, settings.sync.mix_alpha) == ("mix", 0.5)
    assert (settings.up.name, settings.up.error_feedback) == ("fp4", False)


def test_decoupled_diloco():
    settings = preset("decoupled-diloco")
    assert (settings.sync.sync_every, settings.sync.num_fragments, settings.sync.overlap) == (24, 24, 2)
    assert (settings.sync.adopt, settings.policy.quorum) == ("overwrite", 1)
    assert (settings.merge.rule, settings.merge.weights) == ("rda", "tokens2_per_step")
    assert (settings.up.name, settings.down.name) == ("bf16", "bf16")


def test_sparseloco():
    settings = preset("sparseloco")
    assert (settings.sync.sync_every, settings.sync.overlap) == (30, 0)
    assert (settings.up.name, settings.up.chunk, settings.up.keep, settings.up.value_bits) == ("topk", 4096, 64, 2)
    assert (settings.up.error_feedback, settings.up.decay) == (True, 0.95)
    assert (settings.merge.rule, settings.outer.optimizer, settings.outer.momentum) == ("sparse_mean", "sgd", 0.0)
