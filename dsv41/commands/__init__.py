"""The subcommands of ``dsv41``: each module has ``add_parser(subparsers)`` and ``run(args) -> int``."""
