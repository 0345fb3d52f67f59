"""Selection by budget, threshold and diversity, and slices with neighbouring sentences."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import ValidationError
from small import data_row, encode_words, save_stand_ins, tiny_tokenizer, write_rows

from data_builders import workers
from data_builders.build import build, load_built
from data_builders.chunking import chunk_text
from data_builders.key import build_key, chunks_key
from data_builders.nuggets.neighbours import widened
from data_builders.nuggets.rules import rules
from data_builders.retrieval import one_stage_chunks, select_nuggets
from data_builders.selection import active_tokens, select, similarity
from data_builders.tables import Chunk
from data_builders.workers import nugget_columns
from recipes.retrieval import RetrievalConfig
from recipes.schema import Recipe

SCORE = st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.75])
LIGHT = settings(max_examples=40, deadline=None)


# The tokens of a chunk, of few kinds; and of each nugget its start, length and score.
DRAWN = st.tuples(
    st.binary(min_size=1, max_size=16),
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9), SCORE), max_size=5),
)


def question_of(drawn):
    """Chunks in rank order with nuggets that are alike, overlap and touch, and their scores."""
    chunks, scores = [], []
    for number, (content, nuggets) in enumerate(drawn):
        ids = [byte % 5 for byte in content]
        placed = [(start % len(ids), length, score) for start, length, score in nuggets]
        found = sorted((start, min(start + length, len(ids)), score)
                       for start, length, score in placed)  # fmt: skip
        spans = [(start, end) for start, end, _ in found]
        chunks.append(Chunk(f"c{number}", "", "", ids, spans, [""] * len(spans)))
        scores.append([score for _, _, score in found])
    return chunks, scores


QUESTION = st.lists(DRAWN, min_size=1, max_size=4).map(question_of)
BUDGETS = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 40),
        "max_similarity": st.sampled_from([None, 0.0, 0.5, 0.8, 1.0]),
        "a_chunk": st.integers(0, 2),
    }
)
K = st.integers(1, 12)
TOKENIZER = tiny_tokenizer()


def config_of(budget=None, k=30, **options):
    return RetrievalConfig.model_validate({"encoder": "e", "k": k, "budget": budget, **options})


def bag(chunks, place):
    start, end = chunks[place[0]].nuggets[place[1]]
    return Counter(chunks[place[0]].token_ids[start:end])


def jaccard(one, other):
    """As its definition for multisets, counted token by token."""
    tokens = {*one, *other}
    shared = sum(min(one[token], other[token]) for token in tokens)
    return shared / sum(max(one[token], other[token]) for token in tokens)


@LIGHT
@given(QUESTION, K)
def test_without_options_the_best_k_are_selected_as_ever(asked, k):
    chunks, scores = asked
    assert select(chunks, scores, k, config_of()) == select_nuggets(
        scores, [one.nuggets for one in chunks], k
    )


@LIGHT
@given(QUESTION, K, st.sampled_from([-1.0, 0.0, 0.2, 0.25, 0.6, 9.0]))
def test_a_threshold_cuts_the_best_k_where_scores_fall_below(asked, k, least):
    chunks, scores = asked
    every = select(chunks, scores, k, config_of())
    expected = [(c, n) for c, n in every if scores[c][n] >= least]
    assert select(chunks, scores, k, config_of(min_score=least)) == expected
    assert expected == every[: len(expected)]


def test_a_threshold_keeps_the_score_that_it_is_written_as():
    stored = 0.699999988079071  # 0.7 as float32
    found = select([Chunk("c", "", "", [1], [(0, 1)], ["a"])], [[stored]], 1, config_of(None, 1))
    assert found == select(
        [Chunk("c", "", "", [1], [(0, 1)], ["a"])], [[stored]], 1, config_of(None, 1, min_score=0.7)
    )


@LIGHT
@given(QUESTION, K, BUDGETS, st.sampled_from(["merge", "keep"]))
def test_a_budget_is_never_exceeded_and_nothing_that_fits_is_forgotten(asked, k, budget, overlap):
    chunks, scores = asked
    config = config_of(budget, overlap=overlap)
    chosen = select(chunks, scores, k, config)

    def spent(places):
        if overlap == "merge":
            return active_tokens(chunks, places)
        return sum(bag(chunks, place).total() for place in places)

    assert spent(chosen) <= budget["tokens"]
    assert len(chosen) <= k
    assert len(set(chosen)) == len(chosen)
    ranked = select_nuggets(scores, [one.nuggets for one in chunks], 99)
    assert chosen == [place for place in ranked if place in chosen]
    limit = budget["max_similarity"]
    for at, place in enumerate(chosen):
        for other in chosen[:at]:
            assert limit is None or jaccard(bag(chunks, place), bag(chunks, other)) <= limit
    if len(chosen) < k:
        for place in set(ranked) - set(chosen):
            alike = limit is not None and any(
                jaccard(bag(chunks, place), bag(chunks, other)) > limit for other in chosen
            )
            assert alike or spent([*chosen, place]) > budget["tokens"]


@LIGHT
@given(QUESTION, BUDGETS, K, K)
def test_a_smaller_k_selects_some_of_the_same_and_without_reserved_ones_the_best(
    asked, budget, one, other
):
    chunks, scores = asked
    fewer, more = (select(chunks, scores, k, config_of(budget)) for k in sorted((one, other)))
    assert set(fewer) <= set(more)
    if not budget["a_chunk"]:
        assert fewer == more[: len(fewer)]


@LIGHT
@given(QUESTION, st.integers(1, 2), st.sampled_from([None, 0.25]))
def test_every_chunk_keeps_its_best_where_there_is_room(asked, a_chunk, least):
    chunks, scores = asked
    budget = {"tokens": 24 * len(chunks), "max_similarity": None, "a_chunk": a_chunk}
    config = config_of(budget, min_score=least)
    # k leaves no room for others.
    chosen = select(chunks, scores, a_chunk * len(chunks), config)
    for number, row in enumerate(scores):
        own = [n for c, n in chosen if c == number]
        best = select_nuggets([row], [chunks[number].nuggets], a_chunk)
        expected = [n for _, n in best if least is None or row[n] >= least]
        assert own[: len(expected)] == expected


def test_reserved_nuggets_come_one_by_one_so_that_a_short_budget_reaches_every_chunk():
    chunks = [Chunk(f"c{n}", "", "", [*range(8 * n, 8 * n + 8)], [(0, 4), (4, 8)], ["a", "b"])
              for n in range(3)]  # fmt: skip
    scores = [[0.9, 0.8], [0.3, 0.2], [0.7, 0.1]]
    by_score = {"tokens": 12, "max_similarity": None}
    assert select(chunks, scores, 9, config_of(by_score)) == [(0, 0), (0, 1), (2, 0)]
    reserved = by_score | {"a_chunk": 2}
    assert select(chunks, scores, 9, config_of(reserved)) == [(0, 0), (2, 0), (1, 0)]
    wider = reserved | {"tokens": 16}
    assert select(chunks, scores, 9, config_of(wider)) == [(0, 0), (0, 1), (2, 0), (1, 0)]


def test_what_does_not_fit_is_passed_over_and_shared_tokens_count_once():
    spans = [(0, 10), (10, 19), (4, 12), (19, 21)]
    chunks = [Chunk("c", "", "", [*range(21)], spans, [""] * 4)]
    scores = [[0.9, 0.8, 0.7, 0.6]]
    budget = {"tokens": 14, "max_similarity": None}
    # The second needs 9 more, the third 2 beyond the first, the last 2.
    assert select(chunks, scores, 9, config_of(budget)) == [(0, 0), (0, 2), (0, 3)]
    assert select(chunks, scores, 9, config_of(budget, overlap="keep")) == [(0, 0), (0, 3)]


@LIGHT
@given(QUESTION, BUDGETS, K, st.randoms(use_true_random=False))
def test_the_order_of_chunks_with_distinct_scores_does_not_matter(asked, budget, k, shuffler):
    chunks, scores = asked
    ranks = iter(shuffler.sample(range(1000), sum(map(len, scores))))
    scores = [[next(ranks) / 1000 for _ in row] for row in scores]
    order = shuffler.sample(range(len(chunks)), len(chunks))
    again = select([chunks[c] for c in order], [scores[c] for c in order], k, config_of(budget))
    assert [(order[c], n) for c, n in again] == select(chunks, scores, k, config_of(budget))


def test_a_tie_goes_to_the_better_chunk_and_then_to_the_earlier_place():
    chunks = [Chunk(f"c{n}", "", "", [10 * n + t for t in range(4)], [(2, 4), (0, 2)], ["a", "b"])
              for n in range(2)]  # fmt: skip
    scores = [[0.5, 0.5], [0.5, 0.5]]
    found = select(chunks, scores, 9, config_of({"tokens": 6}))
    assert found == [(0, 1), (0, 0), (1, 1)]


@LIGHT
@given(QUESTION, BUDGETS, K, K)
def test_a_table_for_a_larger_k_gives_what_one_for_the_smaller_would(asked, budget, one, other):
    chunks, scores = asked
    config = config_of(budget, selection="one_stage")
    smaller, larger = sorted((one, other))

    def of_table(made_for):
        kept = one_stage_chunks(scores, made_for)
        return [chunks[c] for c in kept], [scores[c] for c in kept]

    tables = (of_table(smaller), of_table(larger))
    first, second = (
        [(held[c].chunk_id, n) for c, n in select(held, rows, smaller, config)]
        for held, rows in tables
    )
    assert first == second


def test_similarity_is_symmetric_and_counts_repeats():
    one, other = Counter([1, 1, 2]), Counter([1, 2, 3])
    assert similarity(one, other) == similarity(other, one) == 2 / 4
    assert similarity(one, one) == 1


def test_reserved_nuggets_beyond_k_are_refused():
    with pytest.raises(ValidationError, match=r"2 nuggets of each of 5 chunks are more than k"):
        config_of({"tokens": 9, "a_chunk": 2}, k=9)
    assert config_of({"tokens": 9, "a_chunk": 2}, k=9, selection="one_stage").budget.a_chunk == 2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection")
    save_stand_ins(folder)
    for split, numbers in {"train": range(4), "dev": range(10, 14)}.items():
        write_rows(folder / f"{split}.jsonl", [data_row(number) for number in numbers])
    return folder


def recipe(folder, retrieval=None, nuggets=None):
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"path": str(folder / "model")},
            "data": {
                "train": [str(folder / "train.jsonl")],
                "dev": [str(folder / "dev.jsonl")],
                "built_root": str(folder / "built"),
            },
            "nuggets": nuggets or {},
            "retrieval": {
                "encoder": str(folder / "encoder"), "k_c": 3, "k": 9, **(retrieval or {})
            },
            "train": {"run_folder": str(folder / "run")},
        }
    )  # fmt: skip


def test_keys_change_with_what_is_set_alone(world):
    plain = build_key(recipe(world), "dev")
    assert not {"budget", "min_score"} & plain.keys()
    assert "neighbour_sentences" not in plain["chunks"]
    ways = [
        {"budget": {"tokens": 40}},
        {"budget": {"tokens": 50}},
        {"budget": {"tokens": 50}, "overlap": "keep"},
        {"min_score": 0.0},
        {"min_score": 0.2},
    ]
    keys = [plain, *(build_key(recipe(world, way), "dev") for way in ways)]
    assert all(keys.count(key) == 1 for key in keys)
    assert build_key(recipe(world, {"overlap": "keep"}), "dev") == plain
    wide = recipe(world, nuggets={"neighbour_sentences": 1})
    assert chunks_key(wide) == {**plain["chunks"], "neighbour_sentences": 1}


def test_a_build_selects_and_widens(world, monkeypatch):
    monkeypatch.setattr(workers, "load_encoder", lambda config, threads: encode_words)
    budget = {"budget": {"tokens": 90, "a_chunk": 1}, "min_score": 0.0}
    config = recipe(world, budget, {"neighbour_sentences": 1})
    build(config, "train")
    tables = load_built(config, "train")
    for row in tables.chunks:
        found = tables.chunk(row["chunk_id"])
        assert found.slice_texts != found.nugget_texts
        for (start, end), own, wide in zip(
            found.nuggets, found.nugget_texts, found.slice_texts, strict=True
        ):
            assert own in wide
            assert wide in TOKENIZER.decode(found.token_ids[start:end])
    for row in tables.samples:
        chunks = [tables.chunk(name) for name in row["chunk_ids"]]
        chosen = select(chunks, row["nugget_scores"], 9, config.retrieval)
        spans = zip(row["span_chunks"], row["span_starts"], row["span_ends"], strict=True)
        assert list(spans) == [(c, *chunks[c].nuggets[n]) for c, n in chosen]
        assert 0 < active_tokens(chunks, chosen) <= 90
    # Tables without neighbours have no column for them.
    build(recipe(world), "train")
    plain = load_built(recipe(world), "train")
    assert "widened_texts" not in plain.chunks.column_names
    assert plain.chunk(plain.chunks[0]["chunk_id"]).widened_texts is None


TEXT = "Ann Lee\nShe was born in Oss. Her father, who was old, died. She left.\nThe end came."


@pytest.mark.parametrize(
    ("nugget", "count", "expected"),
    [
        ("Her father", 0, "Her father, who was old, died."),
        ("Her father", 1, "She was born in Oss. Her father, who was old, died. She left."),
        ("Ann Lee", 1, "Ann Lee\nShe was born in Oss."),
        ("died. She", 0, "Her father, who was old, died. She left."),
        ("Ann Lee", 9, TEXT),
    ],
)
def test_a_slice_takes_whole_sentences_along(nugget, count, expected):
    start = TEXT.index(nugget)
    [(first, last)] = widened(TEXT, [(start, start + len(nugget))], count)
    assert TEXT[first:last] == expected


def test_sentences_without_space_between_them_are_not_taken_for_their_neighbours():
    text = "她生于北京。他在那里死了。故事完了。"
    first, second, third = ((0, 6), (6, 13), (13, 18))
    assert widened(text, [first, second, third], 0) == [first, second, third]
    assert widened(text, [first, second], 1) == [(0, 13), (0, 18)]


@LIGHT
@given(st.text(st.sampled_from("aB .\n1"), min_size=1, max_size=60), st.integers(0, 3))
def test_slices_hold_their_nuggets_and_grow_with_the_count(text, count):
    [piece] = chunk_text(TOKENIZER, text, 512)
    plain, wide, wider = (
        nugget_columns(piece, rules(text), None, n) for n in (0, count, count + 1)
    )
    assert plain["nugget_texts"] == wide["nugget_texts"]
    assert ("widened_texts" in wide) == (count > 0)
    assert wide["repeated"] == plain["repeated"]
    for narrow, broad in ((plain, wide), (wide, wider)):
        assert all(
            a >= b for a, b in zip(narrow["nugget_starts"], broad["nugget_starts"], strict=True)
        )
        assert all(a <= b for a, b in zip(narrow["nugget_ends"], broad["nugget_ends"], strict=True))
    for start, end, own, seen in zip(
        wider["nugget_starts"], wider["nugget_ends"], wider["nugget_texts"],
        wider["widened_texts"], strict=True,
    ):  # fmt: skip
        assert own in seen
        assert seen == seen.strip()
        first, last = piece.offsets[start][0], piece.offsets[end - 1][1]
        assert seen in text[first:last]
    starts = wider["nugget_starts"]
    assert starts == sorted(starts)
