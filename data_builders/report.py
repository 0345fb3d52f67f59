"""What a build found: counts, drops by reason, lengths, and how often the answer is still there."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data_builders.answers import answer_key
from data_builders.stages import ALIGNMENT_KINDS, SAMPLE_SHARD_COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_YES_NO = {answer_key("yes"), answer_key("no")}


def make_report(chunks: "Dataset", samples: "Dataset", context_passages: int) -> dict[str, Any]:
    """The report of a build, all lengths in tokens.

    Args:
        chunks: distinct chunks, with the alignment counts of the shards.
        samples: all samples, with the shards' columns.
        context_passages: passages of all rows, repeats counted.
    """
    columns = chunks.select_columns(
        ["token_ids", "nugget_starts", "nugget_ends", "passage", *ALIGNMENT_KINDS]
    ).with_format("numpy")[:]
    nuggets_a_chunk = [len(starts) for starts in columns["nugget_starts"]]
    nugget_tokens = [
        end - start
        for starts, ends in zip(columns["nugget_starts"], columns["nugget_ends"], strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    counts = {kind: int(np.sum(columns[kind])) for kind in ALIGNMENT_KINDS}
    rows = samples.select_columns(
        [name for name in SAMPLE_SHARD_COLUMNS if name not in ("nugget_scores", "chunk_scores")]
    ).to_list()
    return {
        "questions": len(rows),
        "questions_by_dataset": dict(sorted(Counter(row["dataset"] for row in rows).items())),
        "context_passages": context_passages,
        "distinct_passages": len(set(columns["passage"])),
        "chunks": len(chunks),
        "chunk_tokens": quantiles([len(ids) for ids in columns["token_ids"]]),
        "nuggets": sum(nuggets_a_chunk),
        "nuggets_a_chunk": quantiles(nuggets_a_chunk),
        "nugget_tokens": quantiles(nugget_tokens),
        "alignment": {kind: counts[kind] for kind in ("exact", "fuzzy", "abandoned")},
        "drops": {
            "candidate_not_found": counts["abandoned"],
            "same_tokens_as_another": counts["repeated"],
        },
        "chunks_without_nuggets": nuggets_a_chunk.count(0),
        "selected_tokens": quantiles([_selected_tokens(row) for row in rows]),
        "questions_without_nuggets": sum(not row["span_chunks"] for row in rows),
        "gold_chunks_retrieved": _gold_recall(rows),
        "answers": _answers(rows),
        "raft": {
            "noised": sum(row["noised"] for row in rows),
            "no_distractor_found": sum(row["noise_drawn"] and not row["noised"] for row in rows),
        },
    }


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """`QUANTILES` and the mean of the values; empty for no values."""
    if not values:
        return {}
    found = np.quantile(np.asarray(values), list(QUANTILES.values()), method="nearest")
    named = {name: float(value) for name, value in zip(QUANTILES, found, strict=True)}
    return {**named, "mean": round(float(np.mean(values)), 2)}


def render_report(report: dict[str, Any]) -> str:
    """The report as aligned lines, one a figure."""
    lines = [(name, _shown(value)) for name, value in report.items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_shown(item)}" for name, item in value.items())
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _selected_tokens(row: dict[str, Any]) -> int:
    """Distinct chunk tokens under the selected spans."""
    spans = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
    return len({(chunk, token) for chunk, start, end in spans for token in range(start, end)})


def _gold_recall(rows: Sequence[dict[str, Any]]) -> float | None:
    """The share of gold chunks among the retrieved ones, over all questions that have gold."""
    gold = sum(len(row["gold_chunk_ids"]) for row in rows)
    kept = sum(len(set(row["gold_chunk_ids"]) & set(row["chunk_ids"])) for row in rows)
    return round(kept / gold, 4) if gold else None


def _answers(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Where the answer's words are found, over questions without noise; yes and no count apart."""
    kept = [row for row in rows if not row["noised"]]
    worded = [
        row for row in kept if not all(answer_key(answer) in _YES_NO for answer in row["answers"])
    ]
    return {
        "yes_or_no": len(kept) - len(worded),
        "in_words": len(worded),
        "in_contexts": sum(row["answer_in_contexts"] for row in worded),
        "in_retrieved_chunks": sum(row["answer_in_chunks"] for row in worded),
        "in_selected_nuggets": sum(row["answer_in_spans"] for row in worded),
        "absent_from_every_passage": sum(not row["answer_in_contexts"] for row in worded),
    }
