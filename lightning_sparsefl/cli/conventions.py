"""What all commands have in common, in a module that imports nothing slow."""

EXIT_USAGE = 2
"""Exit code after an error message."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""
EXIT_BROKEN_PIPE = 141
"""Exit code where the reader of the output has ended, as a shell gives it."""
QUIET = "--quiet"
"""Option that silences everything but warnings and errors."""
QUIET_HELP = "Print nothing but warnings and errors."
