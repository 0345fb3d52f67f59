"""How the ranks of a run may share its model; the command line says it and no recipe does."""

from typing import Literal, get_args

Sharding = Literal["ddp", "zero2", "zero3", "zero3_offload", "fsdp2"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
