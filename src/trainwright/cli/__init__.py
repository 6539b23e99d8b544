"""The command line: `trainwright new`, `trainwright fit --config config.yaml`, and the others that `--help` lists.

Each sub-command is a function `(arguments) -> exit code` in a module of its own, imported when the command is called.
"""
