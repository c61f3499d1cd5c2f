"""Engines that run the clients of a simulation. All engines give exactly the same results."""
