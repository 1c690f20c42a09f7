"""What all commands have in common, in a module that imports nothing slow."""

EXIT_USAGE = 2
"""Exit code after an error message."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""
EXIT_BROKEN_PIPE = 141
"""Exit code where the reader of the output has ended, as a shell gives it."""
ENV_PREFIX = "SPARSEFL"
"""Start of the environment variables of options, before the name of a subcommand."""
QUIET = "--quiet"
"""Option that silences everything but warnings and errors."""
QUIET_HELP = "Print nothing but warnings and errors."
CONFIG_HELP = (
    "YAML file, or the name of one that `sparsefl configs` lists; can be repeated, later files take precedence."
)
COMPLETION_HELP = "Print a script that completes options and names in this shell (extra `completion`), and exit."
SHELLS = ("bash", "zsh")
"""Shells for which there is a script."""
DESCRIPTION = "Train, evaluate, export and compare sparse and personalised federated learning."
"""Text at the start of the program's help."""

TRAINER_COMMANDS = {
    "fit": "Train for `max_rounds` rounds.",
    "validate": "Evaluate the global and the personal models on the validation sets, and return the scores.",
    "test": "Evaluate the global and the personal models on the test sets, and return the scores.",
    "profile": (
        "Estimate parameters, densities, FLOPs and bytes of the whole run without training and without the data."
    ),
    "replay": "Repeat one client's local fit with bit-equal results in this process, without writing files.",
    "export": "Export the global model or a client's personal model as Lightning checkpoint, safetensors and ONNX.",
}
"""Subcommands that are methods of the trainer, with the summaries of these."""
CONFIGS = "configs"
"""Subcommand about the configurations of the package."""
FOLDER_COMMANDS = {
    "report": "Write tables, figures and a page about one or many runs.",
    "compare": "Print a table of runs, with one row for each method and setting.",
}
"""Subcommands that read run folders, with their help texts."""
SUBCOMMANDS = {
    **TRAINER_COMMANDS,
    CONFIGS: "List, print or copy the configurations that are installed with the package.",
    **FOLDER_COMMANDS,
}
"""All subcommands, with their help texts."""
