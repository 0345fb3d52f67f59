"""A run: its set-up, its steps, its end.

Accelerate brings devices, ranks, mixed precision and trackers; data order, accumulation, stopping
and resuming are ours, since they decide what a step means.
"""

import logging
import warnings
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.attention import enable_packed
from cache_ops.contextualizer import contextualizer_of
from cache_ops.hf import check_vocabulary, load_tokenizer, restore_rope_tables
from cache_ops.rope import Rope
from cache_ops.soft_tokens import SoftTokens
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from recipes.progress import track
from recipes.resolve import Resolved
from recipes.schema import Recipe
from train.adapters import invocation_ids
from train.attention import attention_kernel
from train.batches import BatchOrder
from train.beside import put_beside
from train.checkpoint import load_state, put_best, save_model
from train.context import open_frozen_context
from train.distillation import Distillation
from train.examples import ExampleBuilder, Lengths
from train.history import is_finished
from train.lineage import check_lineage, starting_weights
from train.loop import Loop
from train.model_shape import ModelShape
from train.optim import optimizer_and_schedule, trainable_model
from train.ranks import any_rank
from train.recorder import Recorder
from train.run_folder import (
    alone_in,
    refuse_unwritable,
    refuse_used,
    remove_leftovers,
    told_unwritable,
)
from train.sharding import open_accelerator, splits_weights
from train.step import Stepper
from train.stopping import StopRequest
from train.teacher import check_distillation, learned_answers, teach
from train.throughput import flops_of, peak_of
from train.trackers import (
    end_trackers,
    refuse_missing_trackers,
    start_trackers,
    tracker_state,
)
from train.watching import OpenEvaluator
from train.whole import prepare, whole_model

logger = logging.getLogger(__name__)


def train(
    resolved: Resolved,
    open_evaluator: OpenEvaluator | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Fine-tunes the recipe's model and leaves it in `<train.run_folder>/checkpoint`.

    A finished run that is resumed stays as it is. A run that is asked to stop saves its state and
    ends; all ranks stop when one is asked.

    Args:
        resolved: the recipe.
        open_evaluator: for `train.evaluate`.
        stop: says when to stop; None: never before the end.

    Raises:
        UserError: no built data, a run folder that is used or in use, settings that do not fit
            together or not the weights of `train.init_from`, frozen context without the slices it
            needs, no room for a state or the checkpoint.
        ForeignStoreError, StoreError: see `train.context.open_frozen_context`.
        ModelNotFoundError, UnsupportedModelError: see `cache_ops.hf.load_model`.
        DivergedError: the loss or its gradient is no longer finite; names the questions.
    """
    folder = Path(resolved.config.train.run_folder)
    refuse_unwritable(folder)
    refuse_missing_trackers(resolved.config.train)
    accelerator = open_accelerator(resolved.config)
    with alone_in(folder, accelerator):
        refuse_used(resolved)
        if is_finished(folder):
            if accelerator.is_main_process:
                logger.info("%s is finished already", folder)
        else:
            _train(resolved, accelerator, open_evaluator, stop or StopRequest())
    end_trackers(accelerator)


def _train(
    resolved: Resolved,
    accelerator: Accelerator,
    open_evaluator: OpenEvaluator | None,
    stop: StopRequest,
) -> None:
    config = resolved.config
    folder = Path(config.train.run_folder)
    main = accelerator.is_main_process
    set_seed(config.seed)
    if main:
        _warn_of_idle_options(config)
    tokenizer = load_tokenizer(config.model.path)
    check_lineage(resolved, tokenizer, report=main)
    tables = load_built(config, "train")
    model, soft_tokens = _open_model(config, tokenizer)
    check_distillation(config, model.config)
    enable_packed(model, attention_kernel(config, model.config, accelerator.device))
    template = PromptTemplate(tokenizer, config.prompt)
    rope = Rope.from_config(model.config)
    builder = ExampleBuilder(tables, template, rope, config, soft_tokens)
    lengths = measure_lengths(builder, len(tables.samples), stop, report=main)
    if any_rank(accelerator, stop.asked):
        _tell_stopped(0, main)
        return
    order = BatchOrder.of(
        config.train,
        [length.row_tokens for length in lengths],
        builder.chunk_ids(),
        ranks=accelerator.num_processes,
        seed=config.seed,
    )
    total_steps = order.steps_of(config.train)
    activated = config.train.tuning == "lora" and config.train.lora.activated
    invocation = invocation_ids(template) if activated else None
    split = splits_weights(accelerator)
    frozen = None
    if config.context.gradient == "frozen":
        # The weights are still the base model's, also in a run that will be resumed.
        with accelerator.main_process_first():
            frozen = open_frozen_context(
                config, model, tokenizer, builder.used_ranges, writable=main, split=split
            )
    evaluate = None
    if config.train.evaluate is not None and open_evaluator is not None:
        supply = None if frozen is None else frozen.supply
        evaluate = open_evaluator(config, accelerator, model, tokenizer, soft_tokens, supply, split)
    distillation = None
    if config.train.distillation is not None:
        needed = order.samples_of(total_steps)
        said = teach(config, accelerator, model, template, tables, needed, stop)
        if said is None:
            if frozen is not None:
                frozen.close()
            _tell_stopped(0, main)
            return
        distillation = Distillation(config.train.distillation, said)
        if (answers := learned_answers(config, said)) is not None:
            # Prefixes and order stay those of the longest answers.
            builder = ExampleBuilder(tables, template, rope, config, soft_tokens, answers)
            lengths = measure_lengths(builder, len(tables.samples), StopRequest(), report=main)
    # Every rank has seen the folder unused before the main one writes into it.
    accelerator.wait_for_everyone()
    if main:
        remove_leftovers(folder)
        with told_unwritable(folder):
            resolved.write(folder)

    optimizer, schedule = optimizer_and_schedule(model, config.train, total_steps)
    model, optimizer = prepare(accelerator, model, optimizer)
    restore_rope_tables(model)
    progress = load_state(accelerator, folder, model, optimizer, config.train)
    with warnings.catch_warnings():
        # torch does not know of the optimizer's steps before the run was resumed.
        warnings.filterwarnings("ignore", "(Detected call of|Seems like) `", UserWarning)
        for _ in range(progress.step):
            schedule.step()
    start_trackers(accelerator, resolved, progress.tracker_ids, progress.step)
    progress.tracker_ids = tracker_state(accelerator)

    plain = accelerator.unwrap_model(model)
    contextualizer = contextualizer_of(plain)
    shape = ModelShape.of(plain.config, contextualizer.spec if contextualizer else None)
    stepper = Stepper(
        accelerator, model, optimizer, builder, order, lengths, frozen, config.train.max_grad_norm,
        flops_of(shape, config), distillation, contextualizer,
    )  # fmt: skip
    recorder = None
    if main:
        peak = peak_of(accelerator.device, config)
        peak = peak and peak * accelerator.num_processes
        recorder = Recorder(folder, config.train, progress.step, total_steps, peak)
    loop = Loop(
        accelerator, config.train, folder, model, optimizer, schedule, stepper, total_steps,
        progress, stop, evaluate, recorder,
    )  # fmt: skip
    if loop.run():
        trained = whole_model(accelerator, model, lambda: _open_model(config, tokenizer)[0])
        if trained is not None:
            watch = progress.watch
            kept = config.train.evaluate is not None and config.train.evaluate.keep_best
            weights_of = watch.best_step if kept and watch.best_step else progress.step
            if kept and watch.best_step:
                put_best(folder, trained, watch.best_step)
            if watch.best_f1 == 0:
                logger.warning("every evaluation found an F1 of 0: no step is better than another")
            save_model(folder, trained, tokenizer, invocation=invocation)
            logger.info(
                "trained %d steps; the model, with the weights of step %d, is in %s",
                progress.step, weights_of, folder / "checkpoint",
            )  # fmt: skip
        accelerator.wait_for_everyone()
    else:
        _tell_stopped(progress.step, main)
    if frozen is not None:
        frozen.close()
        if main:
            logger.info("prefix tokens of the main rank: %s", frozen.report())
    if recorder is not None:
        recorder.close()


def _tell_stopped(step: int, main: bool) -> None:
    if main:
        when = f"after step {step}" if step else "before the first step"
        logger.info("stopped %s; train.resume=true goes on from there", when)


def _open_model(
    config: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, SoftTokens]]:
    """The model to be trained, with what its system trains beside the weights."""
    start = starting_weights(config)
    model = trainable_model(
        config.model_copy(update={"model": config.model.model_copy(update={"path": start})})
    )
    check_vocabulary(model, tokenizer)
    return model, put_beside(model, config, Path(start))


def _warn_of_idle_options(config: Recipe) -> None:
    idle = config.context.asked() if config.train.system != "coinrag" else {}
    if idle:
        logger.warning(
            "%s: prefixes of train.system=coinrag have it, those of %s do not",
            ", ".join(f"context.{name}" for name in sorted(idle)),
            config.train.system,
        )


def measure_lengths(
    builder: ExampleBuilder, samples: int, stop: StopRequest, *, report: bool
) -> list[Lengths]:
    """Builds every sample once, so that one that cannot be trained on shows before step 1.

    Ends early when asked to stop.
    """
    lengths: list[Lengths] = []
    for index in track(range(samples), "lengths") if report else range(samples):
        if stop.asked:
            return lengths
        lengths.append(builder.lengths(index))
    if report:
        tokens = [length.tokens for length in lengths]
        shortened = sum(length.dropped > 0 for length in lengths)
        dropped = sum(length.dropped for length in lengths)
        lost = ""
        if shortened:
            lost = f"; {shortened} lost {dropped} nuggets or chunks to train.max_length_tokens"
        median, high = np.quantile(tokens, [0.5, 0.99], method="higher")
        logger.info(
            "%d samples of %d tokens at the median, %d at the 99th percentile, %d at most%s",
            samples, median, high, max(tokens), lost,
        )  # fmt: skip
        if emptied := [index for index, length in enumerate(lengths) if length.all_dropped]:
            (first,) = builder.question_ids(emptied[:1])
            logger.warning(
                "%d samples, first question %s, have no nugget or chunk left: "
                "train.max_length_tokens took all of them",
                len(emptied), first,
            )  # fmt: skip
    return lengths
