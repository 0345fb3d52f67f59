"""A small transformer that lets the slices of one prefix exchange information before the query.

Slices were encoded apart from each other. In every decoder layer the contextualizer reads the
prefix's keys, at their new places and so with their positions, and values; the prefix's tokens
attend to each other, in both directions; and what comes out is added to keys and values. What is
added is zero until it is trained. Each decoder layer has its own reading and writing matrix, and
all share the blocks between. The idea is the contextualizer of the CoinRAG overview; its shape is
ours.

With W the width, E the elements of a token's keys and values in one decoder layer, L decoder
layers, n blocks and P prefix tokens, there are 2 L E W + n (8 W^2 + 2 W) + W parameters, and a
prefix takes 2 P L (2 E W + n (8 W^2 + 2 P W)) operations:

    width 256, 1 block       parameters    operations a token, P = 500    the model's own a token
    SmolLM2-135M              6,423,296      59 x 10^6 (28%)               212 x 10^6
    Qwen2-7B                 15,205,120      73 x 10^6 (0.6%)           13,051 x 10^6

A prefix has several times the tokens of a query, and the model computes the query alone, so a small
model wants a narrow one: SmolLM2-135M at a width of 64 takes 8.8 x 10^6 operations a token.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedConfig, PreTrainedModel

from cache_ops.hf import decoder
from cache_ops.rope import head_dim

CONTEXTUALIZER_FILE = "contextualizer.safetensors"
CONTEXTUALIZER = "contextualizer"
"""The name under which a decoder has it while it is trained."""
_EPSILON = 1e-6


class ContextualizerError(ValueError):
    """A saved contextualizer does not fit what is asked of it; says how."""

    is_user_error = True


@dataclass(frozen=True)
class ContextualizerSpec:
    """What a contextualizer is."""

    system: str
    """Whose prefixes it corrects."""
    decoder_layers: int
    kv_heads: int
    head_dim: int
    width: int
    layers: int
    """Blocks, which all decoder layers share."""
    heads: int

    @classmethod
    def of(
        cls, config: PreTrainedConfig, system: str, *, width: int, layers: int, heads: int
    ) -> Self:
        """That of a contextualizer beside the model of a config."""
        sizes = (config.num_hidden_layers, config.num_key_value_heads, head_dim(config))
        return cls(system, *sizes, width, layers, heads)

    @property
    def options(self) -> dict[str, int]:
        """What of it a recipe says."""
        return {"width": self.width, "layers": self.layers, "heads": self.heads}

    @property
    def elements(self) -> int:
        """Of the keys and values of one token in one decoder layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        width = self.width
        blocks = self.layers * (8 * width**2 + 2 * width)
        return 2 * self.decoder_layers * self.elements * width + blocks + width

    def forward_flops(self, tokens: float, pairs: float) -> float:
        """Floating-point operations over prefixes: two for each multiply-add.

        Args:
            tokens: of all prefixes.
            pairs: of a token and one of the same prefix, over all prefixes.
        """
        matrices = 2 * self.elements * self.width + self.layers * 8 * self.width**2
        attention = self.layers * 2 * self.width
        return 2 * self.decoder_layers * (matrices * tokens + attention * pairs)


class Contextualizer(nn.Module):
    """Corrects the keys and values of prefixes; fp32 until it is cast."""

    def __init__(self, spec: ContextualizerSpec) -> None:
        super().__init__()
        self.spec = spec
        layers, elements, width = spec.decoder_layers, spec.elements, spec.width
        self.read = nn.ModuleList(nn.Linear(elements, width, bias=False) for _ in range(layers))
        self.blocks = nn.ModuleList(_Block(width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(width, eps=_EPSILON)
        self.write = nn.ModuleList(nn.Linear(width, elements, bias=False) for _ in range(layers))
        for linear in self.write:
            nn.init.zeros_(cast(nn.Linear, linear).weight)

    def forward(
        self, layer: int, key_1HPD: Tensor, value_1HPD: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The corrected keys and values of a decoder layer, in the dtype that they came in.

        Args:
            layer: of the decoder.
            key_1HPD: the keys of prefixes that stand one after the other, at their new places.
            value_1HPD: their values.
            lengths: tokens of each prefix; one does not see another.
        """
        read = cast(nn.Linear, self.read[layer])
        kv_P2HD = torch.cat((key_1HPD, value_1HPD)).permute(2, 0, 1, 3)
        # Keys are much larger than values, and a few of their dimensions larger than the others.
        normed_P2HD = rms_norm(kv_P2HD.float(), kv_P2HD.shape[-1:], eps=_EPSILON)
        dtype = self.norm.weight.dtype
        hidden_PW = read(normed_P2HD.flatten(1).to(dtype)).to(dtype)
        for block in self.blocks:
            hidden_PW = block(hidden_PW, lengths)
        change_PE = self.write[layer](self.norm(hidden_PW))
        key_change_1HPD, value_change_1HPD = (
            change_PE.unflatten(1, kv_P2HD.shape[1:]).permute(1, 2, 0, 3).split(1)
        )
        return (
            key_1HPD + key_change_1HPD.to(key_1HPD.dtype),
            value_1HPD + value_change_1HPD.to(value_1HPD.dtype),
        )


class _Block(nn.Module):
    """Attention among the tokens of each prefix, then an MLP; both read what is normed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden_PW: Tensor, lengths: Sequence[int]) -> Tensor:
        projected_PE = self.query_key_value(self.attention_norm(hidden_PW))
        qkv_31NPD = projected_PE.unflatten(1, (3, 1, self._heads, -1)).permute(1, 2, 3, 0, 4)
        attended = [
            scaled_dot_product_attention(*one_31NPD)
            for one_31NPD in qkv_31NPD.split(list(lengths), dim=3)
        ]
        attended_PW = torch.cat(attended, dim=2)[0].transpose(0, 1).flatten(1)
        hidden_PW = hidden_PW + self.attended(attended_PW)
        return hidden_PW + self.down(silu(self.up(self.mlp_norm(hidden_PW))))


def new_contextualizer(spec: ContextualizerSpec, seed: int) -> Contextualizer:
    """An untrained one, which changes nothing; its weights depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Contextualizer(spec)


def put_contextualizer(model: PreTrainedModel, contextualizer: Contextualizer) -> None:
    """Makes it a part of a model, to be trained with it; the model's call is to name it."""
    body = decoder(model)
    setattr(body, CONTEXTUALIZER, contextualizer.to(next(body.parameters()).device))


def contextualizer_of(model: PreTrainedModel) -> Contextualizer | None:
    """The model's contextualizer, if it has one."""
    return getattr(decoder(model), CONTEXTUALIZER, None)


def take_contextualizer(model: PreTrainedModel) -> Contextualizer | None:
    """Takes a model's contextualizer out, so that it is a plain one again."""
    contextualizer = contextualizer_of(model)
    if contextualizer is not None:
        delattr(decoder(model), CONTEXTUALIZER)
    return contextualizer


def save_contextualizer(folder: Path, contextualizer: Contextualizer) -> None:
    """Writes a contextualizer and what it is beside a model's weights."""
    tensors = {
        name: weight.detach().cpu().contiguous()
        for name, weight in contextualizer.named_parameters()
    }
    about = {"spec": json.dumps(asdict(contextualizer.spec))}
    save_file(tensors, folder / CONTEXTUALIZER_FILE, metadata=about)


def contextualizer_saved_in(folder: Path) -> ContextualizerSpec | None:
    """What the contextualizer beside a model's weights is; None where there is none.

    Raises:
        ContextualizerError: its file is damaged.
    """
    path = folder / CONTEXTUALIZER_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return ContextualizerSpec(**json.loads((file.metadata() or {})["spec"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ContextualizerError(f"{path} is damaged: {error}") from error


def load_contextualizer(folder: Path, config: PreTrainedConfig) -> Contextualizer:
    """The contextualizer beside a model's weights, on the CPU.

    Args:
        folder: of the weights.
        config: the model's.

    Raises:
        ContextualizerError: there is none, or it is damaged or another model's.
    """
    path, spec = folder / CONTEXTUALIZER_FILE, contextualizer_saved_in(folder)
    if spec is None:
        raise ContextualizerError(
            f"{folder} holds no contextualizer ({CONTEXTUALIZER_FILE}): was it trained with "
            "context.contextualizer?"
        )
    fitting = ContextualizerSpec.of(
        config, spec.system, width=spec.width, layers=spec.layers, heads=spec.heads
    )
    if spec != fitting:
        raise ContextualizerError(f"{path} is of another model: {spec}, not {fitting}")
    contextualizer = new_contextualizer(spec, seed=0)
    try:
        contextualizer.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ContextualizerError(f"{path} is damaged: {error}") from error
    return contextualizer
