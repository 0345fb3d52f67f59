"""Records: everything about one token, its keys and values of all layers, as one run of bytes.

Records stand one after another, so that one nugget is one contiguous range of a file. A record
holds keys and values `[L, 2, H, D]`; under `int8` and `float8` one fp32 scale for each vector of
`head_dim` values follows them, `[L, 2, H]`. In shape suffixes, R is the bytes of one record.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig

StoreDtype = Literal["float32", "bfloat16", "float16", "int8", "float8"]

_STORED_AS: dict[StoreDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_LARGEST_CODE: dict[StoreDtype, float] = {
    "int8": 127.0,
    "float8": torch.finfo(torch.float8_e4m3fn).max,
}
_SCALE_BYTES = 4


class RecordRangeError(ValueError):
    """Keys or values that the stored dtype cannot hold; says which dtype can."""

    is_user_error = True


@dataclass(frozen=True)
class RecordLayout:
    """The geometry of a model's keys and values and the dtype that they are stored in."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: StoreDtype

    def __post_init__(self) -> None:
        assert self.dtype in get_args(StoreDtype), self.dtype
        assert self.head_dim % 2 == 0, "RoPE rotates pairs"

    @classmethod
    def from_model(cls, config: PreTrainedConfig, dtype: StoreDtype) -> Self:
        """The layout of a supported model's records."""
        head_dim = getattr(config, "head_dim", None)
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            dtype=dtype,
        )

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> Self:
        """The layout that `as_json` wrote."""
        return cls(**parts)

    def as_json(self) -> dict[str, Any]:
        """A plain dict of the layout's parts."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which keys and values are stored."""
        return _STORED_AS[self.dtype]

    @property
    def has_scales(self) -> bool:
        """Whether scales follow the keys and values."""
        return self.dtype in _LARGEST_CODE

    @property
    def token_bytes(self) -> int:
        """Bytes of one record, scales included."""
        return self._vectors * (
            self.head_dim * self.torch_dtype.itemsize + self.has_scales * _SCALE_BYTES
        )

    @property
    def _vectors(self) -> int:
        return self.layers * 2 * self.kv_heads

    def encode(self, kv_TL2HD: Tensor) -> Tensor:
        """Writes keys and values as records.

        Float dtypes round to the nearest. `int8` and `float8` (e4m3) divide each vector by
        `largest absolute value / largest code` first, so that a value is off by at most half a
        scale (`int8`), or by 1/16 of itself or 1/1024 of a scale, whichever is more (`float8`).

        Args:
            kv_TL2HD: keys and values of T tokens, in any float dtype, on any device.

        Returns:
            records_TR: uint8, contiguous, on the CPU; never memory of `kv_TL2HD`.

        Raises:
            RecordRangeError: a value is not finite once stored.
        """
        shape = (self.layers, 2, self.kv_heads, self.head_dim)
        assert kv_TL2HD.shape[1:] == shape, f"{tuple(kv_TL2HD.shape[1:])} is not {shape}"
        kv_TL2HD = kv_TL2HD.detach()
        if not self.has_scales:
            stored_TL2HD = kv_TL2HD.to("cpu", self.torch_dtype, copy=True)
            self._check_finite(stored_TL2HD)
            stored_TL2HD = stored_TL2HD.contiguous()
            return stored_TL2HD.flatten(1).view(torch.uint8)

        largest = _LARGEST_CODE[self.dtype]
        kv_TL2HD = kv_TL2HD.to("cpu", torch.float32)
        scales_TL2H = kv_TL2HD.abs().amax(-1) / largest
        self._check_finite(scales_TL2H)
        # Below the smallest normal number a scale has too few bits to bound the error.
        scales_TL2H = scales_TL2H.clamp_min(torch.finfo(torch.float32).tiny)
        codes_TL2HD = (kv_TL2HD / scales_TL2H[..., None]).clamp_(-largest, largest)
        if self.dtype == "int8":
            codes_TL2HD = codes_TL2HD.round_()
        codes_TL2HD = codes_TL2HD.to(self.torch_dtype).contiguous()
        return torch.cat(
            (
                codes_TL2HD.flatten(1).view(torch.uint8),
                scales_TL2H.contiguous().flatten(1).view(torch.uint8),
            ),
            dim=1,
        )

    def decode(self, records_TR: Tensor, dtype: torch.dtype) -> Tensor:
        """Reads records as keys and values.

        Args:
            records_TR: uint8 records, rows contiguous, on any device.
            dtype: the dtype wanted.

        Returns:
            kv_TL2HD on the records' device; where `dtype` is the stored one a view of the records.
        """
        assert records_TR.shape[1] == self.token_bytes, (records_TR.shape, self.token_bytes)
        shape = (self.layers, 2, self.kv_heads, self.head_dim)
        if not self.has_scales:
            return records_TR.view(self.torch_dtype).unflatten(1, shape).to(dtype)
        code_bytes = self._vectors * self.head_dim
        codes_TL2HD = records_TR[:, :code_bytes].view(self.torch_dtype).unflatten(1, shape)
        scales_TL2H = records_TR[:, code_bytes:].view(torch.float32).unflatten(1, shape[:-1])
        return codes_TL2HD.to(torch.float32).mul_(scales_TL2H[..., None]).to(dtype)

    def _check_finite(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise RecordRangeError(
                f"keys or values are not finite once stored as {self.dtype}; if the model is "
                "sound, set store.dtype to bfloat16 or float32, which have its range"
            )
