"""``python -m holdfast`` (and ``torchrun -m holdfast``)."""

from holdfast.cli import main

main()
