"""`python -m platon`, as torchrun calls it."""

from platon.cli import main

main()
