"""Passes of a model whose weights are split between ranks, each of which answers questions its own.

A rank computes with weights that it has gathered from the others, module by module, so a pass of
one must be a pass of all. What they compute differs; that it goes through the whole model, and how
often, must not.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


class Lockstep:
    """A model that many ranks call, each as often as it likes until it calls `finish`.

    It takes the place of the model where prefixes are encoded and requests answered.

    Attributes:
        config: of the model.
        device: that it computes on.
        dtype: of its weights.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator) -> None:
        self.config, self.device, self.dtype = model.config, accelerator.device, model.dtype
        self._model: Any = model
        self._accelerator = accelerator

    def __call__(self, **inputs: Any) -> Any:
        """A pass, once every other rank begins one."""
        self._any_working(True)
        return self._run(**inputs)

    def model(self, **inputs: Any) -> Any:
        """What stands where a causal LM has its decoder: it runs with the head, as every pass."""
        return self(**inputs, logits_to_keep=1)

    def set_attn_implementation(self, name: str) -> None:
        """See `PreTrainedModel`."""
        self._model.set_attn_implementation(name)

    def finish(self) -> None:
        """Runs passes for nothing until every rank has called this; the weights are split after it.

        The attention is then sdpa.
        """
        self.set_attn_implementation("sdpa")
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        while self._any_working(False):
            self._run(input_ids=ids_11, use_cache=False, logits_to_keep=1)
        # FSDP2 leaves the last ones gathered for a backward pass, which does not come.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _any_working(self, mine: bool) -> bool:
        working = torch.tensor(int(mine), device=self.device)
        total: Tensor = self._accelerator.reduce(working, "sum")
        return bool(total.item())

    def _run(self, **inputs: Any) -> Any:
        # Gathered weights stay; training could not use ones that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._model(**inputs)
