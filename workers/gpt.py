"""A byte-level GPT to be read in one sitting: rotary positions, RMSNorm, squared ReLU, untied output.

Nothing here knows that the model is trained on islands. To see its size:

    python workers/gpt.py
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; the defaults have 0.85 M parameters."""

    context: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    vocab: int = 256

    def __post_init__(self) -> None:
        if min(self.context, self.layers, self.width, self.heads) < 1 or self.width % (2 * self.heads):
            raise ValueError(
                f"width ({self.width}) must be a multiple of twice the heads ({self.heads}), all sizes ≥ 1"
            )


def norm(x: Tensor) -> Tensor:
    """RMSNorm without learned scale."""
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position (RoPE, arXiv 2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(norm(x), cos, sin)
        out: Tensor = x + self.down(F.relu(self.up(norm(x))).square())
        return out


class GPT(nn.Module):
    """The language model. It starts by giving every byte the same chance: exactly 8 bits per byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        channels = config.width // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10_000.0 ** (-torch.arange(channels) / channels))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "lm_head.weight")):
                nn.init.zeros_(weight)  # each block starts as the identity
            else:
                std = 1.0 if name == "embed.weight" else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) bytes to (batch, time, vocab) scores of the byte that follows each."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x, cos, sin)
        scores: Tensor = self.lm_head(norm(x))
        return scores

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of `tokens[:, 1:]` given what comes before each."""
        scores = self(tokens[:, :-1]).float()
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue `prompt` by `num_bytes` bytes drawn from the model; the same seed draws the same."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor(list(prompt), device=self.cos.device)[None]
        for _ in range(num_bytes):
            scores = self(tokens[:, -self.config.context :])[0, -1].float().cpu()
            drawn = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)[None]), dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())


if __name__ == "__main__":
    print(f"{sum(p.numel() for p in GPT(GPTConfig()).parameters()):,} parameters")
