"""Where runs go: a W&B server, or folders for another machine to send."""
