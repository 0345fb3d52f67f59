"""Rotating cached keys by a difference of positions.

RoPE rotates each key pair by `position * frequency`, so a key computed at position m becomes the
key at position n by a further rotation of `(n - m) * frequency`. This is exact for every RoPE type
whose frequencies do not depend on the sequence length. YaRN's attention factor is already inside
the cached keys; the further rotation is a pure one.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies in radians a position, fp32, one for each pair of head dimensions.

    They are computed from the config and not read from a model, whose own table may have been
    rounded by a cast to bf16.
    """

    inverse_frequencies: Tensor

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> Self:
        """Reads `config.rope_parameters`; the config must have passed `hf.check_supported`."""
        parameters = config.rope_parameters
        if parameters["rope_type"] == "default":
            dimension = head_dim(config)
            exponents = torch.arange(0, dimension, 2, dtype=torch.float32) / dimension
            return cls(1.0 / (parameters["rope_theta"] ** exponents))
        frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        return cls(frequencies.float())

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each `[*positions.shape, head_dim]` fp32, of a rotation by `positions`.

        The angles are formed in fp64, so that a rotation does not lose digits at large distances.
        """
        frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[..., None].double() * frequencies.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().float(), angles.sin().float()


def rotate(keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates keys `[..., head_dim]` by broadcastable tables, in fp32; keeps the keys' dtype."""
    wide = keys.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(keys.dtype)


def head_dim(config: PreTrainedConfig) -> int:
    """Dimensions of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
