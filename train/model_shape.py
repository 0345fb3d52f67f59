"""The sizes of a model that memory and work depend on, from its config alone, without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cache_ops.contextualizer import ContextualizerSpec
from cache_ops.packing import PackedBatch
from cache_ops.rope import head_dim


@dataclass(frozen=True)
class ModelShape:
    """A supported model; widths in elements a token."""

    layers: int
    hidden: int
    heads: int
    query: int
    key_value: int
    """Of the keys; the values are as wide."""
    mlp: int
    vocabulary: int
    tied: bool
    """The head is the embedding's matrix."""
    normed_heads: bool
    """Queries and keys of each head pass an RMSNorm."""
    linears: Mapping[str, tuple[int, int]]
    """Inputs and outputs of each linear module of a layer, by the last part of its name."""
    parameters: int
    """Without those of what is trained beside the weights."""
    layer_parameters: int
    contextualizer: ContextualizerSpec | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, contextualizer: ContextualizerSpec | None = None) -> Self:
        """The shape of the causal LM of a config that has passed `hf.check_supported`."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        layer: nn.Module = model.model.layers[0]
        linears = {
            name.rpartition(".")[2]: (module.in_features, module.out_features)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        }
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            query=config.num_attention_heads * head_dim(config),
            key_value=config.num_key_value_heads * head_dim(config),
            mlp=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            normed_heads=hasattr(model.model.layers[0].self_attn, "q_norm"),
            linears=linears,
            parameters=sum(weight.numel() for weight in model.parameters()),
            layer_parameters=sum(weight.numel() for weight in layer.parameters()),
            contextualizer=contextualizer,
        )

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def contextualizer_parameters(self) -> int:
        """Elements of the contextualizer, if there is one."""
        return 0 if self.contextualizer is None else self.contextualizer.parameters

    @property
    def layer_matrices(self) -> int:
        """Elements of the linear modules of a layer, without biases."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    def lora_parameters(self, targets: Sequence[str], rank: int, *, dora: bool) -> int:
        """Elements of an adapter on `targets` in all layers."""
        sizes = [self.linears[target] for target in targets if target in self.linears]
        return self.layers * sum(
            rank * (inputs + outputs) + dora * outputs for inputs, outputs in sizes
        )

    def forward_flops(self, row: "RowShape") -> float:
        """Floating-point operations of one forward pass of a row: two for each multiply-add."""
        matrices = self.layers * self.layer_matrices * row.tokens
        head = self.embedding_parameters * row.answers
        # Scores, and their sums of values.
        attention = self.layers * 2 * self.query * row.visible_pairs
        return 2 * (matrices + head + attention) + self.contextualizer_flops(row)

    def contextualizer_flops(self, row: "RowShape") -> float:
        """Of these, those of the contextualizer."""
        if self.contextualizer is None:
            return 0.0
        return self.contextualizer.forward_flops(row.prefix, row.prefix_pairs)


@dataclass(frozen=True)
class RowShape:
    """A packed row, or the mean of many; counts of tokens."""

    tokens: float
    segments: float
    """Of the tokens, those of prompt and chunks."""
    prefix: float
    """Sliced tokens of all examples."""
    answers: float
    masked_pairs: float
    """Elements of the masks under which questions and answers attend."""
    visible_pairs: float
    """Pairs of a token and one that it attends to."""
    prefix_pairs: float = 0.0
    """Pairs of sliced tokens of the same example."""

    @classmethod
    def of(cls, batch: PackedBatch, *, frozen: bool = False) -> Self:
        """The shape of a packed micro-batch; with `frozen` as it is over prefixes at hand."""
        layout = batch.layout
        lengths = () if frozen else layout.segment_lengths
        segment_pairs = sum(length * (length + 1) // 2 for length in lengths)
        return cls(
            tokens=sum(lengths) + sum(layout.own_lengths),
            segments=sum(lengths),
            prefix=sum(layout.prefix_lengths),
            answers=len(batch.labels_A),
            masked_pairs=sum(mask.numel() for mask in layout.visible),
            visible_pairs=segment_pairs + sum(int(mask.sum()) for mask in layout.visible),
            prefix_pairs=sum(length**2 for length in layout.prefix_lengths),
        )
