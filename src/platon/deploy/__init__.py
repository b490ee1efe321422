"""Makes the pruned model small and fast."""
