"""What explains a wrong answer, and whose tokens a prefix holds, in every system."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cache_ops.layout import Layout, computed
from cache_ops.plan import PrefixPlan
from cache_ops.soft_tokens import SoftTokens
from data_builders.nuggets.online import OnlineNugget
from data_builders.prompt import PromptTemplate
from data_builders.tables import Chunk
from eval.diagnosis import diagnose
from eval.systems import SYSTEMS, Evidence, Question, Request, Serving, Width
from recipes.resolve import with_changes
from recipes.schema import Recipe

TEXTS = {
    "a": "Ann Lee was born in Lower Tarn. She moved to Oss in 1921.",
    "b": "Oss lies on a river. There is no bridge, yes, none.",
    "c": "Bela Kun was the mayor of Oss.",
}


def asked(answers: Sequence[str], gold: Sequence[str] = ()) -> Question:
    chunks = [Chunk(name, "", text, [], [], []) for name, text in TEXTS.items()]
    return Question("q", "d", "?", [*answers], chunks, [[], [], []], [*gold])


def saw(*evidence: tuple[str, str]) -> Request:
    return Request(Layout(PrefixPlan(())), {}, [Evidence(*piece) for piece in evidence])


BORN, MOVED = ("a", "Ann Lee was born in Lower Tarn."), ("a", "She moved to Oss in 1921.")
RIVER = ("b", "Oss lies on a river.")


@pytest.mark.parametrize(
    ("answers", "gold", "k_c", "evidence", "kinds"),
    [
        # Seen and not given; retrieved and not seen; not retrieved; and two at once.
        (["lower tarn"], ["a", "b"], 2, [BORN, RIVER], ["distractor_bias"]),
        (["Lower Tarn"], ["a", "b"], 2, [MOVED, RIVER], ["extraction_loss"]),
        (["Bela Kun"], ["a", "c"], 2, [BORN, RIVER], ["bridge_gap"]),
        (["1921"], ["a", "c"], 2, [BORN], ["bridge_gap", "extraction_loss"]),
        (["1921"], ["a", "c"], 2, [MOVED], ["bridge_gap", "distractor_bias"]),
        # Any answer counts, and whole words alone.
        (["Tarnish", "1921"], ["a"], 2, [MOVED], ["distractor_bias"]),
        (["Tar"], ["a"], 3, [BORN], []),
        # Over two nuggets of a chunk, whichever was better; not over two chunks.
        (["Lower Tarn. She moved"], ["a"], 2, [MOVED, RIVER, BORN], ["distractor_bias"]),
        (["in 1921 Oss"], ["a"], 2, [MOVED, RIVER], []),
        # The words yes and no stand in b, and are no answer there.
        (["no"], ["a", "b"], 2, [RIVER], []),
        (["Yes", "no."], ["a", "c"], 2, [BORN], ["bridge_gap"]),
        # The data name no gold chunk.
        (["Bela Kun"], [], 2, [BORN], []),
    ],
)
def test_kinds_of_error(
    answers: list[str],
    gold: list[str],
    k_c: int,
    evidence: list[tuple[str, str]],
    kinds: list[str],
) -> None:
    question, served = asked(answers, gold), saw(*evidence)
    assert diagnose(question, served, k_c, f1=0.8).error_kinds == kinds
    right = diagnose(question, served, k_c, f1=1.0)
    assert right.error_kinds == []
    assert (right.gold_recall is None) == (not gold)


def test_recall_counts_gold_chunks_among_the_retrieved() -> None:
    question = asked(["x"], ["a", "c", "elsewhere"])
    recalls = [diagnose(question, saw(), k_c, 0.0).gold_recall for k_c in range(4)]
    assert recalls == [0, 1 / 3, 1 / 3, 2 / 3]
    # One-stage selection takes nuggets of chunks beyond the first k_c.
    assert diagnose(question, saw(("c", TEXTS["c"])), 1, 0.0).gold_recall == 2 / 3


def test_what_holds_the_answer_is_told_for_right_answers_too() -> None:
    found = diagnose(asked(["Lower Tarn"]), saw(MOVED), 1, 1.0)
    assert (found.answer_in_chunks, found.answer_in_prefix) == (True, False)
    found = diagnose(asked(["Lower Tarn"]), saw(BORN), 1, 1.0)
    assert (found.answer_in_chunks, found.answer_in_prefix) == (True, True)
    # A model's own words may say what no chunk says.
    found = diagnose(asked(["Grey Hills"]), saw(("a", "Where? Grey Hills")), 1, 0.0)
    assert (found.answer_in_chunks, found.answer_in_prefix) == (False, True)


@given(st.data())
def test_computed_tokens_belong_to_the_chunks_that_they_come_from(data: st.DataObject) -> None:
    # Few different tokens, so that the place of a cut is often not to be seen in them.
    tokens = st.lists(st.integers(0, 2), max_size=8)
    chunks = [Chunk(name, "", "", data.draw(tokens), [], []) for name in "abc"]
    context = [token for chunk in chunks for token in chunk.token_ids]
    owners = [chunk.chunk_id for chunk in chunks for _ in chunk.token_ids]
    start = data.draw(st.integers(0, len(context)))
    end = data.draw(st.integers(start, len(context)))
    prompt = data.draw(tokens)
    kept = [*prompt, *context[:start], *context[end:]]
    question = Question("q", "d", "?", ["x"], chunks, [[], [], []], ["a"])
    request = Request(computed(kept), {}, [], cut=(start, end))
    assert request.cut_tokens == end - start
    found = diagnose(question, request, 3, 1.0)
    assert found.context_tokens == len(kept) - len(prompt)
    assert found.gold_tokens == (owners[:start] + owners[end:]).count("a")


@pytest.fixture
def serving(tokenizer: PreTrainedTokenizerBase, recipe: Callable[..., Recipe]) -> Serving:
    config = recipe()
    return Serving(
        config,
        PromptTemplate(tokenizer, config.prompt),
        tokenizer,
        extractor=lambda question, chunks: [OnlineNugget(1, "Bela Kun", 0)],
    )


WHOLE = [name for name, system in SYSTEMS.items() if not system.selects_nuggets]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("prompt", [True, False])
def test_gold_tokens_of_whole_chunks(
    question: Question, serving: Serving, name: str, prompt: bool
) -> None:
    if not prompt:
        serving.template.prompt_ids = []
    sizes = [len(chunk.token_ids) for chunk in question.chunks]
    # The first is gold, the second is gold and not retrieved.
    shuffled = replace(question, chunks=[question.chunks[at] for at in (0, 2, 1)])
    found = diagnose(shuffled, SYSTEMS[name].request(shuffled, Width(2, None), serving), 2, 0.5)
    assert (found.gold_tokens, found.context_tokens) == (sizes[0], sizes[0] + sizes[2])
    assert found.gold_recall == 0.5
    assert found.error_kinds == ["bridge_gap", "distractor_bias"]


def test_link_tokens_are_context_and_nobodys(question: Question, serving: Serving) -> None:
    linked = replace(serving, soft_tokens={"links": SoftTokens(1000, 3, 2)})
    served = SYSTEMS["kvlink"].request(question, Width(3, None), linked)
    sizes = [len(chunk.token_ids) for chunk in question.chunks]
    found = diagnose(question, served, 3, 1.0)
    assert (found.gold_tokens, found.context_tokens) == (sum(sizes[:2]), sum(sizes) + 6)


@pytest.mark.parametrize(
    "change", [[], ["context.encoding=isolated"], ["context.positions=original"]]
)
def test_gold_tokens_of_nuggets(question: Question, serving: Serving, change: list[str]) -> None:
    changed = replace(serving, config=with_changes(serving.config, change))
    served = SYSTEMS["coinrag"].request(question, Width(3, 4), changed)
    found = diagnose(question, served, 3, 1.0)
    # Two nuggets of eight tokens lie in chunk 0, one in each of the others; 0 and 1 are gold.
    assert (found.gold_tokens, found.context_tokens) == (24, 32)


def test_gold_tokens_of_online_nuggets(
    question: Question, serving: Serving, tokenizer: PreTrainedTokenizerBase
) -> None:
    served = SYSTEMS["online_nuggets"].request(question, Width(3, 4), serving)
    size = len(tokenizer("Bela Kun\n", add_special_tokens=False)["input_ids"])
    found = diagnose(question, served, 3, 1.0)
    assert (found.gold_tokens, found.context_tokens) == (size, size)
