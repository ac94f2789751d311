"""The small C library of the package, if it was built: rows copied out of maps or lent, and numbers permuted."""

import ctypes
from functools import cache
from pathlib import Path

__all__ = ["find_library"]


@cache
def find_library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built; all that it does is done without it as well."""
    try:
        library = ctypes.CDLL(str(Path(__file__).resolve().parent / "_native" / "libgather.so"))
        library.lazyshards_columns  # noqa: B018  # the youngest of its functions: one built before it serves no more
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
    library.lazyshards_map_to_lend.argtypes = (ctypes.c_char_p, pointer, pointer)
    library.lazyshards_map_to_lend.restype = number
    library.lazyshards_lend.argtypes, library.lazyshards_lend.restype = (number,) * 3, number
    library.lazyshards_take_back.argtypes = (number, ctypes.c_char_p, pointer)
    library.lazyshards_take_back.restype = number
    library.lazyshards_unmap_lent.argtypes, library.lazyshards_unmap_lent.restype = (number,), None
    library.lazyshards_hush.argtypes, library.lazyshards_hush.restype = (number,), None
    library.lazyshards_heads.argtypes = (ctypes.c_char_p, number, number, pointer, pointer)
    library.lazyshards_heads.restype = None
    library.lazyshards_page.argtypes, library.lazyshards_page.restype = (pointer, number, pointer), number
    library.lazyshards_columns.argtypes = (pointer, number, number, number, pointer, number)
    library.lazyshards_columns.restype = number
    library.lazyshards_permute.argtypes = (pointer, number, number, number, pointer, number)
    library.lazyshards_permute.restype = None
    return library
