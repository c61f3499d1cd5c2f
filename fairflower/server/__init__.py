"""A run at the server, from the first round to the run folder."""
