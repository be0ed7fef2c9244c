"""What the processes tell of themselves, and how it becomes one exposition."""
