"""The version, in the one place that the build, the package and `lazyshards --version` read."""

__all__ = ["__version__"]

__version__ = "0.1.0"
