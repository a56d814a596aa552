"""Whether a call must go through PyTorch's dispatcher: only if something looks on, since that costs 20 to 40 us."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_by_torch(x: Tensor) -> bool:
    """Whether anything looks on that must see an operator: fake tensors, tracing, modes, autocast, functorch."""
    return (
        type(x) is not Tensor
        or _is_any_autocast_enabled()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack() > 0
        or _peek_interpreter_stack() is not None
    )


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_get_tracing_state = torch._C._get_tracing_state
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
