"""Measure every speed claim of lazyshards beside its peers and the machine's limits: ``python -m benchmarks``."""
