"""Heads and neurons: found by structure, proved by a trial, and cut out of a block."""
