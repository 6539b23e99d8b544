"""Run each module where its map says: its inputs follow it, and offloaded weights are there while it computes."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from trainwright.core.errors import CheckpointError
from trainwright.strategies.offload.device_copies import Fetched, fetch_to
from trainwright.strategies.offload.hooks import ModelHook, SequentialHook
from trainwright.strategies.offload.mapped_file import Span
from trainwright.strategies.offload.moving import Device, find_device, move_inputs, to_device
from trainwright.strategies.offload.prefetch import Prefetcher

WeightsMap = Mapping[str, torch.Tensor]
TiedParams = dict[int, dict[torch.device, torch.Tensor]]

# Modules that share a parameter share what stands in its place, and what is put back in the end. Entries go with
# their keys: with the parameter when the last module has given it up, with the placeholder when it is no longer used.
_PLACEHOLDERS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
_RESTORED: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Slot:
    """A parameter or buffer whose value is away between two forwards.

    Attributes:
        name: within the hook's module, dotted where it belongs to a submodule.
        placeholder: what stands in its place meanwhile, on the meta device.
        device: where it was before.
        former: what stood there before, kept where its memory is what the weights map hands out anyway.
        mapped: what is put in its place, where that is a view of a file or of host memory and can be used again.
    """

    name: str
    is_buffer: bool
    placeholder: torch.Tensor
    device: torch.device
    former: torch.Tensor | None
    mapped: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Slot:
        placeholder, former = copy.deepcopy((self.placeholder, self.former), memo)
        return replace(self, placeholder=placeholder, former=former, mapped=None)  # mapped anew, not read into memory


class AlignDevicesHook(ModelHook):
    """Bring a module's inputs to its device and, if asked, its weights for the time of its forward.

    Args:
        execution_device: where the forward runs; None leaves weights and inputs where they are.
        offload: keep the weights in `weights_map`, and meta tensors in their place between forwards.
        io_same_device: move the output to where the first tensor of the input was.
        weights_map: the weights by their names in the module; a copy on the CPU unless given.
        offload_buffers: offload buffers too (those that a state dict holds). Otherwise they stay on the execution
            device.
        place_submodules: also those of the modules within.
        skip_keys: names of arguments, and keys of an output, that stay where they are.
        tied_params_map: by the address of a weight's memory on the host, its copies on devices: modules that share a
            weight share the copy while it is in use.
        prefetcher: brings the weights in ahead of time.
        tensor_names: the only ones that it places or offloads; all unless given.
    """

    runs_after_failure = True  # weights are given back

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: WeightsMap | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParams | None = None,
        *,
        prefetcher: Prefetcher | None = None,
        tensor_names: frozenset[str] | None = None,
    ) -> None:
        self.execution_device = None if execution_device is None else to_device(execution_device)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        self.tied_params_map = tied_params_map
        self.prefetcher = prefetcher
        self.tensor_names = tensor_names
        self.num_bytes = 0
        self._slots: list[_Slot] = []
        self._spans: dict[str, Span] = {}
        self._number = -1
        self._lock = threading.RLock()
        self._users: dict[int, int] = {}  # calls that are under way, by thread
        self._shared: list[int] = []  # keys of `tied_params_map` that this hook has filled
        self._input_devices: dict[int, list[torch.device | None]] = {}  # by thread, innermost call last

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys or None})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _users={}, _input_devices={}, _shared=[])
        if self.prefetcher is not None:
            self._number = self.prefetcher.add(self)

    def acts_before(self) -> bool:
        """Say whether there is a device to bring anything to."""
        return self.execution_device is not None or self.io_same_device

    def acts_after(self) -> bool:
        """Say whether weights have to go or the output has to move."""
        return self.offload or self.io_same_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors, or put meta tensors in their place; waits for the device where any move.

        Raises:
            CheckpointError: the weights map lacks a weight that the module does not have either.
        """
        device = self.execution_device
        if device is None or device == _META:
            return module
        tensors = list(_tensors(module, recurse=self.place_submodules))
        if self.tensor_names is not None:
            tensors = [entry for entry in tensors if entry[0] in self.tensor_names]
        if not self.offload:
            for name, tensor, _ in tensors:
                if not tensor.is_meta:
                    _place(module, name, tensor, device)
            return module
        kept = [(name, t, b) for name, t, b in tensors if not b or self._is_offloaded_buffer(module, name)]
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor, _ in kept}
        self._slots = [self._slot(name, tensor, is_buffer) for name, tensor, is_buffer in kept]
        self._note_places()
        for slot in self._slots:
            put(module, slot.name, slot.placeholder)
        away = {slot.name for slot in self._slots}
        for name, tensor, _ in tensors:
            if name not in away and not tensor.is_meta:
                _place(module, name, tensor, device)
        return module

    def _is_offloaded_buffer(self, module: nn.Module, name: str) -> bool:
        owner, leaf = _owner(module, name)
        return self.offload_buffers and leaf not in owner._non_persistent_buffers_set

    def _slot(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> _Slot:
        assert self.weights_map is not None
        try:
            value = self.weights_map[name]
        except KeyError:
            raise CheckpointError(f"the weights map holds no {name!r}, which is to be offloaded.") from None
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(value.shape)} in the weights map and {tuple(tensor.shape)} in the module."
            )
        former = None
        placeholder = tensor
        if not tensor.is_meta:
            placeholder = _PLACEHOLDERS.setdefault(tensor, like(tensor, torch.empty_like(tensor, device=_META)))
            if tensor.device == value.device and tensor.data_ptr() == value.data_ptr():
                former = tensor
        return _Slot(name, is_buffer, placeholder, tensor.device, former)

    def _note_places(self) -> None:
        locate = getattr(self.weights_map, "locate", None)
        for slot in self._slots:
            span = None if locate is None else locate(slot.name)
            if span is not None:
                self._spans[slot.name] = span
        self.num_bytes = sum(slot.placeholder.nbytes for slot in self._slots)
        if self.prefetcher is not None and self._slots and (self._spans or self.execution_device != _CPU):
            self._number = self.prefetcher.add(self)

    def offloaded(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, Span | None]]:
        """Yield what is kept away between forwards: its name within the module, what stands in its place meanwhile (of
        the dtype that the forward sees), its value, and where that lies in a file.
        """
        assert self.weights_map is not None
        for slot in self._slots:
            yield slot.name, slot.placeholder, self.weights_map[slot.name], self._spans.get(slot.name)

    def fetch(self) -> Fetched:
        """Bring the weights to the execution device; called by the prefetcher too, from its thread."""
        assert self.weights_map is not None
        assert self.execution_device is not None
        ready = {slot.name: slot.mapped for slot in self._slots if slot.mapped is not None}
        if len(ready) == len(self._slots):
            tensors: dict[str, torch.Tensor] = ready
        else:
            tensors = {slot.name: self.weights_map[slot.name] for slot in self._slots}
        dtypes = {slot.name: slot.placeholder.dtype for slot in self._slots}
        return fetch_to(self.execution_device, tensors, dtypes, self._spans)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and inputs to the execution device."""
        if self.io_same_device:
            devices = self._input_devices.setdefault(threading.get_ident(), [])
            devices.append(find_device((args, kwargs)))
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        return (
            move_inputs(args, self.execution_device, self.skip_keys),
            move_inputs(kwargs, self.execution_device, self.skip_keys),
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Give the weights back; move the output to where the input was."""
        if self.offload:
            self._give_back(module)
        if self.io_same_device:
            devices = self._input_devices.get(threading.get_ident())
            device = devices.pop() if devices else None
            if device is not None:
                output = move_inputs(output, device, self.skip_keys)
        return output

    def _bring(self, module: nn.Module) -> None:
        thread = threading.get_ident()
        with self._lock:  # who comes second waits until the weights are there
            if not self._users and self._slots:
                self._put_weights(module)
            self._users[thread] = self._users.get(thread, 0) + 1

    def _put_weights(self, module: nn.Module) -> None:
        # Outside of inference mode, also where the forward runs in it: what is kept must serve any later call.
        with torch.inference_mode(False), torch.no_grad():
            ahead = self._number >= 0 and self.prefetcher is not None
            fetched = self.prefetcher.take(self._number) if ahead and self.prefetcher is not None else self.fetch()
            tensors = fetched.use()
            weights = [slot.mapped if slot.mapped is not None else self._weight(slot, tensors) for slot in self._slots]
        for slot, weight in zip(self._slots, weights, strict=True):
            put(module, slot.name, weight)

    def _weight(self, slot: _Slot, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return what stands in the slot's place during the forward."""
        assert self.weights_map is not None
        value = tensors[slot.name]
        if self.tied_params_map is not None:
            value = self._shared_copy(slot, value)
        if slot.former is not None and slot.former.device == value.device:
            return slot.former
        weight = like(slot.placeholder, value)
        span = self._spans.get(slot.name)
        if span is not None and value.device == _CPU and value.data_ptr() == self.weights_map[slot.name].data_ptr():
            slot.mapped = weight  # a view of the file: it costs nothing to keep
        return weight

    def _shared_copy(self, slot: _Slot, value: torch.Tensor) -> torch.Tensor:
        assert self.weights_map is not None
        assert self.tied_params_map is not None
        key = self.weights_map[slot.name].data_ptr()
        copies = self.tied_params_map.get(key)
        if copies is None or not value.numel():
            return value
        if value.device not in copies:
            copies[value.device] = value
            self._shared.append(key)
        return copies[value.device]

    def _give_back(self, module: nn.Module) -> None:
        thread = threading.get_ident()
        with self._lock:
            calls = self._users.get(thread, 0)
            if not calls:  # the weights could not be brought
                return
            if calls > 1:
                self._users[thread] = calls - 1
                return
            del self._users[thread]
            if self._users or not self._slots:
                return
            for slot in self._slots:
                put(module, slot.name, slot.placeholder)
            if self.tied_params_map is not None and self.execution_device is not None:
                for key in self._shared:
                    self.tied_params_map[key].pop(self.execution_device, None)
                self._shared.clear()
            if self._number >= 0 and self.prefetcher is not None:
                self.prefetcher.give_back()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the weights back where they were; those that were on the meta device stay there."""
        for slot in self._slots:
            if slot.former is not None:
                put(module, slot.name, slot.former)
            elif slot.device != _META:
                assert self.weights_map is not None
                restored = _RESTORED.get(slot.placeholder)
                if restored is None:
                    value = self.weights_map[slot.name].to(slot.device, slot.placeholder.dtype, copy=True)
                    restored = _RESTORED[slot.placeholder] = like(slot.placeholder, value)
                put(module, slot.name, restored)
        self._slots = []
        return module


def _tensors(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, tensor and whether it is a buffer, of the module and, if asked, of those within."""
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, False
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, True


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Let `value` stand in a parameter's or buffer's place. Past `setattr`, which would look it up in each table."""
    owner, leaf = (module, name) if "." not in name else _owner(module, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = value  # type: ignore[assignment]  # a Parameter there, by like
    else:
        owner._buffers[leaf] = value


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as what `tensor` is: a parameter of its class and attributes, or a plain buffer."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return type(tensor)(value, requires_grad=tensor.requires_grad, **tensor.__dict__)
    return value


def _place(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter or buffer for good; a parameter keeps its identity, so that whoever else holds it follows."""
    if tensor.device == device:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
    else:
        put(module, name, like(tensor, tensor.detach().to(device)))


def stand_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what stands in a parameter's place in those modules that share it and are offloaded."""
    return _PLACEHOLDERS.get(tensor)


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads a module's own weights, if there is one."""
    hook = module.__dict__.get("_hf_hook")
    for each in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(each, AlignDevicesHook) and each.offload:
            return each
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Say whether a hook keeps this module's own weights away between forwards."""
    return offloading_hook(module) is not None


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have a module's own weights at hand inside of a `with` block, those of the modules within it not.

    Args:
        module: offloaded weights are brought to the device and given back at the end: what was written to them may be
            lost. Others are moved there and back, with what was written to them.
        execution_device: where; unless told, the one of the hook, and weights that are not offloaded stay.
    """
    hook = offloading_hook(module)
    if hook is not None:
        with _bound_for(hook, execution_device):
            hook.pre_forward(module)
            try:
                yield
            finally:
                hook.post_forward(module, None)
    elif execution_device is not None:
        device = to_device(execution_device)
        before = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(device)
            yield
        finally:
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data = parameter.data.to(before[name])
    else:
        yield


@contextlib.contextmanager
def _bound_for(hook: AlignDevicesHook, device: Device | None) -> Iterator[None]:
    """Let a hook bring its weights elsewhere for once, past what was fetched ahead."""
    if device is None or to_device(device) == hook.execution_device:
        yield
        return
    before, prefetcher = hook.execution_device, hook.prefetcher
    hook.execution_device, hook.prefetcher = to_device(device), None
    try:
        yield
    finally:
        hook.execution_device, hook.prefetcher = before, prefetcher
