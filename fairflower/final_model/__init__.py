"""A run's final model: loss landscape, sharpness for each client, and export."""
