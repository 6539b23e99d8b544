"""Objects are restored from a snapshot."""

from __future__ import annotations

import torch

from trainwright.trainer.search.state_snapshot import StateSnapshot


def test_members_of_sets_are_restored() -> None:
    tensor, frozen = torch.ones(2), torch.ones(2)
    holder = {"members": {tensor}, "frozen": frozenset({frozen})}
    snapshot = StateSnapshot(holder)
    tensor.zero_()
    frozen.zero_()
    holder["members"].clear()
    snapshot.restore()
    assert holder["members"] == {tensor}
    assert torch.equal(tensor, torch.ones(2))
    assert torch.equal(frozen, torch.ones(2))
