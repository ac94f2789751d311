"""The small C library of the package, if it was built: rows copied out of maps, and numbers permuted."""

import ctypes
from functools import cache
from pathlib import Path

__all__ = ["find_library"]


@cache
def find_library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built; all that it does is done without it as well."""
    try:
        library = ctypes.CDLL(str(Path(__file__).resolve().parent / "_native" / "libgather.so"))
        library.lazyshards_heads  # noqa: B018  # the youngest of its functions: one built before it serves no more
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.lazyshards_map.argtypes, library.lazyshards_map.restype = (ctypes.c_char_p, pointer), pointer
    library.lazyshards_unmap.argtypes, library.lazyshards_unmap.restype = (pointer, number), None
    of_files, of_rows = (pointer,) * 5 + (number,), (pointer, number, number, pointer)
    library.lazyshards_gather.argtypes = (*of_files, *of_rows, pointer, pointer)
    library.lazyshards_gather.restype = number
    library.lazyshards_copy.argtypes = (pointer, ctypes.c_char_p, pointer, number, number, pointer)
    library.lazyshards_copy.restype = number
    library.lazyshards_hush.argtypes, library.lazyshards_hush.restype = (number,), None
    library.lazyshards_heads.argtypes = (ctypes.c_char_p, number, number, pointer, pointer)
    library.lazyshards_heads.restype = None
    library.lazyshards_permute.argtypes = (pointer, number, number, number, pointer, number)
    library.lazyshards_permute.restype = None
    return library
