"""One process on one device."""

from __future__ import annotations

from trainwright.strategies.strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Trains in this process, on one device: the plain form of the contract."""
