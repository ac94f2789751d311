"""Compile ``kernels.c``, once a process, and call it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["load"]


@cache
def load() -> ctypes.CDLL:
    """Return the compiled kernels.

    Raises
    ------
    ImportError
        If there is no C compiler.
    """
    source = Path(__file__).with_suffix(".c")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ImportError("no C compiler (cc or gcc) to build the limit with")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        subprocess.run([compiler, "-O2", "-pthread", "-shared", "-fPIC", "-o", library, source], check=True)
        kernels = ctypes.CDLL(str(library))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    kernels.gather.argtypes = (pointer, pointer, number, number, number, number, number, pointer)
    kernels.gather.restype = number
    kernels.read_rows.argtypes = (pointer, pointer, pointer, number, number, number, pointer)
    kernels.read_rows.restype = number
    kernels.read_headers.argtypes = (ctypes.c_char_p, number, number)
    kernels.read_headers.restype = number
    return kernels
