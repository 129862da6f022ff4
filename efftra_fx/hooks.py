"""Hooks of a user's model: those that capture sees, those that a step calls, and those that are refused.

on modules, forward                captured with what they compute
on parameters, for gradients       called once a step with the whole batch's gradient
on parameters, after accumulation  called once a step when `.grad` is there
on modules, backward               refused: a captured step has no module whose backward it could follow
on tensors inside forward          refused
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from efftra_fx import private
from efftra_fx.errors import CaptureError
from efftra_fx.places import is_user_file, line_of_caller


def check_hooks(*models: nn.Module) -> None:
    """Raise CaptureError for hooks on backwards of modules, which no captured step would call."""
    if any(map(_of_user, private.global_hooks(backward=True))):
        raise CaptureError(
            "a hook on the backward of all modules is registered (torch.nn.modules.module), which the captured step "
            "would not call; remove it while the model is compiled and trained"
        )
    for model in models:
        for path, module in model.named_modules():
            if any(map(_of_user, private.module_hooks(module, backward=True))):
                which = f"module '{path}'" if path else "the model"
                raise CaptureError(
                    f"{which} has a backward hook, which the captured step would not call; remove it, use a "
                    "hook on a parameter or a torch.autograd.Function in forward, or read gradients after the step"
                )


def hook_notes(*models: nn.Module) -> tuple[str, ...]:
    """Say once what becomes of forward hooks."""
    hooked = [
        path or "the model"
        for model in models
        for path, module in model.named_modules()
        if any(map(_of_user, private.module_hooks(module)))
    ]
    if not hooked and not any(map(_of_user, private.global_hooks())):
        return ()
    which = ", ".join(hooked) or "all modules"
    return (
        f"forward hooks of {which} are part of the captured step: what they compute is kept, and what else they do in "
        "Python (print, store) happens while the model is captured and not at each step",
    )


def has_hooks(parameter: Tensor) -> bool:
    """Say whether a parameter has hooks for its gradient."""
    return any(private.tensor_hooks(parameter))


def hooked(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a whole gradient as the parameter's hooks leave it."""
    for hook in private.tensor_hooks(parameter)[0]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def call_after_accumulation(parameter: Tensor, held: Tensor) -> None:
    """Call the hooks that wait for `.grad` of a parameter; `held` is what this process holds of it."""
    for hook in private.tensor_hooks(parameter)[1]:
        hook(held)


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """While this lasts, user code that registers a hook on a tensor is refused with its line."""
    names = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
    before = {name: getattr(Tensor, name) for name in names}

    def refusing(name: str) -> Callable[..., Any]:
        def register(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_user_file(sys._getframe(1).f_code.co_filename):
                raise CaptureError(
                    f"{line_of_caller()} calls {name} on a tensor inside forward, which the captured step would not "
                    "follow; use a torch.autograd.Function that does the same in its backward, or register it on a "
                    "parameter outside of forward"
                )
            return before[name](tensor, *args, **kwargs)

        return register

    for name in names:
        setattr(Tensor, name, refusing(name))
    try:
        yield
    finally:
        for name in names:
            setattr(Tensor, name, before[name])


def _of_user(hook: Any) -> bool:
    """Say whether a hook is not one of torch's own, such as those of weight norms."""
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not (origin == "torch" or origin.startswith("torch."))


__all__ = [
    "call_after_accumulation",
    "check_hooks",
    "has_hooks",
    "hook_notes",
    "hooked",
    "tensor_hooks_refused",
]
