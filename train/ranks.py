"""What ranks tell each other so that all of them do the same; every rank must call it."""

import torch
from accelerate import Accelerator


def from_main(accelerator: Accelerator, number: int) -> int:
    """The main rank's number, on every rank."""
    # A bool would be a tensor of another size than the others' 0.
    mine = int(number) if accelerator.is_main_process else 0
    return int(accelerator.reduce(torch.tensor(mine, device=accelerator.device), "sum").item())


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether it is so on some rank, on every rank."""
    count = torch.tensor(int(flag), device=accelerator.device)
    return bool(accelerator.reduce(count, "sum").item())
