"""The server's part of a run: registration, rounds, evaluation, checkpoints and run folder."""
