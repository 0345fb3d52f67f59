"""What a build found: counts, drops by reason, lengths, and how often the answer is still there.

`corpus` holds the figures of the CoinRAG paper's Table 4. Figures are gathered row by row, so that
memory does not grow with the tables.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from data_builders.answers import answer_key
from data_builders.records import Passage
from data_builders.workers import ALIGNMENT_KINDS

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HISTOGRAMS = ("passage_words", "nugget_words", "nuggets_a_chunk", "nuggets_a_question")
_YES_NO = {answer_key("yes"), answer_key("no")}
Row = Mapping[str, Any]


class Tally:
    """Gathers the report of one build."""

    def __init__(self) -> None:
        self._lengths: dict[str, Counter[int]] = {}
        self._counts: Counter[str] = Counter()
        self._datasets: Counter[str] = Counter()

    def passage(self, passage: Passage) -> None:
        """Counts a distinct passage; words are what stands between white space."""
        self._length("passage_words", len(passage.full_text.split()))

    def chunk(self, row: Row) -> None:
        """Counts a distinct chunk, with the alignment counts of its nuggets."""
        spans = list(zip(row["nugget_starts"], row["nugget_ends"], strict=True))
        self._length("chunk_tokens", len(row["token_ids"]))
        self._length("nuggets_a_chunk", len(spans))
        for (start, end), text in zip(spans, row["nugget_texts"], strict=True):
            self._length("nugget_tokens", end - start)
            self._length("nugget_words", len(text.split()))
        for kind in ALIGNMENT_KINDS:
            self._counts[kind] += row[kind]
        self._counts["covered"] += len({t for start, end in spans for t in range(start, end)})
        self._counts["overlap"] += sum(
            max(0, min(before[1], after[1]) - after[0]) for before, after in pairwise(spans)
        )

    def sample(self, row: Row) -> None:
        """Counts a sample row, with what `samples.sample_row` adds for the report."""
        self._datasets[row["dataset"]] += 1
        if row["candidate_nuggets"] is not None:
            self._length("nuggets_a_question", row["candidate_nuggets"])
        self._length("selected_tokens", _selected_tokens(row))
        gold = set(row["gold_chunk_ids"])
        worded = not all(answer_key(answer) in _YES_NO for answer in row["answers"])
        self._counts.update(
            {
                "context_passages": row["context_passages"],
                "without_nuggets": not row["span_chunks"],
                "gold": len(gold),
                "gold_retrieved": len(gold & set(row["chunk_ids"])),
                "noised": row["noised"],
                "no_distractor": row["noise_drawn"] and not row["noised"],
            }
        )
        # A noised question has lost its answer on purpose.
        if not row["noised"]:
            self._counts["in_words" if worded else "yes_or_no"] += 1
        if worded and not row["noised"]:
            for place in ("contexts", "chunks", "spans"):
                self._counts[f"answer_in_{place}"] += row[f"answer_in_{place}"]

    def report(self, extraction: Row | None) -> dict[str, Any]:
        """All figures; lengths in tokens unless their name has another unit.

        Args:
            extraction: what became of the requests to a model, if a model was asked.
        """
        count, length = self._counts, self._lengths
        chunks = length.get("chunk_tokens", Counter())
        tokens = sum(size * times for size, times in chunks.items())
        nugget_tokens = length.get("nugget_tokens", Counter())
        in_nuggets = sum(size * times for size, times in nugget_tokens.items())
        return {
            "questions": self._datasets.total(),
            "questions_by_dataset": dict(sorted(self._datasets.items())),
            "context_passages": count["context_passages"],
            "corpus": {
                "passages": length["passage_words"].total(),
                "passage_words": quantiles(length["passage_words"]),
                "chunks": chunks.total(),
                "nuggets": nugget_tokens.total(),
                "nugget_words": quantiles(length.get("nugget_words", Counter())),
                "nuggets_a_question": quantiles(length.get("nuggets_a_question", Counter())),
                "neighbour_overlap": _share(count["overlap"], in_nuggets),
                "tokens_covered": _share(count["covered"], tokens),
            },
            "chunk_tokens": quantiles(chunks),
            "nuggets_a_chunk": quantiles(length.get("nuggets_a_chunk", Counter())),
            "nugget_tokens": quantiles(nugget_tokens),
            "alignment": {kind: count[kind] for kind in ("exact", "fuzzy", "abandoned")},
            **({"extraction": dict(extraction)} if extraction else {}),
            "drops": {
                "candidate_not_found": count["abandoned"],
                "same_tokens_as_another": count["repeated"],
            },
            "chunks_without_nuggets": length.get("nuggets_a_chunk", Counter())[0],
            "selected_tokens": quantiles(length["selected_tokens"]),
            "questions_without_nuggets": count["without_nuggets"],
            "share_of_gold_chunks_retrieved": _share(count["gold_retrieved"], count["gold"]),
            "answers": {
                "yes_or_no": count["yes_or_no"],
                "in_words": count["in_words"],
                "in_contexts": count["answer_in_contexts"],
                "in_retrieved_chunks": count["answer_in_chunks"],
                "in_selected_nuggets": count["answer_in_spans"],
                "absent_from_every_passage": count["in_words"] - count["answer_in_contexts"],
            },
            "raft": {"noised": count["noised"], "no_distractor_found": count["no_distractor"]},
            "histograms": {
                name: sorted(length.get(name, Counter()).items()) for name in HISTOGRAMS
            },
        }

    def _length(self, name: str, value: int) -> None:
        self._lengths.setdefault(name, Counter())[value] += 1


def quantiles(values: Counter[int]) -> dict[str, float]:
    """`QUANTILES` and the mean of counted values; empty for no values."""
    if not values:
        return {}
    distinct = sorted(values)
    up_to = list(accumulate(values[value] for value in distinct))
    places = {name: round((up_to[-1] - 1) * share) for name, share in QUANTILES.items()}
    named = {
        name: next(v for v, upto in zip(distinct, up_to, strict=True) if place < upto)
        for name, place in places.items()
    }
    mean = sum(value * times for value, times in values.items()) / up_to[-1]
    return {**named, "mean": round(mean, 2)}


def render_report(report: Row) -> str:
    """The report as aligned lines, one a figure; without histograms."""
    shown = {name: _shown(value) for name, value in report.items() if name != "histograms"}
    lines = [(name, value) for name, value in shown.items() if value]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {value}" for name, value in lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = ((name.replace("_", " "), _shown(item)) for name, item in value.items())
        return ", ".join(f"{name} {item}" for name, item in parts if item)
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value or "")


def _selected_tokens(row: Row) -> int:
    """Distinct chunk tokens under the selected spans."""
    spans = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
    return len({(chunk, token) for chunk, start, end in spans for token in range(start, end)})


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
