"""Reweighted attention to chunks that were encoded in parallel: APE (Yang et al., 2025).

Chunks that do not see each other attract more attention together than one text would. APE
sharpens the attention among their tokens and takes weight from all of them: with l_j the logits of
the chunks' tokens, T a temperature and S a scale, the chunks give

    softmax(l / T) @ values    with the log-sum-exp    S * logsumexp(l / T)

and this is merged with the attention to everything else by the two log-sum-exps, the other one
plain. T = S = 1 is ordinary attention. The factor is S as in the paper's listing of the algorithm;
the authors' code has S * T there, so that its 0.9 and 0.9 are T = 0.9 and S = 0.81 here.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParallelAttention:
    """How computed tokens attend to the cached chunks, as against everything else.

    Attributes:
        shared_tokens: tokens at the start of the prefix that are no chunk's: the shared prompt.
        temperature: divides the logits of the chunks' tokens.
        scale: factor on the log-sum-exp of the attention to the chunks.
    """

    shared_tokens: int
    temperature: float
    scale: float


def attend_in_parallel(
    query_1QTD: Tensor,
    keys_1HCD: Tensor,
    values_1HCD: Tensor,
    visible_TC: Tensor | None,
    scaling: float,
    parallel: ParallelAttention,
    chunks: slice,
) -> Tensor:
    """Attends to the keys in `chunks`, which every query sees, and to the others; [1, T, Q, D].

    Merging by log-sum-exps is one softmax over all keys in which the chunks' logits are l / T plus
    (S - 1) * logsumexp(l / T), for these sum to the exponential of the scaled log-sum-exp.

    Args:
        query_1QTD: queries, several to a head of the keys.
        keys_1HCD: all keys of the request.
        values_1HCD: their values.
        visible_TC: which keys each query sees; None: all.
        scaling: of the products of queries and keys.
        parallel: temperature and scale.
        chunks: which of the keys are the chunks'.
    """
    grouped_HGTD = query_1QTD[0].unflatten(0, (keys_1HCD.shape[1], -1))
    keys_H1CD, values_H1CD = keys_1HCD[0, :, None], values_1HCD[0, :, None]
    logits_HGTC = scaling * (grouped_HGTD.float() @ keys_H1CD.float().transpose(-1, -2))
    if visible_TC is not None:
        logits_HGTC = logits_HGTC.masked_fill(~visible_TC, float("-inf"))
    sharpened_HGTC = logits_HGTC[..., chunks] / parallel.temperature
    total_HGT1 = sharpened_HGTC.logsumexp(dim=-1, keepdim=True)
    logits_HGTC[..., chunks] = sharpened_HGTC + (parallel.scale - 1) * total_HGT1
    attended_HGTD = logits_HGTC.softmax(dim=-1) @ values_H1CD.float()
    return attended_HGTD.flatten(0, 1).transpose(0, 1)[None].to(query_1QTD.dtype)
