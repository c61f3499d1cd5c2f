"""Local training of all clients: the round, measurements, and state between rounds."""
