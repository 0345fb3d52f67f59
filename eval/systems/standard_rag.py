"""Standard RAG: full causal prefill of [prompt, C_1 … C_k, query], nothing cached."""

from cache_ops.plan import PrefixPlan
from data_builders.prompt import PromptTemplate
from eval.systems.interface import Question, Request, Width
from recipes.building import RetrievalConfig


def request(
    question: Question, width: Width, template: PromptTemplate, retrieval: RetrievalConfig
) -> Request:
    """Everything is an online token; the chunks keep their retrieval order."""
    chunks = question.chunks[: width.k_c]
    context_ids = [*template.prompt_ids, *(token for c in chunks for token in c.token_ids)]
    return Request(
        plan=PrefixPlan(()),
        context_ids=context_ids,
        active_tokens=len(context_ids),
        evidence=[chunk.title for chunk in chunks],
    )
