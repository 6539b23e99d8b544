"""Hooks that run before and after a module's forward.

They are registered as torch's forward hooks, and do not replace `forward`. The signature of `forward` can therefore be
inspected, and a deep copy of a module uses the weights of the copy. `module.forward(...)` does not run hooks.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from trainwright.bigmodels.dispatch.moves import allow_moves
from trainwright.bigmodels.weights.moving import Device, default_device, move_inputs, to_device
from trainwright.core.host.memory import clear_device_cache

# Entries of a module's `__dict__`. Both exist while a module has a hook.
_HOOK = "_hf_hook"  # the `ModelHook`. Other libraries (peft, diffusers) read this name.
_HANDLES = "_hf_hook_handles"  # the handles of torch's forward hooks that call it


class ModelHook:
    """Base class of hooks. Override methods to run code before and after a module's forward.

    Attributes:
        no_grad: Run the forward without recording gradients. May be assigned at any time. Default: False.
        runs_after_failure: Call `post_forward` with None if the forward raises an `Exception`, to release what
            `pre_forward` acquired. Default: False.
    """

    no_grad: bool = False
    runs_after_failure: ClassVar[bool] = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is added. Return it, or a replacement."""
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the forward, given the arguments of the call."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result of the call, given the output of the forward."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed. Return the module."""
        return module

    def acts_after(self) -> bool:
        """Return whether `post_forward` has an effect. Called once, when the hook is added."""
        return type(self).post_forward is not ModelHook.post_forward


class SequentialHook(ModelHook):
    """Several hooks whose methods are called in order, `post_forward` and `detach_hook` included."""

    runs_after_failure = True  # post_forward then calls only the hooks that also have this set

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:
        """True if one of the hooks disables gradients. An assignment sets the value of all hooks."""
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

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through each hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through each hook. After an error, only call hooks with `runs_after_failure`."""
        # torch calls this hook while it handles the error. An output of None alone is a valid result.
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
        """Return whether `post_forward` of a hook has an effect."""
        return any(hook.acts_after() for hook in self.hooks)


class _Calls:
    """Torch's forward hooks for one `ModelHook`. Stores no module, to avoid a reference cycle."""

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook
        self._grad_modes: dict[int, list[bool]] = {}  # by thread: modes to restore, innermost call last

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        changed = self.hook.pre_forward(module, *args, **kwargs)
        if self.hook.no_grad:
            # Registered once, at the first call without gradients: entries of `_grad_modes` are never removed. torch
            # also runs forward hooks that are registered during the call.
            if not self._grad_modes:
                restore = module.register_forward_hook(self.restore_grad_mode, prepend=True, always_call=True)
                module.__dict__[_HANDLES].append(restore)
            self._grad_modes.setdefault(threading.get_ident(), []).append(torch.is_grad_enabled())
            torch.set_grad_enabled(False)
        return changed

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        return self.hook.post_forward(module, output)

    def restore_grad_mode(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if modes := self._grad_modes.get(threading.get_ident()):
            torch.set_grad_enabled(modes.pop())


class _Once:
    """A forward pre-hook that removes itself."""

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self.act = act

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.act(module)
        _forget_once(module)


def before_next_forward(module: nn.Module, act: Callable[[nn.Module], None]) -> None:
    """Call `act(module)` once, before all hooks of the next forward. If `act` raises, call it before later ones, too.

    `remove_hook_from_module` cancels the call.
    """
    _forget_once(module)
    module.register_forward_pre_hook(_Once(act), prepend=True)


def _forget_once(module: nn.Module) -> None:
    """Remove the hook of `before_next_forward`."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Once)]:
        del module._forward_pre_hooks[key]


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook to a module.

    Args:
        module: Modified in place.
        hook: The hook, which is also stored as `module._hf_hook`.
        append: Keep an existing hook, and run the new hook after it. Default: False, which calls `detach_hook` of the
            existing hook and removes it first.

    Returns:
        The return value of the hook's `init_hook`, which is the module by default.
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
    """Register torch's forward hooks that call a `ModelHook`."""
    calls = _Calls(hook)
    # Runs before all other forward pre-hooks, because they may read the weights.
    handles = [module.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)]
    if hook.acts_after():
        handles.append(module.register_forward_hook(calls.after, always_call=hook.runs_after_failure))
    module.__dict__[_HANDLES] = handles


def _unregister(module: nn.Module) -> None:
    """Remove a module's hook without `detach_hook`. The module can be moved again, unless weights are only on disk."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    module.__dict__.pop(_HOOK, None)
    allow_moves(module)


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return a module's hook, a `SequentialHook` if it has several hooks, or None if it has no hook."""
    hook: ModelHook | None = module.__dict__.get(_HOOK)
    return hook


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """Return a list of a module's hooks in the order in which they run, with those of each `SequentialHook`."""
    return list(_flat(hook_of(module)))


def _flat(hook: ModelHook | None) -> Iterator[ModelHook]:
    if isinstance(hook, SequentialHook):
        for each in hook.hooks:
            yield from _flat(each)
    elif hook is not None:
        yield hook


def set_hook(module: nn.Module, hook: ModelHook | None) -> None:
    """Replace a module's hook without calling `init_hook` and `detach_hook`. With None, the hook is only removed."""
    _unregister(module)
    if hook is not None:
        module.__dict__[_HOOK] = hook
        _register(module, hook)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook after calling its `detach_hook`.

    Args:
        module: Modified in place.
        recurse: Also remove the hooks of all submodules. Default: False.

    Returns:
        The module. A replacement that `detach_hook` returns is ignored.
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
    """Remove the hooks of a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)


class CpuOffload(ModelHook):
    """Hook that stores a model on the CPU, and moves it to a device at a call. The model then stays on the device.

    Removing the hook does not move the model.

    Args:
        execution_device: The device that runs the model. Default: the current accelerator, or the CPU.
        prev_module_hook: The hook of the previous model of a pipeline. A call of this model first moves the previous
            model to the CPU.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.execution_device = default_device() if execution_device is None else to_device(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU. Blocks."""
        return _moved(module, torch.device("cpu"))

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, and move this model and its arguments to the device."""
        if self.prev_module_hook is not None and self.prev_module_hook.offload():
            clear_device_cache()  # before this model needs the memory
        _moved(module, self.execution_device)
        return move_inputs(args, self.execution_device), move_inputs(kwargs, self.execution_device)


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on `device`. Only its first tensor is checked."""
    first: torch.Tensor | None = next(module.parameters(), None)
    if first is None:
        first = next(module.buffers(), None)
    return module if first is None or first.device == device else module.to(device)


class UserCpuOffloadHook:
    """A model and its `CpuOffload` hook, as returned by `cpu_offload_with_hook`."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> bool:
        """Move the model to the CPU. Return whether it was on another device. Blocks."""
        first = next(self.model.parameters(), None)
        was_on_device = first is not None and first.device.type != "cpu"
        self.hook.init_hook(self.model)
        return was_on_device

    def remove(self) -> None:
        """Remove the hook. The model stays on its device."""
        remove_hook_from_module(self.model)


# Layers that contain most of a model's weights. Rounding them is harmless, unlike rounding norms and embeddings.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LayerwiseCastingHook(ModelHook):
    """Hook that stores a module's weights in one dtype, and computes in another dtype.

    Args:
        storage_dtype: Dtype between forwards, such as a float8 type.
        compute_dtype: Dtype during a forward.
        non_blocking: Do not wait for the conversion.
    """

    runs_after_failure = True  # to convert the weights back

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the storage dtype."""
        return _cast(module, self.storage_dtype, self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the weights to the compute dtype."""
        _cast(module, self.compute_dtype, self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back to the storage dtype."""
        _cast(module, self.storage_dtype, self.non_blocking)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the compute dtype. They remain rounded."""
        return _cast(module, self.compute_dtype, self.non_blocking)


def _cast(module: nn.Module, dtype: torch.dtype, non_blocking: bool) -> nn.Module:
    return module.to(dtype=dtype, non_blocking=non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store weights of linear and convolutional layers in one dtype, and compute in another. For inference.

    Args:
        module: The module, which is changed in place. It may itself be such a layer.
        storage_dtype: Dtype between forwards, such as `torch.float8_e4m3fn`, which takes half the memory of bfloat16.
        compute_dtype: Dtype during a forward.
        skip_modules_pattern: Regular expressions. Modules whose dotted name contains a match are not changed, nor are
            their submodules. One expression, or several in a tuple. Default: None, which skips no module.
        skip_modules_classes: Classes whose modules and their submodules are not changed.
        non_blocking: Do not wait for the conversions.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)  # without state, so all layers share it

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, _LAYERS):
            add_hook_to_module(part, hook, append=True)
            return
        for child_name, child in part.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
