"""KVLink's link tokens: a trainable embedding for each (document, offset), beside the vocabulary.

Their ids start where the embedding matrix ends, padding rows included, so that no text and no
padding of the vocabulary can collide with them, and the output layer cannot give one. They are
saved in a file of their own next to the weights, which load without them like any model.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cache_ops.hf import decoder

LINKS_FILE = "link_tokens.safetensors"


class LinksNotFoundError(ValueError):
    """Saved link tokens do not fit what is asked of them; says how."""

    is_user_error = True


class LinkedEmbedding(nn.Module):
    """An embedding whose ids go on beyond the vocabulary with link tokens."""

    def __init__(self, vocabulary: nn.Embedding, links_ND: Tensor) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.links_ND = nn.Parameter(links_ND)

    @property
    def weight(self) -> nn.Parameter:
        """The vocabulary's rows: what ties and checks of the model look at."""
        return cast(nn.Parameter, self.vocabulary.weight)

    @property
    def num_embeddings(self) -> int:
        """The vocabulary's rows, without link tokens."""
        return self.vocabulary.num_embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings [..., D] of ids [...]."""
        is_link = input_ids >= self.vocabulary.num_embeddings
        embedded = self.vocabulary(input_ids.masked_fill(is_link, 0))
        numbers = (input_ids - self.vocabulary.num_embeddings).clamp(min=0)
        links = self.links_ND[numbers.masked_fill(~is_link, 0)].to(embedded.dtype)
        return torch.where(is_link[..., None], links, embedded)


class Links:
    """The ids of link tokens: `per_document` for each of `documents` places in a prompt."""

    def __init__(self, first_id: int, documents: int, per_document: int) -> None:
        self.first_id, self.documents, self.per_document = first_id, documents, per_document

    def ids(self, documents: int) -> list[list[int]]:
        """For each of the first `documents` documents the ids of its link tokens.

        Raises:
            LinksNotFoundError: there are fewer.
        """
        if documents > self.documents:
            raise LinksNotFoundError(
                f"link tokens were made for {self.documents} documents, {documents} are linked: "
                "train with a retrieval.k_c as large as the widest prefix"
            )
        count = self.per_document
        starts = range(self.first_id, self.first_id + documents * count, count or 1)
        return [[*range(start, start + count)] for start in starts] if count else [[]] * documents


def add_links(model: PreTrainedModel, documents: int, per_document: int, seed: int) -> Links:
    """Gives a model link tokens: each starts as the mean of the vocabulary and a little noise.

    A model may have several such tables, each with ids of its own. The noise, a tenth of the
    vocabulary's spread, makes each distinct; it depends on `seed` alone.
    """
    vocabulary = _embedding(model)
    rows_VD = vocabulary.weight.detach().float()
    generator = torch.Generator().manual_seed(seed)
    shape = (documents * per_document, rows_VD.shape[1])
    noise_ND = torch.randn(shape, generator=generator).to(rows_VD.device)
    links_ND = rows_VD.mean(dim=0) + 0.1 * rows_VD.std(dim=0) * noise_ND
    return _append(model, links_ND, documents, per_document)


def links_of(model: PreTrainedModel) -> LinkedEmbedding | None:
    """The model's embedding with link tokens, if it has any."""
    embedding = decoder(model).get_input_embeddings()
    return embedding if isinstance(embedding, LinkedEmbedding) else None


def take_links(model: PreTrainedModel) -> Tensor | None:
    """Takes a model's link tokens out, so that it is a plain one again; links_ND or None."""
    linked = links_of(model)
    if linked is None:
        return None
    decoder(model).set_input_embeddings(linked.vocabulary)
    return linked.links_ND.detach()


def save_links(folder: Path, links_ND: Tensor, per_document: int) -> None:
    """Writes link tokens beside a model's weights."""
    about = {"per_document": str(per_document)}
    tensors = {"links": links_ND.detach().cpu().contiguous()}
    save_file(tensors, folder / LINKS_FILE, metadata=about)


def links_saved_in(folder: Path) -> int:
    """How many link tokens a document lie beside a model's weights; 0 where there are none."""
    path = folder / LINKS_FILE
    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as file:
        return int((file.metadata() or {})["per_document"])


def load_links(model: PreTrainedModel, folder: Path) -> Links:
    """Gives a model the link tokens that were saved beside its weights.

    Raises:
        LinksNotFoundError: there are none, or they are of another width.
    """
    path = folder / LINKS_FILE
    if not path.is_file():
        raise LinksNotFoundError(
            f"{folder} holds no link tokens ({LINKS_FILE}): was it trained with "
            "train.system=kvlink and systems.kvlink.link_tokens above 0?"
        )
    with safe_open(path, framework="pt") as file:
        links_ND = file.get_tensor("links")
    per_document = links_saved_in(folder)
    vocabulary = _embedding(model)
    if links_ND.shape[1] != vocabulary.embedding_dim:
        raise LinksNotFoundError(
            f"{path}: link tokens of width {links_ND.shape[1]}, the model's is "
            f"{vocabulary.embedding_dim}"
        )
    return _append(model, links_ND, len(links_ND) // per_document, per_document)


def _append(model: PreTrainedModel, links_ND: Tensor, documents: int, per_document: int) -> Links:
    """Puts a table of link tokens behind the vocabulary and the tables that are there already.

    It is kept in fp32, whatever the model's dtype: small steps of training would be lost in bf16.
    """
    vocabulary = _embedding(model)
    tables = [links_ND.to(vocabulary.weight.device, torch.float32)]
    if (linked := links_of(model)) is not None:
        tables.insert(0, linked.links_ND.detach())
    first_id = vocabulary.num_embeddings + sum(len(table) for table in tables[:-1])
    decoder(model).set_input_embeddings(LinkedEmbedding(vocabulary, torch.cat(tables)))
    return Links(first_id, documents, per_document)


def _embedding(model: PreTrainedModel) -> nn.Embedding:
    embedding: Any = decoder(model).get_input_embeddings()
    return embedding.vocabulary if isinstance(embedding, LinkedEmbedding) else embedding
