"""Pure numerical functions that need no messages, files or torch."""
