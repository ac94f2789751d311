"""Datasets as what other libraries read from; each library is imported by the one module that bears its name."""

__all__ = []
