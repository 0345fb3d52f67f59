"""Fine-tuning a cross-encoder to nuggets, by FlagEmbedding's trainer of encoder-only rerankers.

Of each question it draws, anew in every epoch, one good nugget and `scorer.negatives` others, and
raises the good one's logit by the cross-entropy of a softmax over them, under a learning rate that
falls linearly after a tenth of the steps. The epoch with the lowest held-out loss is kept.

In shape suffixes, N is the nuggets of one question.
"""

import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from FlagEmbedding.abc.finetune.reranker import (
    AbsRerankerCollator,
    AbsRerankerDataArguments,
    AbsRerankerTrainDataset,
    AbsRerankerTrainingArguments,
)
from FlagEmbedding.finetune.reranker.encoder_only.base import (
    CrossEncoderModel,
    EncoderOnlyRerankerTrainer,
)
from transformers import PrinterCallback, TrainerCallback, set_seed

from data_builders.encoder import without_progress_bars
from recipes.errors import UserError
from recipes.progress import Progress
from recipes.retrieval import CrossEncoderConfig
from recipes.scorer import ScorerConfig
from train.scorer_base import load_base
from train.scorer_lists import NuggetList
from train.scorer_measure import Trained, best_epoch, measured, recall, told

logger = logging.getLogger(__name__)

_WARM_UP = 0.1


def train_cross_encoder(
    section: CrossEncoderConfig,
    config: ScorerConfig,
    learned: Sequence[NuggetList],
    held_out: Sequence[NuggetList],
) -> Trained:
    """A cross-encoder for the section's device and lengths, trained from `scorer.base` in float32.

    Args:
        section: has passed `refuse_untrainable`.
        config: the same, how it is trained.
        learned: all of them teach.
        held_out: at least one has an answering nugget.

    Raises:
        UserError: the loss is no longer finite, or see `load_base`.
    """
    # A head that the base lacks is drawn.
    set_seed(config.seed)
    model, tokenizer = load_base(config)
    limit = min(section.max_tokens, tokenizer.model_max_length)
    # The dataset cuts questions at three quarters of both together then, as the reranker does.
    lengths = {"query_max_len": limit * 2 // 3, "passage_max_len": limit - limit * 2 // 3}
    batch_questions = min(config.batch_questions, len(learned))
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        # FlagEmbedding's collator pads to the longest pair and names a maximum all the same.
        warnings.filterwarnings("ignore", message="`max_length` is ignored")
        dataset = _dataset(Path(scratch), learned, config, tokenizer, lengths)
        collator = AbsRerankerCollator(tokenizer, **lengths)
        arguments = AbsRerankerTrainingArguments(
            output_dir=scratch,
            seed=config.seed,
            num_train_epochs=config.epochs,
            per_device_train_batch_size=batch_questions,
            # FlagEmbedding cuts the logits into groups by the size of a whole batch.
            dataloader_drop_last=True,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_steps=_WARM_UP,
            logging_strategy="epoch",
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=section.device == "cpu",
            dataloader_pin_memory=section.device != "cpu",
        )
        steps = len(learned) // batch_questions * config.epochs
        with Progress("cross-encoder", steps, "steps") as progress:
            watch = _Watch(config, _HeldOut(dataset, collator, held_out), progress)
            trainer = EncoderOnlyRerankerTrainer(
                model=CrossEncoderModel(model, tokenizer, train_batch_size=batch_questions),
                args=arguments,
                train_dataset=dataset,
                data_collator=collator,
                processing_class=tokenizer,
                callbacks=[watch],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    def write(folder: Path) -> None:
        with without_progress_bars():
            model.save_pretrained(folder, state_dict=watch.kept)
        tokenizer.save_pretrained(folder)

    return Trained(watch.epochs, best_epoch(watch.epochs), write)


class _HeldOut:
    """The held-out questions with an answer, as the trainer's dataset reads pairs."""

    def __init__(
        self,
        dataset: AbsRerankerTrainDataset,
        collator: AbsRerankerCollator,
        lists: Sequence[NuggetList],
    ) -> None:
        self._answered = [one for one in lists if one.answering]
        self._pairs = [
            collator(
                [([dataset.create_one_example(one.question, text) for text in one.texts], None)]
            )["pair"]
            for one in self._answered
        ]

    @torch.inference_mode()
    def measure(self, epoch: int, model: CrossEncoderModel) -> dict[str, Any]:
        """The loss over all nuggets of a question, and the recall."""
        model.eval()
        scores, losses = [], []
        for one, pairs in zip(self._answered, self._pairs, strict=True):
            logits_N = model.encode(pairs.to(model.model.device)).view(-1).cpu()
            losses.append((logits_N.logsumexp(0) - logits_N[one.good_N].logsumexp(0)).item())
            parts = logits_N.split([len(chunk.nuggets) for chunk in one.chunks])
            scores.append([part.tolist() for part in parts])
        model.train()
        return measured(epoch, sum(losses) / len(losses), recall(self._answered, scores))


class _Watch(TrainerCallback):
    """Measures every epoch, keeps the weights of the best and ends when no better ones come."""

    def __init__(self, config: ScorerConfig, held_out: _HeldOut, progress: Progress) -> None:
        self.epochs: list[dict[str, Any]] = []
        self.kept: dict[str, torch.Tensor] = {}
        self._config, self._held_out, self._progress = config, held_out, progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._add({}, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._progress.advance()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # The trainer logs once more at its end.
        if "loss" not in given["logs"]:
            return
        loss = given["logs"]["loss"]
        if not math.isfinite(loss):
            raise UserError(
                f"scorer.learning_rate {self._config.learning_rate:g}: the loss of epoch "
                f"{len(self.epochs)} is no longer finite; lower it"
            )
        self._add({"loss": loss}, given["model"])
        if len(self.epochs) - 1 - best_epoch(self.epochs) >= self._config.patience:
            control.should_training_stop = True

    def _add(self, known: Mapping[str, float], model: CrossEncoderModel) -> None:
        epoch = len(self.epochs)
        self.epochs.append({**self._held_out.measure(epoch, model), **known})
        logger.info("epoch %d: %s", epoch, told(self.epochs[-1]))
        if best_epoch(self.epochs) == epoch:
            state = model.model.state_dict()
            self.kept = {name: part.detach().cpu().clone() for name, part in state.items()}


def _dataset(
    scratch: Path,
    learned: Sequence[NuggetList],
    config: ScorerConfig,
    tokenizer: Any,
    lengths: Mapping[str, int],
) -> AbsRerankerTrainDataset:
    """The lists as FlagEmbedding reads them, through a file."""
    path = scratch / "learned.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for one in learned:
            good = one.good_N.tolist()
            texts = list(zip(one.texts, good, strict=True))
            line = {
                "query": one.question,
                "pos": [text for text, is_good in texts if is_good],
                "neg": [text for text, is_good in texts if not is_good],
            }
            file.write(json.dumps(line) + "\n")
    arguments = AbsRerankerDataArguments(
        train_data=[os.fspath(path)],
        cache_path=os.fspath(scratch / "cache"),
        train_group_size=1 + config.negatives,
        **lengths,
    )
    with without_progress_bars():
        return AbsRerankerTrainDataset(arguments, tokenizer)
