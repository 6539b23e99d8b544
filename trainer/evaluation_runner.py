"""What a Trainer evaluates: the sanity check before training, validations between steps, stages of their own, tries."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from trainwright.core.rng import isolate_rng, rng_state, set_rng_state
from trainwright.trainer import evaluation
from trainwright.trainer.preemption import EvaluationWatch, leave
from trainwright.trainer.rehearsal import Rehearsal
from trainwright.trainer.stage import StageRunner
from trainwright.trainer.training_pass import pass_training_data


class EvaluationRunner(StageRunner):
    """Adds evaluations to a stage; `Trainer` adds the loop."""

    def _sanity_check(self) -> None:
        """Try some validation batches, leaving no trace in metrics or generators; not after a resume."""
        limit = self.num_sanity_val_steps
        if limit == 0 or not self.has_validation or self.resumed:
            return
        with isolate_rng(self.strategy.device):
            self.sanity_checking = True
            try:
                self.fire("on_sanity_check_start")
                data = self.evaluation_data("validate")
                most = None if limit == -1 else limit
                watch = EvaluationWatch(self.preemption, self.strategy.processes, data)
                evaluation.evaluate(self, "validate", max_batches=most, abandon=watch)
                self.fire("on_sanity_check_end")
            except evaluation.Abandoned:
                self._leave()
            finally:
                self.sanity_checking = False
                self._forget_metrics()

    def pass_training_data(self) -> None:
        """Run `training_step` on an epoch of data without gradients and logging; see `Run.pass_training_data`."""
        pass_training_data(self, self.train_data())

    def _validate(self) -> None:
        if not self.has_validation:
            self.state.validation_owed = False
            return
        self.state.validation_owed = True  # a checkpoint that is written meanwhile does not know what it comes to
        in_step, self.metrics.in_step = self.metrics.in_step, False
        data, generators = self.evaluation_data("validate"), rng_state(self.device)
        try:
            watch = EvaluationWatch(self.preemption, self.strategy.processes, data)
            evaluation.evaluate(self, "validate", abandon=watch, taken=self._note_validation)
        except evaluation.Abandoned:
            set_rng_state(generators, self.device)  # a resume does the whole validation again, as if for the first time
            if self.log_every.due(self.state):
                self._flush_step()
            self._leave()
        except BaseException:
            set_rng_state(generators)  # likewise, for who saves now; a device may have failed and is left alone
            raise
        self.metrics.in_step = in_step

    def _note_validation(self) -> None:
        self.state.validation_owed = False
        self._validated_at = self.state.step

    def progress(self) -> dict[str, Any]:
        """Return where training stands, for a checkpoint: with a validation that is due and has not been done."""
        state, end = self.state, self._group_end
        owed = state.validation_owed or (
            end is not None
            and self._validated_at != state.step
            and self.has_validation
            and self.validation.outstanding(state, *end)
        )
        return {**state.to_dict(), "validation_owed": owed}

    def _run_evaluation(self, *, kind: Literal["validate", "test"], verbose: bool) -> list[dict[str, float]]:
        flushed, outputs = evaluation.evaluate(self, kind)
        results = evaluation.results_by_loader(flushed, len(outputs))
        if verbose:
            self.print(evaluation.format_results(kind, results))
        return results

    def _predict(self, *, keep: bool) -> list[Any] | None:
        _, outputs = evaluation.evaluate(self, "predict", keep=keep)
        if not keep:
            return None
        merged = evaluation.in_dataset_order(self.strategy.gather_by_data_rank(outputs))
        return merged if self.evaluation_data("predict").is_list else merged[0]

    def rehearse(self, *, alone: bool, remakes_loaders: bool = False) -> Rehearsal:
        """Try steps out and leave no trace; see `Run.rehearse`."""
        return Rehearsal(self, alone=alone, remakes_loaders=remakes_loaders)

    def _leave(self) -> NoReturn:
        leave(self, self.safe_point, self.preemption, requeue=self.settings.arguments["auto_requeue"])

    def _flush_step(self) -> None:
        self.take_metrics(self.metrics.flush_step(self.exchange), "train")
