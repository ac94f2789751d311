"""How many files and connections may be open at a time."""

__all__ = ["open_together"]


def open_together(most: int) -> int:
    """Return how many may be open together for one purpose: at most ``most``, and a quarter of the process's limit.

    Parameters
    ----------
    most : int
        How many would serve best.
    """
    try:
        import resource
    except ImportError:  # not on every system
        return most
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // 4))
