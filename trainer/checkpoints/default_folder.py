"""The folder of checkpoints that have no folder of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainwright.checkpoint.format.manifests import find_checkpoints
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.host.folders import is_url
from trainwright.core.names.replacement import is_replaced
from trainwright.core.run import Stage
from trainwright.loggers.logger import Logger, RunInfo
from trainwright.loggers.versioned import VersionedLogger
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.load_request import LoadRequest
from trainwright.trainer.checkpoints.places import CHECKPOINTS
from trainwright.trainer.checkpoints.search import left_by_earlier


def default_folder(root: Path, loggers: Sequence[Logger], stage: Stage, request: LoadRequest, attempt: Attempt) -> Path:
    """Return the folder of a stage's checkpoints that have no folder of their own. Called on one process.

    It is `checkpoints` in `default_root_dir`. If Trainwright replaces Lightning, it is where programs look for it:
    `checkpoints` in the run's folder of the first logger that has one. A fit then creates the run's folder. A stage
    that continues an earlier run uses the earlier run's folder.

    Args:
        root: `default_root_dir`.
        loggers: the Trainer's loggers.
        stage: the stage.
        request: the checkpoint that the stage loads.
        attempt: the launcher's attempt that the stage belongs to.
    """
    versioned = [logger for logger in loggers if isinstance(logger, VersionedLogger)]
    if not versioned or not is_replaced("lightning"):
        return root / CHECKPOINTS
    logger = versioned[0]
    if not logger.is_version_known:
        earlier = _earlier_folder(Path(logger.save_dir or root, logger.name), request, attempt)
        if earlier is not None:
            return earlier
        if stage != "fit":
            return root / CHECKPOINTS
    if stage == "fit":
        logger.start(RunInfo(root))
    return Path(logger.version_dir or root, CHECKPOINTS)


def _earlier_folder(versions: Path, request: LoadRequest, attempt: Attempt) -> Path | None:
    """Return the folder of checkpoints of the earlier run that the stage continues or evaluates, or None."""
    folders = sorted(versions.glob(f"*/{CHECKPOINTS}"))
    for folder in folders:
        if left_by_earlier(attempt, RunFolder(folder)) is not None:
            return folder
    if request.ckpt_path in ("last", "best"):
        newest_folder = None
        newest_time = None
        for folder in folders:
            for found in find_checkpoints(folder):
                if newest_time is None or found.manifest.created > newest_time:
                    newest_time = found.manifest.created
                    newest_folder = folder
        return newest_folder
    if request.ckpt_path is None or is_url(request.ckpt_path) or not request.resumes("fit"):
        return None
    parent = Path(os.path.realpath(Path(request.ckpt_path).expanduser())).parent
    for folder in folders:
        if folder.resolve() == parent:
            return folder
    return None
