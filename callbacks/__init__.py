"""What happens besides training: the Callback base, the table of its events and the ready-made callbacks.

Names are imported when they are first touched; `CALLBACKS` holds the short names that a configuration may use.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
