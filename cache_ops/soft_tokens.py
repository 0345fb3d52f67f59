"""Soft tokens: trainable embeddings beside the vocabulary, in named groups.

Their ids start where the embedding matrix ends, padding rows included, so that no text and no
padding of the vocabulary can collide with them, and the output layer cannot give one. They are
saved in a file of their own next to the weights, which load without them like any model. KVLink's
link tokens are such a group; `recipes.soft_tokens` says which a recipe asks for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cache_ops.hf import decoder

SOFT_TOKENS_FILE = "soft_tokens.safetensors"

Shape = tuple[int, int]
"""A group's places in a prompt, and its tokens at each place."""


class SoftTokensError(ValueError):
    """Saved soft tokens do not fit what is asked of them; says how."""

    is_user_error = True


@dataclass(frozen=True)
class SoftTokens:
    """The ids of a group, `tokens` of them for each of `places` in a prompt."""

    first_id: int
    places: int
    tokens: int

    def ids(self, places: int) -> list[list[int]]:
        """For each of the first `places` the ids of its tokens.

        Raises:
            SoftTokensError: there are fewer.
        """
        if places > self.places:
            raise SoftTokensError(
                f"soft tokens were made for {self.places} places in a prompt, {places} are asked "
                "for: train with a retrieval.k_c as large as the widest prefix"
            )
        starts = [self.first_id + place * self.tokens for place in range(places)]
        return [[*range(start, start + self.tokens)] for start in starts]


class SoftEmbedding(nn.Module):
    """An embedding whose ids go on beyond the vocabulary with soft tokens.

    Attributes:
        soft_ND: all groups' embeddings, one after the other.
        groups: the ids of each; of several made under one name, the last.
    """

    def __init__(
        self, vocabulary: nn.Embedding, soft_ND: Tensor, groups: Mapping[str, SoftTokens]
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.soft_ND = nn.Parameter(soft_ND)
        self.groups = dict(groups)

    @property
    def weight(self) -> nn.Parameter:
        """The vocabulary's rows: what ties and checks of the model look at."""
        return cast(nn.Parameter, self.vocabulary.weight)

    @property
    def num_embeddings(self) -> int:
        """The vocabulary's rows, without soft tokens."""
        return self.vocabulary.num_embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings [..., D] of ids [...]."""
        is_soft = input_ids >= self.vocabulary.num_embeddings
        embedded = self.vocabulary(input_ids.masked_fill(is_soft, 0))
        numbers = (input_ids - self.vocabulary.num_embeddings).clamp(min=0)
        soft = self.soft_ND[numbers.masked_fill(~is_soft, 0)].to(embedded.dtype)
        return torch.where(is_soft[..., None], soft, embedded)


def numbered(first_id: int, shapes: Mapping[str, Shape]) -> dict[str, SoftTokens]:
    """The ids of some groups, one after the other from `first_id` on."""
    groups = {}
    for name, (places, tokens) in shapes.items():
        groups[name] = SoftTokens(first_id, places, tokens)
        first_id += places * tokens
    return groups


def add_soft_tokens(
    model: PreTrainedModel, shapes: Mapping[str, Shape], seed: int
) -> dict[str, SoftTokens]:
    """Gives a model new groups: each token starts as the vocabulary's mean and a little noise.

    The noise, a tenth of the vocabulary's spread, makes those of a group distinct; it depends on
    `seed` alone, so that a group starts the same beside any others.
    """
    rows_VD = _vocabulary(model).weight.detach().float()
    mean_D, spread_D = rows_VD.mean(dim=0), rows_VD.std(dim=0)
    tables_GND = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed)
        noise_GND = torch.randn((*shape, len(mean_D)), generator=generator).to(mean_D.device)
        tables_GND[name] = mean_D + 0.1 * spread_D * noise_GND
    return _append(model, tables_GND)


def soft_tokens_of(model: PreTrainedModel) -> SoftEmbedding | None:
    """The model's embedding with soft tokens, if it has any."""
    embedding = decoder(model).get_input_embeddings()
    return embedding if isinstance(embedding, SoftEmbedding) else None


def take_soft_tokens(model: PreTrainedModel) -> dict[str, Tensor]:
    """Takes a model's soft tokens out, so that it is a plain one again: each group as table_GND."""
    embedding = soft_tokens_of(model)
    if embedding is None:
        return {}
    decoder(model).set_input_embeddings(embedding.vocabulary)
    soft_ND, vocabulary = embedding.soft_ND.detach(), embedding.num_embeddings
    taken = {}
    for name, group in embedding.groups.items():
        start = group.first_id - vocabulary
        rows_ND = soft_ND[start : start + group.places * group.tokens]
        taken[name] = rows_ND.view(group.places, group.tokens, -1)
    return taken


def save_soft_tokens(folder: Path, tables_GND: Mapping[str, Tensor]) -> None:
    """Writes groups beside a model's weights."""
    tensors = {name: table.detach().cpu().contiguous() for name, table in tables_GND.items()}
    save_file(tensors, folder / SOFT_TOKENS_FILE)


def soft_tokens_saved_in(folder: Path) -> dict[str, Shape]:
    """The groups beside a model's weights; none where there is no file of them.

    Raises:
        SoftTokensError: their file is damaged.
    """
    path = folder / SOFT_TOKENS_FILE
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return {name: (places, tokens) for name, (places, tokens, _) in shapes.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise SoftTokensError(f"{path} is damaged: {error}") from error


def load_soft_tokens(
    model: PreTrainedModel, folder: Path, names: Collection[str]
) -> dict[str, SoftTokens]:
    """Gives a model groups that were saved beside its weights.

    Raises:
        SoftTokensError: one is not there, or of another width, or the file is damaged.
    """
    path = folder / SOFT_TOKENS_FILE
    saved = soft_tokens_saved_in(folder)
    if absent := [name for name in names if name not in saved]:
        raise SoftTokensError(f"{folder} holds no soft tokens {absent[0]!r} ({SOFT_TOKENS_FILE})")
    with safe_open(path, framework="pt") as file:
        tables_GND = {name: file.get_tensor(name) for name in names}
    width = _vocabulary(model).embedding_dim
    if wrong := [table.shape[2] for table in tables_GND.values() if table.shape[2] != width]:
        raise SoftTokensError(f"{path}: soft tokens of width {wrong[0]}, the model's is {width}")
    return _append(model, tables_GND)


def _append(model: PreTrainedModel, tables_GND: Mapping[str, Tensor]) -> dict[str, SoftTokens]:
    """Puts groups behind the vocabulary and the groups that are there already.

    They are kept in fp32, whatever the model's dtype: small steps of training would be lost in
    bf16.
    """
    vocabulary, embedding = _vocabulary(model), soft_tokens_of(model)
    before = [] if embedding is None else [embedding.soft_ND.detach()]
    first_id = vocabulary.num_embeddings + sum(map(len, before))
    shapes = {name: (len(table), table.shape[1]) for name, table in tables_GND.items()}
    groups = numbered(first_id, shapes)
    if not groups:
        return groups
    tables = [table.flatten(0, 1) for table in tables_GND.values()]
    like = vocabulary.weight
    soft_ND = torch.cat([*before, *(table.to(like.device, torch.float32) for table in tables)])
    known = {} if embedding is None else embedding.groups
    decoder(model).set_input_embeddings(SoftEmbedding(vocabulary, soft_ND, known | groups))
    return groups


def _vocabulary(model: PreTrainedModel) -> nn.Embedding:
    embedding: Any = decoder(model).get_input_embeddings()
    return embedding.vocabulary if isinstance(embedding, SoftEmbedding) else embedding
