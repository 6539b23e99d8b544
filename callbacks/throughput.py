"""Log steps, samples, tokens and FLOPs per second, and the model FLOPs utilization."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run, Stage
from trainwright.core.signatures import overrides
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters at the time of a log. `seconds` is the host's clock without the time of validations."""

    seconds: float
    step: int
    samples: int
    tokens: int


class Throughput(Callback):
    """Callback that logs rates every `log_every_n_steps` steps of the Trainer, over about the last `window_size` steps.

    The metrics are `throughput/steps_per_s`, `throughput/samples_per_s`, `throughput/tokens_per_s` (if the task
    overrides `num_tokens`), and with FLOPs `throughput/flops_per_s` and `throughput/mfu`. Rates are sums over all
    ranks. Time in validation is excluded. The callback reads the host's clock and never waits for the device. A rate
    over few steps may therefore be the rate at which steps are queued. Over a window it is the true rate.

    Args:
        window_size: number of steps to average over. All steps since the previous log are used even if they are more.
            Default: 100.
        flops_per_step: floating-point operations of one optimizer step over all ranks, forward and backward.
            Default: None.
        flops_per_sample: floating-point operations of one sample, instead of `flops_per_step`. Default: None.
        peak_flops: peak of one device in FLOP/s, for the model FLOPs utilization (MFU; PaLM, appendix B).
            Default: None.
        measure_flops: count the FLOPs of a rank's first step with torch's FlopCounterMode, and multiply them by the
            number of ranks. Operations in code compiled by `torch.compile` are not counted. Default: False.

    Raises:
        ConfigurationError: several arguments define FLOPs, `peak_flops` is passed without one of them, or the window is
            below 1.
    """

    reads_only = True
    order = Order.LAST

    def __init__(
        self,
        window_size: int = 100,
        flops_per_step: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        measure_flops: bool = False,
    ) -> None:
        if window_size < 1:
            raise ConfigurationError(f"Throughput(window_size={window_size}): write 1 or more steps.")
        sources: list[str] = []  # the arguments that define FLOPs
        if flops_per_step is not None:
            sources.append("flops_per_step")
        if flops_per_sample is not None:
            sources.append("flops_per_sample")
        if measure_flops:
            sources.append("measure_flops")
        if len(sources) > 1:
            raise ConfigurationError(f"Throughput: {' and '.join(sources)} set the same value. Remove all but one.")
        if peak_flops is not None and not sources:
            raise ConfigurationError(
                "Throughput(peak_flops=...) requires flops_per_step, flops_per_sample or measure_flops=True."
            )
        self.window_size = window_size
        self.flops_per_step = flops_per_step  # with `measure_flops`, None until the first step was counted
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self.measure_flops = measure_flops
        # Counters at the start of the fit and at each log, oldest first. The first one is the start of the window.
        self._marks: deque[_Counters] = deque()
        self._paused_s = 0.0  # time of all validations of the fit
        self._pause_began_s = 0.0
        self._counter: FlopCounterMode | None = None  # during the step that is counted
        self._counting = ExitStack()  # ends the counter's context

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage == "fit" and overrides(task, "num_tokens", TaskModule):
            trainer.count_tokens = True

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._paused_s = 0.0
        self._marks = deque([self._mark(trainer)])

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        if self.measure_flops and self.flops_per_step is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counting.enter_context(self._counter)

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if self._counter is not None:
            self._end_count(trainer, self._counter)
            self._marks = deque([self._mark(trainer)])  # a counted step is slow: rates start after it
        step = trainer.state.step
        if step % trainer.log_every_n_steps == 0 and step > self._marks[-1].step:  # a skipped group is not a step
            self._log(trainer)

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        self._pause_began_s = time.monotonic()

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        self._paused_s += time.monotonic() - self._pause_began_s

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._counting.close()  # an exception may have ended the first step
        self._counter = None

    def _end_count(self, trainer: Run, counter: FlopCounterMode) -> None:
        self._counting.close()
        self._counter = None
        self.flops_per_step = float(counter.get_total_flops()) * trainer.world_size

    def _mark(self, trainer: Run) -> _Counters:
        state = trainer.state
        return _Counters(time.monotonic() - self._paused_s, state.step, state.samples, state.tokens)

    def _log(self, trainer: Run) -> None:
        now = self._mark(trainer)
        self._marks.append(now)
        while len(self._marks) > 2 and now.step - self._marks[1].step >= self.window_size:
            self._marks.popleft()
        first = self._marks[0]
        seconds = now.seconds - first.seconds
        if now.step == first.step or seconds <= 0:
            return
        rates = {
            "throughput/steps_per_s": (now.step - first.step) / seconds,
            "throughput/samples_per_s": (now.samples - first.samples) / seconds,
        }
        if now.tokens > first.tokens:
            rates["throughput/tokens_per_s"] = (now.tokens - first.tokens) / seconds
        if self.flops_per_sample is not None:
            rates["throughput/flops_per_s"] = self.flops_per_sample * rates["throughput/samples_per_s"]
        elif self.flops_per_step is not None:
            rates["throughput/flops_per_s"] = self.flops_per_step * rates["throughput/steps_per_s"]
        if self.peak_flops is not None and "throughput/flops_per_s" in rates:
            rates["throughput/mfu"] = rates["throughput/flops_per_s"] / (self.peak_flops * trainer.world_size)
        trainer.log_now(rates)
