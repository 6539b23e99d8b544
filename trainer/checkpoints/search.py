"""Search for the checkpoint that a stage starts from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

from trainwright.callbacks.roles import Saver
from trainwright.checkpoint.format.layout import Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint, HashFiles, hash_files, open_checkpoint, scan
from trainwright.checkpoint.format.reader import check_checkpoint, read_checkpoint
from trainwright.checkpoint.remote import find_remote
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.checkpoint.run_folder import RunFolder, open_valid
from trainwright.core.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, TrainwrightWarning
from trainwright.core.host.folders import is_url
from trainwright.core.run import Stage
from trainwright.processes.process_group import Processes
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.load_request import LoadRequest
from trainwright.trainer.checkpoints.places import CheckpointPlaces
from trainwright.trainer.hooks import StageHooks


class CheckpointSearch:
    """A search for the checkpoint that a load request names. Verifies the files that the stage needs.

    Args:
        request: the load request.
        stage: the stage that starts from the checkpoint.
        places: the folders and URLs of checkpoints.
        hooks: provides each ModelCheckpoint.
        has_trained: this Trainer has completed a step, so that its ModelCheckpoint defines the best checkpoint.
    """

    def __init__(
        self, request: LoadRequest, stage: Stage, places: CheckpointPlaces, hooks: StageHooks, *, has_trained: bool
    ) -> None:
        self._request = request
        self._stage = stage
        self._places = places
        self._hooks = hooks
        self._has_trained = has_trained
        self._parts = request.parts(stage)  # only their files are verified
        # The required kind. None accepts a full checkpoint and one with weights only.
        self._kind: Kind | None = "full" if request.resumes(stage) else None

    def on_all_ranks(self, processes: Processes) -> FoundCheckpoint | None:
        """Return the requested checkpoint on every rank. Rank 0 chooses it; all ranks hash its files. Collective.

        Remote checkpoints are downloaded into `default_root_dir/downloaded` first. The path of `"last"` or `"best"` is
        printed. Returns None to use the current weights: none is requested, or `fit` with `"last"` or an implied
        request finds none.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            ConfigurationError: `"best"` was requested, but neither this Trainer nor an earlier run in its folder has a
                best checkpoint.
            CheckpointError: the checkpoint is damaged, lacks a part, or holds weights only but a resume was requested.
        """
        hashing = SharedHashing(processes)

        def find() -> FoundCheckpoint | None:
            found = self._find(hashing.hash_files)
            # An implied request and a start from weights alone print the path elsewhere.
            is_named = self._request.ckpt_path in ("last", "best")
            if found is not None and is_named and not (self._request.implied or self._request.weights_only):
                self._hooks.print(f'trainwright: ckpt_path="{self._request.ckpt_path}" is {found.path}.')
            return found

        return processes.on_main_rank(find, "find a checkpoint to load", hashing)

    def _find(self, hash_files: HashFiles) -> FoundCheckpoint | None:
        """Return the requested checkpoint, or None to use the current weights. Called on rank 0, as all below."""
        ckpt_path = self._request.ckpt_path
        if ckpt_path is None:
            return None
        if ckpt_path == "last":
            return self._last(hash_files)
        if ckpt_path == "best":
            return self._best_or_current_weights(hash_files)
        return self._open(ckpt_path, hash_files)

    def _open(self, place: str | Path, hash_files: HashFiles) -> FoundCheckpoint:
        """Return the checkpoint at a path or URL."""
        path = self._places.fetch(str(place)) if is_url(place) else Path(str(place)).expanduser()
        found = open_valid(
            self._request.opened or path,
            kind=self._kind,
            parts=self._parts,
            allow_missing=self._request.allowed_missing_parts,
            on_damaged=self._request.on_damaged or "error",
            hash_files=hash_files,
        )
        self._request.check_kind(self._stage, found)
        return found

    def _last(self, hash_files: HashFiles) -> FoundCheckpoint | None:
        """Return the newest checkpoint of the run's folder and its remote folder, or None if `fit` finds none.

        Raises:
            CheckpointNotFoundError: no checkpoint is valid, and either the stage is not `fit`, or all checkpoints are
                damaged or hold weights only.
        """
        folder = self._places.folder
        local = self._places.run_folder.newest(
            accepts=lambda found: self._kind in (None, found.manifest.kind),
            parts=self._parts,
            allow_missing=self._request.allowed_missing_parts,
            on_damaged=self._request.on_damaged or "fall_back",
            hash_files=hash_files,
        )
        newer = self._places.fetch_newer(local, self._kind, skip_damaged=self._request.on_damaged != "error")
        if newer is not None:
            return self._open(newer, hash_files)
        if local is not None:
            return local
        if self._stage == "fit" and not any(scan(folder)) and not self._places.remote_names():
            warnings.warn(
                f"fit(ckpt_path='last'): {folder} has no checkpoint. Training starts from scratch.",
                TrainwrightWarning,
                stacklevel=2,
            )
            return None
        raise CheckpointNotFoundError(
            f"{self._stage}(ckpt_path='last'): no valid checkpoint in {folder}. Pass a path or None."
        )

    def _best_or_current_weights(self, hash_files: HashFiles) -> FoundCheckpoint | None:
        """Return the best checkpoint, or None if the request is implied and no ModelCheckpoint has a best one."""
        saver = self._monitored_saver()
        if self._request.implied and saver is None:
            return None
        best = self._best(hash_files)
        if self._request.implied and saver is not None:
            self._hooks.print(
                f"trainwright: {self._stage} uses the best weights by {saver.monitor!r}, {best.path}. Pass "
                "ckpt_path=None to use the task's current weights."
            )
        return best

    def _monitored_saver(self) -> Saver | None:
        """Return the first ModelCheckpoint that monitors a metric and has a best checkpoint, or None."""
        for saver in self._hooks.all_of(Saver):  # type: ignore[type-abstract]  # a protocol serves as a role
            if saver.monitor is not None and saver.best_model_path:
                return saver
        return None

    def _best(self, hash_files: HashFiles) -> FoundCheckpoint:
        """Return the best checkpoint, or with `on_damaged="fall_back"` the best checkpoint that is not damaged."""
        flaws: list[str] = []  # messages about better checkpoints that are damaged
        for place in self._ranked():
            try:
                found = open_checkpoint(self._places.on_this_machine(place))
                check_checkpoint(
                    found,
                    parts=self._parts,
                    allow_missing=self._request.allowed_missing_parts,
                    hash_files=hash_files,
                )
                self._request.check_kind(self._stage, found)
            except (CheckpointError, FileNotFoundError) as error:
                if self._request.on_damaged != "fall_back":
                    raise
                flaws.append(str(error))
                continue
            if flaws:
                text = f"{' '.join(flaws)} Falling back to {place}, the best valid checkpoint."
                warnings.warn(text, TrainwrightWarning, stacklevel=2)
            return found
        raise CheckpointError(
            f"{self._stage}(ckpt_path='best'): none of the best checkpoints is valid. {' '.join(flaws)}"
        )

    def _ranked(self) -> list[str]:
        """Return the paths or URLs of the best checkpoints, the best first.

        This Trainer's ModelCheckpoint defines the best checkpoint. A Trainer that has not trained uses the index of the
        run whose checkpoints are in the same folder.
        """
        saver = self._monitored_saver() or self._hooks.saver
        if saver is not None and saver.best_model_path:
            scores = saver.best_k_models
            ranked = sorted(scores, key=scores.__getitem__, reverse=saver.mode == "max")
            # The callback's best one comes first. It is usually in `ranked` too, whose second mention is removed.
            return list(dict.fromkeys([saver.best_model_path, *ranked]))
        if self._has_trained:
            raise ConfigurationError(
                f"{self._stage}(ckpt_path='best'): no ModelCheckpoint of this Trainer has a best checkpoint yet. Pass "
                "a path."
            )
        return self._ranked_in_index()

    def _ranked_in_index(self) -> list[str]:
        """Return the paths or URLs of a finished run's checkpoints, the best first.

        The paths come from the index in the folder of this Trainer's first ModelCheckpoint, ranked by that callback's
        `monitor` and `mode`. Without a monitor the newest checkpoint is the best. If the folder has checkpoints of
        several runs, the newest run is used.

        Raises:
            ConfigurationError: the trainer has no ModelCheckpoint, or no checkpoint in its folder has the metric.
            CheckpointError: the index is damaged.
        """
        saver = self._hooks.saver
        if saver is None:
            raise ConfigurationError(
                "ckpt_path='best': no ModelCheckpoint defines the best checkpoint. Pass "
                "callbacks=[ModelCheckpoint(monitor=…)] as in the run that saved it, or a checkpoint's path."
            )
        monitor: str | None = saver.monitor
        if saver.remote is not None:
            place = saver.remote
            entries = _in_remote(saver.remote)
        else:
            place = str(self._places.folder)
            index = RunIndex.of_newest_run(self._places.folder)
            entries = [] if index is None else index.entries()
        if monitor is not None:
            entries = [entry for entry in entries if monitor in entry.metrics]
        if not entries:
            having = "" if monitor is None else f" with the metric {monitor!r}"
            raise ConfigurationError(
                f"ckpt_path='best': there is no checkpoint{having} in {place}. Train first, set default_root_dir or "
                "the ModelCheckpoint's dirpath to the folder of the run that saved it, or pass a checkpoint's path."
            )
        if monitor is None:
            ranked = sorted(entries, key=lambda entry: (entry.created, entry.step), reverse=True)
        else:
            sign = -1.0 if saver.mode == "max" else 1.0
            ranked = sorted(entries, key=lambda entry: _rank(entry.metrics[monitor], sign))
        return [f"{place.rstrip('/')}/{entry.name}" for entry in ranked]


def _rank(value: float, sign: float) -> tuple[bool, float]:
    """Return a sort key for a metric: NaN is the worst value."""
    return (True, 0.0) if math.isnan(value) else (False, sign * value)


def _in_remote(url: str) -> list[IndexEntry]:
    """Return the checkpoints of a remote folder as entries of an index."""
    entries = []
    for item in find_remote(url):
        name = item.url.rstrip("/").rpartition("/")[2]
        manifest = item.manifest
        entries.append(IndexEntry(name, manifest.step, manifest.created, manifest.kind, dict(manifest.metrics)))
    return entries


def left_by_earlier(attempt: Attempt, folder: RunFolder) -> FoundCheckpoint | None:
    """Return the newest valid full checkpoint in `folder` of an earlier attempt of this fit, or None.

    Launchers restart a job for another attempt (see `auto_resume`).

    Warns:
        TrainwrightWarning: a damaged checkpoint was skipped.
    """
    if attempt.key is None or attempt.number == 0:
        return None

    def is_of_this_fit(found: FoundCheckpoint) -> bool:
        if found.manifest.kind != "full":
            return False
        snapshot = read_checkpoint(found, verify=False, parts=("trainer",))
        return bool(snapshot.trainer.get("job") == attempt.key)

    return folder.newest(accepts=is_of_this_fit)


class SharedHashing:
    """Distribution of file hashing over all ranks.

    Rank 0 calls `hash_files` any number of times and then `dismiss`. The other ranks call `serve`. Each exchange is a
    broadcast of file names by rank (None ends `serve`), and a gather of the hashes.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def hash_files(self, paths: Sequence[Path]) -> list[str]:
        """Return the hash of each file. Collective: rank 0 calls this method while the other ranks run `serve`.

        Raises:
            CheckpointError: a rank cannot read one of its files.
        """
        shares = fair_shares([path.stat().st_size for path in paths], self._processes.world_size)
        names_by_rank: list[list[str]] = []
        for share in shares:
            names_by_rank.append([str(paths[i]) for i in share])
        self._processes.broadcast_object(names_by_rank)
        hashes_by_rank = self._processes.gather_object(_hash_share([paths[i] for i in shares[0]]))
        hashes = [""] * len(paths)
        for rank, (share, hashes_of_rank) in enumerate(zip(shares, hashes_by_rank, strict=True)):
            if isinstance(hashes_of_rank, str):  # an error
                raise CheckpointError(
                    f"rank {rank} cannot read a checkpoint file that rank 0 can read: {hashes_of_rank}. Use a folder "
                    "that all ranks share."
                )
            for i, value in zip(share, hashes_of_rank, strict=True):
                hashes[i] = value
        return hashes

    def serve(self) -> None:
        """Hash the files that are assigned to this rank. Collective; blocks until rank 0 calls `dismiss`."""
        while True:
            names_by_rank = self._processes.broadcast_object(None)  # the value of rank 0; the argument is ignored
            if names_by_rank is None:
                return
            paths = [Path(name) for name in names_by_rank[self._processes.rank]]
            self._processes.gather_object(_hash_share(paths))

    def dismiss(self) -> None:
        """End `serve` on the other ranks. Collective: rank 0 calls this method while the other ranks run `serve`."""
        self._processes.broadcast_object(None)


def fair_shares(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Divide file indices among `num` ranks so that each has about the same number of bytes.

    The largest file comes first, and each file goes to the rank with the fewest bytes so far: sizes 5, 1, 4 for two
    ranks become `[[0], [2, 1]]`.
    """
    shares: list[list[int]] = [[] for _ in range(num)]
    bytes_by_rank = [0] * num
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = bytes_by_rank.index(min(bytes_by_rank))
        shares[rank].append(i)
        bytes_by_rank[rank] += sizes[i]
    return shares


def _hash_share(paths: Sequence[Path]) -> list[str] | str:
    """Return the hashes of this rank's files, or the text of an error, which the other ranks receive."""
    try:
        return hash_files(paths)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
