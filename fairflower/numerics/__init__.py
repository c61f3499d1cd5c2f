"""Pure numerical functions, without messages, files or torch."""
