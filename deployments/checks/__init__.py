"""What can be told of a configuration before anything starts: each file looks at one kind of mistake."""
