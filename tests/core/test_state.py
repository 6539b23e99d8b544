from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.state import TrainState

counts = st.integers(0, 2**53)


@given(st.builds(TrainState, *[counts] * 8, st.floats(0, 1e9), st.booleans()))
def test_a_state_survives_json(state: TrainState) -> None:
    back = TrainState()
    back.load_dict(json.loads(json.dumps(state.to_dict())))
    assert back == state
