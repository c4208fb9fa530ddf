"""Callables that stand in for the `forward` of a stock module: an instance attribute, so that its class stays untouched.

What a module computes is found by running it, not by its name.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from torch import nn

NOT_LIKE_IT = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What a module of another kind raises when it is run as one of this."""
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


class StandIn:
    """What stands in for a module's forward.

    Args:
        module: whose forward it replaces, once put there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # whatever its class is


def put(found: Seq[StandIn]) -> int:
    """Let each stand in for its module's forward; returns how many."""
    for each in found:
        each.module.forward = each
    return len(found)


def hooked(module: nn.Module) -> bool:
    """Whether something watches or changes what the module takes or gives, or stands in for its forward."""
    own = vars(module)
    return "forward" in own or any(own[name] for name in _HOOKS)


def undo(model: nn.Module) -> list[StandIn]:
    """Give every module its own forward back; returns what `put` takes."""
    found = [own for module in model.modules() if isinstance(own := vars(module).get("forward"), StandIn)]
    for each in found:
        del each.module.forward
    return found
