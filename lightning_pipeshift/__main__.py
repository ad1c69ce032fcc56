"""``python -m lightning_pipeshift`` is the ``pipeshift`` command."""

from pipeshift_command import main

main()
