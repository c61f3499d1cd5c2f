"""A run's final model: its loss landscape, its sharpness for each client, and its export."""
