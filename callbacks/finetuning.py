"""Freeze a part of a model, and train it from a later epoch on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run, Stage
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule

Modules = nn.Module | Iterable["nn.Module | Modules"]


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze modules before training and unfreeze them during it, as in Lightning.

    A sub-class defines `freeze_before_training`, which calls `freeze`, and `finetune_function`, which calls
    `unfreeze_and_add_param_group` in some epochs. Checkpoints contain the added parameter groups, so a resumed run has
    the same groups. Schedules of `torch.optim` change the learning rates of added groups only if they compute a rate
    from the previous rate.

    Create the modules in the task's `__init__`, because they must exist before `setup`.

    Raises:
        ConfigurationError: in a run: the task has its own `configure_model`, or the strategy's optimizers cannot take
            parameters later (DeepSpeed).
    """

    needs = ("late_groups",)

    def __init__(self) -> None:
        # Index of an optimizer → names of the parameters of each added group. The index is text, as a key of JSON is.
        self._added_groups: dict[str, list[list[str]]] = {}
        self._trained: list[str] | None = None  # names of the parameters that require gradients; None before an epoch
        self._frozen_norms: list[str] = []  # names of the BatchNorm modules with frozen statistics

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        """Freeze modules, before the optimizers are created."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(self, task).")

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze modules. Called for each optimizer at the start of each epoch (0-based)."""
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function(self, task, epoch, optimizer).")

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Flatten modules, or nested lists of modules, to the modules that have own parameters or no children."""
        if isinstance(modules, nn.Module):
            return [module for module in modules.modules() if module._parameters or not module._modules]
        flat = []
        for module in modules:
            flat.extend(BaseFinetuning.flatten_modules(module))
        return flat

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of modules that require gradients, or with `requires_grad=False` those that do not.

        Parameters of BatchNorm layers are included if `train_bn`.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters, and its running statistics if it is a BatchNorm layer."""
        _set_trained(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules. With `train_bn` their BatchNorm layers are still trained."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trained(module, train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze modules."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trained(module, True)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that are not in the optimizer yet. Warn if some are already in it."""
        params = list(params)
        in_optimizer = _ids_in(optimizer)
        new = [p for p in params if id(p) not in in_optimizer]
        if len(new) < len(params):
            warnings.warn(
                f"{len(params) - len(new)} parameters to be unfrozen are in the optimizer already, and keep their "
                "parameter group. In configure_optimizers, pass only parameters with requires_grad=True to the "
                "optimizer.",
                TrainwrightWarning,
                stacklevel=3,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a new group.

        Args:
            modules: a module, or nested lists of modules.
            optimizer: the task's optimizer.
            lr: learning rate of the group. Default: None, the rate of the first group divided by `initial_denom_lr`.
            initial_denom_lr: divisor if `lr` is None. Default: 10.
            train_bn: add parameters of BatchNorm layers to the group. Default: True.
        """
        # BatchNorm layers that were trained from the beginning stay in their group, without the warning of
        # `filter_on_optimizer`. Their ids are read before everything is made trainable.
        trainable = {id(parameter) for parameter in BaseFinetuning.filter_params(modules)}
        never_frozen = trainable & _ids_in(optimizer)
        BaseFinetuning.make_trainable(modules)
        unfrozen = [p for p in BaseFinetuning.filter_params(modules, train_bn) if id(p) not in never_frozen]
        params = BaseFinetuning.filter_on_optimizer(optimizer, unfrozen)
        if not params:
            return
        if lr is None:
            lr = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr
        optimizer.add_param_group({"params": params, "lr": lr})

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit":
            return
        # A new run: the callback may have been used in an earlier one. In a resumed run `load_state_dict` sets these
        # attributes after `setup`.
        if trainer.state.step == 0:
            self._trained = None
            self._added_groups = {}
            self._frozen_norms = []
        if overrides(task, "configure_model", TaskModule):
            raise ConfigurationError(
                f"{type(self).__name__} freezes modules before {type(task).__name__}.configure_model creates them. "
                "Create them in __init__, or freeze them in configure_model."
            )
        self.freeze_before_training(task)

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        if self._trained is None:
            return
        # A resumed run: the optimizers need the added groups before their state is loaded.
        parameters = dict(task.named_parameters())
        trained = set(self._trained)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        for name, module in task.named_modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats = name not in self._frozen_norms
        for number, optimizer in enumerate(trainer.optimizers):
            for names in self._added_groups.get(str(number), []):
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
                _add_to_schedules(trainer, optimizer, optimizer.param_groups[-1])

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        for number, optimizer in enumerate(trainer.optimizers):
            num_groups = len(optimizer.param_groups)
            self.finetune_function(task, trainer.current_epoch, optimizer)
            # Tensors compare by value, so their names are found by identity.
            names = {id(parameter): name for name, parameter in task.named_parameters()}
            for group in optimizer.param_groups[num_groups:]:
                group_names = [names[id(parameter)] for parameter in group["params"]]
                self._added_groups.setdefault(str(number), []).append(group_names)
                _add_to_schedules(trainer, optimizer, group)
        self._trained = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
        self._frozen_norms = []
        for name, module in task.named_modules():
            if isinstance(module, _BatchNorm) and not module.track_running_stats:
                self._frozen_norms.append(name)

    def state_dict(self) -> dict[str, Any]:
        # The keys belong to the format of checkpoints. "resting" are BatchNorm modules with frozen statistics.
        return {"groups": self._added_groups, "trained": self._trained, "resting": self._frozen_norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._added_groups = state_dict["groups"]
        self._trained = state_dict["trained"]
        self._frozen_norms = state_dict["resting"]


class BackboneFinetuning(BaseFinetuning):
    """Callback that trains `task.backbone` only from a later epoch on, with an initially lower learning rate.

    Args:
        unfreeze_backbone_at_epoch: first epoch (0-based) that trains the backbone. Default: 10.
        lambda_func: returns the factor by which each epoch after that one multiplies the backbone's learning rate. It
            receives the 1-based epoch. Default: None, a factor of 2.
        backbone_initial_ratio_lr: initial learning rate of the backbone divided by that of the first group. Default:
            0.1.
        backbone_initial_lr: initial learning rate of the backbone. Default: None, which uses the ratio.
        should_align: limit the backbone's learning rate to that of the first group. Default: True.
        initial_denom_lr: Accepted without effect: other arguments determine the backbone's learning rate. Default: 10.
        train_bn: BatchNorm layers of the backbone are trained from the beginning. Default: True.
        verbose: print the learning rates at each epoch. Default: False.
        rounding: digits of printed learning rates. Default: 12.

    Raises:
        ConfigurationError: in a run: the task has no module `backbone`. See also `BaseFinetuning`.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None  # of the previous epoch; None until the backbone is trained

    def freeze_before_training(self, pl_module: TaskModule) -> None:
        if "backbone" not in dict(pl_module.named_children()):
            raise ConfigurationError(
                f"BackboneFinetuning needs a module {type(pl_module).__name__}.backbone. Name it so, or sub-class "
                "BaseFinetuning."
            )
        self.freeze(pl_module.get_submodule("backbone"), train_bn=self.train_bn)

    def finetune_function(self, pl_module: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        current_lr = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            backbone_lr = self.backbone_initial_lr
            if backbone_lr is None:
                backbone_lr = current_lr * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(
                pl_module.get_submodule("backbone"), optimizer, backbone_lr, self.initial_denom_lr, self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            factor = 2.0 if self.lambda_func is None else self.lambda_func(epoch + 1)
            backbone_lr = self.previous_backbone_lr * factor
            if self.should_align:
                backbone_lr = min(backbone_lr, current_lr)
            optimizer.param_groups[-1]["lr"] = backbone_lr
        else:
            return
        self.previous_backbone_lr = backbone_lr
        if self.verbose:
            shown_lr = round(current_lr, self.rounding)
            shown_backbone_lr = round(backbone_lr, self.rounding)
            pl_module.print(f"epoch {epoch}: learning rate {shown_lr}, of the backbone {shown_backbone_lr}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _ids_in(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _set_trained(module: nn.Module, trained: bool) -> None:
    """Freeze or unfreeze a module's own parameters, and the running statistics of a BatchNorm layer."""
    if isinstance(module, _BatchNorm):
        module.track_running_stats = trained
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(trained)


def _add_to_schedules(trainer: Run, optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Add a new group to the schedules of an optimizer. Its initial learning rate is the current one."""
    # Schedules of torch have one base rate per group (and one function, if they take functions), and torch raises an
    # error if the numbers differ.
    group["initial_lr"] = group["lr"]
    pending: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    while pending:
        schedule = pending.pop()
        pending += vars(schedule).get("_schedulers", [])  # of a sequence or a chain
        if vars(schedule).get("optimizer") is optimizer and "base_lrs" in vars(schedule):
            schedule.base_lrs.append(group["lr"])
            if isinstance(schedule, LambdaLR):
                # The schedule sets initial_lr × factor, so this factor leaves the group's rate as it is.
                schedule.lr_lambdas.append(lambda _: float(group["lr"]) / float(group["initial_lr"]))
            elif isinstance(schedule, MultiplicativeLR):
                schedule.lr_lambdas.append(lambda _: 1.0)
