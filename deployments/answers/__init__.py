"""What routes share: from a parsed request to a task, and from replies to the answer."""
