"""Trains: tasks, recipes, the Trainer bridge, and runs."""
