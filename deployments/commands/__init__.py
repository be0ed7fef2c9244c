"""What the `assay` command does, a file a subcommand and a file a part of it. Standard library only."""
