"""How many bytes of tensors are alive, whatever the allocator makes of them."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Bytes of all tensors alive, of those given and those made since, and the most there were."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()
        for tensor in given:
            self._add(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            finalize(storage, self._release, storage.nbytes())

    def _release(self, size: int) -> None:
        self.now -= size
