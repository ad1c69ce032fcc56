"""``python -m lightning_pipeshift`` is the ``pipeshift`` command."""

from lightning_pipeshift.cli import main

main()
