"""Explanations of differences between strategies, from the recorded facts."""

from __future__ import annotations

from trainwright.cli.parity.parity_compare import COPY, GRADIENT, LOSS, NORM, PARAMETER, Comparison

_HALVES = ("16-true", "bf16-true", "16-mixed", "bf16-mixed")


def explain(comparison: Comparison) -> list[str]:
    """Return possible causes of the first difference, most likely first; empty for equal runs."""
    if comparison.equal:
        return []
    found = comparison.found
    kinds = {difference.kind for difference in found}
    if found[0].step == 0:
        return [
            "The initial weights differ. Random values in configure_model or __init__ must depend on the seed alone, "
            "or come from a file."
        ]
    causes: list[str] = []
    if comparison.other_data:
        causes.append(_other_data(comparison))
    if COPY in kinds:
        causes.append(
            "A parameter was changed on one rank and not on the others: in a hook or training_step that depends on "
            "the rank, or in a buffer of the optimizer."
        )
    if comparison.reference.facts.synchronized != comparison.other.facts.synchronized:
        causes.append(
            "SyncBatchNorm computes its statistics over the micro-batches of all ranks, one process over one at a time."
        )
    if not causes and LOSS in kinds:
        causes.append(
            "Data and weights were the same, and the loss was not: training_step depends on the rank, on the number of "
            "processes, on batch_idx (which counts one rank's batches), or on what each rank remembers for itself."
        )
    if LOSS not in kinds and kinds & {GRADIENT, NORM}:
        causes.append(_other_backward(comparison))
    if kinds == {PARAMETER}:
        causes.append(
            "Loss and gradients agree, so that the optimizers' step differs: clipping, parameter groups, a state that "
            "one of them lacks, or a schedule that does not count steps."
        )
    return causes + _general(comparison)


def notes(comparison: Comparison) -> list[str]:
    """Return harmless differences, and values that were not compared."""
    said = []
    facts = comparison.other.facts
    expected = [name for name in comparison.buffers if name in facts.running_statistics]
    others = [name for name in comparison.buffers if name not in facts.running_statistics]
    if expected:
        said.append(
            f"running statistics differ ({_some(expected)}): each rank's layers see the micro-batches of that rank, "
            "and rank 0's are kept. They do not count as differences; evaluation uses them, training does not."
        )
    if others:
        said.append(
            f"buffers differ ({_some(others)}): each rank has its own, and rank 0's are kept. They do not count as "
            "differences unless they affect a loss."
        )
    if comparison.noise:
        some = [f"{count} of {name}" for name, count in comparison.noise.items()]
        said.append(
            f"not compared: elements whose gradients are rounding noise around zero ({_some(some)}), of which "
            f"{'/'.join(facts.optimizers)} may make full-sized steps."
        )
    return said


def _other_data(comparison: Comparison) -> str:
    epoch, _, place = comparison.other_data[0].partition("/")
    return (
        f"The data differ: micro-batch {place} of epoch {epoch} holds other values. For a data set with random values "
        "set trainer.per_sample_rng=true; a loader with its own order must give the same order on any number of ranks."
    )


def _other_backward(comparison: Comparison) -> str:
    ratios = [d.ratio for d in comparison.found if d.kind == GRADIENT]
    known = [ratio for ratio in ratios if ratio is not None]
    if known and len(known) == len(ratios) and max(known) - min(known) < 1e-2 * abs(known[0]):
        return (
            f"Every gradient that differs is {known[0]:.4g} times the reference's: summed over ranks or micro-batches "
            "instead of averaged, or divided twice."
        )
    return (
        "The losses agree and the gradients do not: a hook on some rank scales or replaces gradients, part of the "
        "backward pass depends on the rank, or micro-batches have other weights."
    )


def _general(comparison: Comparison) -> list[str]:
    """Return possible causes in the task itself."""
    step = comparison.other.steps[comparison.found[0].step]
    rows = {rows for _, rows in step.data.values()}
    said = []
    if step.draws:
        said.append(
            "training_step draws random numbers. Torch's, numpy's and Python's generators are seeded in the same way "
            "for each micro-batch, others are not; and a strategy that splits activations draws for each part."
        )
    if len(rows) > 1 and not comparison.other.facts.counts_items:
        said.append(
            f"The micro-batches have {min(rows)} to {max(rows)} rows and have equal weights, because the task does not "
            "define num_items."
        )
    if comparison.other.facts.precision in _HALVES:
        said.append(
            f"With precision {comparison.other.facts.precision}, sums in another order differ in the third digit. "
            "Compare in 32-true first, or pass --rtol."
        )
    return said


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
