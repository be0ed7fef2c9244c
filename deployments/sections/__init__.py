"""What an operator chooses, a section of `deployments.config.AppArgs` a class."""
