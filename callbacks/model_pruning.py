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
_ENTRY = "pruning"  # of a checkpoint


class ModelPruning(Callback):
    """Callback that sets weights to zero at the end of epochs, with masks of `torch.nn.utils.prune`, as in Lightning.

    Until the fit ends, a pruned `weight` is computed from the parameter `weight_orig` and the buffer `weight_mask`. A
    checkpoint contains the pruned weights under their own names, so that any task can load it. For an exact resume it
    also contains the masks, the masked values, and the initial weights for the lottery ticket. All ranks prune the same
    weights. Each rank needs full weights (one process, DDP).

    Args:
        pruning_fn: `"l1_unstructured"`, `"random_unstructured"`, `"ln_structured"` or `"random_structured"`; a function
            like those of `torch.nn.utils.prune`; or a `BasePruningMethod`.
        parameters_to_prune: pairs of a module and the name of its parameter. Default: all `parameter_names` of the
            task's modules that have no child modules.
        parameter_names: names of the parameters to prune. Default: `("weight", "bias")`.
        use_global_unstructured: rank the weights of all parameters together. False ranks them within each parameter.
            Default: True.
        amount: number of weights to prune each time, a fraction of the unpruned weights, or a function of the epoch
            that returns either. Default: 0.5.
        apply_pruning: enable pruning, or a function of the epoch that returns a bool. Default: True.
        make_pruning_permanent: replace masks by zeros in the parameters at the end of the fit. Default: True.
        use_lottery_ticket_hypothesis: reset the unpruned weights to their initial values after each pruning, or a
            function of the epoch that returns a bool. Default: True.
        resample_parameters: reset the unpruned weights to new random values instead. Default: False.
        pruning_dim: the dimension along which structured methods prune.
        pruning_norm: the norm of `"ln_structured"`.
        verbose: 1 prints the fraction of pruned weights, 2 also the fraction in each parameter. Default: 0.
        prune_on_train_epoch_end: prune at the end of training epochs. False prunes at the end of validations. Default:
            True.

    Raises:
        ConfigurationError: the method is unknown, cannot prune globally, or lacks an argument. In a run: there is no
            parameter to prune.
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
                f"ModelPruning(amount={amount!r}): expected a fraction from 0.0 to 1.0, a number, or a function."
            )
        self._given = parameters_to_prune
        self._names = tuple(parameter_names or ("weight", "bias"))
        self._method = _method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._is_global = use_global_unstructured
        self._amount = amount
        self._apply = apply_pruning
        self._uses_ticket = use_lottery_ticket_hypothesis
        self._resamples = resample_parameters
        self._is_permanent = make_pruning_permanent
        self._at_train_end = prune_on_train_epoch_end
        self._verbose = verbose
        self._targets: list[Target] = []
        self._first: dict[nn.Module, nn.Module] = {}  # module → a copy with its first weights

    def filter_parameters_to_prune(self, parameters_to_prune: list[Target]) -> list[Target]:
        """Return the pairs to prune. Override it to exclude pairs."""
        return parameters_to_prune

    def on_load_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_ENTRY)
        if saved is None:
            return
        self._collect(task)
        weights = checkpoint["state_dict"]
        for name, value in saved["first"].items():
            module, _, key = name.rpartition(".")
            self._first[task.get_submodule(module)].get_parameter(key).data.copy_(value)
        for name, mask in saved["masks"].items():
            module, _, key = name.rpartition(".")
            prune.identity(task.get_submodule(module), key)
            original = weights.pop(name).clone()
            original[mask == 0] = saved["hidden"][name].to(original)
            weights[f"{name}_orig"], weights[f"{name}_mask"] = original, mask.to(original)

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        if not self._targets:
            self._collect(task)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if self._at_train_end:
            self._run(trainer, task)

    def on_validation_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if not self._at_train_end and not trainer.sanity_checking:
            self._run(trainer, task)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        if self._is_permanent:
            self.make_pruning_permanent(task)

    def on_save_checkpoint(self, trainer: Run, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        names = {module: name for name, module in task.named_modules()}
        masks = {}
        hidden = {}
        for module, key in self._targets:
            name = f"{names[module]}.{key}".lstrip(".")
            if f"{name}_mask" in weights:
                masks[name], original = weights.pop(f"{name}_mask"), weights.pop(f"{name}_orig")
                hidden[name] = original[masks[name] == 0]
                weights[name] = original * masks[name]
        first = {
            name: value.detach()
            for module, kept in self._first.items()
            for name, value in kept.named_parameters(names[module], recurse=False)
        }
        checkpoint[_ENTRY] = {"masks": masks, "hidden": hidden, "first": first}

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit":
            self._targets = []
            self._first = {}

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace masks by zeros in the parameters."""
        for each in module.modules():
            for hook in list(each._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(each, hook._tensor_name)

    def apply_pruning(self, amount: int | float) -> None:
        """Prune this number of weights, or this fraction of the unpruned weights."""
        if self._is_global:
            prune.global_unstructured(self._targets, pruning_method=self._method, amount=amount)
            return
        for module, name in self._targets:
            self._method(module, name=name, amount=amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the unpruned weights to their initial values, or to new random values."""
        for module, first in self._first.items():
            if self._resamples and callable(reset := getattr(first, "reset_parameters", None)):
                reset()
            for key, value in first.named_parameters(recurse=False):
                own = f"{key}_orig" if f"{key}_orig" in module._parameters else key
                module.get_parameter(own).data.copy_(value)

    def _collect(self, task: TaskModule) -> None:
        found = [
            (module, name)
            for module in task.modules()
            if not list(module.children())
            for name in self._names
            if module._parameters.get(name) is not None
        ]
        self._targets = self.filter_parameters_to_prune(list(self._given or found))
        if not self._targets:
            raise ConfigurationError(
                f"ModelPruning found no parameter to prune: {type(task).__name__} has none named "
                f"{' or '.join(self._names)}. Pass parameters_to_prune=[(module, name)]."
            )
        unknown = [key for module, key in self._targets if module._parameters.get(key) is None]
        if unknown:
            raise ConfigurationError(
                f"ModelPruning: {unknown[0]!r} is not a parameter of its module. Pass pairs of a module and the name "
                "of one of its own parameters."
            )
        if self._uses_ticket:
            self._first = {module: copy.deepcopy(module) for module, _ in self._targets}

    def _run(self, trainer: Run, task: TaskModule) -> None:
        epoch = trainer.current_epoch
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        if not amount or not (self._apply(epoch) if callable(self._apply) else self._apply):
            return
        seed = int(torch.randint(2**31, (1,)))
        if trainer.world_size > 1:
            seed = int(trainer.all_gather(torch.tensor(seed)).flatten()[0])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # random methods choose the same weights on every rank
            self.apply_pruning(amount)
            if self._uses_ticket(epoch) if callable(self._uses_ticket) else self._uses_ticket:
                self.apply_lottery_ticket_hypothesis()
        if self._verbose:
            self._report(task)

    def _report(self, task: TaskModule) -> None:
        names = {module: name for name, module in task.named_modules()}
        masks = {f"{names[module]}.{key}": module.get_buffer(f"{key}_mask") for module, key in self._targets}
        counts = {name: (int((mask == 0).sum()), mask.numel()) for name, mask in masks.items()}
        pruned, total = (sum(each) for each in zip(*counts.values(), strict=True))
        task.print(f"pruned: {pruned} of {total} weights ({pruned / total:.1%})")
        for name, (number, size) in counts.items() if self._verbose > 1 else ():
            task.print(f"  {name}: {number} of {size} ({number / size:.1%})")


def _method(method: Callable[..., Any] | str, is_global: bool, dim: int | None, norm: int | None) -> Any:
    """Return the class for `prune.global_unstructured`, or a function that prunes one parameter.

    Raises:
        ConfigurationError: see `ModelPruning`.
    """
    if isinstance(method, str) and method not in _METHODS:
        raise unknown("pruning_fn", method, _METHODS)
    needed: dict[object, dict[str, Any]] = {"ln_structured": {"dim": dim, "n": norm}, "random_structured": {"dim": dim}}
    options = needed.get(method, {})
    if None in options.values():
        names = "pruning_dim and pruning_norm" if "n" in options else "pruning_dim"
        raise ConfigurationError(f"ModelPruning(pruning_fn={method!r}) needs {names}.")
    found: Any = _METHODS[method] if isinstance(method, str) else method
    is_class = inspect.isclass(found) and issubclass(found, prune.BasePruningMethod)
    if not is_global:
        return partial(found.apply if is_class else found, **options)
    if not is_class or found.PRUNING_TYPE != "unstructured":
        raise ConfigurationError(
            f"ModelPruning(pruning_fn={getattr(method, '__name__', method)!r}) is not unstructured, so it prunes each "
            "parameter separately. Pass use_global_unstructured=False."
        )
    return found
