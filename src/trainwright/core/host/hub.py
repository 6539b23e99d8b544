"""Access to Hugging Face's hub, or to the copies of its files on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package

_TIMEOUT_S = 5.0


def local_files_only(name: str, file: str = "config.json") -> bool:
    """Return the argument `local_files_only` for `from_pretrained`: True if the hub is unreachable, but a copy exists.

    False if `name` is a local path, or if the hub answers, also with an error, which `from_pretrained` then raises.

    This function makes one request and waits at most 5 s for it. huggingface_hub would retry for half a minute.

    Args:
        name: a file, a folder, or a model's name on the hub.
        file: a file that `from_pretrained` needs; it is requested. Default: `"config.json"`.

    Raises:
        ConfigurationError: the hub cannot be reached, and this machine has no copy of the file.
        MissingPackageError: huggingface_hub is not installed.
    """
    if Path(name).exists():
        return False
    hub: Any = require_package("huggingface_hub", purpose=f"{name!r}, a name on Hugging Face's hub,")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file), timeout=_TIMEOUT_S)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
        return False  # `from_pretrained` raises a more precise error
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        if isinstance(hub.try_to_load_from_cache(name, file), str):
            return True
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{name!r} is not a local file or folder, and Hugging Face's hub cannot be reached: {reason} Pass a local "
            "folder, or set HF_HOME to a folder with a cached copy."
        ) from error
    return False
