"""Count the operators of a step that start a kernel on a GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operators that only allocate, or only look at memory in another way.
_NO_KERNEL = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "lift_fresh")


class Launches(TorchDispatchMode):
    """Counts operators while it is active: ``count``. Runs on tensors of the device "meta", which have a GPU's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        self.count += not operator.is_view and not name.startswith(_NO_KERNEL)
        return operator(*args, **(kwargs or {}))
