"""TurboRAG (Lu et al., 2024), reordered positions: whole cached chunks laid end to end.

Each chunk was encoded alone; chunk i starts where the one before ended, after the prompt.
"""

from cache_ops.plan import Span, plan_prefix
from data_builders.prompt import PromptTemplate
from eval.systems.interface import Question, Request, Width
from recipes.building import RetrievalConfig


def request(
    question: Question, width: Width, template: PromptTemplate, retrieval: RetrievalConfig
) -> Request:
    """Every slice is a whole chunk, in retrieval order; only the query is computed online."""
    chunks = question.chunks[: width.k_c]
    plan = plan_prefix(
        [Span(chunk.chunk_id, 0, len(chunk.token_ids)) for chunk in chunks],
        prompt_length=len(template.prompt_ids),
        chunk_ranks=[chunk.chunk_id for chunk in chunks],
    )
    return Request(
        plan=plan,
        context_ids=[],
        active_tokens=plan.tokens,
        evidence=[chunk.title for chunk in chunks],
    )
