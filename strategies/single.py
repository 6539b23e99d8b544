"""One process on one device."""

from __future__ import annotations

from torch import nn

from trainwright.strategies.strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Trains in this process, on one device: the plain form of the contract."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model itself, on the device."""
        return model.to(self.device)
