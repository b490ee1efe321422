"""Prunes: imports torch and nothing else."""
