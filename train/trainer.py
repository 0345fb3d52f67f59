"""The training loop: one packed forward a micro-batch, cross-entropy over answer tokens only.

The loss of a step is the mean over the answer tokens of its whole effective batch (all ranks, all
accumulated micro-batches), so it does not depend on how the batch was dealt. Accelerate brings
devices, ranks, mixed precision and trackers; data order, accumulation and resuming are here, since
they decide what a step means.
"""

import logging
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_wandb_available, set_seed
from torch import Tensor
from torch.nn.functional import cross_entropy

from cache_ops.hf import check_vocabulary, load_tokenizer, restore_rope_tables
from cache_ops.links import add_links
from cache_ops.rope import Rope
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.progress import track
from recipes.resolve import Resolved
from recipes.schema import Recipe
from train.batches import BatchOrder
from train.checkpoint import load_state, save_model, save_state
from train.context import FrozenContext, open_frozen_context
from train.examples import ExampleBuilder, Lengths
from train.optim import optimizer_and_schedule, trainable_model
from train.recorder import Recorder
from train.run_folder import flat, is_finished, refuse_used

logger = logging.getLogger(__name__)

WHOLE_MODEL_ON_EACH_RANK = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
)


def train(resolved: Resolved) -> None:
    """Fine-tunes the recipe's model and leaves it in `<train.run_folder>/checkpoint`.

    A finished run that is resumed stays as it is.

    Raises:
        UserError: no built data, a used run folder, settings that do not fit together, frozen
            context without the slices it needs.
        ForeignStoreError, StoreError: see `train.context.open_frozen_context`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        FloatingPointError: the loss or its gradient is no longer finite; names the questions.
    """
    config = resolved.config
    run_folder = Path(config.train.run_folder)
    refuse_used(resolved)
    if is_finished(run_folder):
        logger.info("%s is finished already", run_folder)
        return
    if config.train.wandb and not is_wandb_available():
        raise UserError(
            "train.wandb is set but wandb is not installed: pip install 'coinrag[wandb]'"
        )
    accelerator = Accelerator(
        mixed_precision=config.train.mixed_precision,
        log_with="wandb" if config.train.wandb else None,
        project_dir=str(run_folder),
    )
    if accelerator.distributed_type not in WHOLE_MODEL_ON_EACH_RANK:
        raise UserError(
            f"training under {accelerator.distributed_type.value} is not supported: every rank "
            "must hold the whole model (one process, or data-parallel ranks)"
        )
    set_seed(config.seed)
    tokenizer = load_tokenizer(config.model.path)
    template = PromptTemplate(tokenizer, config.prompt)
    tables = load_built(config, "train")
    model = trainable_model(config)
    check_vocabulary(model, tokenizer)
    links = None
    if config.train.system == "kvlink" and config.systems.kvlink.link_tokens:
        links = add_links(
            model, config.retrieval.k_c, config.systems.kvlink.link_tokens, config.seed
        )
    builder = ExampleBuilder(tables, template, Rope.from_config(model.config), config, links)
    order = BatchOrder(
        samples=len(tables.samples),
        effective_batch=config.train.effective_batch_samples,
        micro_batch=config.train.micro_batch_samples,
        ranks=accelerator.num_processes,
        seed=config.seed,
    )
    lengths = measure_lengths(builder, order.samples, accelerator.is_main_process)
    frozen = None
    if config.context.gradient == "frozen":
        # The weights are still the base model's, also in a run that will be resumed.
        with accelerator.main_process_first():
            frozen = open_frozen_context(
                config,
                model,
                tokenizer,
                builder.used_ranges,
                writable=accelerator.is_main_process,
            )
    # Every rank has seen the folder unused before the main one writes into it.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        resolved.write(run_folder)
    accelerator.wait_for_everyone()

    total_steps = order.steps_per_epoch * config.train.epochs
    total_steps = min(total_steps, config.train.max_steps or total_steps)
    optimizer, schedule = optimizer_and_schedule(model, config.train, total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    restore_rope_tables(model)
    plain_model = accelerator.unwrap_model(model)
    first_step, seconds_before = load_state(run_folder, plain_model, optimizer)
    for _ in range(first_step):
        schedule.step()
    _start_tracker(accelerator, resolved)

    started = time.perf_counter() - seconds_before
    recorder = None
    if accelerator.is_main_process:
        recorder = Recorder(run_folder, config.train, first_step, total_steps)
    for step in range(first_step, total_steps):
        values = _run_step(
            accelerator, model, optimizer, builder, frozen, order, lengths, step, config
        )
        values["learning_rate"] = schedule.get_last_lr()[0]
        schedule.step()
        done = step + 1
        elapsed = time.perf_counter() - started
        values |= {"step": done, "epoch": done / order.steps_per_epoch, "elapsed_seconds": elapsed}
        if recorder is not None:
            if recorder.record(values):
                accelerator.log(values, step=done)
            if recorder.saves(done):
                save_state(run_folder, done, plain_model, optimizer, elapsed)
    accelerator.wait_for_everyone()
    if frozen is not None:
        frozen.close()
    if recorder is not None:
        recorder.close()
        if frozen is not None:
            logger.info("prefix tokens of the main rank: %s", frozen.report())
        per_document = config.systems.kvlink.link_tokens
        save_model(run_folder, plain_model, tokenizer, link_tokens=per_document)
        logger.info("trained %d steps; the model is in %s", total_steps, run_folder / "checkpoint")
    accelerator.end_training()


def measure_lengths(builder: ExampleBuilder, samples: int, report: bool) -> list[Lengths]:
    """Builds every sample once, so that one that cannot be trained on shows before step 1."""
    indices = range(samples)
    lengths = [builder.lengths(i) for i in (track(indices, "lengths") if report else indices)]
    if report:
        tokens = [length.tokens for length in lengths]
        shortened = sum(length.dropped > 0 for length in lengths)
        dropped = sum(length.dropped for length in lengths)
        median, high = np.quantile(tokens, [0.5, 0.99], method="higher")
        logger.info(
            "%d samples of %d tokens at the median, %d at the 99th percentile, %d at most; "
            "%d lost %d nuggets or chunks to train.max_length_tokens",
            samples, median, high, max(tokens), shortened, dropped,
        )  # fmt: skip
    return lengths


def _run_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    builder: ExampleBuilder,
    frozen: FrozenContext | None,
    order: BatchOrder,
    lengths: list[Lengths],
    step: int,
    config: Recipe,
) -> dict[str, Any]:
    """One optimizer step; its loss, gradient norm and throughput over all ranks."""
    start = time.perf_counter()
    samples = order.step_samples(step)
    answer_tokens = sum(lengths[index].answer_tokens for index in samples)
    micro_batches = order.micro_batches(step, accelerator.process_index)
    loss_sum = torch.zeros((), device=accelerator.device)
    counts = {"packed_tokens": 0}
    for number, micro_batch in enumerate(micro_batches):
        batch = builder.micro_batch(micro_batch.indices, frozen).to(accelerator.device)
        last = number == len(micro_batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            logits_1AV = model(**batch.model_inputs()).logits
            loss = answer_loss(logits_1AV[0], batch.labels_A) * micro_batch.counts
            # Ranks average their gradients, so each multiplies by their number.
            accelerator.backward(loss * (accelerator.num_processes / answer_tokens))
        loss_sum += loss.detach()
        counts["packed_tokens"] += batch.tokens
    gradient_norm = accelerator.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    loss_mean = float(accelerator.reduce(loss_sum, "sum")) / answer_tokens
    if not (math.isfinite(loss_mean) and math.isfinite(gradient_norm)):
        raise FloatingPointError(
            f"step {step + 1}: loss {loss_mean}, gradient norm {float(gradient_norm)}; "
            f"questions {', '.join(builder.question_ids(samples))}"
        )
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - start
    if frozen is not None:
        counts |= frozen.take_tokens()
    all_counts = torch.tensor(list(counts.values()), device=accelerator.device)
    counts = dict(zip(counts, accelerator.reduce(all_counts, "sum").tolist(), strict=True))
    return {
        "loss": loss_mean,
        "gradient_norm": float(gradient_norm),
        "answer_tokens": answer_tokens,
        **counts,
        "samples_per_second": round(len(samples) / seconds, 4),
        "tokens_per_second": round(counts["packed_tokens"] / seconds, 2),
    }


def answer_loss(logits_AV: Tensor, labels_A: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the answer tokens, in fp32."""
    return cross_entropy(logits_AV.float(), labels_A, reduction="sum")


def _start_tracker(accelerator: Accelerator, resolved: Resolved) -> None:
    wandb = resolved.config.train.wandb
    if wandb is None:
        return
    options = {"mode": wandb.mode, "dir": resolved.config.train.run_folder}
    accelerator.init_trackers(
        wandb.project,
        config=flat(resolved),
        init_kwargs={"wandb": {**options, "name": resolved.config.name}},
    )
