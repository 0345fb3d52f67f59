"""How much memory and disk a run needs, counted from shapes before anything is loaded.

Every part is what the training step really keeps: weights, gradients, the optimizer's state, the
tensors that autograd saves for the backward pass of a packed row, and the largest temporaries.
Nothing is fitted; `tests/benchmarks/planner.py` compares with measured peaks. In comments, C is
the hidden width, Q and K those of queries and keys, F the MLP's, V the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recipes.sharding import Sharding
from recipes.training import TrainConfig
from train.model_shape import ModelShape, RowShape

# Moments of 8 bits have a scale of four bytes for each block of so many.
_BLOCK = 256
# DeepSpeed's default reduce_bucket_size, in elements.
_ZERO_BUCKET = 500_000_000


@dataclass(frozen=True)
class Setting:
    """What of a run, beside its model and its rows, memory depends on."""

    train: TrainConfig
    dtype: str
    """`model.dtype`: of the weights as they are kept."""
    sharding: Sharding = "ddp"
    ranks: int = 1
    passes: int = 1
    """Packed passes of one rank in an optimizer step; from the second on gradients are kept."""

    @property
    def weight_bytes(self) -> int:
        """Of one weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def trained_bytes(self) -> int:
        """Of one trained weight: adapters and soft tokens are kept in fp32."""
        return self.weight_bytes if self.train.tuning == "full" else 4

    @property
    def autocast(self) -> bool:
        """Whether fp32 weights are cast to bf16 wherever a matrix product reads them."""
        mixed = self.train.mixed_precision == "bf16" and self.weight_bytes == 4
        return mixed and self.sharding == "ddp"

    @property
    def compute_bytes(self) -> int:
        """Of one element of a matrix product."""
        return 2 if self.train.mixed_precision == "bf16" else self.weight_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes a rank by part: of its device, and of the host beside it where states are offloaded."""

    device: Mapping[str, float]
    host: Mapping[str, float]

    @property
    def device_total(self) -> float:
        """Peak bytes on the rank's device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> float:
        """Bytes in the host's memory."""
        return sum(self.host.values())


def optimizer_bytes(optimizer: str, weight_bytes: int) -> float:
    """Bytes of the two moments of a trained weight that is kept in `weight_bytes` bytes."""
    return 2 * (1 + 4 / _BLOCK) if optimizer == "adamw_8bit" else 2 * weight_bytes


def trained_parameters(shape: ModelShape, train: TrainConfig) -> int:
    """How many weights a run changes; soft tokens beside them are too few to count."""
    beside = shape.contextualizer_parameters
    if train.tuning == "full":
        return shape.parameters + beside
    if train.tuning == "none":
        return beside
    lora = train.lora
    return shape.lora_parameters(lora.target_modules, lora.rank, dora=lora.dora) + beside


def kv_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return shape.layers * 2 * shape.key_value * element_bytes


def disk_bytes(shape: ModelShape, setting: Setting) -> dict[str, float]:
    """Bytes that a run leaves in its folder, by part, at the most it holds at a time."""
    train = setting.train
    trained = trained_parameters(shape, train)
    state = setting.trained_bytes + optimizer_bytes(train.optimizer, setting.trained_bytes)
    # A new state stands beside the old ones until it is whole; a stop signal saves one, too.
    states = train.keep_states + 1 if train.save_every_steps else 1
    # The best weights so far, those that the newest state calls so, and new ones being written.
    bests = 3 if train.evaluate and train.evaluate.keep_best else 0
    parts = {
        "states": states * state * trained,
        "best_weights": bests * setting.trained_bytes * trained,
        "checkpoint": setting.weight_bytes * shape.parameters + 4 * shape.contextualizer_parameters,
        "adapter": setting.trained_bytes * trained * (train.tuning == "lora"),
    }
    return {name: size for name, size in parts.items() if size}


def step_flops(shape: ModelShape, row: RowShape, train: TrainConfig) -> float:
    """Floating-point operations of a row, forward and backward.

    A backward pass takes twice the operations of a forward pass, or else as many, since frozen
    weights have no gradients; checkpointing runs every layer forward once more.
    """
    forwards = (3 if train.tuning == "full" else 2) + train.gradient_checkpointing
    return shape.forward_flops(row) * forwards


def teacher_memory(shape: ModelShape, setting: Setting, tokens: int) -> float:
    """Bytes on a rank's device while the teacher reads a pass of so many tokens, whole model."""
    casts = 2 * shape.parameters if setting.autocast else 0
    in_layer = 3 * shape.mlp * setting.compute_bytes + 4 * shape.hidden * _residual_bytes(setting)
    cached = kv_bytes(shape, setting.compute_bytes)
    return setting.weight_bytes * shape.parameters + casts + tokens * (in_layer + cached)


def peak_memory(shape: ModelShape, row: RowShape, setting: Setting) -> Memory:
    """The peak of a training step on the longest row, once the optimizer has its state."""
    states, host = _states(shape, setting)
    activations, temporaries = _activations(shape, row, setting, states.get("gradients", 0.0))
    frozen = 0.0
    if row.segments == 0:
        frozen = row.prefix * kv_bytes(shape, setting.weight_bytes)
    parts = {
        **states,
        "activations": activations,
        "temporaries": temporaries,
        "frozen_context": frozen,
    }
    return Memory({name: size for name, size in parts.items() if size}, host)


def _states(shape: ModelShape, setting: Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Weights, gradients and optimizer on the device, and what lies in the host's memory."""
    train, ranks, width = setting.train, setting.ranks, setting.trained_bytes
    low = setting.compute_bytes
    trained = trained_parameters(shape, train)
    frozen = 0 if train.tuning == "full" else shape.parameters
    weights = width * trained + setting.weight_bytes * frozen
    state = optimizer_bytes(train.optimizer, width)
    # Where each rank keeps a share of every weight, one module's are whole while the next come.
    gathered = 2 * low * max(shape.layer_parameters, shape.embedding_parameters)
    match setting.sharding:
        case "ddp":
            # DistributedDataParallel copies gradients into buckets for their reduction.
            return {
                "weights": weights,
                "gradients": width * trained,
                "optimizer": state * trained,
                "reduction_buckets": width * trained * (ranks > 1),
            }, {}
        case "fsdp2":
            return {
                "weights": weights / ranks,
                "gradients": width * trained / ranks,
                "optimizer": state * trained / ranks,
                "gathered_layers": gathered,
            }, {}
        case "zero2" | "zero3" | "zero3_offload":
            # DeepSpeed computes in the lower precision and keeps an fp32 master of what is trained.
            weights = low * (trained + frozen)
            parts = {
                "gradients": low * trained / ranks,
                "optimizer": (4 + optimizer_bytes(train.optimizer, 4)) * trained / ranks,
                "reduction_buckets": low * min(_ZERO_BUCKET, trained),
            }
            if setting.sharding == "zero2":
                return {"weights": weights, **parts}, {}
            if setting.sharding == "zero3":
                return {"weights": weights / ranks, **parts, "gathered_layers": gathered}, {}
            bucket = parts.pop("reduction_buckets")
            # On the host gradients are fp32, as its optimizer takes them.
            parts["gradients"] = 4 * trained / ranks
            return {
                "gathered_layers": gathered,
                "reduction_buckets": bucket,
            }, {"weights": weights / ranks, **parts}


def _activations(
    shape: ModelShape, row: RowShape, setting: Setting, gradients: float
) -> tuple[float, float]:
    """Bytes of (what autograd keeps of a row's forward pass, what comes and goes beside it).

    The peak is looked for where it can be: at the end of the forward pass and in the loss, in the
    backward pass of the last layer, when all is still kept, and in that of the first.
    """
    train, width = setting.train, setting.trained_bytes
    full = train.tuning == "full"
    residual = _residual_bytes(setting)
    layer = _saved_by_layer(shape, row, setting)
    casts = 2 * shape.layer_matrices if setting.autocast else 0
    # The contextualizer's are cast once.
    head_cast = 2 * shape.contextualizer_parameters if setting.autocast else 0
    head_cast += 2 * shape.embedding_parameters if setting.autocast else 0

    # The final norm keeps its input in fp32 and, to train its weight, its output; RoPE its tables.
    ends = row.tokens * shape.hidden * (4 + residual * full)
    ends += 2 * (shape.query // shape.heads) * (row.tokens * residual + row.prefix * 4)

    # Gradients of the MLP's product and of what it multiplies, less what they set free; of hidden
    # states beside them.
    in_layer = row.tokens * (2 * shape.mlp * setting.compute_bytes + 2 * shape.hidden * residual)
    logits = 4 * row.answers * shape.vocabulary
    if train.gradient_checkpointing:
        kept = shape.layers * row.tokens * shape.hidden * residual + ends
        # The layer's input is what the checkpoint keeps, unless the norm makes an fp32 copy.
        again = layer + casts - row.tokens * shape.hidden * 4 * (residual == 4)
        forward = head_cast + casts * shape.layers * full
    else:
        kept = shape.layers * (layer + casts) + head_cast + ends
        again, forward = 0.0, 0

    # A new gradient lies beside the one it is added to, where one was kept from the pass before;
    # that of a tied head until the embedding's joins it.
    only_pass = setting.passes == 1
    head_gradient = width * shape.embedding_parameters * full
    mlp_gradient = width * shape.hidden * shape.mlp * full
    last = (
        forward + _loss_bytes(shape, row, train),
        logits + head_gradient,
        logits + (head_gradient if shape.tied or only_pass else mlp_gradient) + again + in_layer,
    )
    first = (layer + casts + in_layer, (1 + shape.tied - only_pass) * head_gradient)
    peak = max(kept + max(last) - gradients * only_pass, ends + max(first))
    return min(kept, peak), max(peak - kept, 0.0)


def _loss_bytes(shape: ModelShape, row: RowShape, train: TrainConfig) -> float:
    """The logits and the most that the loss makes of them."""
    logits = 4 * row.answers * shape.vocabulary
    if train.distillation is None:
        # Their logarithms, and the gradients of both.
        return 4 * logits
    # Logarithms for the teacher too, if there are any those of tokens that it does not tell apart,
    # with a gradient; of each that it does its id, also as 64 bits, and two log-probabilities.
    top_k = train.distillation.top_k
    return (7 if top_k else 5) * logits + 20 * row.answers * (top_k or shape.vocabulary)


def _residual_bytes(setting: Setting) -> int:
    """Of one element between layers: autocast leaves them in fp32."""
    return 2 if setting.compute_bytes == 2 and not setting.autocast else 4


def _adapter_bytes(setting: Setting) -> int:
    """Of one element that an adapter computes with: its own fp32, unless autocast lowers it."""
    return 2 if setting.train.mixed_precision == "bf16" else 4


def _saved_by_layer(shape: ModelShape, row: RowShape, setting: Setting) -> float:
    """Bytes that autograd keeps of one layer, its input included."""
    train, low = setting.train, setting.compute_bytes
    full = train.tuning == "full"
    targets = train.lora.target_modules if train.tuning == "lora" else []
    residual = _residual_bytes(setting)

    # Autocast copies what a module reads for each, peft in bf16 models for each adapter.
    copies = setting.autocast or (not full and setting.weight_bytes == 2)
    input_bytes = _adapter_bytes(setting) if not full else low

    def kept_inputs(*readers: str) -> int:
        """Bytes of each element that these modules read, as often as it is kept for them."""
        trained = sum(full or name in targets for name in readers)
        return input_bytes * (trained if copies else min(trained, 1))

    # RMSNorm: its input in fp32; before its weight, if that is trained.
    norm = shape.hidden * (4 + residual * full)
    per_token = 2 * norm
    inputs = kept_inputs("q_proj", "k_proj", "v_proj") + kept_inputs("gate_proj", "up_proj")
    per_token += inputs * shape.hidden
    if shape.normed_heads:
        per_token += (shape.query + shape.key_value) * (4 + low * full)
    # Attention: queries and output with its log-sums; the output once more, joined, for o_proj.
    per_token += 2 * shape.query * low + 4 * shape.heads
    per_token += kept_inputs("o_proj") * shape.query
    # SwiGLU: gate, its SiLU, up; their product for down_proj.
    per_token += (3 * low + kept_inputs("down_proj")) * shape.mlp
    if not full:
        adapted = [shape.linears[name] for name in shape.linears if name in targets]
        per_token += len(adapted) * train.lora.rank * low
        # DoRA scales the base's output and the adapter's.
        per_token += 2 * train.lora.dora * low * sum(outputs for _, outputs in adapted)
    # Keys and values of chunks; those of each question's prefix and own tokens, joined.
    own = row.tokens - row.segments
    keys = 2 * shape.key_value * low * ((row.tokens if row.segments else 0) + row.prefix + own)
    corrected = row.prefix * _saved_by_contextualizer(shape, setting)
    return row.tokens * per_token + keys + row.masked_pairs * low + corrected


def _saved_by_contextualizer(shape: ModelShape, setting: Setting) -> float:
    """Bytes that autograd keeps of it in one layer, for each token of a prefix."""
    if (spec := shape.contextualizer) is None:
        return 0.0
    # Its weights are fp32, which autocast lowers where a matrix reads.
    low = 2 if setting.train.mixed_precision == "bf16" else 4
    read = spec.elements * (4 + low)
    # Norms keep their inputs, before and after scaling, matrices theirs; attention keeps its own
    # and its output, joined again for the next matrix; the MLP what SiLU reads and gives.
    norms = (2 * spec.layers + 1) * spec.width * (2 * 4 + low)
    return read + norms + spec.layers * 9 * spec.width * low
