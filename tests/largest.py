"""How large the tensors are that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the most numbers that a tensor owns of those made; of a sparse one, its entries."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                full = each.layout == torch.strided
                owned = each.untyped_storage().nbytes() // each.element_size() if full else 0
                size = min(each.numel(), owned) if full else each.values().numel()
                self.size = max(self.size, size)
        return made
