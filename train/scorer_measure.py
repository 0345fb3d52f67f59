"""How well a scorer ranks the held-out questions: by epoch, and in the report that is left."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_builders.nugget_recall import recall_at
from train.scorer_lists import NuggetList

RECALL_AT = (5, 10)


@dataclass(frozen=True)
class Trained:
    """A scorer after its best epoch, and what every epoch came to; epoch 0 is before training."""

    epochs: list[dict[str, Any]]
    best: int
    write: Callable[[Path], None]
    """Writes the scorer's own files into an empty folder."""


def recall(
    lists: Sequence[NuggetList], scores: Iterable[Sequence[Sequence[float]]]
) -> dict[int, float]:
    """The share of questions with an answering nugget among the best k, for each k of `RECALL_AT`.

    Args:
        lists: at least one has an answering nugget; the others do not count.
        scores: of each list one for each nugget of each chunk.
    """
    scored = [(one, rows) for one, rows in zip(lists, scores, strict=True) if one.answering]
    return {
        k: sum(recall_at(rows, one.chunks, one.answering, k) for one, rows in scored) / len(scored)
        for k in RECALL_AT
    }


def measured(epoch: int, held_out_loss: float, recalls: dict[int, float]) -> dict[str, Any]:
    """What an epoch came to on the held-out questions, as a line of metrics.jsonl."""
    named = {f"recall_at_{k}": recalls[k] for k in RECALL_AT}
    return {"epoch": epoch, "held_out_loss": held_out_loss, **named}


def best_epoch(epochs: Sequence[dict[str, Any]]) -> int:
    """The epoch with the lowest held-out loss, the earliest of equals.

    The loss decides and not the recall: recall is a count over few questions, and the epoch that
    was best by it ranked other questions worse than the one that was best by the loss.
    """
    return min(range(len(epochs)), key=lambda epoch: epochs[epoch]["held_out_loss"])


def told(measured: dict[str, Any]) -> str:
    """An epoch's figures for the log."""
    named = {name: value for name, value in measured.items() if name != "epoch"}
    return ", ".join(f"{name} {value:.4f}" for name, value in named.items())


def report(
    questions: int, learned: Sequence[NuggetList], held_out: Sequence[NuggetList], trained: Trained
) -> dict[str, Any]:
    """Questions by use, and the recall of held-out ones before and after, and without it."""
    bi_encoder = recall(held_out, [one.bi_encoder for one in held_out])
    of_epoch = {"untrained": trained.epochs[0], "trained": trained.epochs[trained.best]}
    return {
        "questions": {
            "in_tables": questions,
            "learned": len(learned),
            "learned_by_weak_labels": sum(not one.answering for one in learned),
            "held_out": len(held_out),
            "held_out_with_answer": sum(bool(one.answering) for one in held_out),
        },
        "best_epoch": trained.best,
        "held_out_recall": {
            "bi_encoder": {f"recall_at_{k}": bi_encoder[k] for k in RECALL_AT},
            **{
                name: {f"recall_at_{k}": epoch[f"recall_at_{k}"] for k in RECALL_AT}
                for name, epoch in of_epoch.items()
            },
        },
    }
