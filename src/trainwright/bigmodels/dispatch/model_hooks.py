"""Hooks that act before and after a module's forward, put on and taken off again.

They run as torch's own forward hooks: `forward` itself stays what it was, so that its signature can still be read, a
deep copy of the module runs with its own weights, and taking a hook off leaves nothing behind. A call that goes round
`module(...)`, as `module.forward(...)` does, goes round its hook too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from trainwright.bigmodels.dispatch.moves import allow_moves
from trainwright.bigmodels.weights.moving import Device, default_device, move_inputs, to_device
from trainwright.core.host.memory import clear_device_cache

_HOOK = "_hf_hook"  # the name under which other libraries (peft, diffusers) look for it
_HANDLES = "_hf_hook_handles"


class ModelHook:
    """Base class of hooks: override the methods to run around a module's forward.

    Attributes:
        no_grad: Run the forward without recording gradients. May be assigned at any time. Default: False.
        runs_after_failure: Call `post_forward` with None if the forward raises an `Exception`, to release what
            `pre_forward` acquired. Default: False.
    """

    no_grad: bool = False
    runs_after_failure: ClassVar[bool] = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is put on; return it, or another to be used in its place."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the forward is called with, given what the module was called with."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what the call gives, given what the forward returned."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is taken off; return the module."""
        return module

    def acts_after(self) -> bool:
        """Say whether `post_forward` does anything; read once, when the hook is put on."""
        return type(self).post_forward is not ModelHook.post_forward


class SequentialHook(ModelHook):
    """Several hooks as one, each method called in the order in which they were given."""

    runs_after_failure = True  # post_forward calls only the hooks that have it set

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]  # computed from the hooks
        """Whether one of the hooks disables gradients. Assigning sets it for all of them."""
        return any(hook.no_grad for hook in self.hooks)

    @no_grad.setter
    def no_grad(self, value: bool) -> None:
        for hook in self.hooks:
            hook.no_grad = value

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module with each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hand the arguments through each hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Hand the output through each hook; after a failure only through those that run after one."""
        failed = output is None and sys.exc_info()[1] is not None
        for hook in self.hooks:
            if hook.runs_after_failure or not failed:
                output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def acts_after(self) -> bool:
        """Say whether any of the hooks acts after the forward."""
        return any(hook.acts_after() for hook in self.hooks)


class _Calls:
    """Torch's forward hooks for one `ModelHook`. Stores no module, to avoid a reference cycle."""

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook
        self._grad_modes: dict[int, list[bool]] = {}  # by thread: modes to restore, innermost call last

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        changed = self.hook.pre_forward(module, *args, **kwargs)
        if self.hook.no_grad:
            if not self._grad_modes:  # torch also runs forward hooks that are registered during the call
                restore = module.register_forward_hook(self.restore_grad_mode, prepend=True, always_call=True)
                module.__dict__[_HANDLES].append(restore)
            self._grad_modes.setdefault(threading.get_ident(), []).append(torch.is_grad_enabled())
            torch.set_grad_enabled(False)
        return changed

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self.hook.post_forward(module, output)

    def restore_grad_mode(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if modes := self._grad_modes.get(threading.get_ident()):
            torch.set_grad_enabled(modes.pop())


class _Once:
    """What a module does before its next forward, and not again."""

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self.act = act

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.act(module)
        _forget_once(module)


def before_next_forward(module: nn.Module, act: Callable[[nn.Module], None]) -> None:
    """Have a module hand itself to a function before its next forward, before all hooks, until that raises nothing.

    Afterwards nothing is left of it, and so it is when hooks are taken off.
    """
    _forget_once(module)
    module.register_forward_pre_hook(_Once(act), prepend=True)


def _forget_once(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Once)]:
        del module._forward_pre_hooks[key]


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook on a module.

    Args:
        module: whose forward it acts around.
        hook: also found as `module._hf_hook` afterwards.
        append: keep a hook that the module has already, and run the new one after it. Otherwise that one is taken
            off, with its `detach_hook`.

    Returns:
        What the hook's `init_hook` returned: the module, unless the hook says otherwise.
    """
    former = module.__dict__.get(_HOOK)
    if former is not None and not append:
        remove_hook_from_module(module)
        former = None
    module = hook.init_hook(module)
    if former is not None:
        _unregister(module)
        hook = SequentialHook(former, hook)
    module.__dict__[_HOOK] = hook
    _register(module, hook)
    return module


def _register(module: nn.Module, hook: ModelHook) -> None:
    calls = _Calls(hook)
    # Runs before all other forward pre-hooks, because they may read the weights.
    handles = [module.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)]
    if hook.acts_after():
        handles.append(module.register_forward_hook(calls.after, always_call=hook.runs_after_failure))
    module.__dict__[_HANDLES] = handles


def _unregister(module: nn.Module) -> None:
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    module.__dict__.pop(_HOOK, None)
    allow_moves(module)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return a module's hook, or what holds several as one."""
    found: ModelHook | None = module.__dict__.get(_HOOK)
    return found


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """Return a module's hooks, one by one, in the order in which they run."""
    return list(_flat(hook_of(module)))


def _flat(hook: ModelHook | None) -> Iterator[ModelHook]:
    if isinstance(hook, SequentialHook):
        for each in hook.hooks:
            yield from _flat(each)
    elif hook is not None:
        yield hook


def set_hook(module: nn.Module, hook: ModelHook | None) -> None:
    """Put a hook in the place of a module's present one, or none, without `init_hook` and `detach_hook`: whoever calls
    this sees to the module's tensors.
    """
    _unregister(module)
    if hook is not None:
        module.__dict__[_HOOK] = hook
        _register(module, hook)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take a module's hook off, with its `detach_hook`; a module without one is left alone.

    Args:
        module: is changed.
        recurse: those of all modules within it too.
    """
    hook = module.__dict__.get(_HOOK)
    _forget_once(module)
    if hook is not None:
        hook.detach_hook(module)
        _unregister(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all modules within it."""
    remove_hook_from_module(module, recurse=True)


class CpuOffload(ModelHook):
    """Keep a whole model on the CPU and move it to a device when it is called; it stays there afterwards.

    Args:
        execution_device: where it runs; the present accelerator unless told, or the CPU where there is none.
        prev_module_hook: of the model that runs before this one in a pipeline: that one leaves the device first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = default_device() if execution_device is None else to_device(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU; waits for the device."""
        return _moved(module, torch.device("cpu"))

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the former model away, bring this one and its arguments in."""
        if self.prev_module_hook is not None and self.prev_module_hook.offload():
            clear_device_cache()
        _moved(module, self.execution_device)
        return move_inputs(args, self.execution_device), move_inputs(kwargs, self.execution_device)


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on `device`; where it is there already, that costs one look at its first tensor."""
    first: torch.Tensor | None = next(module.parameters(), None)
    if first is None:
        first = next(module.buffers(), None)
    return module if first is None or first.device == device else module.to(device)


class UserCpuOffloadHook:
    """A model and its `CpuOffload` hook: what `cpu_offload_with_hook` hands to the user."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> bool:
        """Move the model to the CPU now; return whether it was elsewhere. Waits for the device."""
        first = next(self.model.parameters(), None)
        elsewhere = first is not None and first.device.type != "cpu"
        self.hook.init_hook(self.model)
        return elsewhere

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)
