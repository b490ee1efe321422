"""Sweeps: every combination of some settings, each in a run of its own."""

from platon.lab.sweep.spec import Trial, packaged, read, title

__all__ = ["Trial", "packaged", "read", "title"]
