"""LongBench's rule for over-long prompts: the first and the last half stay, the middle goes.

LongBench (Bai et al., 2024; `pred.py`) leaves the first `limit // 2` and the last `limit // 2`
tokens of a user's message, and puts the chat template around what is left. Here the rule is applied
to all tokens that the model is given: static prompt, context and query, with the template's own in
the first and the last. The middle of these is context, so the cut is made there. The prompt and the
query are never cut: where one of them is longer than half of the limit, the other end of the
context gives way for it.
"""

from recipes.errors import UserError


def prompt_limit(
    max_prompt_tokens: int | None, max_positions: int | None, max_new_tokens: int
) -> int | None:
    """The most tokens that may stand before an answer; None for no limit.

    Args:
        max_prompt_tokens: the recipe's own limit, if any.
        max_positions: the positions that the model was trained for, if they are known.
        max_new_tokens: tokens of the longest answer, which needs positions too.
    """
    limits = [] if max_prompt_tokens is None else [max_prompt_tokens]
    if max_positions is not None:
        limits.append(max_positions - max_new_tokens)
    return min(limits, default=None)


def middle_to_cut(context: int, before: int, after: int, limit: int | None) -> tuple[int, int]:
    """The context tokens `[start, end)` that are left out of an over-long prompt.

    What remains of prompt, context and query is what LongBench's rule leaves of all their tokens
    wherever the prompt and the query are each at most half of the limit.

    Args:
        context: tokens of the context.
        before: tokens of the prompt before it.
        after: tokens of the query after it.
        limit: the most tokens of all three together; None: nothing is cut.

    Returns:
        An empty range at the context's end if everything fits.

    Raises:
        UserError: prompt and query alone are beyond the limit.
    """
    if limit is None or before + context + after <= limit:
        return context, context
    half = limit // 2
    room = 2 * half - before - after
    if room < 0:
        raise UserError(
            f"the prompt and the question take {before + after} tokens without any passage, and "
            f"{limit} may stand before the answer: raise eval.max_prompt_tokens if it is set, "
            "lower eval.max_new_tokens, or shorten the prompt"
        )
    head = min(max(0, half - before), room)
    return head, context - (room - head)
