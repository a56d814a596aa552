"""Whether a call must go through PyTorch's dispatcher: only if something looks on, since that costs 20 to 40 us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def seen_by_torch(*arguments: Any) -> bool:
    """Whether anything looks on that must see an operator: tensors of other classes (fake ones), tracing, modes of both
    kinds, autocast, functorch."""
    return (
        not _PLAIN.issuperset(map(type, arguments))
        or _is_any_autocast_enabled()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _peek_interpreter_stack() is not None
    )


_PLAIN = {Tensor, nn.Parameter, float, int, bool, str, type(None), list, torch.dtype}
"""What an operator takes that nobody has a hand in."""


def _question(name: str) -> Callable[[], Any]:
    """A function of torch._C; where a release has no such one, an answer that means: somebody looks on."""
    found: Any = torch._C
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else lambda: 1


_is_any_autocast_enabled = _question("_is_any_autocast_enabled")
_get_tracing_state = _question("_get_tracing_state")
_len_torch_dispatch_stack = _question("_len_torch_dispatch_stack")
_len_torch_function_stack = _question("_len_torch_function_stack")
_peek_interpreter_stack = _question("_functorch.peek_interpreter_stack")
