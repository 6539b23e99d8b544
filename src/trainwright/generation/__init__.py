"""Text from language models: `generate(model, input_ids, max_new_tokens=32)`. Names are imported when first used."""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
