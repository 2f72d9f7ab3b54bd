"""Tensors of a decoder in GPT-2's shape, so that sizes are mixed as they are in practice."""

from typing import NamedTuple

WIDTH = 1024


class Model(NamedTuple):
    """How large."""

    layers: int
    vocabulary: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {"wte.weight": (self.vocabulary, WIDTH), "wpe.weight": (1024, WIDTH)}
        for number in range(self.layers):
            shapes |= {
                f"h.{number}.ln_1.weight": (WIDTH,),
                f"h.{number}.attn.qkv.weight": (3 * WIDTH, WIDTH),
                f"h.{number}.attn.proj.weight": (WIDTH, WIDTH),
                f"h.{number}.ln_2.weight": (WIDTH,),
                f"h.{number}.mlp.fc.weight": (4 * WIDTH, WIDTH),
                f"h.{number}.mlp.proj.weight": (WIDTH, 4 * WIDTH),
            }
        return shapes | {"ln_f.weight": (WIDTH,)}


SMALL = Model(layers=1, vocabulary=49_152)
"""64 M parameters, the largest tensor 50 M."""

LARGE = Model(layers=16, vocabulary=49_152)
"""253 M parameters, the largest tensor 50 M."""

ISLAND = Model(layers=4, vocabulary=48_128)
"""101 M parameters."""
