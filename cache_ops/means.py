"""A chunk's summary without training: the mean of its tokens' keys and values, layer by layer.

Keys are turned back to position 0, where RoPE leaves them as they are, before they are averaged.
The mean then stands behind the chunk's tokens as one more, at the position that follows theirs, and
is sliced and moved like any token.
"""

import torch
from torch import Tensor

from cache_ops.rope import Rope, rotate


def with_mean(kv_TL2HD: Tensor, rope: Rope) -> Tensor:
    """A chunk's keys and values with their mean behind them, as its record T."""
    tokens = len(kv_TL2HD)
    positions_T = torch.arange(tokens, device=kv_TL2HD.device)
    keys_TLHD, values_TLHD = kv_TL2HD.float().unbind(dim=2)
    cosine_TD, sine_TD = rope.tables(-positions_T)
    key_LHD = rotate(keys_TLHD, cosine_TD[:, None, None], sine_TD[:, None, None]).mean(dim=0)
    key_LHD = rotate(key_LHD, *rope.tables(positions_T.new_tensor(tokens)))
    mean_L2HD = torch.stack((key_LHD, values_TLHD.mean(dim=0)), dim=1)
    return torch.cat((kv_TL2HD, mean_L2HD[None].to(kv_TL2HD.dtype)))
