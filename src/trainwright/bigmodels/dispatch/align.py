"""Run each module where its map says: its inputs follow it, and offloaded weights are there while it computes."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.model_hooks import ModelHook, hooks_of
from trainwright.bigmodels.weights.away import guard, without_guard
from trainwright.bigmodels.weights.mapped_file import FileSpan, load_spans
from trainwright.bigmodels.weights.moving import Device, find_device, move_inputs, to_device
from trainwright.bigmodels.weights.slots import Slot, owner_of, place, put, tensors_of
from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.strategies.offload.copy_stream import Fetched
from trainwright.strategies.offload.prefetch import Prefetcher

WeightsMap = Mapping[str, torch.Tensor]
TiedParams = dict[int, dict[torch.device, torch.Tensor]]

_META = torch.device("meta")
_CPU = torch.device("cpu")
_STAYS_CACHED_BYTES = 256 << 20  # a smaller model on the disk is taken to stay in the page cache after its first use
_NOTHING_AHEAD = Prefetcher(0)  # of the hooks that nobody gave one


class AlignDevicesHook(ModelHook):
    """Bring a module's inputs to its device and, if asked, its weights for the time of its forward.

    Args:
        execution_device: where the forward runs. None leaves weights and inputs where they are; offloaded weights run
            where they were.
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
        self.prefetcher = prefetcher
        self.tensor_names = tensor_names
        self.num_bytes = 0
        self._slots: list[Slot] = []
        # Table, name, shown, weight.
        self._present: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | None]] = []
        self._took = False  # from the prefetcher
        self._spans: dict[str, FileSpan] = {}
        self._number = -1
        self._lock = threading.RLock()
        self._users: dict[int, int] = {}  # calls that are under way, by thread
        self._input_devices: dict[int, list[torch.device | None]] = {}  # by thread, innermost call last

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys or None})"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.offload:
            raise ConfigurationError(
                "a model whose weights are offloaded cannot be pickled, by torch.save or to another process: they are "
                "in files or memory of this one. Use save_model(model, folder) and load_checkpoint_and_dispatch, save "
                "model.state_dict() after remove_hook_from_submodules(model), or dispatch it in the other process."
            )
        return self._state()

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._state(), memo))
        return twin

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _users={}, _input_devices={}, _present=[], _took=False)
        if self.prefetcher is not None:
            self._number = self.prefetcher.add(self)

    def acts_after(self) -> bool:
        """Say whether weights have to go or the output has to move."""
        return self.offload or self.io_same_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the module's tensors, or put meta tensors in their place; waits for the device where any move.

        Raises:
            CheckpointError: the weights map lacks a weight that the module does not have either.
        """
        device = self.execution_device
        if not self.offload and (device is None or device == _META):
            return module
        tensors = list(tensors_of(module, recurse=self.place_submodules))
        if self.tensor_names is not None:
            tensors = [entry for entry in tensors if entry[0] in self.tensor_names]
        if device is None:
            device = self.execution_device = next((t.device for _, t, _ in tensors if not t.is_meta), _CPU)
        if self.offload:
            self._offload(module, tensors)
        away = {slot.name for slot in self._slots}
        for name, tensor, _ in tensors:
            if name not in away and not tensor.is_meta and device != _META:
                place(module, name, tensor, device)
        return module

    def _offload(self, module: nn.Module, tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
        kept = [(name, t, b) for name, t, b in tensors if not b or self._is_offloaded_buffer(module, name)]
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor, _ in kept}
        self._slots = [self._slot(name, tensor, is_buffer) for name, tensor, is_buffer in kept]
        self._note_places()
        for slot in self._slots:
            put(module, slot.name, slot.placeholder)
            guard(slot.placeholder, f"{slot.name!r} of {type(module).__name__}")

    def _is_offloaded_buffer(self, module: nn.Module, name: str) -> bool:
        owner, leaf = owner_of(module, name)
        return self.offload_buffers and leaf not in owner._non_persistent_buffers_set

    def _slot(self, name: str, tensor: torch.Tensor, is_buffer: bool) -> Slot:
        assert self.weights_map is not None
        try:
            value = self.weights_map[name]
        except KeyError:
            raise CheckpointError(f"the weights map holds no {name!r}, which is to be offloaded.") from None
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(value.shape)} in the weights map and {tuple(tensor.shape)} in the module."
            )
        return Slot.of(name, tensor, is_buffer, value)

    def _note_places(self) -> None:
        locate = getattr(self.weights_map, "locate", None)
        for slot in self._slots:
            span = None if locate is None else locate(slot.name)
            if span is not None:
                self._spans[slot.name] = span
        self.num_bytes = sum(slot.placeholder.nbytes for slot in self._slots)
        if self.prefetcher is not None and self._slots and (self._spans or self.execution_device != _CPU):
            self._number = self.prefetcher.add(self)

    def note_shared(self, present: Collection[int]) -> None:
        """Hear the ids of the parameters that modules have at hand which are not offloaded."""
        for slot in self._slots:
            slot.is_shared = slot.former is not None and id(slot.former) in present

    def offloaded(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, FileSpan | None]]:
        """Yield what is kept away between forwards: its name within the module, what stands in its place meanwhile (of
        the dtype that the forward sees), its value, and where that lies in a file.
        """
        assert self.weights_map is not None
        for slot in self._slots:
            shown = slot.table(module).get(slot.leaf)
            placeholder = slot.placeholder if shown is None or not shown.is_meta else shown
            yield slot.name, placeholder, self.weights_map[slot.name], self._spans.get(slot.name)

    def replace(self, module: nn.Module, name: str, value: torch.Tensor, span: FileSpan | None) -> None:
        """Keep another value of a weight from now on, for a placeholder that stands in the module already.

        Args:
            module: the hook's.
            name: of the weight within the module.
            value: of its shape; `span` says where it lies in a file, if it does.
        """
        weights = StoredWeights()
        for known, _, former, former_span in self.offloaded(module):
            weights.add(known, *((value, span) if known == name else (former, former_span)))
        self.weights_map = weights
        self._slots = [slot.replaced(module, value, span) if slot.name == name else slot for slot in self._slots]
        self._spans = {}
        self.forget()
        for slot in self._slots:
            guard(slot.placeholder, f"{slot.name!r} of {type(module).__name__}")

    def forget(self) -> None:
        """Drop what was fetched ahead, whose values have changed."""
        if self.prefetcher is not None:
            self.prefetcher.forget()
        self._number = -1
        self._note_places()

    def release(self, module: nn.Module) -> StoredWeights:
        """Restore weights that are in memory, without a copy, and return those that are in files.

        The module keeps placeholders for weights in files. The hook is unchanged.
        """
        in_files = StoredWeights()
        for slot in self._slots:
            assert self.weights_map is not None
            shown, value, span = (
                slot.table(module).get(slot.leaf),
                self.weights_map[slot.name],
                self._spans.get(slot.name),
            )
            if span is None:
                slot.restore(module, value, copies=False)
            elif shown is not None and shown.is_meta:
                slot.leave()
                in_files.add(slot.name, value, span)
        return in_files

    def remembered(self) -> dict[str, Any]:
        """Return what `replace` changes, to be given to `remember` if the weights must be as they are now."""
        return {"weights_map": self.weights_map, "_slots": self._slots, "_spans": self._spans}

    def remember(self, remembered: dict[str, Any]) -> None:
        """Keep the weights again that were kept when `remembered` was called."""
        self.__dict__.update(remembered)
        self.forget()

    def places(self, module: nn.Module) -> set[tuple[int, str]]:
        """Return where the weights that are brought stand: the ids of modules' tables, and names in them."""
        return {(id(slot.table(module)), slot.leaf) for slot in self._slots}

    @property
    def stays_on_host(self) -> bool:
        """Whether weights are used where the map has them, on the CPU."""
        return self.execution_device == _CPU

    def fetch(self) -> Fetched:
        """Bring the weights to the execution device; called by the prefetcher too, from its thread."""
        assert self.execution_device is not None
        return self._fetch(self.execution_device)

    def _fetch(self, device: torch.device) -> Fetched:
        assert self.weights_map is not None
        slots = [slot for slot in self._slots if slot.kept is None] if device == _CPU else self._slots
        dtypes = {slot.name: slot.placeholder.dtype for slot in slots}
        weights = [(name, self.weights_map[name], dtype, self._spans.get(name)) for name, dtype in dtypes.items()]
        copies = (self.prefetcher or _NOTHING_AHEAD).copies_to(device)
        if not copies.is_beside:
            load_spans(self._spans.values())
        return copies.bring(weights)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and inputs to the execution device."""
        if self.io_same_device:
            devices = self._input_devices.setdefault(threading.get_ident(), [])
            devices.append(find_device((args, kwargs)))
        if self.offload:
            self.bring(module)
        if self.execution_device is None:
            return args, kwargs
        moved = move_inputs(args, self.execution_device, self.skip_keys)
        return moved, move_inputs(kwargs, self.execution_device, self.skip_keys) if kwargs else kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Give the weights back; move the output to where the input was."""
        if self.offload:
            self.give_back()
        if self.io_same_device:
            devices = self._input_devices.get(threading.get_ident())
            device = devices.pop() if devices else None
            if device is not None:
                output = move_inputs(output, device, self.skip_keys)
        return output

    def bring(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Put the weights into the module until this thread has called `give_back` as often. Where they are there for
        another use, they stay on the device that they are on.

        Args:
            module: the hook's.
            device: where a user wants them for work by hand; the execution device, for a forward, unless given.
        """
        thread = threading.get_ident()
        with self._lock:  # who comes second waits until the weights are there
            if not self._users and self._slots:
                try:
                    self._put_weights(module, device)
                except BaseException:
                    self._end_use()
                    raise
            self._users[thread] = self._users.get(thread, 0) + 1

    def _put_weights(self, module: nn.Module, device: torch.device | None) -> None:
        target, by_hand = (self.execution_device, False) if device is None else (device, True)
        assert target is not None
        away: list[tuple[Slot, dict[str, Any], torch.Tensor]] = []
        weights: list[torch.Tensor | None] = []  # for what is away: as kept
        there: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        keeps, records = target == _CPU and not by_hand, torch.is_grad_enabled()
        with without_guard():
            for slot in self._slots:
                table = slot.table(module)
                shown = table.get(slot.leaf)
                if shown is not None and shown.is_meta:
                    away.append((slot, table, shown))
                    weights.append(slot.kept_as(shown) if keeps else None)
                elif shown is not None:  # else the module has given it up
                    there.append((table, slot.leaf, shown))
        if self._must_read(weights):
            # Outside of inference mode, also where the forward runs in it: what is kept must serve any later call.
            with torch.inference_mode(False), torch.no_grad():
                tensors = self._take(target).use()
                for number, (slot, _, shown) in enumerate(away):
                    if weights[number] is None:
                        value = self._value(slot, tensors, target)
                        weight = weights[number] = slot.weight(shown, value, records=keeps or records, by_hand=by_hand)
                        if keeps:
                            slot.keep(weight, self._is_lasting(slot, weight))
        self._present += [(table, slot.leaf, shown, w) for (slot, table, shown), w in zip(away, weights, strict=True)]
        for table, leaf, shown in there:
            # Somebody has put values there, as functional_call does: they are meant, and recorded where they move.
            if shown.device != target:
                self._present.append((table, leaf, shown, shown.to(target)))
        for table, leaf, _, brought in self._present:
            table[leaf] = brought

    def _must_read(self, weights: Sequence[torch.Tensor | None]) -> bool:
        """Return whether a weight is not kept, or the page cache may not hold the files of those that are."""
        is_small = self.prefetcher is None or self.prefetcher.total_bytes <= _STAYS_CACHED_BYTES
        if not is_small or any(weight is None for weight in weights):
            return bool(weights)
        for file in {span.file for span in self._spans.values()}:
            file.check()
        return False

    def _take(self, device: torch.device) -> Fetched:
        if self._number < 0 or self.prefetcher is None or device != self.execution_device:
            return self._fetch(device)
        fetched = self.prefetcher.take(self._number)
        self._took = True
        self.prefetcher.follow(self._number)
        return fetched

    def _value(self, slot: Slot, tensors: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        assert self.weights_map is not None
        value = tensors.get(slot.name)
        if value is None:  # of another dtype, or frozen, since the weight was kept
            value = self.weights_map[slot.name].to(device)
        return value

    def _is_lasting(self, slot: Slot, weight: torch.Tensor) -> bool:
        """Say whether a weight on the host is a view of a file or of memory that is there anyway."""
        assert self.weights_map is not None
        known = slot.name in self._spans or slot.former is not None
        return known and weight.data_ptr() == self.weights_map[slot.name].data_ptr()

    def give_back(self) -> None:
        """End a use that `bring` began; the last one out takes the weights away."""
        thread = threading.get_ident()
        with self._lock:
            calls = self._users.get(thread, 0)
            if not calls:  # the weights could not be brought
                return
            if calls > 1:
                self._users[thread] = calls - 1
                return
            del self._users[thread]
            if not self._users:
                self._end_use()

    def _end_use(self) -> None:
        for table, leaf, shown, weight in self._present:
            if table.get(leaf) is weight:  # what somebody has put there meanwhile stays
                table[leaf] = shown
        self._present.clear()
        if self._took and self.prefetcher is not None:
            self._took = False
            self.prefetcher.give_back()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the weights back where they were, with the dtype and `requires_grad` that the module shows; those that
        were on the meta device stay there, and so do values that were put into the module since.
        """
        self._end_use()
        for slot in self._slots:
            assert self.weights_map is not None
            slot.restore(module, self.weights_map[slot.name])
        self._slots = []
        return module


def offloading_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks that offload a module's own weights: one, or one for each that has a place of its own."""
    return [each for each in hooks_of(module) if isinstance(each, AlignDevicesHook) and each.offload]


def has_offloaded_params(module: nn.Module) -> bool:
    """Say whether a hook keeps this module's own weights away between forwards."""
    return bool(offloading_hooks(module))


def note_shared(model: nn.Module) -> None:
    """Tell the hooks on a model which of the weights that they keep away other modules of it have at hand."""
    tables = [module._parameters for module in model.modules()]
    present = {id(tensor) for table in tables for tensor in table.values() if tensor is not None and not tensor.is_meta}
    for module in model.modules():
        for hook in offloading_hooks(module):
            hook.note_shared(present)


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have a module's own weights at hand inside of a `with` block, those of the modules within it not.

    Args:
        module: offloaded weights are brought to the device and given back at the end: what was written to them may be
            lost. Others are moved there and back, with what was written to them.
        execution_device: where; unless told, the one of the hook, and weights that are not offloaded stay.
    """
    hooks = offloading_hooks(module)
    if hooks:
        with contextlib.ExitStack() as stack:
            for hook in hooks:
                device = hook.execution_device if execution_device is None else to_device(execution_device)
                hook.bring(module, device)
                stack.callback(hook.give_back)
            yield
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
