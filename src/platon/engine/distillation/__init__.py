"""Distillation: the model that is trained also learns from a teacher."""
