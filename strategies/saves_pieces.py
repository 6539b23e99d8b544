"""Whether the ranks of a strategy save together what each of them holds, or the main rank the whole of it."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigurationError, nearest

_STATE_DICT_TYPES = {
    "full": "full", "full_state_dict": "full", "1": "full",
    "sharded": "sharded", "sharded_state_dict": "sharded", "3": "sharded",
}  # fmt: skip


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


def state_dict_type_name(value: Any) -> str:
    """Return `"sharded"` or `"full"` for what says so, in torch's and Hugging Face Accelerate's words too.

    Raises:
        ConfigurationError: it is neither.
    """
    word = str(getattr(value, "name", value)).lower()  # torch's enumeration has names
    if word not in _STATE_DICT_TYPES:
        raise ConfigurationError(
            f"state_dict_type={value!r} is unknown.{nearest(word, _STATE_DICT_TYPES)} Write 'sharded' (each rank "
            "writes its pieces; any number of ranks reads them) or 'full' (rank 0 writes the whole)."
        )
    return _STATE_DICT_TYPES[word]
