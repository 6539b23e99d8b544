"""Whether the ranks of a strategy save together what each of them holds, or the main rank the whole of it."""

from __future__ import annotations

from typing import Any


class SavesPieces:
    """What a strategy says about that; a part of `Strategy`. By default the main rank saves everything, whole."""

    @property
    def saves_pieces(self) -> bool:
        """Whether each rank writes its own pieces into a checkpoint now. The same on every rank; asked before a save.

        If it is True, `model_state` and `optimizer_states` collect nothing: they return tensors as they lie on this
        rank, which `in_pieces` understands. What is whole there is saved by the main rank.
        """
        return False

    def in_pieces(self, state: Any) -> Any:
        """Return a tree of state with `trainwright.checkpoint.Pieces` for every tensor that lies in pieces.

        Called on every rank with the same tree when `saves_pieces` is True, once for each save. Not collective. Of
        values that several ranks hold, one alone may give them; the same object in two places must stay one.
        """
        return state
