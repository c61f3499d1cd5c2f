"""Local training of all clients: rounds, measurements, and a client's state between rounds."""
