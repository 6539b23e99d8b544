"""Prune weights during training, by `torch.nn.utils.prune`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, unknown
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule

Target = tuple[nn.Module, str]
prune: Any = torch_prune  # which has no types
_METHODS = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
# The entry of a checkpoint: a dict of three dicts, each by the name of a parameter, such as "net.0.weight".
# "masks": 1 for weights that are kept, 0 for pruned ones; in the shape of the parameter.
# "hidden": the values of `weight_orig` at pruned weights, flat. The checkpoint's own weights are 0 there.
# "first": the initial weights, for the lottery ticket; in the shape of the parameter.
_ENTRY = "pruning"


class ModelPruning(Callback):
    """Callback that sets weights to zero at the end of epochs, with masks of `torch.nn.utils.prune`, as in Lightning.

    From its first pruning on, a `weight` is computed from the parameter `weight_orig` and the buffer `weight_mask`.
    `make_pruning_permanent` turns it into a parameter again at the end of the fit. A checkpoint contains the pruned
    weights under their own names, so that any task can load it. For an exact resume it also contains the masks, the
    masked values, and the initial weights for the lottery ticket. All ranks prune the same weights. Each rank needs
    full weights (one process, DDP). Validations and tests outside of a fit prune nothing.

    Args:
        pruning_fn: `"l1_unstructured"`, `"random_unstructured"`, `"ln_structured"` or `"random_structured"`; a
            `BasePruningMethod`; or a function like those of `torch.nn.utils.prune`, which prunes one parameter and
            therefore needs `use_global_unstructured=False`.
        parameters_to_prune: pairs of a module and the name of its parameter. Default: all `parameter_names` of the
            task's modules that have no child modules.
        parameter_names: names of the parameters to prune. Default: `("weight", "bias")`.
        use_global_unstructured: rank the weights of all parameters together. False ranks them within each parameter.
            Default: True.
        amount: number of weights to prune each time, a fraction of the unpruned weights, or a function of the epoch
            that returns either. Structured methods count slices along `pruning_dim` instead of weights. Default: 0.5.
        apply_pruning: enable pruning, or a function of the epoch that returns a bool. Default: True.
        make_pruning_permanent: replace masks by zeros in the parameters at the end of the fit. Default: True.
        use_lottery_ticket_hypothesis: reset the unpruned weights to their initial values after each pruning, or a
            function of the epoch that returns a bool. Default: True.
        resample_parameters: these resets draw new random values instead, by the module's `reset_parameters`. No effect
            without `use_lottery_ticket_hypothesis`. Default: False.
        pruning_dim: the dimension along which the named structured methods prune, which need it. Default: None.
        pruning_norm: the norm of `"ln_structured"`, which needs it. Default: None.
        verbose: 1 prints the fraction of pruned weights, 2 also the fraction in each parameter. Default: 0.
        prune_on_train_epoch_end: prune at the end of training epochs. False prunes at the end of validations. Default:
            True.

    Raises:
        ConfigurationError: an amount that is not a function is out of range, or the method is unknown, cannot prune
            globally, or lacks an argument. In a run: no parameter is found, a pair does not name a parameter of its
            module, or its module is not in the task.
    """

    needs = ("full_weights",)

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Sequence[Target] | None = None,
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        if not callable(amount) and not (amount >= 0 and (isinstance(amount, int) or amount <= 1)):
            raise ConfigurationError(
                f"ModelPruning(amount={amount!r}): expected a fraction from 0.0 to 1.0, a number of weights from 0, or "
                "a function."
            )
        self._parameters_to_prune = parameters_to_prune
        self._names = tuple(parameter_names or ("weight", "bias"))
        self._method = _method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._is_global = use_global_unstructured
        self._amount = amount
        self._apply = apply_pruning
        self._uses_ticket = use_lottery_ticket_hypothesis
        self._resamples = resample_parameters
        self._is_permanent = make_pruning_permanent
        self._at_train_epoch_end = prune_on_train_epoch_end
        self._verbose = verbose
        # Both are set by `_collect` at the beginning of a fit, and cleared by `teardown`.
        self._targets: list[Target] = []  # pairs to prune
        # Module → a copy with its initial weights. Empty without use_lottery_ticket_hypothesis.
        self._initial: dict[nn.Module, nn.Module] = {}

    def filter_parameters_to_prune(self, parameters_to_prune: list[Target]) -> list[Target]:
        """Return the pairs to prune. Override it to exclude pairs."""
        return parameters_to_prune

    def on_load_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_ENTRY)
        if saved is None:
            return
        if trainer.stage == "fit":
            self._collect(task)
            for name, value in saved["first"].items():
                module, key = _owner(task, name)
                if module in self._initial:  # else this run resets no weights to initial ones
                    self._initial[module].get_parameter(key).data.copy_(value)
        weights = checkpoint["state_dict"]
        for name, mask in saved["masks"].items():
            module, key = _owner(task, name)
            if trainer.stage == "fit":
                # Prunes nothing, but creates `weight_orig` and `weight_mask`, into which the values are loaded.
                prune.identity(module, key)
            elif not _is_pruned(module, key):
                continue  # an evaluation needs the product only, which the checkpoint has under the plain name
            original = weights.pop(name).clone()
            original[mask == 0] = saved["hidden"][name].to(original)
            weights[f"{name}_orig"] = original
            weights[f"{name}_mask"] = mask.to(original)

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        # A resumed run has collected them in `on_load_checkpoint`, before the weights were loaded.
        if not self._targets:
            self._collect(task)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if self._at_train_epoch_end:
            self._prune(trainer, task)

    def on_validation_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        is_in_fit = trainer.stage == "fit" and not trainer.sanity_checking
        if is_in_fit and not self._at_train_epoch_end:
            self._prune(trainer, task)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        if self._is_permanent:
            self.make_pruning_permanent(task)

    def on_save_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        names = {module: name for name, module in task.named_modules()}
        masks = {}
        hidden = {}
        for module, key in self._targets:
            name = _full_name(names[module], key)
            if f"{name}_mask" not in weights:
                continue  # not pruned yet
            mask = weights.pop(f"{name}_mask")
            original = weights.pop(f"{name}_orig")
            weights[name] = original * mask
            masks[name] = mask
            hidden[name] = original[mask == 0]  # the product has lost these values
        initial = {}
        for module, copied in self._initial.items():
            for name, value in copied.named_parameters(names[module], recurse=False):
                initial[name] = value.detach()
        checkpoint[_ENTRY] = {"masks": masks, "hidden": hidden, "first": initial}

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._targets = []
        self._initial = {}

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace masks by zeros in the parameters."""
        for child in module.modules():
            # `prune.remove` changes the dict of hooks during the iteration.
            for hook in list(child._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(child, hook._tensor_name)

    def apply_pruning(self, amount: int | float) -> None:
        """Prune this number of weights or slices, or this fraction of the unpruned ones."""
        if self._is_global:
            prune.global_unstructured(self._targets, pruning_method=self._method, amount=amount)
            return
        for module, name in self._targets:
            self._method(module, name=name, amount=amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the unpruned weights to their initial values, or to new random values."""
        for module, initial in self._initial.items():
            if self._resamples:
                reset = getattr(initial, "reset_parameters", None)
                if callable(reset):
                    reset()
            for key, value in initial.named_parameters(recurse=False):
                # The mask multiplies `weight_orig`, so pruned weights stay zero.
                name = f"{key}_orig" if _is_pruned(module, key) else key
                module.get_parameter(name).data.copy_(value)

    def _collect(self, task: TaskModule) -> None:
        """Set `_targets`, and `_initial` to copies of their modules with the weights that the task has now."""
        if self._parameters_to_prune:
            candidates = list(self._parameters_to_prune)
        else:
            candidates = self._leaf_parameters(task)
        self._targets = self.filter_parameters_to_prune(candidates)
        if not self._targets:
            raise ConfigurationError(
                f"ModelPruning found no parameter to prune: {type(task).__name__} has none named "
                f"{' or '.join(self._names)}. Pass parameters_to_prune=[(module, name)]."
            )
        in_task = set(task.modules())
        for module, key in self._targets:
            if module not in in_task:
                raise ConfigurationError(
                    f"ModelPruning: the {type(module).__name__} of parameter {key!r} is not in {type(task).__name__}. "
                    "Pass pairs with modules of the task."
                )
            if not _has_parameter(module, key):
                raise ConfigurationError(
                    f"ModelPruning: {key!r} is not a parameter of its module. Pass pairs of a module and the name "
                    "of one of its own parameters."
                )
        if self._uses_ticket:
            self._initial = {module: self._initial_copy(module) for module, _ in self._targets}

    def _initial_copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module with plain parameters, also if an earlier fit has pruned them."""
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                # A pruned weight, which the last forward has computed. `deepcopy` raises an error for a tensor with a
                # graph. The next forward computes the weight again.
                setattr(module, name, value.detach())
        copied = copy.deepcopy(module)
        self.make_pruning_permanent(copied)
        return copied

    def _leaf_parameters(self, task: TaskModule) -> list[Target]:
        """Return the parameters named `parameter_names` of all modules that have no child modules."""
        targets = []
        for module in task.modules():
            if list(module.children()):
                continue
            for name in self._names:
                if _has_parameter(module, name):
                    targets.append((module, name))
        return targets

    def _prune(self, trainer: Run, task: TaskModule) -> None:
        epoch = trainer.current_epoch
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        applies = self._apply(epoch) if callable(self._apply) else self._apply
        if not amount or not applies:
            return
        seed = int(torch.randint(2**31, (1,)))  # outside of `isolate_rng`, so that each pruning has another seed
        if trainer.world_size > 1:
            seed = int(trainer.all_gather(torch.tensor(seed)).flatten()[0])
        # Random methods choose the same weights on every rank. `torch.manual_seed` also seeds the accelerator, whose
        # generator must be restored: otherwise all ranks would draw the same dropout masks afterwards.
        # A validation runs in inference mode, whose tensors (here the masks) cannot be used in a later training step.
        with isolate_rng(trainer.device), torch.inference_mode(False):
            torch.manual_seed(seed)
            self.apply_pruning(amount)
            uses_ticket = self._uses_ticket(epoch) if callable(self._uses_ticket) else self._uses_ticket
            if uses_ticket:
                self.apply_lottery_ticket_hypothesis()
        if self._verbose:
            self._report(task)

    def _report(self, task: TaskModule) -> None:
        names = {module: name for name, module in task.named_modules()}
        num_pruned = 0
        num_weights = 0
        lines = []
        for module, key in self._targets:
            mask = module.get_buffer(f"{key}_mask")
            zeros = int((mask == 0).sum())
            size = mask.numel()
            num_pruned += zeros
            num_weights += size
            lines.append(f"  {_full_name(names[module], key)}: {zeros} of {size} ({zeros / size:.1%})")
        task.print(f"pruned: {num_pruned} of {num_weights} weights ({num_pruned / num_weights:.1%})")
        if self._verbose > 1:
            for line in lines:
                task.print(line)


def _has_parameter(module: nn.Module, name: str) -> bool:
    """Return whether a module itself has a parameter, which an earlier fit may have pruned."""
    return module._parameters.get(name, module._parameters.get(f"{name}_orig")) is not None


def _is_pruned(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is computed from `weight_orig` and `weight_mask`."""
    return f"{name}_orig" in module._parameters


def _owner(task: TaskModule, full_name: str) -> Target:
    """Return the module of a parameter, and the parameter's name in it: `"net.0.weight"` → `task.net[0], "weight"`."""
    module_name, _, name = full_name.rpartition(".")
    return task.get_submodule(module_name), name


def _full_name(module_name: str, name: str) -> str:
    """Return a parameter's name in the task. The task itself has an empty `module_name`."""
    return f"{module_name}.{name}" if module_name else name


def _method(method: Callable[..., Any] | str, is_global: bool, dim: int | None, norm: int | None) -> Any:
    """Return the class for `prune.global_unstructured`, or a function that prunes one parameter.

    Raises:
        ConfigurationError: see `ModelPruning`.
    """
    if isinstance(method, str) and method not in _METHODS:
        raise unknown("pruning_fn", method, _METHODS)
    options: dict[str, Any] = {}
    if method == "ln_structured":
        if dim is None or norm is None:
            raise ConfigurationError(f"ModelPruning(pruning_fn={method!r}) needs pruning_dim and pruning_norm.")
        options = {"dim": dim, "n": norm}
    elif method == "random_structured":
        if dim is None:
            raise ConfigurationError(f"ModelPruning(pruning_fn={method!r}) needs pruning_dim.")
        options = {"dim": dim}
    resolved: Any = _METHODS[method] if isinstance(method, str) else method
    is_class = inspect.isclass(resolved) and issubclass(resolved, prune.BasePruningMethod)
    if not is_global:
        function = resolved.apply if is_class else resolved
        return partial(function, **options)
    # `prune.global_unstructured` takes a class, and ranks single weights.
    if not is_class:
        raise ConfigurationError(
            f"ModelPruning(pruning_fn={getattr(method, '__name__', method)}) is a function, which prunes one parameter "
            "at a time. Pass the name of a method or a BasePruningMethod, or use_global_unstructured=False."
        )
    if resolved.PRUNING_TYPE != "unstructured":
        raise ConfigurationError(
            f"ModelPruning(pruning_fn={getattr(method, '__name__', method)!r}) is not unstructured, so it prunes each "
            "parameter separately. Pass use_global_unstructured=False."
        )
    return resolved
