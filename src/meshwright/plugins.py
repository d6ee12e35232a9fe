"""Keep JAX's plugin for NVIDIA from printing a traceback on a machine without a GPU.

JAX initialises every plugin that is installed when its devices are first asked for. The plugin then asks for
the releases of cuDNN, cuFFT and other libraries, and JAX logs what fails with its traceback. Meshwright has
the plugin installed for its compiler, which needs none of them. So importing `meshwright` before the first
use of JAX's devices suffices; `JAX_PLATFORMS=cpu` keeps JAX from asking at all.

Imports: the standard library. Used by: `meshwright`, `cli`.
"""

from __future__ import annotations

import glob
import logging

# Device files that exist where the NVIDIA driver (under WSL: Windows' driver) has a GPU.
NVIDIA_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")
JAX_PLUGIN_ERROR = "Jax plugin configuration error"


def quiet_jax_plugins() -> None:
    """Suppress JAX's traceback about a CUDA plugin that cannot start.

    Without a GPU nothing is missing, so nothing is printed. With a GPU one line warns that it is not used. A
    second call changes nothing.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_shorten)


def has_nvidia_gpu() -> bool:
    """Return whether the NVIDIA driver has a GPU on this machine."""
    return any(glob.glob(pattern) for pattern in NVIDIA_DEVICES)


def _shorten(record: logging.LogRecord) -> bool:
    if not record.getMessage().startswith(JAX_PLUGIN_ERROR) or "cuda" not in record.getMessage():
        return True
    if not has_nvidia_gpu():
        return False
    cause = "" if record.exc_info is None else f": {record.exc_info[1]}"
    record.msg = f"warning: JAX cannot use the NVIDIA GPU of this machine{cause}. Run `meshwright doctor`."
    record.args, record.exc_info, record.exc_text = (), None, None
    return True
