"""Hooks that act before and after a module's forward, put on and taken off again.

They run as torch's own forward hooks: `forward` itself stays what it was, so that its signature can still be read, a
deep copy of the module runs with its own weights, and taking a hook off leaves nothing behind. A call that goes round
`module(...)`, as `module.forward(...)` does, goes round its hook too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from trainwright.bigmodels.weights.moving import Device, default_device, move_inputs, to_device
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import clear_device_cache

_HOOK = "_hf_hook"  # the name under which other libraries (peft, diffusers) look for it
_HANDLES = "_hf_hook_handles"
MOVES = ("cuda", "xpu", "cpu", "to_empty")


class Refusal:
    """Stands in the place of a method that a module must not be asked for while its hook is on."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigurationError."""
        raise ConfigurationError(self.message)


class OnlyDtype(Refusal):
    """Stands in the place of a module's `to`: lets a change of dtype through, and refuses a move."""

    def __init__(self, message: str, module: nn.Module) -> None:
        super().__init__(message)
        self._module = weakref.ref(module)  # the two would keep each other

    def __getstate__(self) -> dict[str, Any]:
        return {"message": self.message, "module": self._module()}  # a copy's own is the copied module

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["message"], state["module"])  # type: ignore[misc]  # as if made for that one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the module as its class does; raise ConfigurationError where a device is asked for."""
        module = self._module()
        if module is None or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            raise ConfigurationError(self.message)
        return type(module).to(module, *args, **kwargs)


def refuse_moves(module: nn.Module) -> None:
    """Have a module with offloaded weights raise ConfigurationError where it is asked to go to another device, until
    its hook is taken off.
    """
    message = (
        "this model has weights that are offloaded to the CPU or the disk: it cannot be moved as a whole. Take the "
        "hooks off first (remove_hook_from_submodules), or dispatch it with another device_map."
    )
    refused: dict[str, Any] = {name: Refusal(message) for name in MOVES if hasattr(module, name)}
    refused["to"] = OnlyDtype(message, module)
    for name, refusal in refused.items():
        if isinstance(module.__dict__.get(name, refusal), Refusal):  # else it refuses by itself, hook or not
            module.__dict__[name] = refusal


class _Owners:
    """The modules that a hook is on, without keeping them; a copy of a module is the owner of the hook's copy."""

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owners:
        copied = _Owners()
        copied.modules.update(memo[id(module)] for module in self.modules if id(module) in memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Owners, ()


class _NoGrad:
    """The attribute `no_grad` of hooks: modules are told when it is assigned, and ask for nothing while it is not."""

    def __init__(self, default: Any) -> None:
        self.default = default  # a bool, or a function of the hook

    def __get__(self, hook: ModelHook | None, owner: type[ModelHook]) -> bool:
        if hook is None:
            return bool(self.default) if isinstance(self.default, bool) else False
        found = vars(hook).get("no_grad")
        if found is None:
            found = self.default if isinstance(self.default, bool) else self.default(hook)
        return bool(found)

    def __set__(self, hook: ModelHook, value: bool) -> None:
        vars(hook)["no_grad"] = bool(value)
        for module in _owners(hook).modules:
            _watch_recording(module)


def _owners(hook: ModelHook) -> _Owners:
    found: _Owners = vars(hook).setdefault("_owners", _Owners())
    return found


class ModelHook:
    """What happens around a module's forward; derive from it and override what you need.

    Attributes:
        no_grad: run the forward without recording gradients; may be assigned at any time. Default: False.
        runs_after_failure: `post_forward` is called with None also where the forward raised an `Exception`, to give
            back what `pre_forward` took. Otherwise it is not called then.
    """

    no_grad: bool = _NoGrad(False)  # type: ignore[assignment]  # reads as a bool
    runs_after_failure: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        default = cls.__dict__.get("no_grad")
        if isinstance(default, bool):
            cls.no_grad = _NoGrad(default)  # type: ignore[assignment]  # reads as a bool

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

    def acts_before(self) -> bool:
        """Say whether `pre_forward` does anything; read once, when the hook is put on."""
        return type(self).pre_forward is not ModelHook.pre_forward

    def acts_after(self) -> bool:
        """Say whether `post_forward` does anything; read once, when the hook is put on."""
        return type(self).post_forward is not ModelHook.post_forward


class SequentialHook(ModelHook):
    """Several hooks as one, each method called in the order in which they were given."""

    no_grad: bool = _NoGrad(lambda self: any(hook.no_grad for hook in self.hooks))  # type: ignore[assignment]
    runs_after_failure = True  # passed on to those who asked for it only

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

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

    def acts_before(self) -> bool:
        """Say whether any of the hooks acts before the forward."""
        return any(hook.acts_before() for hook in self.hooks)

    def acts_after(self) -> bool:
        """Say whether any of the hooks acts after the forward."""
        return any(hook.acts_after() for hook in self.hooks)


class _Calls:
    """What torch calls around the forward on behalf of one hook. It holds no module: the two would keep each other."""

    def __init__(self, hook: ModelHook) -> None:
        self.hook = hook
        self._recording: dict[int, list[bool]] = {}  # by thread: what to put back, innermost call last

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return self.hook.pre_forward(module, *args, **kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self.hook.post_forward(module, output)

    def stop_recording(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._recording.setdefault(threading.get_ident(), []).append(torch.is_grad_enabled())
        if self.hook.no_grad:
            torch.set_grad_enabled(False)

    def resume_recording(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before = self._recording.get(threading.get_ident())
        if before:
            torch.set_grad_enabled(before.pop())


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
    handles = []
    # The first before the forward: others may want to see the weights. Appended after it, in the order of arrival.
    if hook.acts_before():
        handles.append(module.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True))
    if hook.acts_after():
        handles.append(module.register_forward_hook(calls.after, always_call=hook.runs_after_failure))
    module.__dict__[_HANDLES] = handles
    for one in {id(each): each for each in (hook, *_flat(hook))}.values():
        _owners(one).modules.add(module)
    _watch_recording(module)


def _watch_recording(module: nn.Module) -> None:
    """Have a module ask its hook before each forward whether to record gradients, once the hook has said no."""
    hook, handles = module.__dict__.get(_HOOK), module.__dict__.get(_HANDLES)
    if hook is None or handles is None or not hook.no_grad:
        return
    asks = (getattr(call, "__func__", None) is _Calls.stop_recording for call in module._forward_pre_hooks.values())
    if not any(asks):
        calls = _Calls(hook)
        handles.append(module.register_forward_pre_hook(calls.stop_recording))
        handles.append(module.register_forward_hook(calls.resume_recording, prepend=True, always_call=True))


def _unregister(module: nn.Module) -> None:
    for one in hooks_of(module):
        _owners(one).modules.discard(module)
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    module.__dict__.pop(_HOOK, None)
    for name in [name for name, value in module.__dict__.items() if isinstance(value, Refusal)]:
        del module.__dict__[name]


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
