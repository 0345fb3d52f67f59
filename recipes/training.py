"""The section that says how a run trains; see `recipes.schema` for the whole.

How a model is split over ranks is no part of a recipe: `coinrag train --sharding` or the config of
`accelerate launch` says it, and the same recipe gives the same losses under each.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from recipes.section import Fraction, Natural, Positive, Section, Text, mistake
from recipes.systems import TrainedSystem


class LoraConfig(Section):
    rank: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    target_modules: Annotated[list[Text], Field(min_length=1)] = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    # DoRA: the magnitude of each weight row is learned apart from its direction.
    dora: bool = False
    # rsLoRA: scaled by alpha / sqrt(rank) in place of alpha / rank.
    rank_stabilized: bool = False
    # aLoRA: acts from the query on, so the base model's slices serve it.
    activated: bool = False

    @field_validator("activated")
    @classmethod
    def _has_no_magnitudes(cls, activated: bool, info: ValidationInfo) -> bool:
        if activated and info.data.get("dora"):
            raise mistake(
                "an activated adapter cannot be a DoRA: expected false with train.lora.dora true",
                involves="train.lora.dora",
            )
        return activated


class WandbConfig(Section):
    project: Text
    mode: Literal["online", "offline"] = "offline"


class TrackioConfig(Section):
    # On this machine alone: `trackio show --project PROJECT`.
    project: Text


class EvaluateConfig(Section):
    """Answers to dev questions while training, by the engine that serves."""

    every_steps: Positive
    # The first so many of each data set.
    questions_per_dataset: Positive = 20
    # Evaluations without a better F1 after which the run ends; null: it goes on.
    patience: Positive | None = None
    # The weights of the best F1 become the checkpoint; else those of the last step.
    keep_best: bool = True
    sample_answers: Natural = 3


class DistillationConfig(Section):
    """A teacher beside the answers: the model that the run starts from, reading whole chunks."""

    # Of KL(teacher || student) in the loss; cross-entropy has the rest.
    weight: Fraction = 0.5
    # Of both distributions; the divergence counts times its square.
    temperature: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    # gold: the data's; teacher: its own greedy ones, of at most eval.max_new_tokens.
    answers: Literal["gold", "teacher"] = "gold"
    # How many of the most likely tokens it tells apart, all others counting as one; null: all of
    # the vocabulary. 8 bytes an answer token for each.
    top_k: Positive | None = 64


class TrainConfig(Section):
    # Whose prefixes are trained on; block_attention learns each sample in full and in blocks.
    system: TrainedSystem = "coinrag"
    # none: the weights stay as they are, and only what is trained beside them learns (soft tokens).
    tuning: Literal["full", "lora", "none"] = "full"
    lora: LoraConfig = LoraConfig()
    # A finished run whose weights this one starts from; null: those of model.path.
    init_from: Text | None = None
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-6
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_fraction: Fraction = 0.03
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    # adamw_stochastic: bf16 weights, rounded at random; adamw_8bit: moments of 8 bits, and bf16
    # weights are rounded at random.
    optimizer: Literal["adamw", "adamw_stochastic", "adamw_8bit"] = "adamw"
    epochs: Positive = 1
    max_steps: Positive | None = None
    # Samples of one optimizer step: over micro-batches, accumulation and all ranks together.
    effective_batch_samples: Positive = 16
    # Most samples of one packed pass.
    micro_batch_samples: Positive = 4
    # Most tokens of one packed pass, whose samples are then dealt so that passes carry equal work;
    # null: passes are dealt by samples alone.
    micro_batch_tokens: Positive | None = None
    # Samples that share chunks meet in one pass, which encodes a chunk once.
    group_shared_chunks: bool = False
    max_length_tokens: Positive = 1024
    gradient_checkpointing: bool = False
    mixed_precision: Literal["no", "bf16"] = "no"
    # varlen: one flash call over all chunks of a pass and one over all examples, on GPUs in bf16;
    # auto: where it can be.
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    log_every_steps: Positive = 1
    save_every_steps: Positive | None = None
    # States kept to resume from, the newest.
    keep_states: Positive = 1
    resume: bool = False
    run_folder: Text
    evaluate: EvaluateConfig | None = None
    distillation: DistillationConfig | None = None
    # A loss or gradient norm above so many times the median of the last steps is logged with its
    # questions.
    spike_factor: Annotated[float, Field(gt=1.0)] = 4.0
    wandb: WandbConfig | None = None
    # In the folder `tensorboard` of the run.
    tensorboard: bool = False
    trackio: TrackioConfig | None = None

    @field_validator("micro_batch_samples")
    @classmethod
    def _divides_effective_batch(cls, micro: int, info: ValidationInfo) -> int:
        effective = info.data.get("effective_batch_samples", micro)
        if effective % micro:
            raise mistake(
                f"expected a divisor of train.effective_batch_samples ({effective}), got {micro}",
                involves="train.effective_batch_samples",
            )
        return micro
