"""CLI: the command line of a script for its task and data, with `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import inspect
import random
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from trainwright import DataModule, TaskModule, Trainer, seed_everything
from trainwright.cli.configs.cli_parser import ReduceLROnPlateau, class_of
from trainwright.cli.configs.cli_parser import _parser_class as parser_class
from trainwright.cli.configs.option_groups import group_trainer_options
from trainwright.cli.configs.overrides import CommandLine, read_command_line, read_configs
from trainwright.cli.configs.parsing import accept_strategies, build, listed, parse, plain
from trainwright.cli.configs.save_config_callback import SaveConfigCallback
from trainwright.cli.import_path import add_project_to_import_path
from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.signatures import overrides

if TYPE_CHECKING:
    from trainwright.cli.configs.cli_parser import CLIParser

_USAGE_ERROR = 2  # as in argparse
# Arguments of the Trainer's stages that are objects, which the CLI builds and passes.
_PASSED_BY_CLI = ("self", "task", "model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")
_NUM_SEEDS = 2**32


class _StageRequest(NamedTuple):
    """Stage to run, with its settings."""

    name: str
    words: list[str]  # the arguments after the stage
    config: dict[str, Any]  # the stage's settings in a mapping, or in files that are named before the stage


class CLI:
    """Command line that builds a task, its data and a Trainer from configuration files and arguments, and runs them.

        CLI(MyTask, MyData)       # python script.py fit --config config.yaml --trainer.max_epochs 3 --model.lr 0.01

    Keys are `model`, `data`, `trainer`, `optimizer`, `lr_scheduler`, `seed_everything` and the arguments of the stage
    (`ckpt_path`, …). `task` is accepted instead of `model`.

    Args:
        model_class: the task's class, or a function that returns a task. Default: None. The configuration then names
            the class.
        datamodule_class: the data module's class, or a function that returns a data module. Default: None. The
            configuration may then name the class.
        save_config_callback: class of the callback that saves the settings when `fit` begins. None does not save the
            settings. Default: `SaveConfigCallback`.
        save_config_kwargs: further arguments of `save_config_callback`. Default: None.
        trainer_class: a subclass of Trainer, or a function that returns a Trainer. Default: `Trainer`.
        trainer_defaults: defaults of the Trainer's arguments. Its callbacks are added to the callbacks of the
            configuration. Default: None.
        seed_everything_default: a seed. True selects a random seed, which is saved. False sets no seed. Default: True.
        parser_kwargs: arguments of jsonargparse's parser, such as `default_config_files`. Under the name of a stage, a
            dict with arguments for this stage. Default: None.
        subclass_mode_model: whether a configuration may name a subclass of `model_class`. Default: False.
        subclass_mode_data: whether a configuration may name a subclass of `datamodule_class`. Default: False.
        args: list of arguments, or a mapping instead of a file. Default: None, which is `sys.argv[1:]`.
        run: run the stage that the first argument names. False only builds the objects. Default: True.
        auto_configure_optimizers: whether the keys `optimizer` and `lr_scheduler` exist. They replace the task's
            `configure_optimizers`. Default: True.

    Attributes:
        parser: the parser.
        subcommand: the stage; None with `run=False`.
        config: the settings. With `run=True`, they are under the stage's name, as in `cli.config.fit.trainer`.
        config_init: `config` with objects instead of class paths.
        model: the task.
        datamodule: the data module, or None.
        trainer: the Trainer.

    Raises:
        ConfigurationError: a setting is not valid. With arguments from `sys.argv`, the error is printed and the script
            exits with 2.
    """

    def __init__(
        self,
        model_class: type[TaskModule] | Callable[..., TaskModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Sequence[str] | Mapping[str, Any] | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        self.trainer_class = trainer_class
        self.trainer_defaults = dict(trainer_defaults or {})
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = dict(parser_kwargs or {})
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None
        self.auto_configure_optimizers = auto_configure_optimizers
        self.subcommand: str | None = None
        # `_read` also sets `parser`, `config`, `_settings` (class paths) and `_stage_arguments` (names of the arguments
        # of the stage's method). `instantiate_classes` sets `_built`: `_settings` with objects instead of class paths.
        try:
            self._read(args, run)
        except ConfigurationError as error:
            if args is not None:
                raise
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
            raise SystemExit(_USAGE_ERROR) from None
        self._seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        self._run()

    # For sub-classes

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Override to add arguments and links to the parser (a `CLIParser`), and to set defaults."""

    def before_instantiate_classes(self) -> None:
        """Override to run code after the settings are read and before anything is built."""

    def after_instantiate_classes(self) -> None:
        """Override to run code after everything is built and before anything is run."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the names of the stages, each with the arguments of the Trainer's method that are not settings."""
        return {name: set(_PASSED_BY_CLI) for name in ("fit", "validate", "test", "predict")}

    @staticmethod
    def configure_optimizers(task: TaskModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result of the task's `configure_optimizers` for a configured optimizer and schedule."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor},
            }
        return [optimizer], [lr_scheduler]

    def instantiate_classes(self) -> None:
        """Build the task, the data and the Trainer. May be overridden."""
        self._built = build(self.parser, self._settings)
        self.config_init = self._below_stage(self._built)
        self.datamodule = self._built.get("data")
        self.model = self._built.get("model")
        self._use_configured_optimizer()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Build the Trainer from the settings. `kwargs` override settings. May be overridden."""
        defaults = self._default_objects()
        arguments = {**defaults, **_as_dict(self._built.get("trainer")), **kwargs}
        for name, value in defaults.items():
            # The settings hold None for an argument that the configuration does not set.
            if arguments[name] is None:
                arguments[name] = value
        callbacks = listed(arguments.get("callbacks"))
        callbacks += [self._built[key] for key in self.parser.callback_keys]
        callbacks += listed(self.trainer_defaults.get("callbacks"))
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            callbacks.append(self.save_config_callback(self.parser, self._settings, **self.save_config_kwargs))
        arguments["callbacks"] = callbacks
        return self.trainer_class(**arguments)

    # Reading

    def _read(self, args: Sequence[str] | Mapping[str, Any] | None, run: bool) -> None:
        add_project_to_import_path()
        config: dict[str, Any] = {}
        words: list[str] = []
        if isinstance(args, Mapping):
            config = plain(dict(args))
        else:
            words = list(sys.argv[1:] if args is None else args)
        if run:
            request = self._take_stage(words, config)
            self.subcommand = request.name
            words = request.words
            config = request.config
        self.parser = self._make_parser()
        line = read_command_line(words)
        # Files after the stage override those before it.
        config = {**config, **read_configs(line.configs)}
        self._settings = self._parse(config, line)
        self.config = self._below_stage(self._settings)

    def _take_stage(self, words: list[str], config: dict[str, Any]) -> _StageRequest:
        """Return the stage that the command line names, or that a mapping or a file contains.

        `script.py --config all.yaml fit --trainer.max_epochs 3`: a file before the stage has the settings of each stage
        under its name, as in `fit: {trainer: …}`. If it has the settings of only one stage, the command line need not
        name the stage.

        Args:
            words: the command line. Empty for a mapping.
            config: a mapping instead of a command line. Empty for a command line. A mapping names the stage with
                `subcommand`, or the first stage with settings is run.
        """
        names = list(self.subcommands())
        stage: str | None = None
        if config and not words:
            stage = config.pop("subcommand", None) or next((name for name in names if name in config), None)
        else:
            index = next((i for i, word in enumerate(words) if word in names), len(words))
            words_before = words[:index]
            words = words[index:]
            if "-h" in words_before or "--help" in words_before:
                print(f"usage: {Path(sys.argv[0]).name} [--config FILE] {{{','.join(names)}}} [ARGUMENTS]")
                raise SystemExit(0)
            if words:
                stage = words.pop(0)
            elif not words_before or not words_before[0].startswith("-"):  # nothing, or a misspelled stage
                raise ConfigurationError(
                    f"name the stage to run: {', '.join(names)}.{nearest(''.join(words_before[:1]), names)}"
                )
            config = read_configs(read_command_line(words_before).configs)
            in_files = [name for name in names if name in config]
            if stage is None and len(in_files) == 1:
                stage = in_files[0]
        if stage not in names:
            raise ConfigurationError(f"name the stage to run: {', '.join(names)}.{nearest(stage or '', names)}")
        stage_config = config.get(stage)
        return _StageRequest(stage, words, dict(stage_config) if isinstance(stage_config, Mapping) else {})

    def _make_parser(self) -> Any:
        """Build the parser, with the arguments of the stage `subcommand`. Set `_stage_arguments`."""
        stages = self.subcommands()
        options = {key: value for key, value in self.parser_kwargs.items() if key not in stages}
        options |= self.parser_kwargs.get(self.subcommand or "", {})
        if "parser_mode" in options:
            raise ConfigurationError("parser_kwargs: parser_mode is not supported; files are read as YAML. Remove it.")
        program = f"{Path(sys.argv[0]).name} {self.subcommand or ''}".rstrip()
        usage = f"{program} [--config FILE] [KEY=VALUE …]"
        # Without exits, a wrong setting can be explained. Without abbreviations, a misspelled option is an error.
        defaults = {"prog": program, "usage": usage, "exit_on_error": False, "allow_abbrev": False}
        parser: Any = parser_class()(**{**defaults, **options})
        parser.add_argument("-c", "--config", action="config", help="YAML file; may be repeated, later ones win")
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="seed every generator before building; true: with a random seed",
        )
        self._add_core(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.schedules:
                parser.add_lr_scheduler_args()
        parser.link_settings()  # after all arguments, because a link names two of them
        self._stage_arguments: list[str] = []
        if self.subcommand is not None:
            self._stage_arguments = self._add_stage(parser, self.subcommand)
        return parser

    def _add_core(self, parser: CLIParser) -> None:
        accept_strategies()
        parser.add_class_arguments(class_of(self.trainer_class), "trainer", instantiate=False, fail_untyped=False)
        group_trainer_options(parser)
        defaults: dict[str, Any] = {}
        for name, value in self.trainer_defaults.items():
            if name != "callbacks" and _is_plain(value):
                defaults[f"trainer.{name}"] = value
        parser.set_defaults(defaults)
        model = self.model_class or TaskModule
        data = self.datamodule_class or DataModule
        parser.add_lightning_class_args(model, "model", self.subclass_mode_model, required=False)
        parser.add_lightning_class_args(data, "data", self.subclass_mode_data, required=False)

    def _add_stage(self, parser: CLIParser, stage: str) -> list[str]:
        """Add the arguments of the stage's method, except for objects. Return their names: `["ckpt_path", …]`."""
        cls = class_of(self.trainer_class)
        parameters = set(inspect.signature(getattr(cls, stage)).parameters) - {"self"}
        skip = self.subcommands()[stage] & parameters
        added = list(parser.add_method_arguments(cls, stage, skip=skip, fail_untyped=False))
        if "ckpt_path" in added:
            parser.set_defaults(ckpt_path=None)  # the same for stages that receive the task
        return added

    def _parse(self, config: dict[str, Any], line: CommandLine) -> Any:
        """Return the settings as a namespace of jsonargparse, with class paths instead of objects.

        Args:
            config: the settings of the files. Arguments of other stages are removed from it.
            line: the command line. Its settings override `config`.
        """
        # `trainer.max_epochs` and `trainer.devices` have the top key `trainer`.
        top_keys = dict.fromkeys(action.dest.partition(".")[0] for action in self.parser._actions)
        known = [key for key in top_keys if key not in ("help", "print_config", "config")]
        # One file may be used for all stages: `verbose` of `validate` is not an error in `fit`.
        for stage in self.subcommands():
            for name in inspect.signature(getattr(class_of(self.trainer_class), stage)).parameters:
                if name not in known and name not in _PASSED_BY_CLI:
                    config.pop(name, None)
        # Classes that the configuration cannot replace. A function instead of a class has no class path.
        fixed_classes: dict[str, type] = {}
        if not self.subclass_mode_model and isinstance(self.model_class, type):
            fixed_classes["model"] = self.model_class
        if not self.subclass_mode_data and isinstance(self.datamodule_class, type):
            fixed_classes["data"] = self.datamodule_class
        settings = parse(self.parser, config, line, known=known, classes=fixed_classes)
        if settings.get("model") is None and self.subclass_mode_model:
            raise ConfigurationError("no model is configured. Name it: --model=module.Class, or model: in --config.")
        return settings

    def _below_stage(self, settings: object) -> Any:
        """Return settings under the stage's name, as Lightning's CLI stores them, or unchanged with `run=False`."""
        from jsonargparse import Namespace

        if self.subcommand is None:
            return settings
        return Namespace(subcommand=self.subcommand, **{self.subcommand: settings})  # type: ignore[no-untyped-call]  # jsonargparse has no types here

    def _seed(self) -> None:
        """Seed all generators. Called before anything is built, because models draw their initial weights."""
        seed = self._settings.seed_everything
        if seed is False:
            return
        if seed is True:
            seed = random.randrange(_NUM_SEEDS)
        self._settings.seed_everything = seed  # saved with the settings
        seed_everything(seed, workers=True)

    # Building and running

    def _default_objects(self) -> dict[str, Any]:
        """Return the values of `trainer_defaults` that YAML cannot represent."""
        objects: dict[str, Any] = {}
        for name, value in self.trainer_defaults.items():
            if name != "callbacks" and not _is_plain(value):
                objects[name] = value
        return objects

    def _use_configured_optimizer(self) -> None:
        """Set the task's `configure_optimizers` if the configuration defines an optimizer."""
        if not self.auto_configure_optimizers:
            return
        optimizer_group, schedule_group = self.parser.automatic()
        optimizer = _ClassRecipe.of(optimizer_group, self._built, self._settings)
        schedule = _ClassRecipe.of(schedule_group, self._built, self._settings)
        if optimizer is None:
            return
        if overrides(self.model, "configure_optimizers", TaskModule):
            warnings.warn(
                f"{type(self.model).__name__}.configure_optimizers is not called: the configuration names an "
                f"optimizer, {optimizer.path}.",
                TrainwrightWarning,
                stacklevel=4,
            )
        make = partial(_configure_optimizers, self.configure_optimizers, optimizer, schedule)
        self.model.configure_optimizers = types.MethodType(make, self.model)

    def _run(self) -> None:
        stage = self.subcommand
        if stage is None:
            return
        # A sub-class may define `before_fit`, `after_fit`, and `fit` itself.
        before_stage = getattr(self, f"before_{stage}", None)
        after_stage = getattr(self, f"after_{stage}", None)
        if before_stage is not None:
            before_stage()
        arguments = {name: self._built[name] for name in self._stage_arguments}
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        method = getattr(self, stage, None)
        if method is not None:
            method(model=self.model, **arguments)
        else:
            getattr(self.trainer, stage)(self.model, **arguments)
        if after_stage is not None:
            after_stage()


class _ClassRecipe(NamedTuple):
    """Recipe for an optimizer or a schedule: a class path and its arguments, without the parameters or the optimizer.

    They are created later, when the task's `configure_optimizers` is called.
    """

    path: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, group: tuple[str, Any] | None, built: Any, settings: Any) -> _ClassRecipe | None:
        """Return the recipe of a group of arguments. None without a group, or if the configuration does not set it.

        Args:
            group: key of the arguments, and their class, or a tuple of the base classes of a class path.
            built: the settings with objects instead of class paths.
            settings: the settings with class paths, because jsonargparse omits `dict_kwargs` in `built`.
        """
        if group is None:
            return None
        key, base = group
        values = built.get(key)
        if values is None:
            return None
        if not isinstance(base, tuple):  # the arguments of one class: `optimizer: {lr: 0.1}`
            return cls(f"{base.__module__}.{base.__qualname__}", _as_dict(values))
        # `optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}`
        arguments = _as_dict(values.get("init_args")) | _as_dict(settings[key].get("dict_kwargs"))
        return cls(values["class_path"], arguments)

    def make(self, argument: str, value: object) -> Any:
        """Create an optimizer from parameters, or a schedule from an optimizer.

        Args:
            argument: name of the argument of a function that receives `value`.
            value: the parameters or the optimizer. A class receives it as its first argument.
        """
        from trainwright.core.registry import import_object

        module, _, name = self.path.rpartition(".")
        make = import_object(f"{module}:{name}")
        if isinstance(make, type):
            return make(value, **self.arguments)
        return make(**{argument: value}, **self.arguments)


def _configure_optimizers(
    finish: Callable[..., Any], recipe: _ClassRecipe, schedule: _ClassRecipe | None, task: TaskModule
) -> Any:
    """Create the configured optimizer and schedule when the task's `configure_optimizers` is called."""
    optimizer = recipe.make("params", task.parameters())
    lr_scheduler = None
    if schedule is not None:
        lr_scheduler = schedule.make("optimizer", optimizer)
    return finish(task, optimizer, lr_scheduler)


def _as_dict(settings: object) -> dict[str, Any]:
    """Return the values of a namespace by name. Nested objects are not converted."""
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        return dict(settings)
    return dict(vars(settings))


def _is_plain(value: object) -> bool:
    """Return whether YAML can represent a value, so that it can be a default of the parser."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Path))
