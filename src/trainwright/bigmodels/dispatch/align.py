"""The hook that runs a module on its device. It moves inputs to the device and loads offloaded weights."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwright.bigmodels.dispatch.model_hooks import ModelHook, hooks_of
from trainwright.bigmodels.weights.moving import Device, find_device, move_inputs, to_device
from trainwright.bigmodels.weights.placeholders import Placeholders, without_guard
from trainwright.bigmodels.weights.slots import Slot, move_tensor, owner_of, put, tensors_of
from trainwright.bigmodels.weights.stored_weights import FileSpan, MappedFile, StoredWeights, load_spans
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.strategies.offload.copy_stream import Fetched
from trainwright.strategies.offload.prefetch import Prefetcher

WeightsMap = Mapping[str, torch.Tensor]
TiedParams = dict[int, dict[torch.device, torch.Tensor]]

_META = torch.device("meta")
_CPU = torch.device("cpu")
_STAYS_CACHED_BYTES = 256 << 20  # a smaller model is assumed to stay in the page cache after its first use
_NO_PREFETCH = Prefetcher(0)  # for hooks without a prefetcher
_NOT_PREFETCHED = -1  # stands for a unit's number in the prefetcher


class _Exchanged(NamedTuple):
    """A weight that replaces another tensor of a module during a use."""

    table: dict[str, Any]  # the `_parameters` or `_buffers` of the module that contains the tensor
    leaf: str  # name in this table
    shown: torch.Tensor  # the module's tensor before and after the use: mostly a meta tensor
    weight: torch.Tensor


class AlignDevicesHook(ModelHook):
    """Hook that moves a module's inputs to its device, and with `offload` loads its weights for each forward.

    Args:
        execution_device: The device that runs the forward. None with `offload`: the device of the module's first
            tensor that is not on the meta device, or the CPU. None without `offload`: nothing is moved.
        offload: Between forwards, the weights are in `weights_map`, and the module has meta tensors in their place.
        io_same_device: Move the output to the device of the first input tensor.
        weights_map: Name of a weight in the module → its value. Default: copies of the weights on the CPU.
        offload_buffers: Also offload persistent buffers. By default, buffers stay on the execution device.
        place_submodules: Also move or offload the tensors of submodules. By default, only the module's own tensors.
        skip_keys: Names of arguments, and keys of an output dict, that stay on their device.
        tied_params_map: Accepted without effect: in Accelerate it saves memory, and the results are the same.
        prefetcher: `Prefetcher` that loads the weights before the forward. Default: the forward loads them.
        tensor_names: Names of the tensors to move or offload. Default: all.

    Attributes:
        placeholders: The placeholders of the model. Each hook has its own until `attach` sets one for all hooks of a
            model, so that modules that share a weight share its placeholder.
        num_bytes: Size of the offloaded weights in the dtypes of the forward.
    """

    # A use is a forward, or a `load` for the user. Several uses can overlap: recursion, threads, and a forward within
    # `align_module_device`. The first one loads the weights, and the end of the last one unloads them.

    runs_after_failure = True  # to unload the weights

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
        self.prefetcher = prefetcher
        self.tensor_names = tensor_names
        self.placeholders = Placeholders()
        self.num_bytes = 0
        self._slots: list[Slot] = []  # the offloaded tensors. Empty without `offload`.
        self._present: list[_Exchanged] = []  # the weights of the current use. Empty between uses.
        # The weights of the last use, if the next use can put the same tensors into the module. Otherwise empty.
        self._ready: list[_Exchanged] = []
        self._is_prefetched = False  # True if the loaded weights are from the prefetcher, which needs a `release`
        self._spans: dict[str, FileSpan] = {}  # name → location, for weights in files
        self._files: tuple[MappedFile, ...] = ()  # the files of these locations
        self._number = _NOT_PREFETCHED  # this hook's number in the prefetcher
        self._lock = threading.RLock()  # guards `_users`, `_present` and `_ready`
        self._users: dict[int, int] = {}  # id of a thread → number of its uses that have not ended
        self._input_devices: dict[int, list[torch.device | None]] = {}  # by thread, innermost call last

    def __repr__(self) -> str:
        names = "execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys"
        return f"AlignDevicesHook({', '.join(f'{name}={self.__dict__[name]}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        if self.offload:
            raise ConfigurationError(
                "a model whose weights are offloaded cannot be pickled, by torch.save or for another process: they are "
                "in files or in memory of this process. Use save_model(model, folder) and "
                "load_checkpoint_and_dispatch, save model.state_dict() after remove_hook_from_submodules(model), or "
                "dispatch the model in the other process."
            )
        return self._state()

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        # Without __init__, because a subclass may have other arguments, and __getstate__ refuses copy.copy.
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._state(), memo))
        return twin

    def _state(self) -> dict[str, Any]:
        """Return the attributes that can be copied. `__setstate__` creates the others."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "placeholders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state, _lock=threading.RLock(), _users={}, _input_devices={}, _present=[], _ready=[], _is_prefetched=False
        )
        self.placeholders = Placeholders()
        if self.prefetcher is not None:
            self._number = self.prefetcher.add(self)

    def acts_after(self) -> bool:
        """Return whether weights have to be unloaded or the output has to be moved."""
        return self.offload or self.io_same_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to the device (blocks), or replace them by meta tensors if they are offloaded.

        With `offload`, buffers that are not offloaded are also moved. Tensors on the meta device are not moved.

        Raises:
            CheckpointError: A weight is not in the weights map, or has another shape in the weights map.
        """
        device = self.execution_device
        if not self.offload and (device is None or device == _META):
            return module
        tensors = list(tensors_of(module, recurse=self.place_submodules))
        if self.tensor_names is not None:
            tensors = [entry for entry in tensors if entry[0] in self.tensor_names]
        if device is None:
            device = next((tensor.device for _, tensor, _ in tensors if not tensor.is_meta), _CPU)
            self.execution_device = device
        if self.offload:
            self._offload(module, tensors)
        offloaded = {slot.name for slot in self._slots}
        for name, tensor, _ in tensors:
            if name not in offloaded and not tensor.is_meta and device != _META:
                move_tensor(module, name, tensor, device)
        return module

    def _offload(self, module: nn.Module, tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
        offloaded = []
        for name, tensor, is_buffer in tensors:
            if not is_buffer or self._is_offloaded_buffer(module, name):
                offloaded.append((name, tensor, is_buffer))
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor, _ in offloaded}
        with without_guard():
            self._slots = [self._slot(*entry) for entry in offloaded]
        self._locate_weights()
        for slot in self._slots:
            put(module, slot.name, slot.placeholder)
            slot.mark(module)

    def _is_offloaded_buffer(self, module: nn.Module, name: str) -> bool:
        owner, leaf = owner_of(module, name)
        return self.offload_buffers and leaf not in owner._non_persistent_buffers_set

    def _slot(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> Slot:
        assert self.weights_map is not None
        try:
            value = self.weights_map[name]
        except KeyError:
            raise CheckpointError(f"the weights map does not contain {name!r}, which is offloaded. Add it.") from None
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(value.shape)} in the weights map, expected {tuple(tensor.shape)}."
            )
        return Slot.of(name, tensor, is_buffer, value, self.placeholders)

    def _locate_weights(self) -> None:
        """Store the locations of the weights in files, and register the hook with the prefetcher."""
        # `StoredWeights` has `locate`. A mapping of the user may have no such method.
        locate = getattr(self.weights_map, "locate", None)
        for slot in self._slots:
            span = None if locate is None else locate(slot.name)
            if span is not None:
                self._spans[slot.name] = span
        former_bytes = self.num_bytes
        self._ready = []
        self._files = tuple({span.file for span in self._spans.values()})
        with without_guard():
            self.num_bytes = sum(slot.placeholder.nbytes for slot in self._slots)
        # Weights in host memory that are used on the CPU are neither read nor copied.
        needs_fetch = bool(self._slots) and (bool(self._spans) or self.execution_device != _CPU)
        if self.prefetcher is None or not needs_fetch:
            self._number = _NOT_PREFETCHED
        elif self._number == _NOT_PREFETCHED or self.num_bytes != former_bytes:
            # A unit of the same size keeps its number: the prefetcher counts the bytes of each number.
            self._number = self.prefetcher.add(self)

    def note_shared(self, present: Collection[int]) -> None:
        """Record which offloaded weights other modules have in memory. `present` are the ids of these parameters."""
        for slot in self._slots:
            slot.is_shared = slot.former is not None and id(slot.former) in present

    def offloaded(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, FileSpan | None]]:
        """Yield name, placeholder, value and location in a file (or None) of each offloaded tensor.

        The placeholder is the meta tensor that the module has. Its dtype is the dtype of the forward. If a user has
        removed the tensor or assigned a value, it is the hook's meta tensor.
        """
        assert self.weights_map is not None
        for slot in self._slots:
            shown = slot.table(module).get(slot.leaf)
            placeholder = slot.placeholder
            if shown is not None and shown.is_meta:
                placeholder = shown
            yield slot.name, placeholder, self.weights_map[slot.name], self._spans.get(slot.name)

    def replace(self, module: nn.Module, name: str, value: torch.Tensor, span: FileSpan | None) -> None:
        """Replace the value of an offloaded tensor. The module must already have a meta tensor like the new value.

        `span` is the location of the value in a file. None: the value is in memory.
        """
        weights = StoredWeights()
        for known, _, former, former_span in self.offloaded(module):
            if known == name:
                weights.add(name, value, span)
            else:
                weights.add(known, former, former_span)
        self.weights_map = weights
        self._slots = [slot.replaced(module) if slot.name == name else slot for slot in self._slots]
        self._spans = {}
        self.forget()
        for slot in self._slots:
            slot.mark(module)

    def forget(self) -> None:
        """Discard prefetched weights, because values have changed."""
        if self.prefetcher is not None:
            self.prefetcher.discard()
        self._locate_weights()

    def release(self, module: nn.Module) -> bool:
        """Put weights that are in memory back into the module, without a copy. Return whether others are in files.

        The module keeps placeholders for weights in files. The hook is unchanged.
        """
        has_files = False
        for slot in self._slots:
            assert self.weights_map is not None
            shown = slot.table(module).get(slot.leaf)
            span = self._spans.get(slot.name)
            if span is None:
                slot.restore(module, self.weights_map[slot.name], copies=False)
            elif shown is not None and shown.is_meta:  # not removed or assigned by a user
                has_files = True
                slot.replaced_weight.value = self.weights_map[slot.name]
                slot.replaced_weight.span = span
                slot.replaced_weight.is_hooked = False
        return has_files

    def offloaded_entries(self, module: nn.Module) -> set[tuple[int, str]]:
        """Return (id of the module's dict of parameters or buffers, name in this dict) of each offloaded tensor."""
        return {(id(slot.table(module)), slot.leaf) for slot in self._slots}

    @property
    def stays_on_host(self) -> bool:
        """True if the weights are used on the CPU, without a copy."""
        return self.execution_device == _CPU

    def fetch(self) -> Fetched:
        """Load the weights to the execution device. The prefetcher calls this from its thread."""
        assert self.execution_device is not None
        return self._fetch(self.execution_device)

    def _fetch(self, device: torch.device) -> Fetched:
        assert self.weights_map is not None
        weights = []
        with without_guard():
            for slot in self._slots:
                value = self.weights_map[slot.name]
                weights.append((slot.name, value, slot.placeholder.dtype, self._spans.get(slot.name)))
        copies = (self.prefetcher or _NO_PREFETCH).copies_to(device)
        if not copies.is_async:  # otherwise the copies read the files into pinned memory
            load_spans(self._spans.values())
        return copies.copy_in(weights)

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the weights, and move the inputs to the execution device."""
        if self.io_same_device:
            devices = self._input_devices.setdefault(threading.get_ident(), [])
            devices.append(find_device((args, kwargs)))
        if self.offload:
            self.load(module)
        if self.execution_device is None:
            return args, kwargs
        args = move_inputs(args, self.execution_device, self.skip_keys)
        if kwargs:
            kwargs = move_inputs(kwargs, self.execution_device, self.skip_keys)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Unload the weights, and move the output to the device of the input."""
        if self.offload:
            self.unload()
        if self.io_same_device:
            devices = self._input_devices.get(threading.get_ident())
            device = devices.pop() if devices else None
            if device is not None:
                output = move_inputs(output, device, self.skip_keys)
        return output

    def load(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Load the weights into the module. They stay loaded until every thread has called `unload` for each `load`.

        If the weights are already loaded, they stay on the device of the earlier `load`.

        Args:
            module: The module of the hook.
            device: The device for a use outside of a forward, such as `align_module_device`. Gradients are then kept.
                Default: None, which loads for a forward on the execution device.

        Raises:
            CheckpointError: A file cannot be read, or has become shorter.
        """
        thread = threading.get_ident()
        users = self._users
        with self._lock:  # a second thread waits until the weights are loaded
            if not users and self._slots:
                try:
                    self._put_weights(module, device)
                except BaseException:
                    self._end_use()
                    raise
            users[thread] = users.get(thread, 0) + 1

    def _put_weights(self, module: nn.Module, device: torch.device | None) -> None:
        """Begin the first use. `device` is that of `load`."""
        if device is None and self._ready and self._is_still_ready():
            if not self._is_cached():
                assert self.execution_device is not None
                self._fetched(self.execution_device)  # reads the files again, of which the tensors are views
            self._present += self._ready
            for table, leaf, _, weight in self._ready:
                table[leaf] = weight
            return
        for_user = device is not None
        target = self.execution_device if device is None else device
        assert target is not None
        offloaded: list[tuple[Slot, dict[str, Any], torch.Tensor]] = []
        assigned: list[tuple[Slot, dict[str, Any], torch.Tensor]] = []
        with without_guard():
            for slot in self._slots:
                table = slot.table(module)
                tensor = table.get(slot.leaf)
                if tensor is None:  # a user has removed it
                    continue
                if tensor.is_meta:
                    offloaded.append((slot, table, tensor))
                else:
                    assigned.append((slot, table, tensor))
        is_host_forward = target == _CPU and not for_user
        # The next forward can use the same tensors if all of them are views of files or of host memory (`_is_lasting`).
        # Tensors of submodules are excluded, because a submodule may be replaced, and `_is_still_ready` would compare
        # the dicts of the former one.
        has_all = len(offloaded) == len(self._slots)
        is_lasting = is_host_forward and has_all and not any(slot.path for slot in self._slots)
        if offloaded:
            # A later forward that uses these tensors again may record gradients, even if this one does not.
            records = is_host_forward or torch.is_grad_enabled()
            # Outside of inference mode, even if the forward runs in it: lasting tensors are used in later calls.
            with torch.inference_mode(False), torch.no_grad():
                values = self._fetched(target).use()
                for slot, table, placeholder in offloaded:
                    weight = slot.weight(placeholder, values[slot.name], records=records, for_user=for_user)
                    self._present.append(_Exchanged(table, slot.leaf, placeholder, weight))
                    is_lasting = is_lasting and self._is_lasting(slot, weight)
        # Before values of the user are added, which later forwards must not use again.
        self._ready = self._present[:] if is_lasting else []
        for slot, table, tensor in assigned:
            # Values that the user has put into the module, for example by functional_call. A move is recorded for the
            # backward.
            if tensor.device != target:
                self._present.append(_Exchanged(table, slot.leaf, tensor, tensor.to(target)))
        # The module changes only after everything that may fail.
        for table, leaf, _, weight in self._present:
            table[leaf] = weight

    def _is_still_ready(self) -> bool:
        """Return whether the module's meta tensors, their dtypes and `requires_grad` are those of the last forward."""
        with without_guard():
            for table, leaf, shown, weight in self._ready:
                if table.get(leaf) is not shown or weight.dtype != shown.dtype:
                    return False
                if weight.requires_grad != shown.requires_grad:
                    return False
        return True

    def _is_cached(self) -> bool:
        """Return whether the weights are small enough to stay in the page cache. Raise if a file was truncated."""
        if self.prefetcher is not None and self.prefetcher.total_bytes > _STAYS_CACHED_BYTES:
            return False
        for file in self._files:
            file.check()
        return True

    def _fetched(self, device: torch.device) -> Fetched:
        """Return the weights on a device. Use the prefetcher if it loads to this device."""
        if self._number == _NOT_PREFETCHED or self.prefetcher is None or device != self.execution_device:
            return self._fetch(device)
        fetched = self.prefetcher.acquire(self._number)
        self._is_prefetched = True  # before `follow`, so that `_end_use` releases the unit if `follow` raises
        self.prefetcher.follow(self._number)
        return fetched

    def _is_lasting(self, slot: Slot, weight: torch.Tensor) -> bool:
        """Return whether the next forward can use a loaded weight again: it is a view of memory that is not freed."""
        assert self.weights_map is not None
        # A user-written weights map may return new memory at each access.
        memory_stays = slot.name in self._spans or slot.former is not None
        # A later forward must use `former` itself once its `requires_grad` is that of the module's tensor.
        is_copy_of_shared = slot.is_shared and weight is not slot.former
        if not memory_stays or is_copy_of_shared:
            return False
        # False if the dtype was converted, which needs new memory.
        return weight.data_ptr() == self.weights_map[slot.name].data_ptr()

    def unload(self) -> None:
        """Record the end of a use that began with `load`. The end of the last use unloads the weights."""
        thread = threading.get_ident()
        with self._lock:
            calls = self._users.get(thread, 0)
            if not calls:  # loading failed
                return
            if calls > 1:
                self._users[thread] = calls - 1
                return
            del self._users[thread]
            if not self._users:
                self._end_use()

    def _end_use(self) -> None:
        """Unload the weights. Has no effect between uses."""
        for table, leaf, shown, weight in self._present:
            if table.get(leaf) is weight:  # a value that a user has assigned during the use stays
                table[leaf] = shown
        self._present.clear()
        if self._is_prefetched and self.prefetcher is not None:
            self._is_prefetched = False
            self.prefetcher.release()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the weights on their former device, with the dtype and `requires_grad` of the placeholders.

        Tensors that were on the meta device stay on it. Values that a user has assigned are not changed.
        """
        self._end_use()
        for slot in self._slots:
            assert self.weights_map is not None
            slot.restore(module, self.weights_map[slot.name])
        self._slots = []
        return module


def offloading_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks that offload a module's own weights. A tensor with its own device map entry has its own hook."""
    return [each for each in hooks_of(module) if isinstance(each, AlignDevicesHook) and each.offload]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook offloads this module's own weights."""
    return bool(offloading_hooks(module))


def note_shared(model: nn.Module) -> None:
    """Record in a model's hooks which offloaded weights are also in modules that are not offloaded."""
    present: set[int] = set()
    with without_guard():
        for module in model.modules():
            for tensor in module._parameters.values():
                if tensor is not None and not tensor.is_meta:
                    present.add(id(tensor))
    for module in model.modules():
        for hook in offloading_hooks(module):
            hook.note_shared(present)


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Return a context in which a module's own weights, without those of submodules, are loaded.

    Args:
        module: The module. If its weights are offloaded, they are loaded to the device and unloaded at the end, and
            changes may be lost. Otherwise its parameters are moved to the device and back, with their changes.
        execution_device: The device. None: offloaded weights are loaded to the device of their hook, and weights that
            are not offloaded stay on their device.
    """
    hooks = offloading_hooks(module)
    if hooks:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                device = hook.execution_device if execution_device is None else to_device(execution_device)
                hook.load(module, device)
                stack.callback(hook.unload)
            yield
    elif execution_device is not None:
        device = to_device(execution_device)
        original_devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
        try:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(device)
            yield
        finally:
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data = parameter.data.to(original_devices[name])
    else:
        yield
