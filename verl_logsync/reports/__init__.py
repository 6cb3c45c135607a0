"""Reports about what a command found and did. They know values only."""
