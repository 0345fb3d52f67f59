"""`train.attention`: which kernel a run takes, and what it says where one cannot be."""

from types import SimpleNamespace

import pytest
import torch

from recipes.errors import UserError
from recipes.resolve import resolve
from train import attention
from train.attention import attention_kernel

MODEL = SimpleNamespace(head_dim=64, attention_dropout=0.0)


def kernel(device: str, *overrides: str) -> str:
    config = resolve(["quickstart", *overrides]).config
    return attention_kernel(config, MODEL, torch.device(device))


def test_auto_is_sdpa_without_a_gpu() -> None:
    assert kernel("cpu") == "sdpa"
    assert kernel("cpu", "train.mixed_precision=bf16") == "sdpa"


def test_varlen_where_it_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"train.attention=varlen needs a CUDA GPU.* runs on cpu"):
        kernel("cpu", "train.attention=varlen", "train.mixed_precision=bf16")


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], torch.float32),
        (["train.mixed_precision=bf16"], torch.bfloat16),
        (["model.dtype=bfloat16", "train.tuning=lora"], torch.bfloat16),
    ],
)
def test_what_attention_computes_in_decides(
    overrides: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(config: object, asked: torch.dtype, device: torch.device) -> str | None:
        assert asked == dtype
        return "does not like float32" if asked == torch.float32 else None

    monkeypatch.setattr(attention, "why_not_varlen", why_not)
    fits = dtype != torch.float32
    assert kernel("cuda", *overrides) == ("varlen" if fits else "sdpa")
    assert kernel("cuda", "train.attention=sdpa", *overrides) == "sdpa"
    if fits:
        assert kernel("cuda", "train.attention=varlen", *overrides) == "varlen"
    else:
        with pytest.raises(UserError, match="does not like float32"):
            kernel("cuda", "train.attention=varlen", *overrides)
