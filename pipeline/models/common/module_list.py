"""``nn.ModuleList`` whose elements have a type: PyTorch declares them all as plain modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

Element = TypeVar("Element", bound=nn.Module)

if TYPE_CHECKING:

    class ModuleList(nn.ModuleList, Generic[Element]):
        """What the type checker sees of ``nn.ModuleList``."""

        def __init__(self, modules: Iterable[Element]) -> None: ...

        def __iter__(self) -> Iterator[Element]: ...

        @overload
        def __getitem__(self, idx: slice) -> ModuleList[Element]: ...

        @overload
        def __getitem__(self, idx: int) -> Element: ...

        def __getitem__(self, idx: int | slice) -> Element | ModuleList[Element]: ...

else:
    ModuleList = nn.ModuleList
