"""The ``pipeshift`` command and its subcommands."""
