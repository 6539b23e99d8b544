"""One strategy's run for `trainwright parity`: `python -m trainwright.cli.parity.parity_run FOLDER`, its own process.

The folder holds `plan.json`. The run writes its steps into it (see `parity_tape`), or `error.txt` with the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.cli.configs.overrides import CommandLine
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.registry import import_object

# Arguments of the Trainer that are read from the configuration, because they affect a step.
STEP_ARGUMENTS = (
    *("accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark"),
    *("compile", "use_distributed_sampler", "per_sample_rng", "uneven_batches"),
    *("limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs"),
)


@dataclass(frozen=True)
class Plan:
    """Plan of one run, JSON-compatible."""

    strategy: str  # a name, or "module:name" of a strategy, a class or a function that makes one
    devices: int  # processes, if the strategy can run several
    steps: int
    seed: int
    defaults: dict[str, Any]  # configuration that the files override
    configs: list[str]
    assignments: list[tuple[str, str]]  # key and text of each override on the command line


def main(folder: Path) -> int:
    """Run the plan of a folder; return 0, or 1 with an `error.txt` there."""
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    try:
        _record(plan, folder)
    except Exception as error:  # noqa: BLE001  # any error of the task is shown with the other strategies' results
        text = str(error) if isinstance(error, TrainwrightError) else traceback.format_exc()
        (folder / "error.txt").write_text(text)
        return 1
    return 0


def _record(plan: Plan, folder: Path) -> None:
    from trainwright import Trainer
    from trainwright.cli.configs.parsing import build
    from trainwright.cli.fit import read_settings
    from trainwright.cli.parity.parity_tape import StepTape
    from trainwright.core.rng import seed_everything

    line = CommandLine(list(map(Path, plan.configs)), plan.assignments)
    parser, settings = read_settings("fit", line, defaults=plan.defaults)
    given = settings.pop("trainer").as_dict()
    if given.get("callbacks"):
        print("trainwright: note: the configuration's callbacks are not used in the comparison.", file=sys.stderr)
    seed_everything(plan.seed)
    built = build(parser, settings)
    strategy, devices = load_strategy(plan)
    tape = StepTape(folder, (given["accumulate_grad_batches"] or 1) * plan.devices, plan.seed)
    trainer = Trainer(
        **{name: given[name] for name in STEP_ARGUMENTS},
        strategy=strategy,
        devices=devices,
        max_steps=plan.steps,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        preemption_grace=None,
        default_root_dir=folder / "files",
        seed=plan.seed,
        callbacks=[tape],
    )
    trainer.fit(built.task, datamodule=built.data)


def load_strategy(plan: Plan) -> tuple[Any, int]:
    """Return the strategy for the Trainer, and its number of processes."""
    from trainwright.strategies.registry import STRATEGIES, make_strategy
    from trainwright.strategies.strategy import Strategy

    name = plan.strategy
    if name == "auto":
        return name, plan.devices
    if ":" in name and "=" in name:
        made: Any = make_strategy(name)
    else:
        make = import_object(name) if ":" in name else STRATEGIES.get(name)
        made = make() if callable(make) else make
    if not isinstance(made, Strategy):
        raise ConfigurationError(
            f"--strategies {name}: a {type(made).__name__} is not a Strategy. Name a strategy, or its class."
        )
    return made, plan.devices if made.is_distributed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
