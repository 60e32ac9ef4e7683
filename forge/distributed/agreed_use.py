"""Parameters that get a gradient on some ranks only, as experts do that no sample of a rank has chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from forge.errors import TaskError
from forge.util.patterns import listed


class AgreedUse:
    """Refuses gradients that some ranks have and others do not: torch would add them to those of other parameters.

    Ranks compare once, and whenever other parameters are trained; then each rank compares with that.
    """

    def __init__(self, who: str, cure: str):
        self._who, self._cure = who, cure
        self._agreed: dict[tuple[str, ...], list[bool]] = {}

    def check(
        self, named: Iterable[tuple[str, nn.Parameter]], used: set[int], gather: Callable[[Any], list[Any]]
    ) -> None:
        """Compare the parameters with a gradient; `gather` asks the ranks that hold the same ones."""
        trained = [(name, id(parameter) in used) for name, parameter in named if parameter.requires_grad]
        key, own = tuple(name for name, _ in trained), [is_used for _, is_used in trained]
        if key in self._agreed:
            odd = [name for name, now, then in zip(key, own, self._agreed[key], strict=True) if now is not then]
        else:
            odd = [name for name, *each in zip(key, *gather(own), strict=True) if len(set(each)) > 1]
            self._agreed[key] = own
        if odd:
            raise TaskError(
                f"{self._who}: {listed(odd)} got a gradient on some ranks, or in some updates, only, as experts do "
                f"that no sample has chosen. {self._cure}"
            )
